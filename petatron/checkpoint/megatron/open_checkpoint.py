"""A Megatron checkpoint as logical tensors: find it, check all of it, and read one tensor at a time."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from petatron.base.errors import CheckpointError, ConfigError
from petatron.base.text import some
from petatron.base.untrusted_files import is_count, read_bytes, reading
from petatron.checkpoint.convert.formats import TRACKER
from petatron.checkpoint.megatron.arguments import read_arguments
from petatron.checkpoint.megatron.lazy_weight import Stored
from petatron.checkpoint.megatron.legacy_reader import read_legacy
from petatron.checkpoint.megatron.pickle_allowlist import damaged
from petatron.checkpoint.megatron.torch_dist_reader import read_dist
from petatron.checkpoint.megatron.weight_layouts import unpack
from petatron.checkpoint.megatron.weight_names import Weight, megatron_weights, shapes_of
from petatron.config.schema.model import ModelConfig, MoEConfig
from petatron.models.hf.stored_counts import check_counts
from petatron.sharding.shard_spec import Shape

_HEAD = "output_layer.weight"
_MOST_TRACKER_BYTES = 4096


@dataclass(frozen=True, slots=True)
class LazyTensor:
    """A logical tensor that is read when it is asked for."""

    shape: Shape
    dtype: torch.dtype
    load: Callable[[], Tensor]


@dataclass(frozen=True, slots=True)
class MegatronCheckpoint:
    """An opened checkpoint. `model` and `moe` are values for ModelConfig and MoEConfig; `moe` is empty without experts.

    `iteration` is 0 for a release.
    """

    iteration: int
    model: dict[str, Any]
    moe: dict[str, Any]
    tensors: Mapping[str, LazyTensor]


def open_megatron(folder: Path, *, vocab_size: int | None = None) -> MegatronCheckpoint:
    """The newest step of a folder that Megatron saved to, or one step's own folder.

    `vocab_size` is the number of token ids; without it the one in the checkpoint's arguments is taken, if there is one. Names and
    shapes of all weights are checked here, and values are read by `LazyTensor.load`.
    """
    with reading(folder, damaged):
        return _open(find_step(folder), vocab_size)


def _open(step: Path, vocab_size: int | None) -> MegatronCheckpoint:
    found = read_dist(step) if (step / ".metadata").is_file() else read_legacy(step)
    values, experts, problems = read_arguments(found.arguments, vocab_size)
    if problems:
        raise ConfigError(problems)
    check_counts(step, damaged, values, experts, num_tensors=found.num_weights, experts_apart=True)
    model, moe = ModelConfig(**values), MoEConfig(**experts) if experts else None
    weights = megatron_weights(model, moe)
    stored = dict(found.weights({weight.name: weight.kind for weight in weights}))
    if not model.untie_embeddings_and_output_weights:
        stored.pop(_HEAD, None)  # the last pipeline stage's copy of the embedding
    _check(step, weights, stored)
    shapes = shapes_of(model, moe)
    iteration = 0 if step.name == "release" else found.iteration
    if not is_count(iteration):
        raise damaged(step, f"says that it is of iteration {iteration}")
    return MegatronCheckpoint(iteration, values, experts, _lazy(weights, stored, shapes, model))


def find_step(folder: Path) -> Path:
    """The folder of one step: `folder` itself, or the one that its tracker names."""
    if not folder.is_dir():
        raise CheckpointError(f"{folder} is not a folder. Give the folder that a Megatron run saved to.")
    if (folder / ".metadata").is_file() or any(folder.glob("mp_rank_*")):
        return folder
    tracker = folder / TRACKER
    if not tracker.is_file():
        raise CheckpointError(
            f"{folder} holds neither {TRACKER}, nor .metadata, nor mp_rank folders. Give the folder that a Megatron run "
            "saved to, or the iter_ folder of one step; formats other than torch and torch_dist are not read."
        )
    with reading(tracker, damaged):
        text = read_bytes(tracker, _MOST_TRACKER_BYTES).decode().strip()
    if re.fullmatch(r"[0-9]{1,18}", text) is None and text != "release":
        raise CheckpointError(
            f"{tracker} says {text[:40]!r} instead of a number or `release`. Write the step to read into it."
        )
    step = folder / ("release" if text == "release" else f"iter_{int(text):07d}")
    if not step.is_dir():
        there = some(sorted(path.name for path in folder.iterdir() if path.is_dir())) or "no folder"
        raise CheckpointError(
            f"{tracker} names {step.name}, but there is {there}. Copy it, or give another step's folder."
        )
    return step


def _check(step: Path, weights: tuple[Weight, ...], stored: Mapping[str, Stored]) -> None:
    """Every weight is there with its shape, and nothing else is."""
    names = {weight.name for weight in weights}
    problems = [f"{weight.name} is missing" for weight in weights if weight.name not in stored]
    problems += [f"{name} is not a weight of this model ({stored[name].where})" for name in stored.keys() - names]
    for weight in weights:
        found = stored.get(weight.name)
        if found is None or _fits(weight, found.shape):
            continue
        rows = "at least " if weight.kind == "vocabulary" else ""
        wanted = f"the arguments make it {rows}{list(weight.shape)}"
        problems.append(f"{weight.name} is {list(found.shape)}, but {wanted} ({found.where})")
    if problems:
        lines = "\n".join(f"  {problem}" for problem in _some_lines(problems))
        raise CheckpointError(
            f"The weights in {step} are not those of the model that its arguments describe:\n{lines}\n"
            "Convert only checkpoints of decoder language models, with the arguments they were trained with."
        )


def _some_lines(problems: list[str], most: int = 12) -> list[str]:
    more = len(problems) - most
    return sorted(problems)[:most] + ([f"and {more} more"] if more > 0 else [])


def _fits(weight: Weight, shape: Shape) -> bool:
    if weight.kind == "vocabulary":
        return len(shape) == 2 and shape[0] >= weight.shape[0] and shape[1:] == weight.shape[1:]
    return shape == weight.shape


def _lazy(
    weights: tuple[Weight, ...], stored: Mapping[str, Stored], shapes: Mapping[str, Shape], model: ModelConfig
) -> dict[str, LazyTensor]:
    """Logical tensors in the order of the model; an expert's weights become the rows of one."""
    sources: dict[str, list[tuple[Weight, Stored, int]]] = {}
    for weight in weights:
        for part, name in enumerate(weight.logical):
            sources.setdefault(name, []).append((weight, stored[weight.name], part))
    return {
        name: LazyTensor(shapes[name], parts[0][1].dtype, partial(_load, parts, shapes[name], model))
        for name, parts in sources.items()
    }


def _load(parts: list[tuple[Weight, Stored, int]], shape: Shape, model: ModelConfig) -> Tensor:
    with reading(Path(parts[0][1].where), damaged):
        return _read(parts, shape, model)


def _read(parts: list[tuple[Weight, Stored, int]], shape: Shape, model: ModelConfig) -> Tensor:
    """One logical tensor, as memory of its own."""
    weight, stored, part = parts[0]
    out = torch.empty(shape, dtype=stored.dtype)
    for weight, stored, part in parts:
        place = out if weight.expert is None else out[weight.expert]
        place.copy_(unpack(weight, stored.read(), part, model))
    return out
