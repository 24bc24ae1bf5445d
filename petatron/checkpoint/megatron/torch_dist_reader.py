"""Reading the distributed format, `torch_dist`: a table in `.metadata`, tensors in `__R_N.distcp`, the rest in `common.pt`.

The table lists global tensors and, for each, chunks with their place in the tensor and in a file; a chunk in a file is what
`torch.save` makes of a tensor. Layers of one shape are one tensor with the layers along its first dimension, experts are another
dimension after that; models whose layers differ have a tensor per layer, newer files one per expert. Reading a weight
touches only the chunks that it meets.
"""

from __future__ import annotations

import math
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import groupby
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from petatron.base.errors import CheckpointError
from petatron.base.untrusted_files import is_count, open_file, reading
from petatron.checkpoint.files.disk import read_fully
from petatron.checkpoint.files.safetensors_file import MOST_DIMS
from petatron.checkpoint.megatron.arguments import arguments_of
from petatron.checkpoint.megatron.lazy_weight import Found, Stored
from petatron.checkpoint.megatron.pickle_allowlist import damaged, load_blob, load_file, load_metadata
from petatron.checkpoint.megatron.pickle_interpreter import StandIn
from petatron.checkpoint.megatron.weight_names import is_weight, modern_name
from petatron.sharding.boxes import Box, BoxIndex, tiling_problem
from petatron.sharding.shard_spec import Shape

_MOST_WEIGHTS = 1_000_000
_OTHER_STATE = re.compile(r"(chained_\d+\.)?optimizer\b|rng_state|rerun_state_machine_state|opt_param_scheduler")
_LAYER = re.compile(r"decoder\.layers\.(?:(\d+)\.)?(.+)")
_EXPERT = re.compile(r"mlp\.experts\.experts\.(?:(\d+)\.)?(.+)")
_HALF = re.compile(r"(.*linear_fc1\.(?:weight|bias))_([wv])")


@dataclass(frozen=True, slots=True)
class _Chunk:
    start: Shape
    shape: Shape
    file: Path
    offset: int
    length: int


@dataclass(frozen=True, slots=True)
class _Global:
    """A tensor of the table."""

    name: str
    shape: Shape
    dtype: torch.dtype
    chunks: tuple[_Chunk, ...]
    index: BoxIndex


@dataclass(frozen=True, slots=True)
class _Box:
    """Which part of a global tensor a weight is: `lead` are its indices along the dimensions before the weight's own.

    half: 0 for a gate and 1 for an up that are tensors of their own; transposed: stored as [in, out].
    """

    tensor: _Global
    lead: Shape
    half: int | None = None
    transposed: bool = False

    @property
    def shape(self) -> Shape:
        inner = self.tensor.shape[len(self.lead) :]
        return (*inner[:-2], inner[-1], inner[-2]) if self.transposed else inner


def read_dist(step: Path) -> Found:
    """All weights of a step's folder."""
    common_path = step / "common.pt"
    if not common_path.is_file():
        raise CheckpointError(f"{step} has no common.pt, which holds the model's arguments. Copy the whole folder.")
    common = load_file(common_path)
    reader = _Reader()
    boxes: dict[str, list[_Box]] = {}
    with reading(step / ".metadata", damaged):
        tensors = list(_table(step))
        _check_files(tensors)
        num_weights = sum(math.prod(tensor.shape[: _stacked(tensor)]) for tensor in tensors)
        if num_weights > _MOST_WEIGHTS:
            raise damaged(step / ".metadata", f"has {num_weights:,} weights, more than any model")
        for tensor in tensors:
            for name, box in _weights_in(tensor):
                boxes.setdefault(name, []).append(box)
    weights = {name: _stored(step, reader, found) for name, found in boxes.items()}
    iteration = int(common.get("iteration") or 0)
    return Found(arguments_of(common, common_path), iteration, len(weights), lambda kinds: weights)


def _table(step: Path) -> Iterator[_Global]:
    path = step / ".metadata"
    table = load_metadata(path)
    try:
        tensors: dict[str, Any] = table.fields["state_dict_metadata"]
        places = {
            _place(index.fields["fqn"], _shape(index.fields["offset"] or ())): info
            for index, info in table.fields["storage_data"].items()
        }
        for name, facts in tensors.items():
            if isinstance(facts, StandIn) and "chunks" in facts.fields and _is_model_weight(name):
                yield _global(step, name, facts, places)
    except (KeyError, AttributeError, TypeError) as error:
        raise CheckpointError(
            f"{path} is not a table that is understood ({type(error).__name__}: {error}). "
            "Save the checkpoint with a torch between 2.1 and this one."
        ) from None


