"""Reads the rows of a downloaded dataset's files, and makes documents of them.

Parquet is read row group by row group and JSON lines and text block by block, so memory does not grow with a file. A row is whatever
is under the text key: rows that are not text are counted and skipped, and a file without any is an error, since the key is wrong then.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from petatron.base.errors import DataError
from petatron.base.format_text import abbreviate_names
from petatron.base.terminal_escape import printable
from petatron.base.untrusted_files import open_regular_file, reading_untrusted
from petatron.data.data_file_error import data_file_error
from petatron.data.fetch.dataset_hub import import_fetch_library
from petatron.data.inputs.line_blocks import read_line_blocks

_KINDS = {"parquet": ("parquet",), "json": ("jsonl", "json", "ndjson"), "text": ("txt",)}
_PACKED = (".gz", ".zst")
_ROWS_PER_BATCH = 256
_PARQUET_BUFFER_BYTES = 1 << 20
_ROWS_WITHOUT_TEXT = 1000
"""After this many rows without any text, the text key is wrong."""
_HEADING = re.compile(r" ?= (?![= ]).*[^= ] = ?\n?")


@dataclass(slots=True)
class RowCounts:
    """What was read of a file, and what of it was skipped."""

    rows: int = 0
    not_text: int = 0
    empty: int = 0
    too_long: int = 0


def file_kind(name: str) -> str | None:
    """How a file is read, by its name; None if it is not.

    >>> file_kind("data/train-00000.parquet"), file_kind("en/c4-train.00000.json.gz"), file_kind("a.txt"), file_kind("README.md")
    ('parquet', 'json', 'text', None)
    """
    for ending in _PACKED:
        name = name.removesuffix(ending)
    ending = name.rpartition(".")[2].lower()
    return next((kind for kind, endings in _KINDS.items() if ending in endings), None)


def read_rows(path: Path, name: str, text_key: str, *, max_line_bytes: int) -> Iterator[object]:
    """Yields what is under the text key, row by row. `name` is the file's name in its dataset, which says its format."""
    kind = file_kind(name)
    if kind == "parquet":
        return _parquet_rows(path, text_key)
    lines = _lines(path, max_line_bytes)
    return _json_rows(path, lines, text_key) if kind == "json" else (line.decode(errors="replace") for line in lines)


def _parquet_rows(path: Path, text_key: str) -> Iterator[object]:
    parquet: Any = import_fetch_library("pyarrow.parquet")
    with reading_untrusted(path, data_file_error), open_regular_file(path) as source:
        file = parquet.ParquetFile(source, pre_buffer=False, buffer_size=_PARQUET_BUFFER_BYTES)
        _check_column(path, file.schema_arrow, text_key)
        for group in range(file.num_row_groups):
            for batch in file.iter_batches(_ROWS_PER_BATCH, row_groups=[group], columns=[text_key], use_threads=False):
                yield from batch.column(text_key).to_pylist()


def _check_column(path: Path, schema: Any, text_key: str) -> None:
    text = [column.name for column in schema if str(column.type) in ("string", "large_string", "string_view")]
    if text_key not in text:
        what = "is not text" if text_key in schema.names else "does not exist"
        names = abbreviate_names([printable(name, max_chars=80) for name in text]) or "none"
        raise DataError(
            f"The column {text_key!r} {what} in {path}. Its text columns: {names}. Name one with --text-key."
        )


def _lines(path: Path, max_line_bytes: int) -> Iterator[bytes]:
    """Split at newlines alone: a carriage return is text."""
    for block in read_line_blocks(path, max_line_bytes=max_line_bytes):
        yield from (line + b"\n" for line in block.data.removesuffix(b"\n").split(b"\n"))


def _json_rows(path: Path, lines: Iterable[bytes], text_key: str) -> Iterator[object]:
    keys: list[str] = []
    rows = texts = 0
    for line in lines:
        if not line.strip():
            continue
        try:
            record = json.loads(line)
        except (ValueError, RecursionError):
            record = None
        row = record.get(text_key) if isinstance(record, dict) else None
        keys = keys or (list(record) if isinstance(record, dict) else [])
        rows, texts = rows + 1, texts + isinstance(row, str)
        if not texts and rows == _ROWS_WITHOUT_TEXT:
            break
        yield row
    if rows and not texts:
        named = abbreviate_names([printable(key, max_chars=80) for key in keys])
        has = f"Its first object has {named}. Name one with --text-key." if named else "Its lines are not JSON objects."
        raise DataError(f"None of the first {rows:,} lines of {path} has text under {text_key!r}. {has}")


def documents_of(
    rows: Iterable[object],
    counts: RowCounts,
    *,
    join: str,
    following: Iterable[object],
    continues: bool,
    max_bytes: int,
) -> Iterator[str]:
    """Yields the documents of one file.

    following: rows of the files after it, where an article may end; continues: its rows before the first heading are of the
    file before it.
    """
    texts = _texts(rows, counts)
    if join == "none":
        stripped = (text.removesuffix("\n") for text in texts)
    elif join == "file":
        stripped = _whole_file(texts, max_bytes)
    else:
        stripped = _articles(texts, (row for row in following if isinstance(row, str)), continues, max_bytes)
    for text in stripped:
        if text.strip():
            yield text
        else:
            counts.empty += 1


def _texts(rows: Iterable[object], counts: RowCounts) -> Iterator[str]:
    for row in rows:
        counts.rows += 1
        if isinstance(row, str):
            yield row
        else:
            counts.not_text += 1


def _whole_file(texts: Iterable[str], max_bytes: int) -> Iterator[str]:
    document = _JoinedRows(max_bytes)
    for text in texts:
        document.add(text)
    yield document.take()


def _articles(texts: Iterable[str], following: Iterable[str], continues: bool, max_bytes: int) -> Iterator[str]:
    article = _JoinedRows(max_bytes)
    for text, is_heading in _with_headings(texts):
        if is_heading:
            if article.size and not continues:
                yield article.take()
            continues = False
        if not continues and (article.size or text.strip()):
            article.add(text)
    if not article.size:  # no article begins in this file
        return
    for text, is_heading in _with_headings(following):
        if is_heading:
            break
        article.add(text)
    yield article.take()


def _with_headings(texts: Iterable[str]) -> Iterator[tuple[str, bool]]:
    """A title is a line ` = Title = ` after a blank one; ` = = Section = = ` is none."""
    after_blank = True
    for text in texts:
        yield text, after_blank and _HEADING.fullmatch(text) is not None
        after_blank = not text.strip()


class _JoinedRows:
    """Rows that become one document of limited size."""

    def __init__(self, max_size: int) -> None:
        self._max_size, self.size = max_size, 0
        self._parts: list[str] = []

    def add(self, text: str) -> None:
        self._parts.append(text if text.endswith("\n") else f"{text}\n")
        self.size += len(self._parts[-1])
        if self.size > self._max_size:
            raise DataError(
                f"Rows joined to one document have more than {self._max_size:,} characters. Make each row a document with --join none, "
                "or allow more with --max-line-bytes."
            )

    def take(self) -> str:
        text = "".join(self._parts).strip("\n")
        self._parts, self.size = [], 0
        return text
