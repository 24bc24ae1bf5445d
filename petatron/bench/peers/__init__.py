"""Contenders of `petatron bench train`: our own step, and the same work done by other libraries.

A contender is built from the run's config and trains that model on the given batches: weights in fp32 (ours: bf16 with fp32 master
weights), GEMMs in bf16 or FP8, AdamW with the run's settings, gradients clipped, one update per micro-batch. Each is one file; what
a peer cannot express is raised before anything is built.
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from petatron.base.errors import Problem
    from petatron.config import RunConfig
    from petatron.models.batch import Batch

OURS, OWN_BF16 = "petatron", "bf16"
_MODULES: Mapping[str, str] = {
    OURS: "petatron.bench.peers.petatron_step",
    "torchtitan": "petatron.bench.peers.torchtitan",
    "hf": "petatron.bench.peers.huggingface",
    OWN_BF16: "petatron.bench.peers.petatron_step_without_fp8",
}
PEER_ATTENTIONS = ("sdpa", "flex")
PEERS = tuple(name for name in _MODULES if name != OURS)


@dataclass(frozen=True, slots=True, kw_only=True)
class BenchSpec:
    """The work that every contender does."""

    run: RunConfig
    device: torch.device
    compile: bool
    fp8_recipe: str | None
    """None: GEMMs in bf16."""
    peer_paths: tuple[Path, ...] = ()
    """Folders with the source of peers."""
    keep_gathered: bool = False
    """torchtitan: do not reshard the gathered bf16 weights between forward and backward."""
    peer_attention: str = PEER_ATTENTIONS[0]
    """torchtitan 0.3: how it attends."""
    peer_cuda_graphs: bool = True
    """torchtitan 0.3: capture forward and backward passes in a CUDA graph, as it does by default."""

    @property
    def micro_batches(self) -> int:
        """Micro-batches of one step. More than one only for our own steps: others update per micro-batch."""
        return self.run.train.global_batch_size // self.run.train.micro_batch_size

    @property
    def tokens(self) -> int:
        """Tokens of one step."""
        return self.micro_batches * self.run.train.micro_batch_size * self.run.model.seq_length


class Contender(Protocol):
    """A model with its optimizer; `step` must not wait for the device."""

    def step(self, batch: Batch) -> Tensor:
        """Runs one update from a micro-batch, repeated for each micro-batch of the step; returns the loss as a device scalar."""
        ...


def problems(name: str, spec: BenchSpec) -> Sequence[Problem]:
    """Returns what keeps a contender from doing this work, without building it."""
    return [*importlib.import_module(_MODULES[name]).problems(spec)]


def build(name: str, spec: BenchSpec) -> Contender:
    """Builds a contender with its initial weights on the device."""
    return importlib.import_module(_MODULES[name]).build(spec)


def version(name: str, spec: BenchSpec) -> str | None:
    """Returns the version of a peer, as tables name it; None for our own steps, and where nothing says it."""
    module = importlib.import_module(_MODULES[name])
    return module.version(spec) if hasattr(module, "version") else None
