"""Reads the distributed format, `torch_dist`: metadata in `.metadata`, tensors and objects in `__R_N.distcp`.

Other state, with the arguments of the run, is in `common.pt`, or (since version 0.19) an object like the others.

The metadata lists global tensors and, for each, chunks with their offset in the tensor and in a file; a chunk in a file is a
`torch.save` of a tensor. Layers of one shape are one tensor stacked along its first dimension, experts along the next; models
whose layers differ have a tensor per layer, newer files one per expert. Reading a weight reads only the chunks it overlaps.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from petatron.base.errors import CheckpointError
from petatron.base.untrusted_files import reading_untrusted
from petatron.checkpoint.megatron.arguments import checkpoint_arguments
from petatron.checkpoint.megatron.lazy_weight import (
    STATE_KINDS,
    LazyWeight,
    MegatronContents,
    StateKind,
    StoredOptimizer,
    other_state,
    stored_scheduler,
)
from petatron.checkpoint.megatron.optimizer_state import (
    check_readable,
    optimizer_parts,
    read_grad_scaler,
    read_step,
    unreadable_kind,
)
from petatron.checkpoint.megatron.read_megatron_pickles import load_common_state, load_torch_file, megatron_file_error
from petatron.checkpoint.megatron.torch_dist_metadata import (
    ChunkReader,
    DistTable,
    DistTensor,
    StoredChunk,
    check_files,
    read_blob,
)
from petatron.checkpoint.megatron.weight_names import is_weight, mcore_name
from petatron.sharding.boxes import Box
from petatron.sharding.shard_spec import Shape

_MAX_WEIGHTS = 1_000_000
_COMMON_STATE = "common_state/shard_0_1"
"""The object that has the arguments where there is no common.pt."""
_OTHER_STATE = re.compile(r"(chained_\d+\.)?optimizer\b|rng_state|rerun_state_machine_state|opt_param_scheduler")
_OPTIMIZER = re.compile(r"(?:chained_\d+\.)?optimizer\.state\.(param|fp32_param|exp_avg|exp_avg_sq)\.(.+)")
_KINDS: Mapping[str, StateKind] = {
    "param": "master", "fp32_param": "master", "exp_avg": "exp_avg", "exp_avg_sq": "exp_avg_sq",
}  # fmt: skip
_BUCKETS = re.compile(r"(?:chained_\d+\.)?optimizer\.distributed\.")
_LAYER = re.compile(r"(?:decoder|encoder)\.layers\.(?:(\d+)\.)?(.+)")
_DEPTH = re.compile(r"(mtp\.layers\.\d+\.(?:transformer_layer|mtp_model_layer(?:\.layers\.\d+)?))\.(.+)")
_EXPERT = re.compile(r"mlp\.experts\.experts\.(?:(\d+)\.)?(.+)")
_HALF = re.compile(r"(.*linear_fc1\.(?:weight|bias))_([wv])")
_MIXER_PART = re.compile(r"(.*mixer\.(?:in_proj\.weight|conv1d\.(?:weight|bias)))\.(z|x|B|C|dt)")
_MIXER_PARTS = ("z", "x", "B", "C", "dt")


@dataclass(frozen=True, slots=True)
class _WeightSlice:
    """The part of a global tensor that is one weight: `leading_index` are its indices along the stacked dimensions.

    part: the order among parts of one weight that are tensors of their own: a gate and an up, or z, x, B, C and dt of a mixer.
    transposed: stored as [in, out].
    """

    tensor: DistTensor
    leading_index: Shape
    part: int | None = None
    transposed: bool = False

    @property
    def shape(self) -> Shape:
        inner = self.tensor.shape[len(self.leading_index) :]
        return (*inner[:-2], inner[-1], inner[-2]) if self.transposed else inner


def read_torch_dist(step: Path) -> MegatronContents:
    """Reads all weights of a step's folder."""
    with reading_untrusted(step / ".metadata", megatron_file_error):
        table = DistTable.read(step)
        weights = _weights(table, {name: name for name in table.entries if _is_model_weight(name)})
        common, path = _read_common(step, table.object_place(_COMMON_STATE))
    iteration = int(common.get("iteration") or 0)
    arguments, others = checkpoint_arguments(common, path), other_state([*table.entries, *common])
    has_optimizer = "optimizer" in others
    return MegatronContents(
        arguments=arguments,
        iteration=iteration,
        num_weights=len(weights),
        other_state=others,
        lazy_weights=lambda kinds: weights,
        scheduler=stored_scheduler(common),
        optimizer=(lambda kinds: _read_optimizer(table, common, path, arguments)) if has_optimizer else None,
    )


