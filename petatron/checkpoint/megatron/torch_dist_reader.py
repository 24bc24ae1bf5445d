"""Reads the distributed format, `torch_dist`: metadata in `.metadata`, tensors and objects in `__R_N.distcp`.

Other state, with the arguments of the run, is in `common.pt`, or (since version 0.19) an object like the others.

The metadata lists global tensors and, for each, chunks with their offset in the tensor and in a file; a chunk in a file is a
`torch.save` of a tensor. Layers of one shape are one tensor stacked along its first dimension, experts along the next; models
whose layers differ have a tensor per layer, newer files one per expert. Reading a weight reads only the chunks it overlaps.
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
from petatron.base.untrusted_files import is_count, open_regular_file, reading_untrusted
from petatron.checkpoint.files.disk import read_into
from petatron.checkpoint.files.safetensors_file import MAX_DIMS
from petatron.checkpoint.megatron.arguments import checkpoint_arguments
from petatron.checkpoint.megatron.lazy_weight import LazyWeight, MegatronContents, other_state
from petatron.checkpoint.megatron.pickle_allowlist import (
    load_common_state,
    load_dist_metadata,
    load_tensor_blob,
    load_torch_file,
    megatron_file_error,
)
from petatron.checkpoint.megatron.pickle_interpreter import InertObject
from petatron.checkpoint.megatron.weight_names import is_weight, mcore_name
from petatron.sharding.boxes import Box, BoxIndex, tiling_problem
from petatron.sharding.shard_spec import Shape

_MAX_WEIGHTS = 1_000_000
_COMMON_STATE = "common_state/shard_0_1"
"""The object that has the arguments where there is no common.pt."""
_OTHER_STATE = re.compile(r"(chained_\d+\.)?optimizer\b|rng_state|rerun_state_machine_state|opt_param_scheduler")
_LAYER = re.compile(r"decoder\.layers\.(?:(\d+)\.)?(.+)")
_DEPTH = re.compile(r"(mtp\.layers\.\d+\.(?:transformer_layer|mtp_model_layer))\.(.+)")
_EXPERT = re.compile(r"mlp\.experts\.experts\.(?:(\d+)\.)?(.+)")
_HALF = re.compile(r"(.*linear_fc1\.(?:weight|bias))_([wv])")
_MIXER_PART = re.compile(r"(.*mixer\.(?:in_proj\.weight|conv1d\.(?:weight|bias)))\.(z|x|B|C|dt)")
_MIXER_PARTS = ("z", "x", "B", "C", "dt")


@dataclass(frozen=True, slots=True)
class _StoredChunk:
    start: Shape
    shape: Shape
    file: Path
    offset: int
    length: int


@dataclass(frozen=True, slots=True)
class _DistTensor:
    """A global tensor of the metadata."""

    name: str
    shape: Shape
    dtype: torch.dtype
    chunks: tuple[_StoredChunk, ...]
    index: BoxIndex


@dataclass(frozen=True, slots=True)
class _WeightSlice:
    """The part of a global tensor that is one weight: `leading_index` are its indices along the stacked dimensions.

    part: the order among parts of one weight that are tensors of their own: a gate and an up, or z, x, B, C and dt of a mixer.
    transposed: stored as [in, out].
    """

    tensor: _DistTensor
    leading_index: Shape
    part: int | None = None
    transposed: bool = False

    @property
    def shape(self) -> Shape:
        inner = self.tensor.shape[len(self.leading_index) :]
        return (*inner[:-2], inner[-1], inner[-2]) if self.transposed else inner


def read_torch_dist(step: Path) -> MegatronContents:
    """Reads all weights of a step's folder."""
    reader = _ChunkReader()
    boxes: dict[str, list[_WeightSlice]] = {}
    with reading_untrusted(step / ".metadata", megatron_file_error):
        tensors, names, common_state = _read_metadata(step)
        _check_files([(tensor.name, chunk) for tensor in tensors for chunk in tensor.chunks])
        num_weights = sum(math.prod(tensor.shape[: _num_stacked_dims(tensor)]) for tensor in tensors)
        if num_weights > _MAX_WEIGHTS:
            raise megatron_file_error(step / ".metadata", f"has {num_weights:,} weights, more than any model")
        for tensor in tensors:
            for name, box in _weights_in(tensor):
                boxes.setdefault(name, []).append(box)
    weights = {name: _lazy_weight(step, reader, stored) for name, stored in boxes.items()}
    common, path = _read_common(step, common_state)
    iteration = int(common.get("iteration") or 0)
    arguments, others = checkpoint_arguments(common, path), other_state([*names, *common])
    return MegatronContents(arguments, iteration, len(weights), others, lambda kinds: weights)


