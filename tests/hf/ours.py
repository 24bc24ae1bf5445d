"""The same model on our side, in any layout. Runs on ranks, so it does not import transformers."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

import petatron
from petatron.base.errors import ConfigError
from petatron.config import RunConfig
from petatron.evaluate.score_sequences import score_sequences
from petatron.infer.engine import Engine
from petatron.infer.engine_options import EngineOptions
from petatron.infer.sampling_params import SamplingParams
from petatron.mesh.mesh import ParallelMesh
from petatron.mesh.rank_layout import Layout
from petatron.models.batch import Batch
from petatron.models.decoder import Decoder
from petatron.models.hf import fill_model, parse_config_json
from petatron.pretrained.saveable_model import Model
from petatron.sharding.flat_shard import group_tensor_shards
from petatron.sharding.shard_spec import TensorShard
from petatron.train.build_run import build_model
from petatron.validate import load_config

_FLAGS = "--mock-data --train-iters 1 --lr 1e-3 --num-workers 0 --make-vocab-size-divisible-by 4"


def run_config(
    hf_config: Mapping[str, Any], folder: Path, *, layout: str = "", world_size: int = 1, length: int = 24
) -> RunConfig:
    """The config of a run on a Hugging Face model, through the same door as a user's YAML file."""
    file = folder / "model.yaml"
    values, experts = parse_config_json(hf_config)
    file.write_text(json.dumps({"model": {**values, "seq_length": length}, "moe": experts}))
    flags = f"{_FLAGS} --micro-batch-size 2 {layout}".split()
    return load_config(flags, files=[file], world_size=world_size).config


@dataclass(frozen=True, slots=True)
class Computed:
    """What one rank saw."""

    logits: Tensor
    greedy: Tensor
    loss: float
    grads: list[tuple[TensorShard, Tensor]]


def compute(run: RunConfig, logical: dict[str, Tensor], tokens: Tensor, counted: Tensor, new_tokens: int) -> Computed:
    """Build this rank's part, fill it, and do everything the tests look at."""
    torch.set_num_threads(1)
    rank = dist.get_rank() if dist.is_initialized() else 0
    model = build_model(run, ParallelMesh(Layout.from_config(run.parallel), rank))
    fill_model(model.module, model.placements, logical)
    assert isinstance(model.module, Decoder)
    model.module.eval()
    with torch.no_grad():
        logits = model.module.logits(tokens)
    grown = _continue(model, tokens[:, :8], new_tokens)
    loss = model.train_step([Batch(tokens, tokens.roll(-1, dims=1), counted.float())])
    grads = [
        (piece, view.clone())
        for group in model.param_groups
        for piece, view in group_tensor_shards(group, group.grads())
    ]
    return Computed(logits, grown, loss.item(), grads)


def _continue(model: Model, prompts: Tensor, new_tokens: int) -> Tensor:
    """Greedy continuations by the engine, with pages and chunks shorter than the prompt."""
    engine = Engine(model, options=EngineOptions(page_size=4, max_step_tokens=6))
    answers = engine.complete_on_all_ranks(prompts.tolist(), SamplingParams(max_new_tokens=new_tokens, temperature=0.0))
    return torch.cat((prompts, torch.tensor([answer.ids for [answer] in answers])), dim=1)


def continue_all(cases: list[tuple[RunConfig, dict[str, Tensor], Tensor]], new_tokens: int) -> list[Tensor]:
    """Build and fill this rank's part of each model, and continue its prompts; in any layout."""
    torch.set_num_threads(1)
    rank = dist.get_rank() if dist.is_initialized() else 0
    found = []
    for run, logical, tokens in cases:
        model = build_model(run, ParallelMesh(Layout.from_config(run.parallel), rank))
        for stage in model.stages.values():
            fill_model(stage, model.placements, logical)
        found.append(_continue(model, tokens[:, :8], new_tokens))
    return found


def train_stages(run: RunConfig, logical: dict[str, Tensor], tokens: Tensor, counted: Tensor) -> Computed:
    """Build and fill this rank's stages, and compute loss and gradients; there are no logits or tokens to look at."""
    torch.set_num_threads(1)
    model = build_model(run, ParallelMesh(Layout.from_config(run.parallel), dist.get_rank()))
    for stage in model.stages.values():
        fill_model(stage, model.placements, logical)
        stage.eval()
    loss = model.train_step([Batch(tokens, tokens.roll(-1, dims=1), counted.float())])
    grads = [
        (piece, view.clone())
        for group in model.param_groups
        for piece, view in group_tensor_shards(group, group.grads())
    ]
    return Computed(tokens, tokens, loss.item(), grads)


def assemble(parts: list[Computed], dtype: torch.dtype = torch.float32) -> dict[str, Tensor]:
    """Whole logical gradients from every rank's pieces; asserts that they cover everything."""
    whole: dict[str, Tensor] = {}
    for part in parts:
        for piece, view in part.grads:
            target = whole.setdefault(piece.name, torch.full(piece.logical_shape, float("nan"), dtype=dtype))
            target[piece.logical_slices()] = view
    assert all(not value.isnan().any() for value in whole.values())
    return whole


def opened(folder: str, layout: dict[str, int], dtype: str | None = None, flags: Sequence[str] = ()) -> Model:
    """This rank's part of a folder's model."""
    rank = dist.get_rank() if dist.is_initialized() else 0
    return petatron.from_pretrained(folder, ParallelMesh(Layout(**layout), rank), dtype=dtype, flags=flags)


def logits_of(folder: str, tokens: Tensor, layout: dict[str, int], dtype: str | None = None) -> Tensor:
    with torch.no_grad():
        return opened(folder, layout, dtype).module.eval().logits(tokens)


def scores_of(folder: str, sequences: list[list[int]], layout: dict[str, int]) -> list[Any]:
    return [score.logprobs for score in score_sequences(opened(folder, layout), sequences)]


def weights_of(folder: str, layout: dict[str, int]) -> dict[str, Tensor]:
    return {name: value.detach() for name, value in opened(folder, layout, "float32").module.named_parameters()}


def copy_model(source: str, target: str, layout: dict[str, int]) -> None:
    opened(source, layout).save_pretrained(target)


def problem_of(folder: str, layout: dict[str, int], flags: Sequence[str]) -> str:
    """What is wrong with these flags on this mesh."""
    try:
        opened(folder, layout, flags=flags)
    except ConfigError as error:
        return str(error)
    return ""