def _read_optimizer(
    table: DistTable, common: Mapping[str, Any], path: Path, arguments: Mapping[str, Any]
) -> StoredOptimizer:
    """Opens the state of a plain optimizer, or of a distributed one that was stored by weight."""
    parts = optimizer_parts(common.get("optimizer", {}), path)
    check_readable(parts, arguments, path)
    names: dict[StateKind, dict[str, str]] = {kind: {} for kind in STATE_KINDS}
    for name in table.entries:
        if (match := _OPTIMIZER.fullmatch(name)) is not None:
            names[_KINDS[match[1]]][name] = match[2]
    if any(_BUCKETS.match(name) for name in table.entries):
        raise unreadable_kind("dp_reshardable or another kind of buckets", path)
    with reading_untrusted(table.step / ".metadata", megatron_file_error):
        tensors: dict[StateKind, dict[str, LazyWeight]] = {
            kind: _weights(table, stored) for kind, stored in names.items()
        }
    return StoredOptimizer(tensors, read_step(parts, path), read_grad_scaler(parts))


def _weights(table: DistTable, names: Mapping[str, str]) -> dict[str, LazyWeight]:
    """Returns the weights in tensors of the table, by the names of `weight_names.py`; `names` maps stored names to those of weights."""
    reader, boxes = ChunkReader(), dict[str, list[_WeightSlice]]()
    tensors = table.tensors(names)
    num_weights = sum(math.prod(tensor.shape[: _num_stacked_dims(tensor)]) for tensor in tensors)
    if num_weights > _MAX_WEIGHTS:
        raise megatron_file_error(table.step / ".metadata", f"has {num_weights:,} weights, more than any model")
    for tensor in tensors:
        for name, box in _weights_in(tensor):
            boxes.setdefault(name, []).append(box)
    return {name: _lazy_weight(table.step, reader, stored) for name, stored in boxes.items()}


def _read_common(step: Path, stored: StoredChunk | None) -> tuple[dict[str, Any], Path]:
    """Returns the state that is no tensor of the model, and the file that has it."""
    path = step / "common.pt"
    if path.is_file():
        return load_torch_file(path), path
    if stored is None:
        raise CheckpointError(
            f"{step} has neither common.pt nor {_COMMON_STATE}, which hold the model's arguments. Copy the whole folder; "
            "one of --ckpt-format fsdp_dtensor or torch_dcp has neither, so save it once with --ckpt-format torch_dist."
        )
    check_files([(_COMMON_STATE, stored)])
    return load_common_state(read_blob(stored, _COMMON_STATE), stored.file), stored.file


def _is_model_weight(name: str) -> bool:
    return is_weight(name) and not _OTHER_STATE.match(name)


@dataclass(frozen=True, slots=True)
class _LayerTensor:
    """The name of a global tensor inside a layer: the layer's module, the layer (None: all are stacked), and the rest."""

    module: str
    layer: int | None
    suffix: str


def _in_layer(name: str) -> _LayerTensor | None:
    """Returns None outside of layers."""
    layered = _LAYER.fullmatch(name)
    if layered is not None:
        return _LayerTensor("decoder.layers.{}", None if layered[1] is None else int(layered[1]), layered[2])
    depth = _DEPTH.fullmatch(name)
    return None if depth is None else _LayerTensor(depth[1], 0, depth[2])


