"""Reading JSON lines in blocks: plain, gzip or zstd, told apart by their first bytes, not by their names.

A block is a run of whole lines with the number of its first, so that it can be parsed elsewhere and still name the line
a problem is on. Splitting on newline bytes alone is right for UTF-8, and cheap; nothing is decoded here.
"""

from __future__ import annotations

import gzip
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from petatron.base.errors import DataError

BLOCK_BYTES = 1 << 18
GZIP_MAGIC = b"\x1f\x8b"
ZSTD_MAGIC = b"\x28\xb5\x2f\xfd"
BYTE_ORDER_MARK = b"\xef\xbb\xbf"


@dataclass(frozen=True, slots=True)
class Block:
    """Whole lines of one file. `file_position` counts bytes of the file as it lies on disk, for progress."""

    path: str
    first_line: int
    data: bytes
    file_position: int


def read_blocks(path: str | Path, *, max_lines: int | None = None, block_bytes: int = BLOCK_BYTES) -> Iterator[Block]:
    """Blocks of about `block_bytes` (more where a line is longer), at most `max_lines` lines in all."""
    line, left = 1, max_lines
    try:
        with Path(path).open("rb") as file:
            for data in _whole_lines(_chunks(file, block_bytes)):
                if line == 1:
                    data = data.removeprefix(BYTE_ORDER_MARK)
                if left is not None:
                    data = _first_lines(data, left)
                if not data:
                    return
                yield Block(str(path), line, data, file.tell())
                count = data.count(b"\n") + (not data.endswith(b"\n"))
                line += count
                left = None if left is None else left - count
    except (OSError, EOFError, zlib.error) as error:  # a cut or damaged gzip file raises the last two, or an OSError
        raise DataError(
            f"{path} cannot be read beyond line {line}: {error}. Check the file, or copy it again."
        ) from error


def _whole_lines(chunks: Iterator[bytes]) -> Iterator[bytes]:
    """Cut chunks at their last newline instead; the last piece may have none."""
    pieces: list[bytes] = []
    for chunk in chunks:
        cut = chunk.rfind(b"\n") + 1
        if cut:
            yield b"".join((*pieces, chunk[:cut]))
            pieces = [chunk[cut:]] if cut < len(chunk) else []
        else:
            pieces.append(chunk)
    if pieces:
        yield b"".join(pieces)


def _first_lines(data: bytes, count: int) -> bytes:
    if data.count(b"\n") <= count and (data.endswith(b"\n") or data.count(b"\n") < count):
        return data
    end = 0
    for _ in range(count):
        end = data.index(b"\n", end) + 1
    return data[:end]


def _chunks(file: BinaryIO, block_bytes: int) -> Iterator[bytes]:
    magic = file.read(4)
    file.seek(0)
    if magic == ZSTD_MAGIC:
        yield from _zstd_chunks(file)
        return
    source = gzip.GzipFile(fileobj=file, mode="rb") if magic[:2] == GZIP_MAGIC else file
    while chunk := source.read(block_bytes):
        yield chunk


def _zstd_chunks(file: BinaryIO) -> Iterator[bytes]:
    try:
        import zstandard
    except ImportError as error:
        raise DataError(
            f"{file.name} is compressed with zstd, which needs the zstandard package: pip install 'petatron[data]'. "
            "Or recompress it with gzip."
        ) from error
    # Frame by frame, because the library's stream reader takes a file cut in mid-frame for a complete one.
    decompressor = zstandard.ZstdDecompressor(max_window_size=1 << 31)
    frame, pending = None, b""
    try:
        while pending or (pending := file.read(1 << 16)):
            frame = frame or decompressor.decompressobj()
            if data := frame.decompress(pending):
                yield data
            pending = frame.unused_data if frame.eof else b""
            frame = None if frame.eof else frame
    except zstandard.ZstdError as error:
        raise OSError(str(error)) from error
    if frame is not None:
        raise OSError("the compressed data ends too early")
