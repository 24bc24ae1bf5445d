"""Opens a Megatron checkpoint as logical tensors: finds it, checks all of it, and reads one tensor at a time."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from petatron.base.errors import CheckpointError, ConfigError
from petatron.base.format_text import abbreviate_names
from petatron.base.model_folder_file_names import TRACKER_FILE
from petatron.base.untrusted_files import is_count, read_limited_bytes, reading_untrusted
from petatron.checkpoint.megatron.arguments import config_from_arguments, tokenizer_values
from petatron.checkpoint.megatron.layer_kind_arguments import masked_language_values, moe_layer_freq
from petatron.checkpoint.megatron.lazy_weight import (
    STATE_KINDS,
    LazyWeight,
    MegatronContents,
    StateKind,
    StoredOptimizer,
)
from petatron.checkpoint.megatron.legacy_reader import read_legacy
from petatron.checkpoint.megatron.read_megatron_pickles import megatron_file_error
from petatron.checkpoint.megatron.torch_dist_reader import read_torch_dist
from petatron.checkpoint.megatron.training_arguments import Sections, training_sections
from petatron.checkpoint.megatron.weight_layouts import extract_logical
from petatron.checkpoint.megatron.weight_names import MegatronWeight, logical_shapes_with_router_bias, megatron_weights
from petatron.config.schema.model import ModelConfig, MoEConfig
from petatron.config.schema.sections.multi_token_prediction import num_prediction_layers
from petatron.models.hf.check_claimed_counts import check_counts
from petatron.models.registry import spec_from_config
from petatron.sharding.shard_spec import Shape

_OUTPUT_LAYER_WEIGHT = "output_layer.weight"
_MAX_TRACKER_BYTES = 4096


@dataclass(frozen=True, slots=True)
class LazyTensor:
    """A logical tensor that is read on demand."""

    shape: Shape
    dtype: torch.dtype
    load: Callable[[], Tensor]


@dataclass(frozen=True, slots=True)
class MegatronTraining:
    """How far a run is: its optimizer's tensors of each kind by logical name, the updates that it has made, and what else continues.

    Master weights are there where the model's have 16 bits. sections: of our configuration, how the run trains. progress, loss_scale: as
    checkpoints of ours record them.
    """

    tensors: Mapping[StateKind, Mapping[str, LazyTensor]]
    updates: int
    sections: Sections
    progress: dict[str, int]
    loss_scale: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class MegatronCheckpoint:
    """An opened checkpoint. `model` and `moe` are values for ModelConfig and MoEConfig; `moe` is empty without experts.

    `iteration` is 0 for a release. `tokenizer` has values for TokenizerConfig, if it is of a kind of ours. `other_state` names what the
    checkpoint has besides weights. `open_training` opens the optimizer's state and the position of the run, and raises if the state is of
    a kind that is not read; None if there is none.
    """

    iteration: int
    model: dict[str, Any]
    moe: dict[str, Any]
    tensors: Mapping[str, LazyTensor]
    other_state: tuple[str, ...]
    tokenizer: dict[str, Any] = field(default_factory=dict)
    open_training: Callable[[], MegatronTraining] | None = None


def iteration_folder(iteration: int) -> str:
    """Returns the name of an iteration's folder; Megatron has no step 0, which is a release."""
    return "release" if iteration == 0 else f"iter_{iteration:07d}"


def open_megatron(folder: Path, *, vocab_size: int | None = None) -> MegatronCheckpoint:
    """Opens the newest step of a folder that Megatron saved to, or one step's own folder.

    `vocab_size` is the number of token ids; the default is the one in the checkpoint's arguments, if there is one. Names and shapes of
    all weights are checked here, and values are read by `LazyTensor.load`.
    """
    with reading_untrusted(folder, megatron_file_error):
        return _open(find_step(folder), vocab_size)


