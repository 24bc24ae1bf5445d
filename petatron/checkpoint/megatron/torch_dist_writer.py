"""Writes tensors in the format of torch.distributed.checkpoint, one after another and without a process group.

torch's writer asks its planner for each tensor at the moment it writes it, so a planner that produces tensors on request never
holds more than one. The dtypes must be known before; they are those of the first chunk of each tensor.
"""

from __future__ import annotations

import io
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import (
    BytesIOWriteData,
    SavePlan,
    SavePlanner,
    TensorWriteData,
    WriteItem,
    WriteItemType,
)

from petatron.sharding.shard_spec import Shape


@dataclass(frozen=True, slots=True)
class LazyChunk:
    """One chunk: its indices along the leading dimensions of its tensor, and how to produce it."""

    leading_index: Shape
    load: Callable[[], Tensor]


@dataclass(frozen=True, slots=True)
class GlobalTensor:
    """A tensor of the checkpoint; each chunk spans the dimensions after the first `num_leading_dims` ones."""

    name: str
    shape: Shape
    num_leading_dims: int
    chunks: tuple[LazyChunk, ...]


def write_dist_tensors(folder: Path, tensors: Sequence[GlobalTensor], objects: Mapping[str, bytes]) -> None:
    """Writes `.metadata` and one `.distcp` file; `objects` are serialized already."""
    # Without copy-ahead the writer keeps the order of the plan, on which fetching relies.
    writer = dcp.FileSystemWriter(str(folder), thread_count=1, per_thread_copy_ahead=0)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that there is no process group, which is intended
        dcp.save({}, storage_writer=writer, planner=_LazySavePlanner(tensors, objects), no_dist=True)


class _LazySavePlanner(SavePlanner):
    def __init__(self, tensors: Sequence[GlobalTensor], objects: Mapping[str, bytes]) -> None:
        self._tensors, self._objects = tensors, objects
        self._chunks_by_index: dict[MetadataIndex, tuple[LazyChunk, Shape]] = {}
        self._state_dict_metadata: dict[str, Any] = {}

    def set_up_planner(self, state_dict: Any, storage_meta: Any = None, is_coordinator: bool = False) -> None:
        """Does nothing: the tensors are known."""

    def create_local_plan(self) -> SavePlan:
        items = [
            WriteItem(MetadataIndex(name), WriteItemType.BYTE_IO, bytes_io_data=BytesIOWriteData(len(content)))
            for name, content in self._objects.items()
        ]
        self._state_dict_metadata |= {name: BytesStorageMetadata() for name in self._objects}
        for tensor in self._tensors:
            inner = tensor.shape[tensor.num_leading_dims :]
            properties = TensorProperties(dtype=tensor.chunks[0].load().dtype)
            chunks = []
            for part in tensor.chunks:
                start = torch.Size((*part.leading_index, *(0 for _ in inner)))
                sizes = torch.Size((*(1 for _ in part.leading_index), *inner))
                chunk = ChunkStorageMetadata(start, sizes)
                index = MetadataIndex(tensor.name, start, len(chunks))
                chunks.append(chunk)
                self._chunks_by_index[index] = (part, tuple(sizes))
                data = TensorWriteData(chunk, properties, torch.Size(tensor.shape))
                items.append(WriteItem(index, WriteItemType.SHARD, tensor_data=data))
            self._state_dict_metadata[tensor.name] = TensorStorageMetadata(properties, torch.Size(tensor.shape), chunks)
        return SavePlan(items)

    def create_global_plan(self, all_plans: list[SavePlan]) -> tuple[list[SavePlan], Metadata]:
        return all_plans, Metadata(self._state_dict_metadata)

    def finish_plan(self, new_plan: SavePlan) -> SavePlan:
        return new_plan

    def resolve_data(self, write_item: WriteItem) -> Tensor | io.BytesIO:
        if write_item.type == WriteItemType.BYTE_IO:
            return io.BytesIO(self._objects[write_item.index.fqn])
        part, shape = self._chunks_by_index[write_item.index]
        return part.load().reshape(shape).contiguous()