def _is_model_weight(name: str) -> bool:
    return is_weight(name) and not _OTHER_STATE.match(name)


def _place(name: str, start: Shape) -> str:
    """What places are looked up by: nobody can make texts collide, as one can tuples of numbers."""
    return f"{name} {start}"


def _global(step: Path, name: str, facts: StandIn, places: Mapping[str, Any]) -> _Global:
    """A tensor whose chunks are all of it, each once."""
    shape, dtype = _shape(facts.fields["size"]), _dtype(facts.fields["properties"])
    boxes = sorted((_shape(chunk.fields["offsets"]), _shape(chunk.fields["sizes"])) for chunk in facts.fields["chunks"])
    chunks = tuple(
        _chunk(step, start, size, places[_place(name, start)])
        for (start, size), _ in groupby(boxes)  # ranks may repeat it
    )
    places_in_tensor = [Box(chunk.start, chunk.shape) for chunk in chunks]
    gap = tiling_problem(shape, places_in_tensor)
    if gap is not None:
        raise CheckpointError(
            f"{step / '.metadata'}: the chunks of {name} do not cover it: {gap}. Copy the folder again, with the .distcp "
            "files of all ranks."
        )
    for chunk in chunks:
        if math.prod(chunk.shape) * dtype.itemsize > chunk.length:
            raise CheckpointError(
                f"{step / '.metadata'}: a chunk of {name} of shape {list(chunk.shape)} has {chunk.length} bytes. Its files are "
                "of different saves; copy the folder again."
            )
    return _Global(name, shape, dtype, chunks, BoxIndex(places_in_tensor))


def _check_files(tensors: Sequence[_Global]) -> None:
    """Chunks are in their files and together not larger than these: a table is believed only as far as there are bytes."""
    sizes: dict[Path, int] = {}
    claimed: dict[Path, int] = {}
    for name, chunk in ((tensor.name, chunk) for tensor in tensors for chunk in tensor.chunks):
        if chunk.file not in sizes:
            sizes[chunk.file] = _file_size(chunk.file, name)
        claimed[chunk.file] = claimed.get(chunk.file, 0) + chunk.length
        if max(chunk.offset + chunk.length, claimed[chunk.file]) > sizes[chunk.file]:
            raise CheckpointError(
                f"{chunk.file} is cut short: {name} needs bytes {chunk.offset} to {chunk.offset + chunk.length}. "
                "Copy it again."
            )


def _file_size(path: Path, name: str) -> int:
    try:
        with open_file(path) as file:
            return os.fstat(file.fileno()).st_size
    except OSError as error:
        raise _unreadable(path, name, error) from None


def _unreadable(path: Path, name: str, error: OSError) -> CheckpointError:
    return CheckpointError(
        f"{path} cannot be read, but holds a part of {name}: {error.strerror}. "
        "Copy the folder again, with the .distcp files of all ranks."
    )


def _shape(value: Any) -> Shape:
    if not isinstance(value, tuple) or len(value) > MOST_DIMS or not all(map(is_count, value)):
        raise TypeError(f"a {type(value).__name__} where a shape should be")
    return value


def _dtype(properties: StandIn) -> torch.dtype:
    """Properties keep themselves as a tuple that begins with the number format."""
    found = properties.fields["dtype"] if isinstance(properties.state, dict) else properties.state[0]
    if not isinstance(found, torch.dtype):
        raise TypeError(f"a {type(found).__name__} where a dtype should be")
    return found


def _chunk(step: Path, start: Shape, shape: Shape, info: StandIn) -> _Chunk:
    kept = info.fields
    name, offset, length = kept["relative_path"], kept["offset"], kept["length"]
    if not isinstance(name, str) or "\0" in name or Path(name).name != name:
        raise CheckpointError(
            f"{step / '.metadata'} points outside of its folder, at {name}. Do not use this checkpoint."
        )
    if kept.get("transform_descriptors"):
        raise CheckpointError(f"{step / name} is compressed, which is not understood. Save it without compression.")
    if not is_count(offset) or not is_count(length):
        raise TypeError(f"no place in {name}")
    return _Chunk(start, shape, step / name, offset, length)


def _stacked(tensor: _Global) -> int:
    """How many of the first dimensions count layers and experts."""
    layered = _LAYER.fullmatch(tensor.name)
    if layered is None:
        return 0
    expert = _EXPERT.fullmatch(layered[2])
    return int(layered[1] is None) + int(expert is not None and expert[1] is None)


