"""Looks up the stored boxes of tensors, distributed over the ranks, so that no rank reads every table of a checkpoint.

The tables are divided among the ranks and each is read once; every tensor's boxes are sent to one rank, chosen by a hash of its
name (`owner_rank`), which holds them in a `StoredBoxLookup`. There other ranks request the boxes that overlap theirs, and receive each
with the table that has its file's digests. So a rank reads its share of the tables and those of the files that it reads anyway.
The owner knows whether a tensor is described completely, and whether any rank requests it.

All messages are JSON values, and the caller sends them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from petatron.checkpoint.files.manifest import StoredBox, StoredTensor, box_from_json, box_to_json
from petatron.checkpoint.files.step_folder import MANIFEST_FILE, damaged_error
from petatron.checkpoint.save.save_plan import owner_rank
from petatron.checkpoint.tensor_chunk import MASTER_PREFIX, WEIGHT_PREFIX, Chunk
from petatron.sharding.boxes import Box, BoxIndex, tiling_problem

MessageRow = list[Any]


def other_precision_key(key: str) -> str | None:
    """Returns the key of the same weights in the other precision."""
    for kind, other in ((MASTER_PREFIX, WEIGHT_PREFIX), (WEIGHT_PREFIX, MASTER_PREFIX)):
        if key.startswith(kind):
            return other + key.removeprefix(kind)
    return None


def wants_full_precision(chunk: Chunk) -> bool:
    return chunk.tensor.dtype.itemsize >= torch.float32.itemsize


def table_rows(entries: Iterable[tuple[str, StoredTensor]], table: int, world_size: int) -> dict[int, list[MessageRow]]:
    """Returns a table's rows by owner rank; `table` is the table's index in the manifest."""
    by_owner: dict[int, list[MessageRow]] = {}
    for key, tensor in entries:
        row = [key, tensor.shape, tensor.dtype, table, [box_to_json(box) for box in tensor.boxes]]
        by_owner.setdefault(owner_rank(key, world_size), []).append(row)
    return by_owner


def box_requests(chunks: Sequence[Chunk], world_size: int) -> dict[int, list[MessageRow]]:
    """Returns a rank's requests by owner rank: chunk index, key, whether it wants full precision, and box."""
    by_owner: dict[int, list[MessageRow]] = {}
    for number, chunk in enumerate(chunks):
        row = [number, chunk.key, wants_full_precision(chunk), chunk.start, tuple(chunk.tensor.shape)]
        by_owner.setdefault(owner_rank(chunk.key, world_size), []).append(row)
    return by_owner


class StoredBoxLookup:
    """Holds all boxes of some tensors of a checkpoint."""

    def __init__(self, source: Path) -> None:
        self._source = source
        self._tensors: dict[str, tuple[tuple[int, ...], str, list[StoredBox], list[int]]] = {}
        self._indexes: dict[str, BoxIndex] = {}
        self._requested: set[str] = set()

    @classmethod
    def from_tensors(cls, source: Path, tensors: Mapping[str, StoredTensor]) -> StoredBoxLookup:
        """Builds the lookup of a whole checkpoint, for a single reader."""
        directory = cls(source)
        directory._tensors = {
            key: (stored.shape, stored.dtype, list(stored.boxes), [0] * len(stored.boxes))
            for key, stored in tensors.items()
        }
        return directory

    def add_rows(self, rows: Iterable[MessageRow]) -> None:
        """Adds rows of `table_rows`, from any rank."""
        for key, shape, dtype, table, boxes in rows:
            known = self._tensors.setdefault(key, (tuple(shape), dtype, [], []))
            if known[:2] != (tuple(shape), dtype):
                raise damaged_error(self._source / MANIFEST_FILE, f"names tables that do not describe {key} alike")
            known[2].extend(map(box_from_json, boxes))
            known[3].extend([table] * len(boxes))

    def source_key(self, key: str, *, full_precision: bool) -> str:
        """Returns which stored tensor fills a chunk.

        Weights may be stored twice, in the model's precision and as master weights. A full-precision chunk is filled from the master
        weights, whatever its key; a checkpoint of a full-precision run stores them once, as the model's.
        """
        other = other_precision_key(key)
        here = self._tensors
        if (
            other is not None
            and other in here
            and (key not in here or (other.startswith(MASTER_PREFIX) and full_precision))
        ):
            return other
        return key

    def lookup(self, key: str, box: Box, *, full_precision: bool) -> tuple[str, StoredTensor | None, list[int]]:
        """Returns the tensor that fills a box with the boxes that overlap it, and the tables of these; None if there is none."""
        key = self.source_key(key, full_precision=full_precision)
        self._requested.add(key)
        tensor = self._tensors.get(key)
        if tensor is None:
            return key, None, []
        shape, dtype, boxes, tables = tensor
        if not box.volume or len(box.shape) != len(shape):
            return key, StoredTensor(shape, dtype, ()), []
        numbers = [number for number, _ in self._index(key).overlaps(box)]
        return key, StoredTensor(shape, dtype, tuple(boxes[n] for n in numbers)), [tables[n] for n in numbers]

    def _index(self, key: str) -> BoxIndex:
        if key not in self._indexes:
            shape, _, stored, _ = self._tensors[key]
            boxes = [box.box for box in stored]
            gap = tiling_problem(shape, boxes)
            if gap is not None:
                raise damaged_error(self._source / MANIFEST_FILE, f"does not describe all of {key}: {gap}")
            self._indexes[key] = BoxIndex(boxes)
        return self._indexes[key]

    def answer_requests(self, requests: Iterable[MessageRow]) -> list[MessageRow]:
        """Answers each request with its index, the tensor's key, shape and dtype (null if there is none), boxes and their tables."""
        rows = []
        for number, key, wide, start, shape in requests:
            source_key, stored, tables = self.lookup(key, Box(tuple(start), tuple(shape)), full_precision=wide)
            if stored is None:
                rows.append([number, source_key, None, None, [], []])
                continue
            boxes = [box_to_json(box) for box in stored.boxes]
            rows.append([number, source_key, stored.shape, stored.dtype, boxes, tables])
        return rows

    def requested_kinds(self) -> list[str]:
        """Returns the kinds of state that ranks requested."""
        return sorted({key.partition("/")[0] for key in self._requested})

    def unexpected_keys(self, may_ignore_key: Callable[[str], bool]) -> list[str]:
        """Returns tensors that no rank requested, and that must not be ignored."""
        return [
            key
            for key in self._tensors
            if key not in self._requested
            and other_precision_key(key) not in self._requested
            and not may_ignore_key(key)
        ]


def parse_answer(row: MessageRow) -> tuple[int, str, StoredTensor | None, list[int]]:
    """Parses a row of `StoredBoxLookup.answer_requests`: chunk index, the tensor that fills it, and the tables of its boxes."""
    number, key, shape, dtype, boxes, tables = row
    stored = None if shape is None else StoredTensor(tuple(shape), dtype, tuple(map(box_from_json, boxes)))
    return number, key, stored, tables
