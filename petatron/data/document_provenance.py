"""The source file and line of each document of a dataset: `<prefix>.sources`, which Megatron's readers ignore.

    offset    bytes  content (little-endian)
    0         8      magic b"PTRNSRC\\0"
    8         4      uint32 version, 1
    12        4      uint32 F, number of files
    16        8      uint64 D, number of documents
    24        8      uint64 I, bytes of all ids
    32        20D    per document: uint64 line, uint64 end of its id among the ids, uint32 file
    32+20D    I      ids, UTF-8, one after the other; a document without one has none of these bytes
    32+20D+I  rest   the names of the files, a JSON list

A line is counted from 1: of JSON lines, text and CSV the line that the document begins on, of a parquet or arrow file its row, of a tar its
sample.
"""

from __future__ import annotations

import json
import mmap
import os
import shutil
import struct
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import chain
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from petatron.base.errors import DataError
from petatron.base.safe_files import create_file, tmp_path_for
from petatron.base.untrusted_files import open_regular_file, reading_untrusted
from petatron.data.data_file_error import data_file_error
from petatron.data.finish_or_abort import FinishOrAbort
from petatron.data.indexed_dataset import IndexedDataset

_MAGIC = b"PTRNSRC\x00"
_VERSION = 1
_HEADER = struct.Struct("<8sIIQQ")
_ENTRY = np.dtype([("line", "<u8"), ("id_end", "<u8"), ("file", "<u4")])
_COPIED_DOCUMENTS = 1 << 16


def sources_path(prefix: str | Path) -> Path:
    return Path(f"{prefix}.sources")


@dataclass(frozen=True, slots=True)
class DocumentIds:
    """Texts of some documents, of length 0 where one has none."""

    text: bytes
    lengths: NDArray[np.int32]

    @staticmethod
    def of(texts: Sequence[bytes] | None, count: int) -> DocumentIds:
        """texts: None if none of `count` documents has an id."""
        if texts is None:
            return DocumentIds(b"", np.zeros(count, np.int32))
        return DocumentIds(b"".join(texts), np.fromiter(map(len, texts), np.int32, count))

    def select(self, kept: NDArray[np.bool_]) -> DocumentIds:
        """Returns those of some documents."""
        if not self.text or bool(kept.all()):
            return DocumentIds(self.text, self.lengths[kept])
        ends = np.cumsum(self.lengths, dtype=np.int64)
        pieces = [
            self.text[end - length : end] for end, length in zip(ends[kept].tolist(), self.lengths[kept].tolist())
        ]
        return DocumentIds(b"".join(pieces), self.lengths[kept])


@dataclass(frozen=True, slots=True)
class DocumentProvenance:
    """Where a document comes from. id: what its object says; None if it says nothing."""

    file: str
    line: int
    id: str | None

    def __str__(self) -> str:
        return f"{self.file}:{self.line}" + (f" (id {self.id})" if self.id is not None else "")


class ProvenanceTable:
    """Reads the sources of a dataset, memory-mapped.

    >>> import os, tempfile
    >>> prefix = os.path.join(tempfile.mkdtemp(), "demo")
    >>> with ProvenanceWriter(prefix, ["a.jsonl"]) as writer:
    ...     writer.add(0, np.array([7]), DocumentIds(b"doc-7", np.array([5], np.int32)))
    >>> ProvenanceTable(prefix)[0]
    DocumentProvenance(file='a.jsonl', line=7, id='doc-7')
    """

    def __init__(self, prefix: str | Path) -> None:
        self.path = sources_path(prefix)
        with reading_untrusted(self.path, data_file_error), open_regular_file(self.path) as file:
            content = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
            magic, version, num_files, documents, id_bytes = _HEADER.unpack(content[: _HEADER.size])
            ids_start = _HEADER.size + _ENTRY.itemsize * documents
            if (magic, version) != (_MAGIC, _VERSION) or ids_start + id_bytes > len(content):
                raise ValueError("its header is none, or the file is truncated")
            self.entries: NDArray = np.frombuffer(content, _ENTRY, documents, _HEADER.size)
            self.files: list[str] = json.loads(content[ids_start + id_bytes :])
            if len(self.files) != num_files or not all(isinstance(name, str) for name in self.files):
                raise ValueError("the names of its files are damaged")
        self._content, self._ids_start, self.num_id_bytes = content, ids_start, id_bytes

    def __len__(self) -> int:
        return len(self.entries)

    def __getitem__(self, document: int) -> DocumentProvenance:
        if not 0 <= document < len(self):
            raise IndexError(f"document {document} of {len(self)} in {self.path}")
        line, end, file = self.entries[document].tolist()
        start = int(self.entries[document - 1]["id_end"]) if document else 0
        if file >= len(self.files) or not start <= end <= self.num_id_bytes:
            raise DataError(f"{self.path} is damaged at document {document}. Copy it again, or remove it.")
        return DocumentProvenance(self.files[file], line, self.id_text(start, end).decode(errors="replace") or None)

    def check(self, entries: NDArray, first_id: int) -> None:
        """Raises if entries name files that are not there, or ids that do not follow one another."""
        ends = entries["id_end"]
        in_order = ends[0] >= first_id and bool((ends[1:] >= ends[:-1]).all()) and ends[-1] <= self.num_id_bytes
        if not in_order or int(entries["file"].max()) >= len(self.files):
            raise DataError(f"{self.path} is damaged. Copy it again, or remove it.")

    def id_text(self, start: int, end: int) -> bytes:
        return self._content[self._ids_start + start : self._ids_start + end]


