"""The record of the tokenizer beside a dataset. No digest covers it: another record is another tokenizer, which is refused by name."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

from petatron.data.indexed_writer import IndexedWriter
from petatron.data.recorded_tokenizer import RecordedTokenizer, check_recorded_tokenizer, read_recorded_tokenizer
from petatron.data.tokenizer import ByteTokenizer
from tests.fuzz.kind import Kind
from tests.fuzz.kinds.commands import petatron_says
from tests.fuzz.kinds.files import files_of


def make(name: str) -> Kind:
    with tempfile.TemporaryDirectory() as folder:
        _write(Path(folder) / "data")
        files = files_of(Path(folder))
    record = tuple(path for path in files if path.endswith(".tokenizer"))
    doors = {"check": _check, "inspect": _inspect, "merge": _merge}
    return Kind(name, files, doors=doors, formats={".tokenizer": "json"}, reads=dict.fromkeys(doors, record))


def _write(prefix: Path) -> None:
    with IndexedWriter(prefix, "uint16") as writer:
        writer.add_document([72, 105, 256])
    recorded = RecordedTokenizer.of(ByteTokenizer())
    assert recorded is not None
    recorded.write(prefix)


def _check(folder: Path, scratch: Path) -> Any:
    check_recorded_tokenizer(str(folder / "data"), ByteTokenizer(), force=False)


def _inspect(folder: Path, scratch: Path) -> Any:
    return petatron_says("data", "inspect", str(folder / "data"))


def _merge(folder: Path, scratch: Path) -> Any:
    prefix = str(folder / "data")
    petatron_says("data", "merge", "--input", prefix, prefix, "--output-prefix", str(scratch / "both"))
    record = read_recorded_tokenizer(scratch / "both")
    return None if record is None else [record.name.encode(errors="replace"), str(record.fingerprint)]
