"""Plans what one rank writes, sends and checks in every save of a layout, from messages of the other ranks; no rank has the whole plan.

    1. The dtype of every tensor of the model folder: one max-reduce over all ranks (`encoded_dtypes`, `set_agreed_dtypes`).
    2. From that, the files of the folder and their writers, the same on every rank (`assign_files_to_ranks.py`).
    3. Messages (`SavePlanner.messages`): a box that belongs to the folder goes to the ranks that write the entries it overlaps; any
       other box goes to the one rank that checks its tensor, chosen by a hash of the key.
    4. The plan (`SavePlanner.plan`): writers know where their entries come from and that nothing is missing; checkers know that the
       boxes of each tensor cover the whole tensor, once.

The time and memory of planning on a rank depend on the number of its own boxes, of the entries of the model, and of the boxes of the
tensors that it writes or checks, not on those of all ranks. `SavePlanner` does not communicate: its caller exchanges the messages. A run
plans at its first save and reuses the plan, since its layout does not change.
"""

from __future__ import annotations

import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from petatron.base.errors import CheckpointError
from petatron.checkpoint.checkpoint_contents import ModelFolder
from petatron.checkpoint.files.manifest import StoredBox, StoredTensor
from petatron.checkpoint.files.safetensors_file import DTYPES, dtype_code
from petatron.checkpoint.files.step_folder import MODEL_FOLDER, rank_file_path
from petatron.checkpoint.save.assign_files_to_ranks import (
    FilePlan,
    WeightSpec,
    check_folder_complete,
    file_table_entries,
    incomplete_weights_error,
    plan_files,
    shapes_from_entries,
)
from petatron.checkpoint.save.plan_weight_transfers import ROUND_BYTES, PrimaryBox, TransferPlan, plan_transfers
from petatron.checkpoint.tensor_chunk import Chunk, ChunkMetadata, folder_tensor_key, folder_tensor_name
from petatron.models.hf.folder_entries import FolderEntry
from petatron.sharding.boxes import Box, BoxIndex, tiling_problem

_DTYPE_CODES = sorted(DTYPES)

LocalTensorMetadata = tuple[str, torch.Size, torch.dtype]
SavePlanKey = tuple[
    tuple[tuple[ChunkMetadata, bool], ...], tuple[LocalTensorMetadata, ...], tuple[FolderEntry, ...] | None
]
"""Everything a plan depends on: this rank's chunks and which it is primary for, its local tensors, the folder's entries."""


def save_plan_key(chunks: Sequence[Chunk], local: Mapping[str, Tensor], model: ModelFolder | None) -> SavePlanKey:
    """Returns the key under which a plan may be reused."""
    chunk_keys = tuple((chunk.metadata, chunk.primary) for chunk in chunks)
    apart = tuple((name, tensor.shape, tensor.dtype) for name, tensor in local.items())
    return chunk_keys, apart, None if model is None else model.entries


@dataclass(frozen=True, slots=True)
class SavePlan:
    """One rank's part of every save in a layout.

    state_entries: for each box in the rank's own file, its entry name and chunk index. files: the folder's, of all ranks.
    table_entries: what this rank writes, as its table lists it. primary_bytes: the size of the boxes this rank is primary for.
    """

    state_entries: tuple[tuple[str, int], ...]
    files: tuple[FilePlan, ...]
    dtypes: Mapping[str, torch.dtype]
    table_entries: tuple[tuple[str, StoredTensor], ...]
    transfers: TransferPlan
    primary_bytes: int

    def with_rounds(self, num_rounds: int) -> SavePlan:
        """Pads the plan to the number of rounds that all ranks take part in."""
        return replace(self, transfers=self.transfers.with_rounds(num_rounds))