def _read_common(step: Path, stored: _StoredChunk | None) -> tuple[dict[str, Any], Path]:
    """Returns the state that is no tensor of the model, and the file that has it."""
    path = step / "common.pt"
    if path.is_file():
        return load_torch_file(path), path
    if stored is None:
        raise CheckpointError(
            f"{step} has neither common.pt nor {_COMMON_STATE}, which hold the model's arguments. Copy the whole folder."
        )
    _check_files([(_COMMON_STATE, stored)])
    return load_common_state(_read_blob(stored, _COMMON_STATE), stored.file), stored.file


def _read_metadata(step: Path) -> tuple[list[_DistTensor], list[str], _StoredChunk | None]:
    """Returns the model's tensors, the names of everything, and the place of the common state if it is an object."""
    path = step / ".metadata"
    table = load_dist_metadata(path)
    try:
        entries: dict[str, Any] = table.fields["state_dict_metadata"]
        places = {
            _storage_key(index.fields["fqn"], _shape(index.fields.get("offset") or ())): info  # objects have no offset
            for index, info in table.fields["storage_data"].items()
        }
        tensors = [
            _dist_tensor(step, name, metadata, places)
            for name, metadata in entries.items()
            if isinstance(metadata, InertObject) and "chunks" in metadata.fields and _is_model_weight(name)
        ]
        common = places.get(_storage_key(_COMMON_STATE, ()))
        return tensors, list(entries), None if common is None else _chunk(step, (), (), common)
    except (KeyError, AttributeError, TypeError) as error:
        raise CheckpointError(
            f"{path} is not a table that is understood ({type(error).__name__}: {error}). "
            "Save the checkpoint with a torch between 2.1 and this one."
        ) from None


def _is_model_weight(name: str) -> bool:
    return is_weight(name) and not _OTHER_STATE.match(name)


def _storage_key(name: str, start: Shape) -> str:
    """Returns the lookup key of a chunk: a text, since nobody can make texts collide, as one can tuples of integers."""
    return f"{name} {start}"


