"""transformers' model of the same config, in eager mode: fp32 weights under autocast, SDPA attention, fused AdamW.

In a run without bf16 there is no autocast, so that losses can be compared in float32.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
from collections.abc import Iterator
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from petatron.base.errors import ConfigError, Problem
from petatron.bench.peers import BenchSpec
from petatron.bench.peers.adamw import ClippedAdamW
from petatron.bench.peers.bench_workload import precision_problems
from petatron.bench.peers.huggingface_experts import (
    RouterLosses,
    cast_expert_weights,
    has_router_losses,
    unmatched_training,
)
from petatron.bench.peers.huggingface_losses import loss_of
from petatron.bench.peers.initial_weights import InitialWeights
from petatron.config import RunConfig
from petatron.config.schema.sections.hybrid import ATTENTION, branch_symbols
from petatron.models.batch import Batch
from petatron.models.hf import family_entries, get_family, to_hf_config
from petatron.models.hf.folder_entries import FolderEntry
from petatron.models.model_spec import ModelSpec
from petatron.models.registry import model_spec
from petatron.optim.loss_scaler import compute_dtype


def model_problems(spec: BenchSpec) -> Iterator[Problem]:
    """Yields why transformers has no such model, or that it is not installed."""
    if importlib.util.find_spec("transformers") is None:
        yield Problem("--against", "hf", "needs transformers, which is not installed", "pip install 'petatron[hf]'.")
    try:
        to_hf_config(model_spec(spec.run))
    except ConfigError as error:
        yield from error.problems


def problems(spec: BenchSpec) -> Iterator[Problem]:
    """Yields why transformers has no such model, or does not train it as we do."""
    yield from model_problems(spec)
    if spec.fp8_recipe is not None:
        fix = "Leave one of them out, or compare with torchtitan."
        yield Problem("--against", "hf", "has no FP8 training to compare --fp8-recipe with", fix)
    yield from precision_problems("hf", spec)
    yield from unmatched_training(spec.run.moe)


def version(spec: BenchSpec) -> str | None:
    return importlib.metadata.version("transformers")


class TransformersContender:
    """A transformers model with an optimizer; experts are balanced by our loss."""

    def __init__(self, spec: BenchSpec) -> None:
        run, dtype = spec.run, compute_dtype(spec.run.precision)
        self._model = build_model(run, device=spec.device, dtype=torch.float32).train()
        entries = _entries(self._model, model_spec(run))
        self._router_losses = None
        if has_router_losses(run.moe):
            sequences = run.train.micro_batch_size
            self._router_losses = RouterLosses(self._model, entries, run.moe, num_sequences=sequences)
        self._autocast = None
        if dtype != torch.float32:
            self._autocast = torch.autocast(spec.device.type, dtype=dtype)
            cast_expert_weights(self._model, entries, dtype)
        self._loss = loss_of(run.model.model_type)
        self._optimizer = ClippedAdamW(self._model, run.optim)

    def step(self, batch: Batch) -> Tensor:
        with self._autocast or nullcontext():
            loss = self._loss(self._model, batch)
        (loss if self._router_losses is None else loss + self._router_losses.pop()).backward()
        self._optimizer.step()
        return loss.detach()


build = TransformersContender


def build_model(run: RunConfig, *, device: torch.device, dtype: torch.dtype) -> nn.Module:
    """Builds the model with the initial weights of every contender."""
    import transformers

    content = to_hf_config(model_spec(run))
    [architecture] = content.pop("architectures")
    config = transformers.AutoConfig.for_model(content.pop("model_type"), **content)
    pattern = run.model.hybrid_layer_pattern
    # What has no attention refuses SDPA.
    attention = "sdpa" if pattern is None or ATTENTION in branch_symbols(pattern) else "eager"
    with torch.device(device):
        model = getattr(transformers, architecture)._from_config(config, attn_implementation=attention, dtype=dtype)
    load_initial_weights(model, model_spec(run), device=device)
    return model


@torch.no_grad()
def load_initial_weights(model: nn.Module, spec: ModelSpec, *, device: torch.device) -> None:
    initial_weights = InitialWeights(spec, device)
    parameters = dict(model.named_parameters())
    for entry in _entries(model, spec):
        for region in entry.regions:
            region.view_in(parameters[entry.name]).copy_(initial_weights[region.name][region.logical_slices()])


def _entries(model: Any, spec: ModelSpec) -> tuple[FolderEntry, ...]:
    """Returns where the parameters of a transformers model have our logical tensors."""
    family = get_family(str(model.config.model_type))
    return family_entries(family, family.in_memory_mappings or family.mappings, spec)
