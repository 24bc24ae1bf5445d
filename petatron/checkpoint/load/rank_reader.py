"""One rank's way to its boxes of a checkpoint: the manifest, its share of the tables, and the other ranks' directories."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Protocol, TypeVar

from torch import Tensor

from petatron.checkpoint.files import step_folder
from petatron.checkpoint.files.disk import StoredFile
from petatron.checkpoint.files.manifest import Manifest, RankTable, StoredTensor, TableFile
from petatron.checkpoint.load import box_reads
from petatron.checkpoint.load.box_directory import Directory, Row, read_answer, requests_for, table_rows
from petatron.checkpoint.message_exchange import exchange
from petatron.checkpoint.state import Chunk
from petatron.mesh.collectives import broadcast_object, gather_objects
from petatron.mesh.mesh import Axis

Result = TypeVar("Result")


class Together(Protocol):
    """Takes an action on every rank; one rank's failure is everyone's."""

    def __call__(self, action: Callable[[], Result], /) -> Result: ...


class Reader:
    """A checkpoint that is being loaded, as one rank sees it. `files` are those whose digests it has learnt."""

    def __init__(self, source: Path, axis: Axis, together: Together) -> None:
        self._source, self._axis, self._together = source, axis, together
        self._tables: dict[int, RankTable] = {}
        self.files: dict[str, StoredFile] = {}

    def open(self, describe: Callable[[], Manifest]) -> Manifest:
        """The manifest as the first rank reads it. If it has no tables, that rank keeps the tensors for all."""
        found = self._together(lambda: describe() if self._axis.rank == 0 else None)
        told = None if found is None else _told(found)
        head = _heard(broadcast_object(told, self._axis))
        self._head = head if found is None else replace(head, tensors=found.tensors)
        self.files = dict(head.files)
        return self._head

    def plan(self, chunks: Sequence[Chunk], *, strict: bool, leaves: Callable[[str], bool] | None) -> box_reads.Plan:
        """Every read of this rank; all that does not fit is one error. All ranks call it."""
        received = exchange(self._together(lambda: self._questions(chunks)), self._axis)
        directory = Directory(self._source)

        def answer() -> dict[int, list[Row]]:
            for said in received.values():
                directory.add(said.get("rows", ()))
            return {rank: directory.answers(said["asks"]) for rank, said in received.items() if "asks" in said}

        told = exchange(self._together(answer), self._axis)
        surplus = directory.surplus(leaves or self._unasked(directory)) if strict else []
        return self._together(lambda: self._reads(chunks, told, strict=strict, surplus=surplus))

    def _unasked(self, directory: Directory) -> Callable[[str], bool]:
        """Without other word, a load leaves the kinds of state that nobody asks for at all."""
        asked = gather_objects(directory.kinds_wanted(), self._axis)
        kinds = {kind for found in asked for kind in found}
        return lambda kind: kind not in kinds

    def _questions(self, chunks: Sequence[Chunk]) -> dict[int, dict[str, list[Row]]]:
        """This rank's share of the tables, and what it asks, by the rank that is to know."""
        size, rank = self._axis.size, self._axis.rank
        found: dict[int, dict[str, list[Row]]] = {}
        for number in range(rank, len(self._head.tables), size):
            table = self._table(number)
            step_folder.check_sizes(self._source, table.files)
            for owner, rows in table_rows(table.entries, number, size).items():
                found.setdefault(owner, {}).setdefault("rows", []).extend(rows)
        for owner, rows in table_rows(self._head.tensors.items(), -1, size).items():
            found.setdefault(owner, {}).setdefault("rows", []).extend(rows)
        for owner, rows in requests_for(chunks, size).items():
            found.setdefault(owner, {})["asks"] = rows
        return found

    def _table(self, number: int) -> RankTable:
        if number not in self._tables:
            self._tables[number] = step_folder.read_table(self._source, self._head.tables[number])
            self.files |= self._tables[number].files
        return self._tables[number]

    def _reads(
        self, chunks: Sequence[Chunk], told: Mapping[int, list[Row]], *, strict: bool, surplus: Sequence[str]
    ) -> box_reads.Plan:
        found: list[tuple[str, StoredTensor | None]] = [("", None)] * len(chunks)
        for row in (row for rows in told.values() for row in rows):
            number, key, stored, tables = read_answer(row)
            found[number] = key, stored
            for table in tables:
                if table >= 0:
                    self._table(table)  # for the digests of its files
        return box_reads.plan_reads(self._source, chunks, found, strict=strict, surplus=surplus)

    def local(self) -> dict[str, Tensor]:
        """The tensors that this rank saved for itself, in the same layout."""
        rank, local = self._axis.rank, dict(self._head.local)
        for number, table in enumerate(self._head.tables):
            if table.path == step_folder.table_path(rank):
                local |= self._table(number).local
        return box_reads.read_local(self._source, local, self.files, rank)


def _told(manifest: Manifest) -> dict[str, Any]:
    """What every rank has to know of a manifest, as JSON values: all but the tensors."""
    return {
        "step": manifest.step,
        "layout": manifest.layout,
        "facts": manifest.facts,
        "local": manifest.local,
        "files": {name: [file.size_bytes, file.blocks] for name, file in manifest.files.items()},
        "tables": [[table.path, table.size_bytes, table.digest] for table in manifest.tables],
    }


def _heard(told: Mapping[str, Any]) -> Manifest:
    return Manifest(
        step=told["step"],
        layout=told["layout"],
        facts=told["facts"],
        tensors={},
        local=told["local"],
        files={name: StoredFile(size, tuple(blocks)) for name, (size, blocks) in told["files"].items()},
        tables=tuple(TableFile(*row) for row in told["tables"]),
    )
