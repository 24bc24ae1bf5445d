"""Turns rows of any format into blocks of JSON lines, so that workers, errors and output are those of JSON lines."""

from __future__ import annotations

import base64
import json
import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from datetime import date, time

import numpy as np

from petatron.data.inputs.line_blocks import LineBlock, RefusedLine


@dataclass(frozen=True, slots=True)
class SourceRow:
    """A row, with the line, row or sample of its file that it is and the bytes of the file that were read for it."""

    line: int
    record: Mapping[str, object]
    file_position: int


@dataclass(frozen=True, slots=True)
class RefusedRow:
    refused: RefusedLine
    file_position: int


def blocks_of_rows(
    path: str,
    rows: Iterable[SourceRow | RefusedRow],
    *,
    block_bytes: int,
    max_line_bytes: int,
    max_lines: int | None = None,
) -> Iterator[LineBlock]:
    """Yields blocks of about `block_bytes`, of at most `max_lines` rows in all. A row that is too long as JSON is refused."""
    lines: list[bytes] = []
    numbers: list[int] = []
    refused: list[RefusedLine] = []
    size = count = position = 0
    for row in rows:
        position = row.file_position
        if isinstance(row, RefusedRow):
            refused.append(row.refused)
        elif (longest := _longest_text(row.record)) > max_line_bytes:  # said before as much memory is taken again
            reason = f"a text of the row has {longest:,} characters, and a line at most {max_line_bytes:,} bytes"
            refused.append(RefusedLine(row.line, reason, "too long"))
        elif (line := _json_line(row.record)) is None:
            refused.append(RefusedLine(row.line, "nested too deeply"))
        elif len(line) - 1 > max_line_bytes:
            reason = f"the row has {len(line) - 1:,} bytes as JSON, more than {max_line_bytes:,}"
            refused.append(RefusedLine(row.line, reason, "too long"))
        else:
            lines.append(line)
            numbers.append(row.line)
            size += len(line)
        done = max_lines is not None and count + len(lines) + len(refused) >= max_lines
        # What is refused may end the work, so nothing waits for it.
        if size >= block_bytes or refused or done:
            yield _block(path, count, lines, numbers, refused, position)
            count += len(lines) + len(refused)
            lines, numbers, refused, size = [], [], [], 0
        if done:
            return
    if lines:
        yield _block(path, count, lines, numbers, refused, position)


def _block(
    path: str, count: int, lines: list[bytes], numbers: list[int], refused: list[RefusedLine], position: int
) -> LineBlock:
    return LineBlock(path, count + 1, b"".join(lines), position, np.array(numbers, np.int64), tuple(refused))


def _longest_text(record: Mapping[str, object]) -> int:
    return max((len(value) for value in record.values() if isinstance(value, str | bytes)), default=0)


def _json_line(record: Mapping[str, object]) -> bytes | None:
    """Returns a record as a line; None where it is nested deeper than JSON can be written."""
    try:
        return json.dumps(record, ensure_ascii=False, allow_nan=False, default=_json_value).encode() + b"\n"
    except RecursionError:
        return None
    except (
        ValueError
    ):  # a number that JSON does not have, or a lone surrogate, which the tokenizer refuses with the reason
        return json.dumps(_finite(record), default=_json_value).encode() + b"\n"


def _json_value(value: object) -> object:
    """Returns what JSON has for a value that it does not have: base64 of bytes, ISO 8601 of a time, or its text."""
    if isinstance(value, bytes):
        return base64.b64encode(value).decode()
    return value.isoformat() if isinstance(value, date | time) else str(value)


def _finite(value: object) -> object:
    """Returns a value with null for infinities and for what is no number."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {key: _finite(part) for key, part in value.items()}
    return [_finite(part) for part in value] if isinstance(value, list | tuple) else value
