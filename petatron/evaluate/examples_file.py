"""Reads the files of tasks: JSON lines, or plain text. Whatever is wrong is reported with its line, several lines at once."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeVar

from petatron.base.errors import DataError
from petatron.base.format_text import abbreviate_names
from petatron.data.inputs.line_blocks import read_line_blocks

_MAX_PROBLEMS = 5
Example = TypeVar("Example")


class ExampleError(ValueError):
    """What is wrong with one example, as a predicate of its line."""


def read_examples(
    path: Path, parse: Callable[[Mapping[str, Any]], Example], *, limit: int | None = None
) -> list[Example]:
    """Parses each JSON line, at most `limit` of them; raises `DataError` with the first problems, or if there is no example."""
    examples: list[Example] = []
    problems: list[str] = []
    for number, line in _numbered_lines(path):
        if (limit is not None and len(examples) >= limit) or len(problems) >= _MAX_PROBLEMS:
            break
        try:
            examples.append(parse(_json_object(line)))
        except ExampleError as error:
            problems.append(f"{path}:{number}: {error}.")
    if problems:
        more = ["There may be more: the file was read so far."] if len(problems) == _MAX_PROBLEMS else []
        raise DataError("\n".join([*problems, *more, "Correct the file, or choose the task it was made for."]))
    if not examples:
        raise DataError(f"{path} has no example. Give a file of JSON lines, one example on each.")
    return examples


def read_text(path: Path) -> str:
    """Reads a whole text file, plain or compressed."""
    data = b"".join(block.data for block in read_line_blocks(path))
    try:
        text = data.decode()
    except UnicodeDecodeError as error:
        line = data[: error.start].count(b"\n") + 1
        raise DataError(f"{path}:{line}: not UTF-8 text ({error.reason}). Convert the file to UTF-8.") from error
    if not text.strip():
        raise DataError(f"{path} has no text. Give a file that has some.")
    return text


def is_json_lines(path: Path) -> bool:
    """Whether the first line that is not blank begins an object."""
    return next((line.lstrip().startswith(b"{") for _, line in _numbered_lines(path)), False)


def text_field(record: Mapping[str, Any], key: str) -> str:
    """Returns a text of a record; it must not be empty."""
    value = field_of(record, key)
    if not isinstance(value, str) or not value.strip():
        raise ExampleError(f'"{key}" is not a text with something in it')
    return value


def field_of(record: Mapping[str, Any], key: str) -> Any:
    if key not in record:
        keys = abbreviate_names([str(name) for name in record]) or "none"
        raise ExampleError(f'the key "{key}" is missing; it has {keys}')
    return record[key]


def _numbered_lines(path: Path) -> Any:
    for block in read_line_blocks(path):
        for number, line in enumerate(block.data.split(b"\n"), block.first_line):
            if line.strip():
                yield number, line


def _json_object(line: bytes) -> Mapping[str, Any]:
    try:
        record = json.loads(line)
        if b"\\u" in line:
            json.dumps(record, ensure_ascii=False).encode()  # half a surrogate is no text
    except (ValueError, RecursionError):
        raise ExampleError("not valid JSON") from None
    if not isinstance(record, dict):
        raise ExampleError("not a JSON object")
    return record
