"""Reads the records of a file of conversations: JSON lines, compressed or not, a JSON array, parquet, arrow or CSV."""

from __future__ import annotations

import hashlib
import io
import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from petatron.base.errors import DataError
from petatron.base.untrusted_files import reading_untrusted
from petatron.data.conversations.refused_conversation import RefusedConversation
from petatron.data.data_file_error import data_file_error
from petatron.data.inputs.compressed_stream import READ_ERRORS, CountedStream, decompressed_chunks
from petatron.data.inputs.expand_inputs import expand_inputs
from petatron.data.inputs.input_file import InputFile
from petatron.data.inputs.input_slice import InputSlice, ReadOptions
from petatron.data.inputs.json_record import parse_record, repeated_keys

_CHUNK_BYTES = 1 << 20
_MAX_ARRAY_BYTES = 1 << 31
"""A JSON array is read as a whole."""
_MAX_LINE_BYTES = 1 << 26


@dataclass(frozen=True, slots=True)
class RawRecord:
    """A record as its file has it: the line, row or sample that it is, and its JSON; else why there is none. share: read of the file."""

    line: int
    json: bytes
    refused: str | None = None
    share: float = 0.0


def conversation_files(source: str) -> list[InputFile]:
    """Returns the files of a word of `--data-path`: a file, a glob or a folder."""
    files = expand_inputs([source], "auto")
    if not files:
        raise DataError(f"{source} has no files. Give JSON lines or parquet files of conversations.")
    return files


def content_digest(file: InputFile) -> str:
    """Returns a hash of a file's bytes."""
    digest = hashlib.blake2b(digest_size=16)
    with reading_untrusted(Path(file.path), lambda _, why: data_file_error(file.path, why)), file.open() as opened:
        while chunk := opened.read(_CHUNK_BYTES):
            digest.update(chunk)
    return digest.hexdigest()


def read_raw_records(file: InputFile) -> Iterator[RawRecord]:
    """Yields the records of a file in their order."""
    if file.format == "jsonl" and _begins_with_array(file):
        yield from _array_records(file)
        return
    options = ReadOptions(keys=(), all_keys=True, max_line_bytes=_MAX_LINE_BYTES)
    for block in InputSlice(file, options).blocks():
        share = min(1.0, block.file_position / file.size) if file.size else 0.0
        for refused in block.refused:
            yield RawRecord(refused.line, b"", refused.reason, share)
        for number, line in enumerate(block.data.split(b"\n"), block.first_line):
            if line.strip():
                place = number if block.lines is None else int(block.lines[number - block.first_line])
                yield RawRecord(place, line, None, share)


def parse_raw_record(raw: RawRecord) -> object:
    """Returns the JSON value of a record; raises `RefusedConversation` where there is none."""
    if raw.refused is not None:
        raise RefusedConversation("no json", f"is refused: {raw.refused}")
    try:
        record = parse_record(raw.json)
    except (ValueError, RecursionError) as error:
        raise RefusedConversation("no json", f"is no JSON ({error}): write an object in each line") from None
    if isinstance(record, dict) and (twice := sorted(repeated_keys(record))):
        raise RefusedConversation("wrong form", f"has the key {twice[0]!r} twice: keep one")
    return record


def _begins_with_array(file: InputFile) -> bool:
    with reading_untrusted(Path(file.path), lambda _, why: data_file_error(file.path, why)), file.open() as opened:
        try:
            head = next(decompressed_chunks(CountedStream(opened).buffered(), file.path, chunk_bytes=_CHUNK_BYTES), b"")
        except READ_ERRORS:
            return False
    return head.removeprefix(b"\xef\xbb\xbf").lstrip().startswith(b"[")


def _array_records(file: InputFile) -> Iterator[RawRecord]:
    """Yields the objects of a JSON array, which are numbered from 1."""
    content = io.BytesIO()
    with reading_untrusted(Path(file.path), lambda _, why: data_file_error(file.path, why)), file.open() as opened:
        for chunk in decompressed_chunks(CountedStream(opened).buffered(), file.path, chunk_bytes=_CHUNK_BYTES):
            content.write(chunk)
            if content.tell() > _MAX_ARRAY_BYTES:
                raise DataError(
                    f"{file.path} is a JSON array of more than {_MAX_ARRAY_BYTES:,} bytes. Write JSON lines."
                )
        records = json.loads(content.getvalue().decode("utf-8-sig"))
        if not isinstance(records, list):
            raise ValueError("has no JSON array")
    for number, record in enumerate(records, start=1):
        yield RawRecord(
            number, json.dumps(record, ensure_ascii=False).encode("utf-8", "surrogatepass"), None, number / len(records)
        )