def _open(step: Path, vocab_size: int | None) -> MegatronCheckpoint:
    contents = read_torch_dist(step) if (step / ".metadata").is_file() else read_legacy(step)
    names = contents.lazy_weights({}).keys()
    values, experts, problems = config_from_arguments(contents.arguments, vocab_size)
    values |= masked_language_values(names, contents.arguments)
    if problems:
        raise ConfigError(problems)
    model, moe = ModelConfig(**values), MoEConfig(**experts) if experts else None
    layers = {**values, "num_layers": model.num_layers + num_prediction_layers(model)}
    claimed = {**experts, "moe_layer_freq": moe_layer_freq(values, experts)} if experts else experts
    check_counts(step, megatron_file_error, layers, claimed, num_tensors=contents.num_weights, separate_experts=True)
    spec = spec_from_config(model, moe)
    weights = megatron_weights(spec)
    expected = {weight.name: weight for weight in weights}

    def logical(stored: Mapping[str, LazyWeight], weights: tuple[MegatronWeight, ...]) -> dict[str, LazyTensor]:
        if not model.untie_embeddings_and_output_weights:  # the last pipeline stage has a copy of the embedding
            stored = {name: weight for name, weight in stored.items() if name != _OUTPUT_LAYER_WEIGHT}
        _check_weights(step, weights, stored)
        return _lazy_tensors(weights, stored, shapes, model)

    def open_training() -> MegatronTraining:
        assert contents.optimizer is not None, "asked of a checkpoint without an optimizer"
        with reading_untrusted(step, megatron_file_error):
            return _open_training(contents, contents.optimizer(expected), weights, logical)

    shapes = logical_shapes_with_router_bias(spec)
    tensors = logical(contents.lazy_weights(expected), weights)
    iteration = 0 if step.name == "release" else contents.iteration
    if not is_count(iteration):
        raise megatron_file_error(step, f"says that it is of iteration {iteration}")
    trains = contents.optimizer is not None and iteration > 0
    return MegatronCheckpoint(
        iteration,
        values,
        experts,
        tensors,
        contents.other_state,
        tokenizer_values(contents.arguments),
        open_training if trains else None,
    )


