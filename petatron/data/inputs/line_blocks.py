"""Reads lines in blocks, of a whole file or of a range of a plain one.

A block is a run of lines with the number of its first, so that it can be parsed elsewhere and still name the line a problem is on.
Splitting on newline bytes alone is correct for UTF-8, and cheap; nothing is decoded here. A line is refused when it is longer than
`max_line_bytes`, and nothing is decompressed further than a block: memory is bounded by a line of the limit and 32 MiB.

A plain file can be read in ranges by several readers. Where a range may begin is a function of the file alone: the first line that
begins at or after the offset that was asked for. So two ranges that share an offset share no line and leave none out. The lines of a
range that begins within the file are counted from its own beginning, since what comes before is read by others; the lines before it are
counted only to say where a problem is.
"""

from __future__ import annotations

import io
from collections.abc import Callable, Generator, Iterator
from contextlib import closing
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import BinaryIO, Literal, TypeVar

import numpy as np
from numpy.typing import NDArray

from petatron.base.errors import DataError
from petatron.base.untrusted_files import open_regular_file
from petatron.data.inputs.compressed_stream import READ_ERRORS, CountedStream, decompressed_chunks

BLOCK_BYTES = 1 << 18
BYTE_ORDER_MARK = b"\xef\xbb\xbf"
MAX_LINE_BYTES = 1 << 28
_SCANNED_BYTES = 1 << 20
RefusalKind = Literal["malformed", "too long"]
Opener = Callable[[], BinaryIO]
Yielded = TypeVar("Yielded")


@dataclass(frozen=True, slots=True)
class RefusedLine:
    """A line that its reader left out."""

    line: int
    reason: str
    kind: RefusalKind = "malformed"


@dataclass(frozen=True, slots=True)
class LineBlock:
    """Lines of JSON from one file. `file_position` counts (compressed) bytes on disk, for progress.

    Formats other than JSON lines become JSON here; `lines` has the line, row or sample of the file that each of them comes from,
    where they do not simply follow `first_line`.
    """

    path: str
    first_line: int
    data: bytes
    file_position: int
    lines: NDArray[np.int64] | None = None
    refused: tuple[RefusedLine, ...] = ()

    @property
    def num_lines(self) -> int:
        return self.data.count(b"\n") + bool(self.data and not self.data.endswith(b"\n"))

    def source_lines(self, numbers: NDArray[np.int64]) -> NDArray[np.int64]:
        """Returns where lines come from that are counted from `first_line`."""
        return numbers if self.lines is None else self.lines[numbers - self.first_line]


def numbered_lines(path: str | Path, *, max_line_bytes: int) -> Iterator[tuple[int, bytes]]:
    """Yields the lines of a file that are not blank, with their numbers from 1 on."""
    for block in read_line_blocks(path, max_line_bytes=max_line_bytes):
        for number, line in enumerate(block.data.splitlines(), block.first_line):
            if line.strip():
                yield number, line


def read_line_blocks(
    path: str | Path,
    *,
    max_lines: int | None = None,
    block_bytes: int = BLOCK_BYTES,
    max_line_bytes: int = MAX_LINE_BYTES,
    start: int = 0,
    end: int | None = None,
    open_file: Opener | None = None,
    skip_long: bool = False,
) -> Generator[LineBlock, None, int]:
    """Yields blocks of about `block_bytes` (more where a line is longer), at most `max_lines` lines in all; returns the number of lines.

    start, end: a range of a plain file, which begins and ends with whole lines (`line_start`). skip_long: lines beyond the limit are
    refused lines of a block instead of an error.
    """
    line, left = 1, max_lines
    opened = open_file or partial(open_regular_file, Path(path), buffering=0)
    try:
        with opened() as file:
            stream = CountedStream(file, start=start, end=end)
            chunks = _chunks(stream.buffered(), str(path), block_bytes, max_line_bytes, is_range=start > 0)
            for data in _lines_or_long(chunks, max_line_bytes):
                if isinstance(data, _LongLine):
                    refused = RefusedLine(line, _too_long(max_line_bytes), "too long")
                    if not skip_long:
                        where = f"{path}:{line + lines_before(opened, start)}"
                        raise DataError(f"{where}: {refused.reason}. {LONG_LINE_FIX}")
                    yield LineBlock(str(path), line, b"", stream.position, refused=(refused,))
                    line += 1
                    left = None if left is None else left - 1
                else:
                    if line == 1 and not start:
                        data = data.removeprefix(BYTE_ORDER_MARK)
                    if left is not None:
                        data = _first_lines(data, left)
                    if data:
                        block = LineBlock(str(path), line, data, stream.position)
                        yield block
                        line += block.num_lines
                        left = None if left is None else left - block.num_lines
                if left == 0:
                    break
    except READ_ERRORS as error:
        if isinstance(error, FileNotFoundError):
            raise DataError(f"{path} does not exist. Check the path.") from error
        raise DataError(
            f"{path} cannot be read beyond line {line}: {error}. Check the file, or copy it again."
        ) from error
    return line - 1


