"""transformers' model of the same config, in eager mode: fp32 weights under bf16 autocast, SDPA attention, fused AdamW."""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional

from petatron.base.errors import ConfigError, Problem
from petatron.bench.peers import BenchSpec
from petatron.bench.peers.adamw import ClippedAdamW
from petatron.bench.peers.initial_weights import InitialWeights
from petatron.config import RunConfig
from petatron.config.schema.hybrid_pattern import ATTENTION, branch_letters
from petatron.models.batch import Batch
from petatron.models.hf import family_entries, get_family, to_hf_config
from petatron.models.model_spec import ModelSpec
from petatron.models.registry import model_spec


def problems(spec: BenchSpec) -> Sequence[Problem]:
    """Returns what transformers cannot express, or that it is not installed."""
    found: list[Problem] = []
    if importlib.util.find_spec("transformers") is None:
        found.append(
            Problem("--against", "hf", "needs transformers, which is not installed", "pip install 'petatron[hf]'.")
        )
    if spec.fp8_recipe is not None:
        fix = "Leave one of them out, or compare with torchtitan."
        found.append(Problem("--against", "hf", "has no FP8 training to compare --fp8-recipe with", fix))
    try:
        config_json(spec.run)
    except ConfigError as error:
        found += error.problems
    return found


def build(spec: BenchSpec) -> TransformersContender:
    return TransformersContender(spec)


class TransformersContender:
    """A transformers model with an optimizer."""

    def __init__(self, spec: BenchSpec) -> None:
        self._model = build_model(spec.run, device=spec.device, dtype=torch.float32).train()
        self._optimizer = ClippedAdamW(self._model, spec.run.optim)
        self._device = spec.device.type

    def step(self, batch: Batch) -> Tensor:
        with torch.autocast(self._device, dtype=torch.bfloat16):
            logits = self._model(input_ids=batch.tokens, use_cache=False).logits
        loss = functional.cross_entropy(logits.float().flatten(0, 1), batch.labels.flatten())
        del logits
        loss.backward()
        self._optimizer.step()
        return loss.detach()


def config_json(run: RunConfig) -> dict:
    """Returns the content of the model's config.json."""
    return to_hf_config(model_spec(run))


def build_model(run: RunConfig, *, device: torch.device, dtype: torch.dtype) -> nn.Module:
    """Builds the model with the initial weights of every contender."""
    from transformers import AutoConfig, AutoModelForCausalLM

    content = config_json(run)
    content.pop("architectures")
    config = AutoConfig.for_model(content.pop("model_type"), **content)
    pattern = run.model.hybrid_layer_pattern
    attention = (
        "sdpa" if pattern is None or ATTENTION in branch_letters(pattern) else "eager"
    )  # what has no attention refuses the former
    with torch.device(device):
        model = AutoModelForCausalLM.from_config(config, attn_implementation=attention, dtype=dtype)
    load_initial_weights(model, model_spec(run), family=str(config.model_type), device=device)
    return model


@torch.no_grad()
def load_initial_weights(model: nn.Module, spec: ModelSpec, *, family: str, device: torch.device) -> None:
    table = get_family(family)
    initial_weights = InitialWeights(spec, device)
    parameters = dict(model.named_parameters())
    for entry in family_entries(table, table.in_memory_mappings or table.mappings, spec):
        for region in entry.regions:
            region.view_in(parameters[entry.name]).copy_(initial_weights[region.name][region.logical_slices()])