class SavePlanner:
    """Plans from one rank's boxes and the messages of other ranks."""

    def __init__(self, chunks: Sequence[Chunk], model: ModelFolder | None, *, rank: int, world_size: int) -> None:
        self._chunks, self._rank, self._world_size = chunks, rank, world_size
        self._entries = () if model is None else model.entries
        self._shapes = shapes_from_entries(self._entries)
        self._tensor_indices = {name: number for number, name in enumerate(self._shapes)}
        self._folder_chunks: list[int] = []
        self._state_chunks: list[int] = []
        for index, chunk in enumerate(chunks):
            in_folder = folder_tensor_name(chunk.key) in self._shapes
            if chunk.primary and in_folder:
                self._folder_chunks.append(index)
            elif chunk.primary and chunk.tensor.numel():
                self._state_chunks.append(index)
        self._dtype_codes = [dtype_code(chunk.key, chunk.tensor) for chunk in chunks]
        self._files: list[FilePlan] = []
        self._dtypes: Mapping[str, torch.dtype] = {}

    def encoded_dtypes(self) -> list[int]:
        """Encodes each folder tensor's dtype as its index and the reversed index, so that one max-reduce finds both extremes."""
        numbers = [0] * (2 * len(self._shapes))
        for index in self._folder_chunks:
            at, number = 2 * self._tensor_indices[self._name(index)], 1 + _DTYPE_CODES.index(self._dtype_codes[index])
            if numbers[at] and numbers[at] != number:
                raise _disagreement_error(
                    self._chunks[index].key, _DTYPE_CODES[numbers[at] - 1], self._dtype_codes[index]
                )
            numbers[at], numbers[at + 1] = number, len(_DTYPE_CODES) + 1 - number
        return numbers

    def set_agreed_dtypes(self, max_encoded: Sequence[int]) -> None:
        """Sets dtypes from the max over all ranks of `encoded_dtypes`; from here on the files are known."""
        missing = [name for name, number in self._tensor_indices.items() if not max_encoded[2 * number]]
        if missing:
            raise incomplete_weights_error([f"no rank holds {name}" for name in missing])
        for name, number in self._tensor_indices.items():
            high, low = max_encoded[2 * number], len(_DTYPE_CODES) + 1 - max_encoded[2 * number + 1]
            if high != low:
                raise _disagreement_error(folder_tensor_key(name), _DTYPE_CODES[low - 1], _DTYPE_CODES[high - 1])
        self._dtypes = {
            name: DTYPES[_DTYPE_CODES[max_encoded[2 * number] - 1]] for name, number in self._tensor_indices.items()
        }
        self._files = plan_files(self._entries, self._dtypes, self._world_size) if self._entries else []

    def messages(self) -> dict[int, dict[str, list[Any]]]:
        """Returns what each rank (this one included) needs to know of this rank's boxes, as JSON values by rank."""
        check_folder_complete(
            self._entries, {self._name(index): self._chunks[index].logical_shape for index in self._folder_chunks}
        )
        by_rank: dict[int, dict[str, list[Any]]] = {}
        regions: dict[str, list[tuple[Box, int]]] = {}
        mine = {self._name(index) for index in self._folder_chunks}
        for file in self._files:
            for region in (region for entry in file.entries for region in entry.regions if region.name in mine):
                regions.setdefault(region.name, []).append((Box(region.start, region.shape), file.rank))
        places = {
            name: (BoxIndex([box for box, _ in parts]), [rank for _, rank in parts]) for name, parts in regions.items()
        }
        for index in self._folder_chunks:
            name, box = self._name(index), self._chunks[index].box
            where, ranks = places[name]
            for rank in sorted({ranks[number] for number, _ in where.overlaps(box)}):
                row = [self._tensor_indices[name], index, box.start, box.shape]
                by_rank.setdefault(rank, {}).setdefault("folder", []).append(row)
        for index in self._state_chunks:
            chunk = self._chunks[index]
            row = [chunk.key, chunk.logical_shape, self._dtype_codes[index], chunk.start, tuple(chunk.tensor.shape)]
            by_rank.setdefault(owner_rank(chunk.key, self._world_size), {}).setdefault("state", []).append(row)
        return by_rank

    def plan(self, received: Mapping[int, Mapping[str, list[Any]]], round_bytes: int = ROUND_BYTES) -> SavePlan:
        """Builds this rank's plan from the messages of all ranks; raises if they are not the whole state."""
        _check_state(received)
        names = list(self._shapes)
        held: dict[str, list[PrimaryBox]] = {}
        for source in sorted(received):
            for number, index, start, shape in received[source].get("folder", ()):
                box = Box(tuple(start), tuple(shape))
                held.setdefault(names[number], []).append(PrimaryBox(source, index, box))
        writing = [file for file in self._files if file.rank == self._rank]
        _check_entries(writing, held)
        local_boxes: dict[str, list[PrimaryBox]] = {}
        for index in self._folder_chunks:
            if self._chunks[index].tensor.numel():
                local_boxes.setdefault(self._name(index), []).append(
                    PrimaryBox(self._rank, index, self._chunks[index].box)
                )
        transfers = plan_transfers(self._rank, self._files, self._dtypes, local_boxes, held, round_bytes)
        state, table = self._state_table(rank_file_path(self._rank))
        weights = {name: WeightSpec(self._shapes[name], dtype) for name, dtype in self._dtypes.items()}
        in_files = [row for file in writing for row in file_table_entries(file, weights, f"{MODEL_FOLDER}/{file.name}")]
        sizes = (self._chunks[index].tensor for index in (*self._folder_chunks, *self._state_chunks))
        return SavePlan(
            state_entries=tuple(state),
            files=tuple(self._files),
            dtypes=self._dtypes,
            table_entries=(*in_files, *table),
            transfers=transfers,
            primary_bytes=sum(tensor.numel() * tensor.dtype.itemsize for tensor in sizes),
        )

    def _state_table(self, path: str) -> tuple[list[tuple[str, int]], list[tuple[str, StoredTensor]]]:
        state, table = [], []
        for index in self._state_chunks:
            chunk = self._chunks[index]
            name = f"{chunk.key}@{','.join(map(str, chunk.start))}"
            stored = StoredBox(path, name, chunk.box, (0,) * chunk.tensor.dim())
            table.append((chunk.key, StoredTensor(chunk.logical_shape, self._dtype_codes[index], (stored,))))
            state.append((name, index))
        return state, table

    def _name(self, index: int) -> str:
        name = folder_tensor_name(self._chunks[index].key)
        assert name is not None, "asked of the folder's chunks only"
        return name


