"""Where a load finds its boxes, without any rank that reads every table.

The tables of a checkpoint are shared out among the ranks, each is read once, and every tensor's boxes go to one rank, chosen by
a hash of its name (`owner_rank`), which keeps them in a `BoxDirectory`. Ranks ask there for the boxes that overlap theirs, and
are told the table that has the digests of each file. So a rank reads its share of the tables and those of the files that it
reads anyway. Whether a tensor is described completely, and whether it is wanted by anyone, the directory's rank knows.

All values are JSON's, and nothing here communicates: `table_rows`, `box_requests`, `BoxDirectory.add`, `BoxDirectory.answers`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from petatron.checkpoint.files.manifest import StoredBox, StoredTensor, box_from_json, box_to_json
from petatron.checkpoint.files.step_folder import MANIFEST_FILE, damaged_error
from petatron.checkpoint.save.save_plan import owner_rank
from petatron.checkpoint.state import MASTER_PREFIX, WEIGHT_PREFIX, Chunk
from petatron.sharding.boxes import Box, BoxIndex, tiling_problem

MessageRow = list[Any]


def other_precision_key(key: str) -> str | None:
    """The same weights in the other precision."""
    for kind, other in ((MASTER_PREFIX, WEIGHT_PREFIX), (WEIGHT_PREFIX, MASTER_PREFIX)):
        if key.startswith(kind):
            return other + key.removeprefix(kind)
    return None


def wants_full_precision(chunk: Chunk) -> bool:
    return chunk.tensor.dtype.itemsize >= torch.float32.itemsize


def table_rows(entries: Iterable[tuple[str, StoredTensor]], table: int, world_size: int) -> dict[int, list[MessageRow]]:
    """What a table says, by the rank whose directory it belongs to; `table` is the table's place in the manifest."""
    found: dict[int, list[MessageRow]] = {}
    for key, tensor in entries:
        row = [key, tensor.shape, tensor.dtype, table, [box_to_json(box) for box in tensor.boxes]]
        found.setdefault(owner_rank(key, world_size), []).append(row)
    return found


def box_requests(chunks: Sequence[Chunk], world_size: int) -> dict[int, list[MessageRow]]:
    """What a rank asks, by the rank that knows: its chunk's number, key, whether it is wide, and box."""
    found: dict[int, list[MessageRow]] = {}
    for number, chunk in enumerate(chunks):
        row = [number, chunk.key, wants_full_precision(chunk), chunk.start, tuple(chunk.tensor.shape)]
        found.setdefault(owner_rank(chunk.key, world_size), []).append(row)
    return found


class BoxDirectory:
    """All boxes of some tensors of a checkpoint."""

    def __init__(self, source: Path) -> None:
        self._source = source
        self._tensors: dict[str, tuple[tuple[int, ...], str, list[StoredBox], list[int]]] = {}
        self._indexes: dict[str, BoxIndex] = {}
        self._requested: set[str] = set()

    @classmethod
    def from_tensors(cls, source: Path, tensors: Mapping[str, StoredTensor]) -> BoxDirectory:
        """The directory of a whole checkpoint, for a reader that is alone."""
        directory = cls(source)
        directory._tensors = {
            key: (stored.shape, stored.dtype, list(stored.boxes), [0] * len(stored.boxes))
            for key, stored in tensors.items()
        }
        return directory

    def add_rows(self, rows: Iterable[MessageRow]) -> None:
        """Take rows of `table_rows`, of any rank."""
        for key, shape, dtype, table, boxes in rows:
            known = self._tensors.setdefault(key, (tuple(shape), dtype, [], []))
            if known[:2] != (tuple(shape), dtype):
                raise damaged_error(self._source / MANIFEST_FILE, f"names tables that do not describe {key} alike")
            known[2].extend(map(box_from_json, boxes))
            known[3].extend([table] * len(boxes))

    def source_key(self, key: str, *, full_precision: bool) -> str:
        """Which tensor fills a chunk.

        Weights may be there twice, in the model's precision and in the optimizer's. Whoever wants them in a wide precision
        gets the wide ones, whatever it calls them; a checkpoint of a run in full precision has them once, as the model's.
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
        """The tensor that fills a box with the boxes that overlap it, and the tables of these; None if there is none."""
        key = self.source_key(key, full_precision=full_precision)
        self._requested.add(key)
        found = self._tensors.get(key)
        if found is None:
            return key, None, []
        shape, dtype, boxes, tables = found
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
        """For every request its number, the tensor's key, shape and dtype (null if there is none), boxes and their tables."""
        rows = []
        for number, key, wide, start, shape in requests:
            found, stored, tables = self.lookup(key, Box(tuple(start), tuple(shape)), full_precision=wide)
            if stored is None:
                rows.append([number, found, None, None, [], []])
                continue
            boxes = [box_to_json(box) for box in stored.boxes]
            rows.append([number, found, stored.shape, stored.dtype, boxes, tables])
        return rows

    def requested_kinds(self) -> list[str]:
        """The kinds of state that were asked for, as far as this directory was."""
        return sorted({key.partition("/")[0] for key in self._requested})

    def unexpected_keys(self, may_ignore_kind: Callable[[str], bool]) -> list[str]:
        """Tensors that nobody has asked for, of kinds that must not be left."""
        return [
            key
            for key in self._tensors
            if key not in self._requested
            and other_precision_key(key) not in self._requested
            and not may_ignore_kind(key.partition("/")[0])
        ]


def parse_answer(row: MessageRow) -> tuple[int, str, StoredTensor | None, list[int]]:
    """A row of `BoxDirectory.answers`: the chunk's number, the tensor that fills it, and the tables of its boxes."""
    number, key, shape, dtype, boxes, tables = row
    stored = None if shape is None else StoredTensor(tuple(shape), dtype, tuple(map(box_from_json, boxes)))
    return number, key, stored, tables
