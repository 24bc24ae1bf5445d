"""The documents of inputs: the one place where curation reads them, as JSON lines whatever their format.

A block of lines is parsed where it is judged, in a worker. Every line (row, sample) is a document, blank, or malformed, so that a step can
account for all of them.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from petatron.base.errors import DataError
from petatron.data.curate.files.step_files import StepFiles
from petatron.data.inputs.input_slice import InputSlice
from petatron.data.inputs.json_record import parse_record, text_value
from petatron.data.inputs.line_blocks import LineBlock, RefusedLine

MAX_SHOWN_PROBLEMS = 5


@dataclass(frozen=True, slots=True)
class Document:
    """One line of an input: `line` is where it is in its file, from 1, `raw` its bytes without the line end, or the row as JSON."""

    line: int
    raw: bytes
    record: dict[str, Any]
    text: str


@dataclass(frozen=True, slots=True)
class ParsedBlock:
    """The lines of a block; each is a document, blank or malformed."""

    is_document: NDArray[np.bool_]
    """Of every line."""
    documents: tuple[Document, ...]
    num_blank: int
    malformed: tuple[RefusedLine, ...]

    @property
    def num_lines(self) -> int:
        return len(self.is_document)


def read_blocks(files: StepFiles) -> Iterator[tuple[int, LineBlock]]:
    """Yields the blocks of all inputs with the index of the input; `DataError` if a file has changed since the step began."""
    for index, file in enumerate(files.sources):
        file.check_unchanged()
        for block in InputSlice(file, files.read_options).blocks():
            yield index, block


def parse_block(block: LineBlock, json_key: str) -> ParsedBlock:
    """Parses a block; the text of a list of strings is its lines.

    >>> parsed = parse_block(LineBlock("a.jsonl", 1, b'{"text": "one"}\\n\\n[]\\n', 0), "text")
    >>> parsed.documents[0].text, parsed.num_blank, parsed.malformed[0].line, parsed.malformed[0].reason
    ('one', 1, 3, 'a JSON list, not an object')
    """
    lines = block_lines(block)
    is_document = np.zeros(len(lines) + len(block.refused), bool)
    numbers = block.source_lines(np.arange(block.first_line, block.first_line + len(lines)))
    documents: list[Document] = []
    malformed: list[RefusedLine] = []
    num_blank = 0
    for place, (number, line) in enumerate(zip(numbers.tolist(), lines)):
        if not line or line.isspace():
            num_blank += 1
            continue
        try:
            record = parse_record(line.decode())
            text = text_value(record, json_key)
            assert isinstance(record, dict)  # it has a key
            documents.append(Document(number, line, record, text if isinstance(text, str) else "\n".join(text)))
            is_document[place] = True
        except json.JSONDecodeError as error:
            malformed.append(RefusedLine(number, f"not JSON ({error.msg}, column {error.colno})"))
        except UnicodeDecodeError as error:
            malformed.append(RefusedLine(number, f"not UTF-8 text ({error.reason})"))
        except RecursionError:
            malformed.append(RefusedLine(number, "nested too deeply"))
        except ValueError as error:
            malformed.append(RefusedLine(number, str(error)))
    return ParsedBlock(is_document, tuple(documents), num_blank, (*malformed, *block.refused))


def block_lines(block: LineBlock) -> list[bytes]:
    """Returns the lines of a block, without those that its reader has refused, which come after them."""
    return block.data.removesuffix(b"\n").split(b"\n") if block.data else []


def malformed_error(path: str, refused: RefusedLine) -> DataError:
    fix = "Allow more with --max-line-bytes" if refused.kind == "too long" else "Correct the line"
    return DataError(
        f"{path}:{refused.line}: {refused.reason}. {fix}, or leave out and count such lines with --on-error skip."
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