def owner_rank(key: str, world_size: int) -> int:
    """Returns the rank that checks (at a load: knows) all boxes of a tensor; the same for all kinds of state of one weight."""
    return zlib.crc32(key.partition("/")[2].encode()) % world_size


def _check_entries(files: Sequence[FilePlan], boxes_by_name: Mapping[str, Sequence[PrimaryBox]]) -> None:
    """Checks that every region of these files is covered exactly once."""
    problems = []
    indexes = {name: BoxIndex([primary.box for primary in boxes]) for name, boxes in boxes_by_name.items()}
    for region in (region for file in files for entry in file.entries for region in entry.regions):
        index = indexes.get(region.name)
        parts = [] if index is None else [c for _, c in index.overlaps(Box(region.start, region.shape))]
        inside = [Box(tuple(a - b for a, b in zip(part.start, region.start)), part.shape) for part in parts]
        gap = tiling_problem(region.shape, inside)
        problems += [] if gap is None else [f"{region.name} in the ranks: {gap}"]
    if problems:
        raise incomplete_weights_error(list(dict.fromkeys(problems)))


def _check_state(received: Mapping[int, Mapping[str, list[Any]]]) -> None:
    """Checks that every tensor assigned to this rank is covered exactly once."""
    tensors: dict[str, tuple[Any, str, list[Box]]] = {}
    for source in sorted(received):
        for key, shape, code, start, size in received[source].get("state", ()):
            known = tensors.setdefault(key, (tuple(shape), code, []))
            if known[:2] != (tuple(shape), code):
                raise _disagreement_error(key, f"{known[1]} {list(known[0])}", f"{code} {list(shape)}")
            known[2].append(Box(tuple(start), tuple(size)))
    for key, (shape, _, boxes) in tensors.items():
        problem = tiling_problem(shape, boxes)
        if problem is not None:
            raise CheckpointError(
                f"the ranks' chunks of {key} are not the whole tensor: {problem}. Nothing was saved. "
                "Mark each box primary on exactly one rank."
            )


def _disagreement_error(key: str, first: str, other: str) -> CheckpointError:
    return CheckpointError(
        f"{key} is {first} on one rank and {other} on another. Nothing was saved. Give every rank's chunk the same logical shape "
        "and dtype."
    )