def _weights_in(tensor: _Global) -> Iterator[tuple[str, _Box]]:
    """The weights that a global tensor holds, by the names of `weight_names.py`."""
    layered = _LAYER.fullmatch(tensor.name)
    if layered is None:
        yield modern_name(tensor.name), _Box(tensor, ())
        return
    stacked = layered[1] is None
    for layer in range(tensor.shape[0]) if stacked and tensor.shape else [int(layered[1] or 0)]:
        lead = (layer,) if stacked else ()
        expert = _EXPERT.fullmatch(layered[2])
        if expert is None:
            half, suffix = _split_half(layered[2])
            yield modern_name(f"decoder.layers.{layer}.{suffix}"), _Box(tensor, lead, half)
            continue
        half, suffix = _split_half(expert[2])
        products = re.fullmatch(r"weight([12])", suffix)
        suffix = suffix if products is None else f"linear_fc{products[1]}.weight"
        together = expert[1] is None
        count = tensor.shape[len(lead)] if together and len(tensor.shape) > len(lead) else 0
        for index in range(count) if together else [int(expert[1])]:
            box = _Box(tensor, (*lead, index) if together else lead, half, products is not None)
            yield f"decoder.layers.{layer}.mlp.experts.{index}.{suffix}", box


def _split_half(name: str) -> tuple[int | None, str]:
    """`linear_fc1.weight_w` and `_v` are the gate and the up of newer files."""
    match = _HALF.fullmatch(name)
    return (None, name) if match is None else ("wv".index(match[2]), match[1])


def _stored(step: Path, reader: _Reader, boxes: list[_Box]) -> Stored:
    """Halves become one weight, gate first."""
    boxes = sorted(boxes, key=lambda box: box.half or 0)
    halves = [box.half for box in boxes]
    if halves not in ([None], [0, 1]):
        names = ", ".join(box.tensor.name for box in boxes)
        raise CheckpointError(f"{step / '.metadata'}: {names} are not one weight, nor a gate and an up. Copy it again.")
    first = boxes[0].shape
    shape = (sum(box.shape[0] for box in boxes), *first[1:]) if first else first
    return Stored(shape, boxes[0].tensor.dtype, str(step / ".metadata"), partial(reader.weight, boxes))


class _Reader:
    """Reads chunks; keeps the last one, since q, k and v, or the experts of one chunk, are asked for one after another."""

    def __init__(self) -> None:
        self._last: tuple[_Chunk, Tensor] | None = None

    def weight(self, boxes: list[_Box]) -> Tensor:
        parts = [self._box(box) for box in boxes]
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def _box(self, box: _Box) -> Tensor:
        tensor = box.tensor
        inner = tensor.shape[len(box.lead) :]
        start, shape = (*box.lead, *(0 for _ in inner)), (*(1 for _ in box.lead), *inner)
        out = torch.empty(shape, dtype=tensor.dtype)
        whole = Box(start, shape)
        for number, common in tensor.index.overlaps(whole):  # chunks tile the tensor
            chunk = tensor.chunks[number]
            out[common.slices_in(whole)] = self._load(chunk, tensor)[common.slices_in(Box(chunk.start, chunk.shape))]
        out = out.reshape(inner)
        return out.transpose(-1, -2) if box.transposed else out

    def _load(self, chunk: _Chunk, tensor: _Global) -> Tensor:
        if self._last is not None and self._last[0] == chunk:
            return self._last[1]
        blob = torch.empty(chunk.length, dtype=torch.uint8)
        try:
            with open_file(chunk.file, buffering=0) as file:
                count = read_fully(file.fileno(), memoryview(blob.numpy()), chunk.offset)
        except OSError as error:
            raise _unreadable(chunk.file, tensor.name, error) from None
        if count != chunk.length:
            raise CheckpointError(f"{chunk.file} became shorter while it was read. Copy it again.")
        loaded = load_blob(blob, chunk.file)
        if loaded.numel() != torch.Size(chunk.shape).numel() or loaded.dtype != tensor.dtype:
            raise CheckpointError(
                f"{chunk.file} has {list(loaded.shape)} of {loaded.dtype} where the table has {list(chunk.shape)} of "
                f"{tensor.dtype} for {tensor.name}. Its files are of different saves; copy the folder again."
            )
        self._last = (chunk, loaded.reshape(chunk.shape))
        return self._last[1]
