"""Reads JSON lines in blocks: plain, gzip or zstd, detected by their first bytes, not by their names; and plain text as JSON lines.

A block is a run of whole lines with the number of its first, so that it can be parsed elsewhere and still name the line
a problem is on. Splitting on newline bytes alone is correct for UTF-8, and cheap; nothing is decoded here.

A few kilobytes may decompress to gigabytes, so nothing is decompressed further than a block, and a line is refused when it is
longer than `max_line_bytes`. With zstd that limit is also the largest window a frame may ask for, and as one call can make 32 MiB
of 1 KiB, it is given no more than that at a time. Memory is bounded by a line of the limit and 32 MiB.

Documents of plain text are paragraphs, which end at a blank line, or a whole file. They become JSON lines here, so that workers, errors
and output are those of the other format. Nothing of the text changes but blank lines between paragraphs, and blank space at the ends of a
document.
"""

from __future__ import annotations

import gzip
import json
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, Literal

from petatron.base.errors import DataError
from petatron.base.untrusted_files import open_regular_file

InputFormat = Literal["jsonl", "text", "text-file"]
"""JSON lines; text whose paragraphs are documents; text whose files are documents."""
BLOCK_BYTES = 1 << 18
GZIP_MAGIC = b"\x1f\x8b"
ZSTD_MAGIC = b"\x28\xb5\x2f\xfd"
BYTE_ORDER_MARK = b"\xef\xbb\xbf"
MAX_LINE_BYTES = 1 << 28
# Without --long, zstd's own tools write no larger window; they refuse larger ones.
_WINDOW_BYTES = 1 << 27
# The smallest block of zstd has 4 bytes and stands for 128 KiB.
_ZSTD_INPUT_BYTES = 1 << 10


@dataclass(frozen=True, slots=True)
class LineBlock:
    """Whole lines of one file. `file_position` counts (compressed) bytes on disk, for progress."""

    path: str
    first_line: int
    data: bytes
    file_position: int


def read_line_blocks(
    path: str | Path,
    *,
    max_lines: int | None = None,
    block_bytes: int = BLOCK_BYTES,
    max_line_bytes: int = MAX_LINE_BYTES,
) -> Iterator[LineBlock]:
    """Yields blocks of about `block_bytes` (more where a line is longer), at most `max_lines` lines in all."""
    line, left = 1, max_lines
    try:
        with open_regular_file(Path(path)) as file:
            for data in _whole_lines(_decompressed_chunks(file, block_bytes, max_line_bytes), max_line_bytes):
                if line == 1:
                    data = data.removeprefix(BYTE_ORDER_MARK)
                if left is not None:
                    data = _first_lines(data, left)
                if not data:
                    return
                yield LineBlock(str(path), line, data, file.tell())
                count = data.count(b"\n") + (not data.endswith(b"\n"))
                line += count
                left = None if left is None else left - count
    except _LongLine as error:
        raise DataError(
            f"{path}:{line + error.after}: the line is longer than {max_line_bytes:,} bytes. If that is meant, allow more with "
            "--max-line-bytes."
        ) from error
    except (OSError, EOFError, zlib.error) as error:  # a damaged gzip file raises the last two, or an OSError
        if isinstance(error, FileNotFoundError):
            raise DataError(f"{path} does not exist. Check the path.") from error
        raise DataError(
            f"{path} cannot be read beyond line {line}: {error}. Check the file, or copy it again."
        ) from error


class _LongLine(Exception):
    """A line is longer than the limit, `after` lines after the first that has not been yielded."""

    def __init__(self, after: int) -> None:
        self.after = after


def _whole_lines(chunks: Iterator[bytes], max_line_bytes: int) -> Iterator[bytes]:
    """Re-splits chunks at their last newline; the last one may have none."""
    pieces: list[bytes] = []
    waiting = 0
    for chunk in chunks:
        cut = chunk.rfind(b"\n") + 1
        if cut:
            yield _check_line_lengths(b"".join((*pieces, chunk[:cut])), max_line_bytes)
            pieces, waiting = [], 0
        if cut < len(chunk):
            pieces.append(chunk[cut:])
            waiting += len(pieces[-1])
        if waiting > max_line_bytes:
            raise _LongLine(after=0)
    if pieces:
        yield b"".join(pieces)


def _check_line_lengths(data: bytes, max_line_bytes: int) -> bytes:
    """Returns the data unchanged; from each start, skips to the last newline within the limit, which must exist."""
    start = 0
    while len(data) - start > max_line_bytes:
        following = data.rfind(b"\n", start, start + max_line_bytes + 1) + 1
        if not following:
            raise _LongLine(after=data.count(b"\n", 0, start))
        start = following
    return data


def _first_lines(data: bytes, count: int) -> bytes:
    if data.count(b"\n") <= count and (data.endswith(b"\n") or data.count(b"\n") < count):
        return data
    end = 0
    for _ in range(count):
        end = data.index(b"\n", end) + 1
    return data[:end]


def _decompressed_chunks(file: BinaryIO, block_bytes: int, max_line_bytes: int) -> Iterator[bytes]:
    magic = file.read(4)
    file.seek(0)
    if magic == ZSTD_MAGIC:
        yield from _join_chunks(_zstd_chunks(file, max_line_bytes), block_bytes)
        return
    source = gzip.GzipFile(fileobj=file, mode="rb") if magic[:2] == GZIP_MAGIC else file
    while chunk := source.read(block_bytes):
        yield chunk


def _join_chunks(chunks: Iterator[bytes], block_bytes: int) -> Iterator[bytes]:
    pieces: list[bytes] = []
    size = 0
    for chunk in chunks:
        pieces.append(chunk)
        size += len(chunk)
        if size >= block_bytes:
            yield b"".join(pieces)
            pieces, size = [], 0
    if pieces:
        yield b"".join(pieces)


def _zstd_chunks(file: BinaryIO, max_line_bytes: int) -> Iterator[bytes]:
    try:
        import zstandard
    except ImportError as error:
        raise DataError(
            f"{file.name} is compressed with zstd, which needs the zstandard package: pip install 'petatron[data]'. "
            "Or recompress it with gzip."
        ) from error
    # Frame by frame, because the library's stream reader accepts a file truncated in mid-frame as complete.
    window = max(_WINDOW_BYTES, max_line_bytes)
    decompressor = zstandard.ZstdDecompressor(max_window_size=min(window, 1 << 31))
    frame, pending = None, b""
    try:
        while pending or (pending := file.read(_ZSTD_INPUT_BYTES)):
            frame = frame or decompressor.decompressobj()
            if data := frame.decompress(pending):
                yield data
            pending = frame.unused_data if frame.eof else b""
            frame = None if frame.eof else frame
    except zstandard.ZstdError as error:
        large = "requires too much memory" in str(error)
        hint = (
            f"; its window is larger than {window:,} bytes, which --max-line-bytes 2147483648 allows" if large else ""
        )
        raise OSError(f"{error}{hint}") from error
    if frame is not None:
        raise OSError("the compressed data ends too early")


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
