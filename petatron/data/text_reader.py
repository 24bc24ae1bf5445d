"""Reads plain text as documents: paragraphs, or a whole file, as the JSON lines that `preprocess.py` takes.

A paragraph ends at a blank line. Documents become JSON lines here, so that workers, errors and output are those of the other format.
Nothing of the text changes but blank lines between paragraphs, and blank space at the ends of a document.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Literal

from petatron.base.errors import DataError
from petatron.data.jsonl_reader import LineBlock, read_line_blocks

InputFormat = Literal["jsonl", "text", "text-file"]
"""JSON lines; text whose paragraphs are documents; text whose files are documents."""
INPUT_FORMATS: tuple[InputFormat, ...] = ("jsonl", "text", "text-file")


def read_text_blocks(
    path: str | Path,
    *,
    key: str,
    whole_file: bool,
    block_bytes: int,
    max_line_bytes: int,
    max_lines: int | None = None,
) -> Iterator[LineBlock]:
    """Yields the documents of a text file as blocks of JSON lines with the one key; `max_lines` is the most documents."""
    lines: list[str] = []
    size = count = position = 0
    for text, position in _documents(path, whole_file, block_bytes, max_line_bytes):
        if max_lines is not None and count + len(lines) >= max_lines:
            break
        lines.append(json.dumps({key: text}, ensure_ascii=False))
        size += len(lines[-1])
        if size >= block_bytes:
            yield LineBlock(str(path), count + 1, "\n".join([*lines, ""]).encode(), position)
            count += len(lines)
            lines, size = [], 0
    if lines:
        yield LineBlock(str(path), count + 1, "\n".join([*lines, ""]).encode(), position)


def _documents(
    path: str | Path, whole_file: bool, block_bytes: int, max_document_bytes: int
) -> Iterator[tuple[str, int]]:
    """Yields documents and the bytes read so far."""
    pending: list[bytes] = []
    size = position = 0
    first = number = 0
    for block in read_line_blocks(path, block_bytes=block_bytes, max_line_bytes=max_document_bytes):
        position = block.file_position
        for number, line in enumerate(block.data.removesuffix(b"\n").split(b"\n"), block.first_line):
            if line.isspace() or not line:
                if pending and not whole_file:
                    yield _text(path, first, pending), position
                    pending, size = [], 0
                if not pending:
                    continue
            first = first if pending else number
            pending.append(line)
            size += len(line) + 1
            if size > max_document_bytes:
                raise DataError(
                    f"{path}:{first}: the document is longer than {max_document_bytes:,} bytes. If that is meant, allow more "
                    "with --max-line-bytes; if paragraphs are documents, use --input-format text."
                )
    if pending:
        yield _text(path, first, pending), position


def _text(path: str | Path, first_line: int, lines: list[bytes]) -> str:
    try:
        return b"\n".join(lines).decode().strip()
    except UnicodeDecodeError as error:
        line = first_line + b"\n".join(lines)[: error.start].count(b"\n")
        raise DataError(f"{path}:{line}: not UTF-8 text ({error.reason}). Convert the file to UTF-8.") from error
