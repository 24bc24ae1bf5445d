"""Locates one rank's boxes in a checkpoint: reads the manifest and its share of the tables, and asks the other ranks."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from torch import Tensor

from petatron.checkpoint.files import step_folder
from petatron.checkpoint.files.digested_file_io import StoredFile
from petatron.checkpoint.files.manifest import Manifest, RankTable, StoredTensor, TableFile
from petatron.checkpoint.load import reshard_reads
from petatron.checkpoint.load.stored_box_lookup import (
    MessageRow,
    StoredBoxLookup,
    box_requests,
    parse_answer,
    table_rows,
)
from petatron.checkpoint.run_on_all_ranks import AllRanks
from petatron.checkpoint.sparse_all_to_all import exchange_messages
from petatron.checkpoint.tensor_chunk import Chunk
from petatron.mesh.json_collectives import all_gather_json, broadcast_json
from petatron.mesh.mesh import Axis


class RankReader:
    """Loads a checkpoint on one rank. `files` are those whose digests it knows."""

    def __init__(self, source: Path, axis: Axis, ranks: AllRanks) -> None:
        self._source, self._axis, self._ranks = source, axis, ranks
        self._tables: dict[int, RankTable] = {}
        self.files: dict[str, StoredFile] = {}

    def read_manifest(self, read: Callable[[], Manifest]) -> Manifest:
        """Broadcasts the manifest that rank 0 reads, all but its tensors. If it has no tables, rank 0 owns all tensors."""
        manifest = self._ranks.run(lambda: read() if self._axis.rank == 0 else None)
        told = None if manifest is None else asdict(replace(manifest, tensors={}))
        head = _manifest_from_message(broadcast_json(told, self._axis))
        self._manifest = head if manifest is None else replace(head, tensors=manifest.tensors)
        self.files = dict(head.files)
        return self._manifest

    def plan_reads(
        self,
        chunks: Sequence[Chunk],
        *,
        strict: bool,
        may_ignore_key: Callable[[str], bool] | None,
        check_all_files: bool,
        may_lack_key: Callable[[str], bool] | None = None,
    ) -> reshard_reads.ReadPlan:
        """Plans every read of this rank; everything that does not fit is one error. All ranks call it."""
        sent = self._ranks.run(lambda: self._rows_and_requests(chunks, check_all_files=check_all_files))
        received = exchange_messages(sent, self._axis)
        directory = StoredBoxLookup(self._source)

        def answer() -> dict[int, list[MessageRow]]:
            for said in received.values():
                directory.add_rows(said.get("rows", ()))
            return {rank: directory.answer_requests(said["asks"]) for rank, said in received.items() if "asks" in said}

        told = exchange_messages(self._ranks.run(answer), self._axis)
        surplus = (
            directory.unexpected_keys(may_ignore_key or self._ignore_unrequested_kinds(directory)) if strict else []
        )
        checks = {"strict": strict, "unexpected_keys": surplus, "may_lack_key": may_lack_key}
        return self._ranks.run(lambda: self._plan_from_answers(chunks, told, **checks))

    def _ignore_unrequested_kinds(self, directory: StoredBoxLookup) -> Callable[[str], bool]:
        """By default a load ignores the kinds of state that no rank requests."""
        kinds = {kind for of_rank in all_gather_json(directory.requested_kinds(), self._axis) for kind in of_rank}
        return lambda key: key.partition("/")[0] not in kinds

    def _rows_and_requests(
        self, chunks: Sequence[Chunk], *, check_all_files: bool
    ) -> dict[int, dict[str, list[MessageRow]]]:
        """Returns this rank's share of the tables and its requests, by owner rank."""
        size, rank = self._axis.size, self._axis.rank
        messages: dict[int, dict[str, list[MessageRow]]] = {}
        if check_all_files and rank == 0:
            step_folder.check_sizes(self._source, self._manifest.files)
        for number in range(rank, len(self._manifest.tables), size):
            table = self._table(number)
            if check_all_files:
                step_folder.check_sizes(self._source, table.files)
            for owner, rows in table_rows(table.entries, number, size).items():
                messages.setdefault(owner, {}).setdefault("rows", []).extend(rows)
        for owner, rows in table_rows(self._manifest.tensors.items(), -1, size).items():
            messages.setdefault(owner, {}).setdefault("rows", []).extend(rows)
        for owner, rows in box_requests(chunks, size).items():
            messages.setdefault(owner, {})["asks"] = rows
        return messages

    def _table(self, number: int) -> RankTable:
        if number not in self._tables:
            self._tables[number] = step_folder.read_table(self._source, self._manifest.tables[number])
            self.files |= self._tables[number].files
        return self._tables[number]

    def _plan_from_answers(
        self,
        chunks: Sequence[Chunk],
        answers: Mapping[int, list[MessageRow]],
        **checks: Any,
    ) -> reshard_reads.ReadPlan:
        lookups: list[tuple[str, StoredTensor | None]] = [("", None)] * len(chunks)
        for row in (row for rows in answers.values() for row in rows):
            number, key, stored, tables = parse_answer(row)
            lookups[number] = key, stored
            for table in tables:
                if table >= 0:
                    self._table(table)  # for the digests of its files
        plan = reshard_reads.plan_reads(self._source, chunks, lookups, **checks)
        read = {box_read.stored.file for box_read in plan.reads}
        step_folder.check_sizes(self._source, {name: file for name, file in self.files.items() if name in read})
        return plan

    def read_local(self) -> dict[str, Tensor]:
        """Reads the tensors that this rank saved for itself, in the same layout."""
        rank, local = self._axis.rank, dict(self._manifest.local)
        for number, table in enumerate(self._manifest.tables):
            if table.path == step_folder.table_path(rank):
                local |= self._table(number).local
        return reshard_reads.read_rank_local(self._source, local, self.files, rank)


def _manifest_from_message(message: Mapping[str, Any]) -> Manifest:
    files = {
        name: StoredFile(file["size_bytes"], tuple(file["block_digests"])) for name, file in message["files"].items()
    }
    return Manifest(**{**message, "files": files, "tables": tuple(TableFile(**table) for table in message["tables"])})
