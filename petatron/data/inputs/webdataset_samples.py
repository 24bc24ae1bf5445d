"""Samples of a WebDataset: files of a tar, packed or not, that follow one another and share a name up to its first dot.

`0001.txt` is the text of sample 0001, and `0001.json` an object with its keys; others (images, say) are passed over. The name is the
id of the sample where the object has none.

The tar is read from front to back by the few rules that its writers follow. The library of Python would read an extended header
whole, however long it says it is.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from petatron.base.errors import DataError
from petatron.base.terminal_escape import printable
from petatron.data.inputs.compressed_stream import READ_ERRORS, CountedStream, decompressed_chunks
from petatron.data.inputs.input_file import InputFile
from petatron.data.inputs.json_record import parse_record, repeated_keys
from petatron.data.inputs.line_blocks import RefusedLine
from petatron.data.inputs.row_blocks import RefusedRow, SourceRow
from petatron.data.inputs.tar_headers import (
    BARE_TAR_TYPES,
    MAX_TAR_NAME_BYTES,
    TAR_BLOCK,
    TAR_FILE_TYPES,
    DamagedTar,
    check_tar_header,
    pax_path,
    split_member_name,
    tar_header_name,
    tar_number,
)

_CHUNK_BYTES = 1 << 18
_READ_ENDINGS = ("txt", "json")


@dataclass(frozen=True, slots=True)
class _Member:
    """A file of the tar. content: None where it is longer than a line may be."""

    name: str
    content: bytes | None


class _Stream:
    """Reads an exact number of bytes of chunks."""

    def __init__(self, chunks: Iterator[bytes]) -> None:
        self._chunks, self._chunk, self._place = chunks, b"", 0

    def read(self, size: int) -> bytes:
        """Returns `size` bytes, fewer only at the end."""
        pieces, left = [], size
        while left:
            if self._place == len(self._chunk):
                self._chunk, self._place = next(self._chunks, b""), 0
                if not self._chunk:
                    break
            pieces.append(self._chunk[self._place : self._place + left])
            self._place += len(pieces[-1])
            left -= len(pieces[-1])
        return b"".join(pieces)

    def skip(self, size: int) -> None:
        while size:
            skipped = len(self.read(min(size, _CHUNK_BYTES)))
            if not skipped:
                raise DamagedTar("it ends too early")
            size -= skipped


def tar_samples(
    file: InputFile, keys: Sequence[str], *, id_key: str | None, max_line_bytes: int
) -> Iterator[SourceRow | RefusedRow]:
    """Yields the samples of a tar, numbered from 1. A .txt is the text of the first key, also beside an object that has that key."""
    sample, number = _Sample(""), 0
    with file.open() as opened:
        stream = CountedStream(opened, end=file.size)
        try:
            chunks = decompressed_chunks(
                stream.buffered(), file.path, chunk_bytes=_CHUNK_BYTES, max_window_bytes=max_line_bytes
            )
            for member in _members(_Stream(chunks), max_line_bytes):
                key, _, ending = split_member_name(member.name)
                if key != sample.key:
                    if sample.has_content:
                        number += 1
                        yield sample.row(number, keys, id_key, stream.position)
                    sample = _Sample(key)
                sample.add(ending, member.content)
        except (*READ_ERRORS, DamagedTar) as error:
            where = f"{file.path} cannot be read beyond sample {number + 1}"
            raise DataError(f"{where}: {error}. Check the file, or copy it again.") from error
        if sample.has_content:
            yield sample.row(number + 1, keys, id_key, stream.position)


class _Sample:
    """The files of one sample that are read."""

    def __init__(self, key: str) -> None:
        self.key = key
        self._contents: dict[str, bytes | None] = {}

    @property
    def has_content(self) -> bool:
        return bool(self._contents)

    def add(self, ending: str, content: bytes | None) -> None:
        if ending in _READ_ENDINGS:
            self._contents[ending] = content

    def row(self, number: int, keys: Sequence[str], id_key: str | None, position: int) -> SourceRow | RefusedRow:
        if any(content is None for content in self._contents.values()):
            reason = f"a file of {printable(self.key, max_chars=200)} is longer than a line may be"
            return RefusedRow(RefusedLine(number, reason, "too long"), position)
        try:
            record = parse_record(self._contents.get("json") or b"{}")
            if not isinstance(record, dict):
                raise ValueError(f"a JSON {type(record).__name__}, not an object")
            text = self._contents.get("txt")
            texts = {} if text is None else {keys[0]: text.decode()}
            if twice := sorted(repeated_keys(record).intersection(keys) - texts.keys()):
                raise ValueError(f"the key {twice[0]!r} is there twice")
        except (ValueError, RecursionError) as error:
            return RefusedRow(RefusedLine(number, f"{printable(self.key, max_chars=200)}: {error}"), position)
        names = {} if id_key is None or id_key in record else {id_key: self.key}
        return SourceRow(number, {**record, **names, **texts}, position)


def _members(stream: _Stream, max_bytes: int) -> Iterator[_Member]:
    """Yields the files whose ending is read, and others without content."""
    long_name: str | None = None
    while True:
        header = stream.read(TAR_BLOCK)
        if header and not header.strip(b"\x00"):
            return
        check_tar_header(header)
        size, kind = tar_number(header[124:136]), header[156:157]
        padding = -size % TAR_BLOCK
        if kind in (b"L", b"x"):
            if size > MAX_TAR_NAME_BYTES:
                raise DamagedTar(f"the name of a file has {size:,} bytes")
            content = _exactly(stream, size)
            named = content.rstrip(b"\x00") if kind == b"L" else pax_path(content)
            long_name = long_name if named is None else named.decode(errors="replace")
            stream.skip(padding)
            continue
        name, long_name = long_name or tar_header_name(header), None
        is_read = kind in TAR_FILE_TYPES and split_member_name(name)[2] in _READ_ENDINGS
        if is_read and size <= max_bytes:
            yield _Member(name, _exactly(stream, size))
            stream.skip(padding)
        else:
            stream.skip(0 if kind in BARE_TAR_TYPES else size + padding)
            if kind in TAR_FILE_TYPES:
                yield _Member(name, None)


def _exactly(stream: _Stream, size: int) -> bytes:
    content = stream.read(size)
    if len(content) < size:
        raise DamagedTar("it ends too early")
    return content
