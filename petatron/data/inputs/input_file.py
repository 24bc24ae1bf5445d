"""`InputFile`: a local or remote input file, and what is known of it before it is read."""

from __future__ import annotations

import io
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

from petatron.base.errors import DataError
from petatron.base.remote_address import is_remote
from petatron.base.untrusted_files import open_regular_file, reading_untrusted
from petatron.data.data_file_error import data_file_error
from petatron.data.inputs import remote_files
from petatron.data.inputs.compressed_stream import (
    HEAD_BYTES,
    READ_ERRORS,
    Compression,
    CountedStream,
    compression_of,
    decompressed_chunks,
)
from petatron.data.inputs.input_formats import (
    FORMAT_HEAD_BYTES,
    INDEXED_FORMATS,
    FileFormat,
    InputFormat,
    format_of_head,
    format_of_name,
)


@dataclass(frozen=True, slots=True)
class InputFile:
    """A file with its format. `version` differs when the content does; `size` is None where its server does not say it."""

    path: str
    format: FileFormat
    size: int | None
    version: str

    @property
    def is_remote(self) -> bool:
        return is_remote(self.path)

    @property
    def can_seek(self) -> bool:
        return not remote_files.is_web_page(self.path)

    def open(self) -> BinaryIO:
        """Opens it without a buffer."""
        if self.is_remote:
            return remote_files.open_remote(self.path, in_order=self.format not in INDEXED_FORMATS)
        return open_regular_file(Path(self.path), buffering=0)

    def check_unchanged(self) -> None:
        """Raises if the file is not the one that was found at first."""
        with reading_untrusted(Path(self.path), lambda _, why: data_file_error(self.path, why)):
            size, version = file_state(self.path)
        if (size, version) != (self.size, self.version):
            sizes = (
                f" (it had {self.size:,} bytes and has {size:,})" if size != self.size and size and self.size else ""
            )
            raise changed_error(self.path, sizes)

    def compression(self) -> Compression | None:
        """Returns what its first bytes say that it is compressed with."""
        return compression_of(self._head(HEAD_BYTES))

    def is_compressed(self) -> bool:
        return self.compression() is not None

    def _head(self, size: int) -> bytes:
        with reading_untrusted(Path(self.path), lambda _, why: data_file_error(self.path, why)), self.open() as file:
            return CountedStream(file, end=size).buffered().read(size)


def changed_error(path: str, how: str = "") -> DataError:
    return DataError(f"{path} has changed while it was read{how}. Run the command again once nobody writes to it.")


def file_state(path: str) -> tuple[int | None, str]:
    """Returns size and version of a file, local or remote."""
    if is_remote(path):
        return remote_files.remote_state(path)
    status = os.stat(path)
    return status.st_size, str(status.st_mtime_ns)


def input_file(path: str, input_format: InputFormat, state: tuple[int | None, str] | None = None) -> InputFile:
    """Describes a file that is there; `auto` takes the format from its name, else from its first bytes."""
    size, version = file_state(path) if state is None else state
    chosen = format_of_name(path) if input_format in ("auto", "huggingface") else input_format
    return InputFile(path, chosen or _format_of_content(path), size, version)


def _format_of_content(path: str) -> FileFormat:
    """Text of any kind counts as JSON lines, whose error says what else it may be. Damage is reported by the reader."""
    file = InputFile(path, "jsonl", None, "")
    with reading_untrusted(Path(path), lambda _, why: data_file_error(path, why)), file.open() as opened:
        stream = CountedStream(opened).buffered()
        try:
            head = next(decompressed_chunks(stream, path, chunk_bytes=FORMAT_HEAD_BYTES), b"")
        except READ_ERRORS:
            return "jsonl"
    return format_of_head(head) or "jsonl"


def seekable(file: BinaryIO, size: int | None) -> Any:
    """Returns an open file as libraries want it that read from several places: with a buffer, or as its server gives it."""
    return _BoundedReader(file, size) if isinstance(file, io.RawIOBase) else file


class _BoundedReader(io.BufferedReader):
    """Reads no further than to the end that a file had at first, whatever length its content asks for: that much memory would be taken."""

    def __init__(self, file: io.RawIOBase, size: int | None) -> None:
        super().__init__(file)
        self._size = size

    def read(self, size: int | None = -1, /) -> bytes:
        if self._size is None:
            return super().read(size)
        left = max(self._size - self.tell(), 0)
        return super().read(left if size is None or size < 0 else min(size, left))
