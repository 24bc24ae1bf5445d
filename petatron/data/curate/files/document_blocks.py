"""The documents of JSON lines: the one place where curation reads its inputs.

A block of lines is parsed where it is judged, in a worker. Every line is a document, blank, or malformed, so that a step can account
for all of them.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from petatron.base.errors import DataError
from petatron.data.curate.files.step_files import StepFiles
from petatron.data.inputs.json_record import parse_record, text_value
from petatron.data.inputs.line_blocks import LineBlock, read_line_blocks

MAX_SHOWN_PROBLEMS = 5


@dataclass(frozen=True, slots=True)
class Document:
    """One line of an input: `line` counts from 1, `raw` is its bytes without the line end."""

    line: int
    raw: bytes
    record: dict[str, Any]
    text: str


@dataclass(frozen=True, slots=True)
class ParsedBlock:
    """The lines of a block; each is in one of the three."""

    num_lines: int
    documents: tuple[Document, ...]
    blank: tuple[int, ...]
    malformed: tuple[tuple[int, str], ...]
    """Line and reason."""


def read_blocks(files: StepFiles) -> Iterator[tuple[int, LineBlock]]:
    """Yields the blocks of all inputs with the index of the input; `DataError` if a file changes meanwhile."""
    for index, path in enumerate(files.inputs):
        before = file_state(path)
        for block in read_line_blocks(path, block_bytes=files.block_bytes, max_line_bytes=files.max_line_bytes):
            yield index, block
        check_unchanged(path, before)


FileState = tuple[int, int, int]


def file_state(path: str) -> FileState:
    """Returns size, time and number of a file, which show whether it was changed."""
    try:
        status = os.stat(Path(path))
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error.strerror or error}.") from error
    return status.st_size, status.st_mtime_ns, status.st_ino


def check_unchanged(path: str, before: FileState) -> None:
    """Raises `DataError` for a file that was changed since."""
    if file_state(path) != before:
        raise DataError(f"{path} was changed while it was read. Run the step again when nobody writes the file.")


def parse_block(block: LineBlock, json_key: str) -> ParsedBlock:
    """Parses a block; the text of a list of strings is its lines.

    >>> parsed = parse_block(LineBlock("a.jsonl", 1, b'{"text": "one"}\\n\\n[]\\n', 0), "text")
    >>> parsed.documents[0].text, parsed.blank, parsed.malformed
    ('one', (2,), ((3, 'a JSON list, not an object'),))
    """
    lines = block.data.removesuffix(b"\n").split(b"\n") if block.data else []
    documents: list[Document] = []
    blank: list[int] = []
    malformed: list[tuple[int, str]] = []
    for number, line in enumerate(lines, block.first_line):
        if not line or line.isspace():
            blank.append(number)
            continue
        try:
            record = parse_record(line.decode())
            text = text_value(record, json_key)
            assert isinstance(record, dict)  # it has a key
            documents.append(Document(number, line, record, text if isinstance(text, str) else "\n".join(text)))
        except json.JSONDecodeError as error:
            malformed.append((number, f"not JSON ({error.msg}, column {error.colno})"))
        except UnicodeDecodeError as error:
            malformed.append((number, f"not UTF-8 text ({error.reason})"))
        except RecursionError:
            malformed.append((number, "nested too deeply"))
        except ValueError as error:
            malformed.append((number, str(error)))
    return ParsedBlock(len(lines), tuple(documents), tuple(blank), tuple(malformed))


def malformed_error(path: str, line: int, reason: str) -> DataError:
    return DataError(
        f"{path}:{line}: {reason}. Correct the line, or leave out and count such lines with --on-error skip."
    )


def joined_lines(lines: Sequence[bytes]) -> bytes:
    """Returns lines with their line ends."""
    return b"".join(line + b"\n" for line in lines)


def record_line(record: dict[str, Any]) -> bytes:
    """Returns a record as a line; a lone surrogate, which is no text, is written as an escape."""
    try:
        return json.dumps(record, ensure_ascii=False).encode()
    except UnicodeEncodeError:
        return json.dumps(record).encode()


def with_key(document: Document, key: str, value: Any) -> bytes:
    """Returns a document's line with one more key; the rest keeps its bytes, unless the key is there already.

    >>> document = parse_block(LineBlock("a", 1, b'{"text": "x",  "n": 1.50}', 0), "text").documents[0]
    >>> with_key(document, "mark", [2])
    b'{"text": "x",  "n": 1.50, "mark": [2]}'
    """
    if key in document.record:
        return record_line({**document.record, key: value})
    return document.raw.rstrip()[:-1] + f", {json.dumps(key)}: {json.dumps(value)}}}".encode()