def _open_training(
    contents: MegatronContents,
    optimizer: StoredOptimizer,
    weights: tuple[MegatronWeight, ...],
    logical: Callable[[Mapping[str, LazyWeight], tuple[MegatronWeight, ...]], dict[str, LazyTensor]],
) -> MegatronTraining:
    """Puts together what a run continues with; `logical` checks tensors of weights, and makes them logical ones."""
    arguments = contents.arguments
    trained = tuple(weight for weight in weights if not weight.name.endswith(".expert_bias"))
    sections = training_sections(arguments, contents.scheduler, iteration=contents.iteration)
    narrow = sections["precision"].get("bf16") or sections["precision"].get("fp16")
    stored = dict(optimizer.tensors)
    if narrow:  # a weight that is float32 in the model is its own master weight
        stored["master"] = {**contents.lazy_weights({weight.name: weight for weight in weights}), **stored["master"]}
        stored["master"] = {name: kept for name, kept in stored["master"].items() if not name.endswith(".expert_bias")}
    tensors: dict[StateKind, dict[str, LazyTensor]] = {
        kind: logical(stored[kind], trained) for kind in STATE_KINDS if kind != "master" or narrow
    }
    batch, iteration = sections["train"]["global_batch_size"], contents.iteration
    consumed: Any = arguments.get("consumed_train_samples")
    consumed = int(consumed) if is_count(consumed) else iteration * batch
    done: Any = contents.scheduler.get("num_steps")  # samples of updates that were not skipped
    done = min(int(done) if is_count(done) else optimizer.step * batch, consumed)
    progress = {
        "iteration": iteration,
        "consumed_samples": consumed,
        "consumed_tokens": consumed * (arguments.get("seq_length") or 0),
        "updates": min(done // batch, iteration),
        "update_samples": done,
    }
    return MegatronTraining(tensors, optimizer.step, sections, progress, optimizer.grad_scaler)


def find_step(folder: Path) -> Path:
    """Returns the folder of one step: `folder` itself, or the one that its tracker names."""
    if not folder.is_dir():
        raise CheckpointError(f"{folder} is not a folder. Give the folder that a Megatron run saved to.")
    if (folder / ".metadata").is_file() or any(folder.glob("mp_rank_*")):
        return folder
    tracker = folder / TRACKER_FILE
    if not tracker.is_file():
        raise CheckpointError(
            f"{folder} holds neither {TRACKER_FILE}, nor .metadata, nor mp_rank folders. Give the folder that a Megatron run "
            "saved to, or the iter_ folder of one step; formats other than torch and torch_dist are not read."
        )
    with reading_untrusted(tracker, megatron_file_error):
        text = read_limited_bytes(tracker, _MAX_TRACKER_BYTES).decode().strip()
    if re.fullmatch(r"[0-9]{1,18}", text) is None and text != "release":
        raise CheckpointError(
            f"{tracker} says {text[:40]!r} instead of a number or `release`. Write the step to read into it."
        )
    step = folder / (text if text == "release" else f"iter_{int(text):07d}")
    if not step.is_dir():
        there = abbreviate_names(sorted(path.name for path in folder.iterdir() if path.is_dir())) or "no folder"
        raise CheckpointError(
            f"{tracker} names {step.name}, but there is {there}. Copy it, or give another step's folder."
        )
    return step


def _check_weights(step: Path, weights: tuple[MegatronWeight, ...], stored: Mapping[str, LazyWeight]) -> None:
    """Every weight is there with its shape, and nothing else is."""
    names = {weight.name for weight in weights}
    problems = [f"{weight.name} is missing" for weight in weights if weight.name not in stored]
    problems += [f"{name} is not a weight of this model ({stored[name].location})" for name in stored.keys() - names]
    for weight in weights:
        stored_weight = stored.get(weight.name)
        if stored_weight is None or _shape_matches(weight, stored_weight.shape):
            continue
        rows = "at least " if weight.layout == "vocabulary" else ""
        wanted = f"the arguments make it {rows}{list(weight.shape)}"
        problems.append(f"{weight.name} is {list(stored_weight.shape)}, but {wanted} ({stored_weight.location})")
    if problems:
        lines = "\n".join(f"  {problem}" for problem in _first_problems(problems))
        raise CheckpointError(
            f"The weights in {step} are not those of the model that its arguments describe:\n{lines}\n"
            "Convert only checkpoints of decoder language models and of BERT, with the arguments they were trained with."
        )


def _first_problems(problems: list[str], max_lines: int = 12) -> list[str]:
    more = len(problems) - max_lines
    return sorted(problems)[:max_lines] + ([f"and {more} more"] if more > 0 else [])


def _shape_matches(weight: MegatronWeight, shape: Shape) -> bool:
    if weight.layout == "vocabulary":
        return len(shape) == len(weight.shape) and shape[0] >= weight.shape[0] and shape[1:] == weight.shape[1:]
    return shape == weight.shape


def _lazy_tensors(
    weights: tuple[MegatronWeight, ...],
    stored: Mapping[str, LazyWeight],
    shapes: Mapping[str, Shape],
    model: ModelConfig,
) -> dict[str, LazyTensor]:
    """Returns logical tensors in model order; the experts' weights become the rows of one."""
    sources: dict[str, list[tuple[MegatronWeight, LazyWeight, int]]] = {}
    for weight in weights:
        for part, name in enumerate(weight.logical_names):
            sources.setdefault(name, []).append((weight, stored[weight.name], part))
    return {
        name: LazyTensor(shapes[name], parts[0][1].dtype, partial(_load, parts, shapes[name], model))
        for name, parts in sources.items()
    }


def _load(parts: list[tuple[MegatronWeight, LazyWeight, int]], shape: Shape, model: ModelConfig) -> Tensor:
    with reading_untrusted(Path(parts[0][1].location), megatron_file_error):
        return _read(parts, shape, model)


def _read(parts: list[tuple[MegatronWeight, LazyWeight, int]], shape: Shape, model: ModelConfig) -> Tensor:
    """Reads one logical tensor into its own memory."""
    weight, stored, part = parts[0]
    out = torch.empty(shape, dtype=stored.dtype)
    for weight, stored, part in parts:
        place = out if weight.expert is None else out[weight.expert]
        place.copy_(extract_logical(weight, stored.load(), part, model))
    return out
