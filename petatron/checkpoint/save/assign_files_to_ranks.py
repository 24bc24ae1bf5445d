"""Assigns the files of a model folder to writer ranks: a function of the entries and their dtypes alone.

So every rank computes the same plan without communication, whatever boxes the others hold.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch

from petatron.base.errors import CheckpointError
from petatron.checkpoint.files.manifest import StoredBox, StoredTensor
from petatron.checkpoint.files.safetensors_file import DTYPE_CODES
from petatron.checkpoint.tensor_chunk import folder_tensor_key
from petatron.models.hf.folder_entries import FolderEntry
from petatron.sharding.boxes import Box, tiling_problem
from petatron.sharding.shard_spec import Shape

_MAX_FILE_BYTES = 4 << 30
_MIN_FILE_BYTES = 512 << 20
_MAX_SHOWN = 5


@dataclass(frozen=True, slots=True)
class WeightSpec:
    """A logical tensor of the model folder."""

    shape: Shape
    dtype: torch.dtype

    @property
    def num_bytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


@dataclass(frozen=True, slots=True)
class FilePlan:
    """A file of the folder, and the rank that writes it."""

    name: str
    entries: tuple[FolderEntry, ...]
    rank: int


def shapes_from_entries(entries: Iterable[FolderEntry]) -> dict[str, Shape]:
    """Derives the shape of every logical tensor from the entries' regions."""
    shapes: dict[str, Shape] = {}
    for region in (region for entry in entries for region in entry.regions):
        stop = tuple(at + size for at, size in zip(region.start, region.shape))
        known = shapes.get(region.name)
        shapes[region.name] = stop if known is None else tuple(map(max, known, stop))
    return shapes


def entry_bytes(entry: FolderEntry, dtypes: Mapping[str, torch.dtype]) -> int:
    return math.prod(entry.shape) * dtypes[entry.regions[0].name].itemsize


def plan_files(entries: Sequence[FolderEntry], dtypes: Mapping[str, torch.dtype], world_size: int) -> list[FilePlan]:
    """Splits the entries into files of at most 4 GiB, more where that lets more ranks write in parallel."""
    sizes = [entry_bytes(entry, dtypes) for entry in entries]
    total = sum(sizes)
    count = max(-(-total // _MAX_FILE_BYTES), min(world_size, -(-total // _MIN_FILE_BYTES)), 1)
    groups: list[list[FolderEntry]] = [[] for _ in range(count)]
    before = 0
    for entry, size in zip(entries, sizes):
        groups[min(count - 1, before * count // max(total, 1))].append(entry)
        before += size
    groups = [group for group in groups if group]
    names = (
        ["model.safetensors"]
        if len(groups) == 1
        else [f"model-{number:05d}-of-{len(groups):05d}.safetensors" for number in range(1, len(groups) + 1)]
    )
    return [
        FilePlan(name, tuple(group), number * world_size // len(groups))
        for number, (name, group) in enumerate(zip(names, groups))
    ]


def check_folder_complete(entries: Sequence[FolderEntry], local_shapes: Mapping[str, Shape]) -> None:
    """Raises if entries do not contain each of these logical tensors once. Each rank checks those it holds boxes of."""
    boxes: dict[str, list[Box]] = {}
    for region in (region for entry in entries for region in entry.regions):
        if region.name in local_shapes:
            boxes.setdefault(region.name, []).append(Box(region.start, region.shape))
    problems = []
    for name, shape in local_shapes.items():
        gap = tiling_problem(shape, boxes[name])
        problems += [] if gap is None else [f"{name} in the folder: {gap}"]
    if problems:
        raise incomplete_weights_error(problems)


def incomplete_weights_error(problems: Sequence[str]) -> CheckpointError:
    return CheckpointError(
        f"the ranks' weights are not the whole model: {'; '.join(problems[:_MAX_SHOWN])}. Nothing was saved."
    )


def file_table_entries(file: FilePlan, weights: Mapping[str, WeightSpec], path: str) -> list[tuple[str, StoredTensor]]:
    """Returns the table entries for a file of the folder."""
    rows = []
    for entry in file.entries:
        for region in entry.regions:
            weight, box = weights[region.name], StoredBox.of_region(path, entry.name, region)
            stored = StoredTensor(weight.shape, DTYPE_CODES[weight.dtype], (box,))
            rows.append((folder_tensor_key(region.name), stored))
    return rows