def _dist_tensor(step: Path, name: str, metadata: InertObject, storage_by_key: Mapping[str, Any]) -> _DistTensor:
    """Builds a tensor whose chunks tile it, each once."""
    shape, dtype = _shape(metadata.fields["size"]), _dtype(metadata.fields["properties"])
    boxes = sorted(
        (_shape(chunk.fields["offsets"]), _shape(chunk.fields["sizes"])) for chunk in metadata.fields["chunks"]
    )
    chunks = tuple(
        _chunk(step, start, size, storage_by_key[_storage_key(name, start)])
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
    return _DistTensor(name, shape, dtype, chunks, BoxIndex(places_in_tensor))


def _check_files(named_chunks: Sequence[tuple[str, _StoredChunk]]) -> None:
    """Checks that chunks are inside their files and together not larger: metadata is trusted only as far as there are bytes."""
    sizes: dict[Path, int] = {}
    claimed: dict[Path, int] = {}
    for name, chunk in named_chunks:
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
        with open_regular_file(path) as file:
            return os.fstat(file.fileno()).st_size
    except OSError as error:
        raise _unreadable(path, name, error) from None


def _unreadable(path: Path, name: str, error: OSError) -> CheckpointError:
    return CheckpointError(
        f"{path} cannot be read, but holds a part of {name}: {error.strerror}. "
        "Copy the folder again, with the .distcp files of all ranks."
    )


def _shape(value: Any) -> Shape:
    if not isinstance(value, tuple) or len(value) > MAX_DIMS or not all(map(is_count, value)):
        raise TypeError(f"a {type(value).__name__} where a shape should be")
    return value


def _dtype(properties: InertObject) -> torch.dtype:
    """Properties are stored as a tuple that begins with the dtype."""
    dtype = properties.fields["dtype"] if isinstance(properties.state, dict) else properties.state[0]
    if not isinstance(dtype, torch.dtype):
        raise TypeError(f"a {type(dtype).__name__} where a dtype should be")
    return dtype


def _chunk(step: Path, start: Shape, shape: Shape, storage_info: InertObject) -> _StoredChunk:
    kept = storage_info.fields
    name, offset, length = kept["relative_path"], kept["offset"], kept["length"]
    if not isinstance(name, str) or "\0" in name or Path(name).name != name:
        raise CheckpointError(
            f"{step / '.metadata'} points outside of its folder, at {name}. Do not use this checkpoint."
        )
    if kept.get("transform_descriptors"):
        raise CheckpointError(f"{step / name} is compressed, which is not understood. Save it without compression.")
    if not is_count(offset) or not is_count(length):
        raise TypeError(f"no place in {name}")
    return _StoredChunk(start, shape, step / name, offset, length)


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


def _num_stacked_dims(tensor: _DistTensor) -> int:
    """Returns how many leading dimensions index layers and experts."""
    layered = _in_layer(tensor.name)
    if layered is None:
        return 0
    expert = _EXPERT.fullmatch(layered.suffix)
    return int(layered.layer is None) + int(expert is not None and expert[1] is None)


def _weights_in(tensor: _DistTensor) -> Iterator[tuple[str, _WeightSlice]]:
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


def _lazy_weight(step: Path, reader: _ChunkReader, boxes: list[_WeightSlice]) -> LazyWeight:
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
    return LazyWeight(shape, boxes[0].tensor.dtype, str(step / ".metadata"), partial(reader.read_weight, boxes))


def _read_blob(chunk: _StoredChunk, name: str) -> Tensor:
    """Returns the bytes of a chunk or an object."""
    blob = torch.empty(chunk.length, dtype=torch.uint8)
    try:
        with open_regular_file(chunk.file, buffering=0) as file:
            count = read_into(file.fileno(), [memoryview(blob.numpy())], chunk.offset)
    except OSError as error:
        raise _unreadable(chunk.file, name, error) from None
    if count != chunk.length:
        raise CheckpointError(f"{chunk.file} became shorter while it was read. Copy it again.")
    return blob


class _ChunkReader:
    """Reads chunks; caches the last one, since q, k and v, or the experts of one chunk, are requested one after another."""

    def __init__(self) -> None:
        self._last: tuple[_StoredChunk, Tensor] | None = None

    def read_weight(self, boxes: list[_WeightSlice]) -> Tensor:
        parts = [self._read_slice(box) for box in boxes]
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def _read_slice(self, box: _WeightSlice) -> Tensor:
        tensor = box.tensor
        inner = tensor.shape[len(box.leading_index) :]
        start, shape = (*box.leading_index, *(0 for _ in inner)), (*(1 for _ in box.leading_index), *inner)
        out = torch.empty(shape, dtype=tensor.dtype)
        wanted = Box(start, shape)
        for number, common in tensor.index.overlaps(wanted):  # chunks tile the tensor
            chunk = tensor.chunks[number]
            out[common.slices_in(wanted)] = self._load_chunk(chunk, tensor)[
                common.slices_in(Box(chunk.start, chunk.shape))
            ]
        out = out.reshape(inner)
        return out.transpose(-1, -2) if box.transposed else out

    def _load_chunk(self, chunk: _StoredChunk, tensor: _DistTensor) -> Tensor:
        if self._last is not None and self._last[0] == chunk:
            return self._last[1]
        loaded = load_tensor_blob(_read_blob(chunk, tensor.name), chunk.file)
        if loaded.numel() != torch.Size(chunk.shape).numel() or loaded.dtype != tensor.dtype:
            raise CheckpointError(
                f"{chunk.file} has {list(loaded.shape)} of {loaded.dtype} where the table has {list(chunk.shape)} of "
                f"{tensor.dtype} for {tensor.name}. Its files are of different saves; copy the folder again."
            )
        self._last = (chunk, loaded.reshape(chunk.shape))
        return self._last[1]
