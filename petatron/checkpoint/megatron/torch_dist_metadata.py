"""The `.metadata` of a torch_dist checkpoint: the tensors and objects it lists, with their places in files.

`.metadata` is trusted only as far as there are bytes: chunks tile their tensor, are inside their files, and are not larger than these.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from petatron.base.errors import CheckpointError
from petatron.base.untrusted_files import is_count, open_regular_file
from petatron.checkpoint.files.digested_file_io import read_into
from petatron.checkpoint.files.safetensors_file import MAX_DIMS
from petatron.checkpoint.megatron.pickle_interpreter import InertObject
from petatron.checkpoint.megatron.read_megatron_pickles import load_dist_metadata, load_tensor_blob
from petatron.sharding.boxes import Box, BoxIndex, tiling_problem
from petatron.sharding.shard_spec import Shape


@dataclass(frozen=True, slots=True)
class StoredChunk:
    start: Shape
    shape: Shape
    file: Path
    offset: int
    length: int


@dataclass(frozen=True, slots=True)
class DistTensor:
    """A global tensor of the metadata."""

    name: str
    shape: Shape
    dtype: torch.dtype
    chunks: tuple[StoredChunk, ...]
    index: BoxIndex


@dataclass(frozen=True, slots=True)
class DistTable:
    """What a step's `.metadata` lists: the entries by name, and the place of every chunk and object."""

    step: Path
    entries: Mapping[str, Any]
    places: Mapping[str, Any]

    @classmethod
    def read(cls, step: Path) -> DistTable:
        table = load_dist_metadata(step / ".metadata")
        with _understood(step):
            places = {
                _storage_key(
                    index.fields["fqn"], _shape(index.fields.get("offset") or ())
                ): info  # objects have no offset
                for index, info in table.fields["storage_data"].items()
            }
            return cls(step, dict(table.fields["state_dict_metadata"].items()), places)

    def tensors(self, names: Mapping[str, str]) -> list[DistTensor]:
        """Returns the tensors among these stored names, each under the name that it is given there."""
        with _understood(self.step):
            tensors = [
                _dist_tensor(self.step, name, as_name, self.entries[name], self.places)
                for name, as_name in names.items()
                if isinstance(self.entries[name], InertObject) and "chunks" in self.entries[name].fields
            ]
        check_files([(tensor.name, chunk) for tensor in tensors for chunk in tensor.chunks])
        return tensors

    def object_place(self, name: str) -> StoredChunk | None:
        """Returns the place of an object; None if there is none of this name."""
        with _understood(self.step):
            info = self.places.get(_storage_key(name, ()))
            return None if info is None else _chunk(self.step, (), (), info)


@contextmanager
def _understood(step: Path) -> Iterator[None]:
    try:
        yield
    except (KeyError, AttributeError, TypeError) as error:
        raise CheckpointError(
            f"{step / '.metadata'} is not a table that is understood ({type(error).__name__}: {error}). "
            "Save the checkpoint with a torch between 2.1 and this one."
        ) from None


def _storage_key(name: str, start: Shape) -> str:
    """Returns the lookup key of a chunk: a text, since nobody can make texts collide, as one can tuples of integers."""
    return f"{name} {start}"


def _dist_tensor(
    step: Path, name: str, as_name: str, metadata: InertObject, storage_by_key: Mapping[str, Any]
) -> DistTensor:
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
    return DistTensor(as_name, shape, dtype, chunks, BoxIndex(places_in_tensor))


def check_files(named_chunks: Sequence[tuple[str, StoredChunk]]) -> None:
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


def _chunk(step: Path, start: Shape, shape: Shape, storage_info: InertObject) -> StoredChunk:
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
    return StoredChunk(start, shape, step / name, offset, length)


def read_blob(chunk: StoredChunk, name: str) -> Tensor:
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


class ChunkReader:
    """Reads chunks; caches the last one, since q, k and v, or the experts of one chunk, are requested one after another."""

    def __init__(self) -> None:
        self._last: tuple[StoredChunk, Tensor] | None = None

    def read_box(self, tensor: DistTensor, wanted: Box) -> Tensor:
        """Returns a box of a tensor in its own memory."""
        out = torch.empty(wanted.shape, dtype=tensor.dtype)
        for number, common in tensor.index.overlaps(wanted):  # chunks tile the tensor
            chunk = tensor.chunks[number]
            out[common.slices_in(wanted)] = self._load_chunk(chunk, tensor)[
                common.slices_in(Box(chunk.start, chunk.shape))
            ]
        return out

    def _load_chunk(self, chunk: StoredChunk, tensor: DistTensor) -> Tensor:
        if self._last is not None and self._last[0] == chunk:
            return self._last[1]
        loaded = load_tensor_blob(read_blob(chunk, tensor.name), chunk.file)
        if loaded.numel() != torch.Size(chunk.shape).numel() or loaded.dtype != tensor.dtype:
            raise CheckpointError(
                f"{chunk.file} has {list(loaded.shape)} of {loaded.dtype} where the table has {list(chunk.shape)} of "
                f"{tensor.dtype} for {tensor.name}. Its files are of different saves; copy the folder again."
            )
        self._last = (chunk, loaded.reshape(chunk.shape))
        return self._last[1]
