"""Who is measured by `petatron bench train`: our own step, and the same work done by others.

A contender is built from the run's config and trains that model on the batches it is given: weights kept in fp32 (ours: bf16 with
fp32 master weights), products in bf16 or FP8, AdamW with the run's numbers, gradients clipped, one update per micro-batch. Each
is one file; what a peer cannot express is a problem that is raised before anything is built.
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
    OURS: "petatron.bench.peers.ours",
    "torchtitan": "petatron.bench.peers.torchtitan",
    "hf": "petatron.bench.peers.huggingface",
    OWN_BF16: "petatron.bench.peers.bf16",
}
PEERS = tuple(name for name in _MODULES if name != OURS)


@dataclass(frozen=True, slots=True, kw_only=True)
class BenchSpec:
    """The work that every contender does."""

    run: RunConfig
    device: torch.device
    compile: bool
    fp8_recipe: str | None
    """None: products in bf16."""
    peer_paths: tuple[Path, ...] = ()
    """Folders that hold the source of peers."""
    keep_gathered: bool = False
    """torchtitan: keep the gathered bf16 weights from the forward to the backward pass."""

    @property
    def micro_batches(self) -> int:
        """Of one step. More than one is for our own steps: others make one update per micro-batch."""
        assert self.run.train.global_batch_size is not None
        return self.run.train.global_batch_size // self.run.train.micro_batch_size

    @property
    def tokens(self) -> int:
        """Tokens of one step."""
        return self.micro_batches * self.run.train.micro_batch_size * self.run.model.seq_length


class Contender(Protocol):
    """A model with its optimizer; `step` may not wait for the device."""

    def step(self, batch: Batch) -> Tensor:
        """One update from a micro-batch, seen as often as a step has micro-batches; the loss as a scalar on the device."""
        ...


def problems(name: str, spec: BenchSpec) -> Sequence[Problem]:
    """What keeps a contender from doing this work, looked up without building it."""
    return importlib.import_module(_MODULES[name]).problems(spec)


def build(name: str, spec: BenchSpec) -> Contender:
    """A contender with its first weights on the device."""
    return importlib.import_module(_MODULES[name]).build(spec)