LONG_LINE_FIX = "If that is meant, allow more with --max-line-bytes."


def _too_long(max_line_bytes: int) -> str:
    return f"the line is longer than {max_line_bytes:,} bytes"


def _chunks(
    file: io.BufferedReader, name: str, block_bytes: int, max_line_bytes: int, *, is_range: bool
) -> Iterator[bytes]:
    if not is_range:
        return decompressed_chunks(file, name, chunk_bytes=block_bytes, max_window_bytes=max_line_bytes)
    return iter(partial(file.read, block_bytes), b"")


class _LongLine:
    """Stands for a line that is longer than the limit."""


def _lines_or_long(chunks: Iterator[bytes], max_line_bytes: int) -> Iterator[bytes | _LongLine]:
    """Re-splits chunks at their last newline; the last one may have none. The content of a long line is dropped after it was announced."""
    pieces: list[bytes] = []
    waiting = 0
    dropping = False
    for chunk in chunks:
        if dropping:
            newline = chunk.find(b"\n") + 1
            if not newline:
                continue
            chunk, dropping = chunk[newline:], False
        cut = chunk.rfind(b"\n") + 1
        if cut:
            yield from _split_at_long_lines(b"".join((*pieces, chunk[:cut])), max_line_bytes)
            pieces, waiting = [], 0
        if cut < len(chunk):
            pieces.append(chunk[cut:])
            waiting += len(pieces[-1])
        if waiting > max_line_bytes:
            yield _LongLine()
            pieces, waiting, dropping = [], 0, True
    if pieces:
        yield b"".join(pieces)


def _split_at_long_lines(data: bytes, max_line_bytes: int) -> Iterator[bytes | _LongLine]:
    """Yields the data unchanged if each line has at most the limit; from each start, skips to the last newline within it."""
    first = start = 0
    while len(data) - start > max_line_bytes:
        following = data.rfind(b"\n", start, start + max_line_bytes + 1) + 1
        if not following:
            if first < start:
                yield data[first:start]
            yield _LongLine()
            first = following = data.index(b"\n", start) + 1
        start = following
    if first < len(data):
        yield data[first:]


def _first_lines(data: bytes, count: int) -> bytes:
    if data.count(b"\n") <= count and (data.endswith(b"\n") or data.count(b"\n") < count):
        return data
    end = 0
    for _ in range(count):
        end = data.index(b"\n", end) + 1
    return data[:end]


def line_start(file: BinaryIO, offset: int, *, after_blank_line: bool = False) -> int:
    """Returns where the first line begins that begins at or after an offset of a plain file; the size of the file if there is none.

    after_blank_line: the first line after a blank one.

    >>> text = io.BytesIO(b"one\\ntwo\\n\\nthree\\n")
    >>> [line_start(text, offset) for offset in (0, 1, 4, 5)], line_start(text, 1, after_blank_line=True)
    ([0, 4, 4, 8], 9)
    """
    if not offset:
        return 0
    position = file.seek(offset - 1)
    reader = io.BufferedReader(CountedStream(file, start=position), _SCANNED_BYTES)
    position += _skip_line(reader)
    while after_blank_line:
        line = reader.readline(_SCANNED_BYTES)
        blank = not line or (line.endswith(b"\n") and line.isspace())
        position += len(line)
        if not line.endswith(b"\n"):
            position += _skip_line(reader) if line else 0
        if blank:
            break
    return position


def _skip_line(reader: io.BufferedIOBase) -> int:
    """Reads to the end of a line, however long it is, and returns how many bytes that were."""
    size = 0
    while piece := reader.readline(_SCANNED_BYTES):
        size += len(piece)
        if piece.endswith(b"\n"):
            break
    return size


def lines_before(open_file: Opener, start: int) -> int:
    """Counts the lines of a plain file before an offset."""
    if not start:
        return 0
    with closing(open_file()) as file:
        reader = CountedStream(file, end=start).buffered()
        return sum(chunk.count(b"\n") for chunk in iter(partial(reader.read, _SCANNED_BYTES), b""))
