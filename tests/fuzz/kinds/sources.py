"""The table beside a dataset that has the file, line and id of each document.

No digest covers it: another line is another line.
"""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import numpy as np

from petatron.data.document_provenance import DocumentIds, ProvenanceTable, ProvenanceWriter, provenance_of
from petatron.data.indexed_dataset import IndexedDataset
from petatron.data.indexed_writer import IndexedWriter
from tests.fuzz.kind import Kind
from tests.fuzz.kinds.commands import petatron_says
from tests.fuzz.kinds.files import files_of

_LENGTHS = (5, 9, 1, 12, 3)


def make(name: str) -> Kind:
    with tempfile.TemporaryDirectory() as folder:
        _write(Path(folder) / "data")
        files = files_of(Path(folder))
    table = {path: content for path, content in files.items() if path.endswith(".sources")}
    doors = {"read": _read, "inspect": _inspect, "merge": _merge}
    return Kind(
        name,
        files,
        doors=doors,
        formats={".sources": "sources"},
        reads=dict.fromkeys(doors, tuple(table)),
        streams=(".sources",),
    )


def _write(prefix: Path) -> None:
    with IndexedWriter(prefix, "uint16") as writer:
        for length in _LENGTHS:
            writer.add_document(list(range(length)))
    with ProvenanceWriter(prefix, ["corpus/a.jsonl", "b.parquet"]) as sources:
        sources.add(0, np.array([1, 3, 4]), DocumentIds.of([b"one", "zwöi".encode(), b""], 3))
        sources.add(1, np.array([7, 8]), DocumentIds.of([b"", b"x" * 50], 2))


def _read(folder: Path, scratch: Path) -> Any:
    table = provenance_of(IndexedDataset(folder / "data"))
    if table is None:
        return None
    assert len(table) == len(_LENGTHS)
    return [str(table[document]).encode(errors="replace") for document in range(len(table))]


def _inspect(folder: Path, scratch: Path) -> Any:
    return [petatron_says("data", "inspect", str(folder / "data"), "--document", str(n)) for n in range(len(_LENGTHS))]


def _merge(folder: Path, scratch: Path) -> Any:
    prefix = str(folder / "data")
    petatron_says("data", "merge", "--input", prefix, prefix, "--output-prefix", str(scratch / "both"))
    if (scratch / "both.sources").exists():
        table = ProvenanceTable(scratch / "both")
        return [table[document] for document in range(len(table))]
    return None
