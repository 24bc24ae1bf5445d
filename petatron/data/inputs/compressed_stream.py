"""Decompresses gzip, zstd, bzip2 and xz, each known by the first bytes of a file and not by its name.

A few kilobytes may decompress to gigabytes, so a reader makes no more than it yields. With zstd, whose one call can make 32 MiB of
1 KiB, no more than that is given to a call. The window of a zstd frame and the dictionary of an xz stream are limited, since a header
of a few bytes decides how much memory they take. A file that ends within its compressed data is an error, also where the library
would take it as complete.
"""

from __future__ import annotations

import bz2
import gzip
import io
import lzma
import zlib
from collections.abc import Callable, Iterator
from typing import Any, BinaryIO, Literal

from petatron.base.errors import DataError

Compression = Literal["gz", "zst", "bz2", "xz"]
GZIP_MAGIC = b"\x1f\x8b"
ZSTD_MAGIC = b"\x28\xb5\x2f\xfd"
_XZ_MAGIC = b"\xfd7zXZ\x00"
_BZIP2_MAGIC = b"BZh"
_BZIP2_BLOCKS = (b"1AY&SY", b"\x17rE8P\x90")
"""What follows the magic and a digit: a block, or the end of an empty file. A text may begin with the magic alone."""
HEAD_BYTES = 10
# Without --long, zstd's own tools write no larger window; they refuse larger ones.
_WINDOW_BYTES = 1 << 27
_XZ_MEMORY_BYTES = 1 << 28
# The smallest block of zstd has 4 bytes and stands for 128 KiB.
_ZSTD_INPUT_BYTES = 1 << 10
_INPUT_BYTES = 1 << 16

READ_ERRORS = (OSError, EOFError, zlib.error)
"""What damaged compressed data raise while they are read."""


def compression_of(head: bytes) -> Compression | None:
    """Returns the compression of a file that begins with `head`, of HEAD_BYTES or all of it.

    >>> compression_of(gzip.compress(b"")), compression_of(bz2.compress(b"a")), compression_of(b"BZh is text")
    ('gz', 'bz2', None)
    """
    if head.startswith(GZIP_MAGIC):
        return "gz"
    if head.startswith(ZSTD_MAGIC):
        return "zst"
    if head.startswith(_XZ_MAGIC):
        return "xz"
    return "bz2" if head.startswith(_BZIP2_MAGIC) and head[4:].startswith(_BZIP2_BLOCKS) else None


class CountedStream(io.RawIOBase):
    """Bytes of a file from `start` to `end`, with the position in the file, also where it cannot seek."""

    def __init__(self, file: BinaryIO, *, start: int = 0, end: int | None = None) -> None:
        self._file, self._end = file, end
        self.position = start
        if start:
            file.seek(start)

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any, /) -> int:
        left = len(buffer) if self._end is None else min(len(buffer), self._end - self.position)
        filled = 0
        # A server may send less than is asked for, and who peeks at the beginning needs all of it.
        while filled < left and (data := self._file.read(left - filled)):
            buffer[filled : filled + len(data)] = data
            filled += len(data)
        self.position += filled
        return filled

    def buffered(self) -> io.BufferedReader:
        return io.BufferedReader(self, 1 << 16)


def decompressed_chunks(
    file: io.BufferedReader, name: str, *, chunk_bytes: int, max_window_bytes: int = _WINDOW_BYTES
) -> Iterator[bytes]:
    """Yields the content of a file, decompressed where it is compressed, in chunks of about `chunk_bytes`.

    Damaged data raise one of READ_ERRORS. `max_window_bytes` allows larger windows than the default.
    """
    compression = compression_of(file.peek(HEAD_BYTES)[:HEAD_BYTES])
    if compression is None or compression == "gz":
        source: Any = gzip.GzipFile(fileobj=file, mode="rb") if compression else file
        while chunk := source.read(chunk_bytes):
            yield chunk
    elif compression == "zst":
        yield from _join_chunks(_zstd_chunks(file, name, max_window_bytes), chunk_bytes)
    else:
        memory = max(_XZ_MEMORY_BYTES, min(2 * max_window_bytes, 1 << 32))
        new: Callable[[], Any] = (
            bz2.BZ2Decompressor if compression == "bz2" else lambda: lzma.LZMADecompressor(memlimit=memory)
        )
        padding = b"\x00" if compression == "xz" else b""
        yield from _join_chunks(_stream_chunks(file, new, padding, chunk_bytes), chunk_bytes)


def _join_chunks(chunks: Iterator[bytes], chunk_bytes: int) -> Iterator[bytes]:
    pieces: list[bytes] = []
    size = 0
    for chunk in chunks:
        pieces.append(chunk)
        size += len(chunk)
        if size >= chunk_bytes:
            yield b"".join(pieces)
            pieces, size = [], 0
    if pieces:
        yield b"".join(pieces)


def _zstd_chunks(file: BinaryIO, name: str, max_window_bytes: int) -> Iterator[bytes]:
    try:
        import zstandard
    except ImportError as error:
        raise DataError(
            f"{name} is compressed with zstd, which needs the zstandard package: pip install 'petatron[data]'. "
            "Or recompress it with gzip."
        ) from error
    # Frame by frame, because the library's stream reader accepts a file truncated in mid-frame as complete.
    window = max(_WINDOW_BYTES, max_window_bytes)
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


def _stream_chunks(file: BinaryIO, new: Callable[[], Any], padding: bytes, chunk_bytes: int) -> Iterator[bytes]:
    """Yields the content of bzip2 or xz streams that follow one another, with `padding` between them."""
    decompressor, pending = None, b""
    try:
        while pending or (pending := file.read(_INPUT_BYTES)):
            if decompressor is None:
                pending = pending.lstrip(padding) if padding else pending
                if not pending:
                    continue
                decompressor = new()
            if data := decompressor.decompress(pending, chunk_bytes):
                yield data
            # The rest of its input is kept inside, and the next call may be given none.
            while not decompressor.eof and not decompressor.needs_input:
                if data := decompressor.decompress(b"", chunk_bytes):
                    yield data
            pending = decompressor.unused_data if decompressor.eof else b""
            decompressor = None if decompressor.eof else decompressor
    except lzma.LZMAError as error:
        hint = (
            "; its dictionary is very large, which --max-line-bytes 2147483648 allows" if "limit" in str(error) else ""
        )
        raise OSError(f"{error}{hint}") from error
    if decompressor is not None:
        raise EOFError("the compressed data ends too early")