def provenance_of(dataset: IndexedDataset) -> ProvenanceTable | None:
    """Returns the sources of a dataset, which must have as many documents; None if there are none."""
    if not os.path.lexists(sources_path(dataset.prefix)):
        return None
    sources = ProvenanceTable(dataset.prefix)
    if len(sources) != dataset.num_documents:
        raise DataError(
            f"{sources.path} is of another dataset: it has {len(sources):,} documents, and {dataset.idx.name} has "
            f"{dataset.num_documents:,}. Copy all files of the dataset again, or remove this one."
        )
    return sources


def merge_provenance(datasets: Sequence[IndexedDataset], output: str | Path) -> bool:
    """Writes the sources of merged datasets and returns whether it has: nothing is written unless all have some."""
    if not all(os.path.lexists(sources_path(dataset.prefix)) for dataset in datasets):
        sources_path(output).unlink(missing_ok=True)
        return False
    sources = [table for dataset in datasets if (table := provenance_of(dataset)) is not None]
    files = list(dict.fromkeys(chain.from_iterable(table.files for table in sources)))
    places = {name: place for place, name in enumerate(files)}
    with ProvenanceWriter(output, files) as writer:
        for table in sources:
            writer.add_table(table, file_numbers=[places[name] for name in table.files])
    return True


class ProvenanceWriter(FinishOrAbort):
    """Streams the sources of a dataset. Leaving it as a context manager finishes, an exception leaves no files."""

    def __init__(self, prefix: str | Path, files: Sequence[str]) -> None:
        self.path, self.files = sources_path(prefix), list(files)
        self.num_documents = self._num_id_bytes = 0
        self._tmp_paths = [tmp_path_for(self.path), tmp_path_for(Path(f"{self.path}.ids"))]
        self._entries = create_file(self._tmp_paths[0], buffering=1 << 16)
        self._ids = create_file(self._tmp_paths[1], buffering=1 << 16)
        self._entries.write(bytes(_HEADER.size))

    def add(self, file: int, lines: NDArray[np.int64], ids: DocumentIds) -> None:
        """Adds documents of one file."""
        entries = np.empty(lines.size, _ENTRY)
        entries["line"], entries["file"] = lines, file
        entries["id_end"] = np.cumsum(ids.lengths, dtype=np.int64) + self._num_id_bytes
        self._write(entries, ids.text)

    def add_table(
        self, sources: ProvenanceTable, *, file_numbers: Sequence[int], lines_before: tuple[int, int] = (0, 0)
    ) -> None:
        """Appends all documents of another dataset.

        file_numbers: for each file of the other table, its number among the files of this one. lines_before: the number of a file of the
        other table, and how many lines to add to its line numbers: those of the file that come before the part that the table is of.
        """
        numbers = np.array(file_numbers, np.uint32)
        for start in range(0, len(sources), _COPIED_DOCUMENTS):
            entries = sources.entries[start : start + _COPIED_DOCUMENTS].copy()
            first_id = int(sources.entries[start - 1]["id_end"]) if start else 0
            sources.check(entries, first_id)
            text = sources.id_text(first_id, int(entries["id_end"][-1]))
            cut_file, num_lines = lines_before
            entries["line"][entries["file"] == cut_file] += np.uint64(num_lines)
            entries["file"] = numbers[entries["file"]]
            entries["id_end"] += np.uint64((self._num_id_bytes - first_id) % (1 << 64))
            self._write(entries, text)

    def finish(self) -> None:
        """Publishes the file."""
        try:
            self._ids.seek(0)
            shutil.copyfileobj(self._ids, self._entries, 1 << 20)
            self._entries.write(json.dumps(self.files).encode())
            self._entries.seek(0)
            counts = (len(self.files), self.num_documents, self._num_id_bytes)
            self._entries.write(_HEADER.pack(_MAGIC, _VERSION, *counts))
            self._entries.flush()
            os.fsync(self._entries.fileno())
            os.replace(self._tmp_paths[0], self.path)
        except OSError as error:
            raise self._disk_error(error) from error
        finally:
            self.abort()

    def abort(self) -> None:
        """Closes and removes the temporary files."""
        for file in (self._entries, self._ids):
            with suppress(OSError):
                file.close()
        for path in self._tmp_paths:
            path.unlink(missing_ok=True)

    def _write(self, entries: NDArray, text: bytes) -> None:
        try:
            self._entries.write(entries.data)
            self._ids.write(text)
        except OSError as error:
            raise self._disk_error(error) from error
        self.num_documents += entries.size
        self._num_id_bytes += len(text)

    def _disk_error(self, error: OSError) -> DataError:
        return DataError(f"Cannot write {self.path}: {error}. Free some space, or choose another output prefix.")