def _num_stacked_dims(tensor: DistTensor) -> int:
    """Returns how many leading dimensions index layers and experts."""
    layered = _in_layer(tensor.name)
    if layered is None:
        return 0
    expert = _EXPERT.fullmatch(layered.suffix)
    return int(layered.layer is None) + int(expert is not None and expert[1] is None)


def _weights_in(tensor: DistTensor) -> Iterator[tuple[str, _WeightSlice]]:
    """Yields the weights of a global tensor, by the names of `weight_names.py`."""
    layered = _in_layer(tensor.name)
    if layered is None:
        yield mcore_name(tensor.name), _WeightSlice(tensor, ())
        return
    stacked = layered.layer is None
    for layer in range(tensor.shape[0]) if stacked and tensor.shape else [layered.layer or 0]:
        lead, module = (layer,) if stacked else (), layered.module.format(layer)
        expert = _EXPERT.fullmatch(layered.suffix)
        if expert is None:
            part, suffix = _split_part(layered.suffix)
            yield mcore_name(f"{module}.{suffix}"), _WeightSlice(tensor, lead, part)
            continue
        part, suffix = _split_part(expert[2])
        products = re.fullmatch(r"weight([12])", suffix)
        suffix = suffix if products is None else f"linear_fc{products[1]}.weight"
        together = expert[1] is None
        count = tensor.shape[len(lead)] if together and len(tensor.shape) > len(lead) else 0
        for index in range(count) if together else [int(expert[1])]:
            box = _WeightSlice(tensor, (*lead, index) if together else lead, part, products is not None)
            yield mcore_name(f"{module}.mlp.experts.{index}.{suffix}"), box


def _split_part(name: str) -> tuple[int | None, str]:
    """`linear_fc1.weight_w` and `_v` are the gate and the up of newer files, `in_proj.weight.z` a part of a mixer's."""
    if (half := _HALF.fullmatch(name)) is not None:
        return "wv".index(half[2]), half[1]
    if (part := _MIXER_PART.fullmatch(name)) is not None:
        return _MIXER_PARTS.index(part[2]), part[1]
    return None, name


def _lazy_weight(step: Path, reader: ChunkReader, boxes: list[_WeightSlice]) -> LazyWeight:
    """Concatenates the parts of a weight in their order; that some of several are missing shows in the shape."""
    boxes = sorted(boxes, key=lambda box: box.part or 0)
    parts = {box.part for box in boxes}
    is_undivided = parts == {None} and len(boxes) == 1
    if not is_undivided and (None in parts or len(boxes) < 2 or len(parts) < len(boxes)):
        names = ", ".join(box.tensor.name for box in boxes)
        kinds = "not one weight, nor a gate and an up, nor the parts of a mixer's"
        raise CheckpointError(f"{step / '.metadata'}: {names} are {kinds}. Copy it again.")
    first = boxes[0].shape
    shape = (sum(box.shape[0] for box in boxes), *first[1:]) if first else first
    return LazyWeight(shape, boxes[0].tensor.dtype, str(step / ".metadata"), partial(_read_weight, reader, boxes))


def _read_weight(reader: ChunkReader, boxes: list[_WeightSlice]) -> Tensor:
    parts = [_read_slice(reader, box) for box in boxes]
    return parts[0] if len(parts) == 1 else torch.cat(parts)


def _read_slice(reader: ChunkReader, box: _WeightSlice) -> Tensor:
    inner = box.tensor.shape[len(box.leading_index) :]
    start, shape = (*box.leading_index, *(0 for _ in inner)), (*(1 for _ in box.leading_index), *inner)
    out = reader.read_box(box.tensor, Box(start, shape)).reshape(inner)
    return out.transpose(-1, -2) if box.transposed else out
