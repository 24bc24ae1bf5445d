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

_BLOCK = 512
_MAX_HEADER_BYTES = 1 << 20
_CHUNK_BYTES = 1 << 18
_FILE_TYPES = (b"0", b"\x00", b"7")
_BARE_TYPES = (b"1", b"2", b"3", b"4", b"5", b"6")
"""Links, devices, folders and FIFOs, which have a header alone, whatever size it says."""
_READ_ENDINGS = ("txt", "json")


@dataclass(frozen=True, slots=True)
class _Member:
    """A file of the tar. content: None where it is longer than a line may be."""

    name: str
    content: bytes | None


class _Damaged(Exception):
    """What is wrong with the tar."""


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
                raise _Damaged("it ends too early")
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
                key, _, ending = _split_name(member.name)
                if key != sample.key:
                    if sample.has_content:
                        number += 1
                        yield sample.row(number, keys, id_key, stream.position)
                    sample = _Sample(key)
                sample.add(ending, member.content)
        except (*READ_ERRORS, _Damaged) as error:
            where = f"{file.path} cannot be read beyond sample {number + 1}"
            raise DataError(f"{where}: {error}. Check the file, or copy it again.") from error
        if sample.has_content:
            yield sample.row(number + 1, keys, id_key, stream.position)


def _split_name(name: str) -> tuple[str, str, str]:
    folder, slash, base = name.rpartition("/")
    stem, dot, ending = base.partition(".")
    return f"{folder}{slash}{stem}", dot, ending.lower()


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
        header = stream.read(_BLOCK)
        if header and not header.strip(b"\x00"):
            return
        _check_header(header)
        size, kind = _number(header[124:136]), header[156:157]
        padding = -size % _BLOCK
        if kind in (b"L", b"x"):
            if size > _MAX_HEADER_BYTES:
                raise _Damaged(f"the name of a file has {size:,} bytes")
            content = _exactly(stream, size)
            named = content.rstrip(b"\x00") if kind == b"L" else _pax_path(content)
            long_name = long_name if named is None else named.decode(errors="replace")
            stream.skip(padding)
            continue
        name, long_name = long_name or _header_name(header), None
        is_read = kind in _FILE_TYPES and _split_name(name)[2] in _READ_ENDINGS
        if is_read and size <= max_bytes:
            yield _Member(name, _exactly(stream, size))
            stream.skip(padding)
        else:
            stream.skip(0 if kind in _BARE_TYPES else size + padding)
            if kind in _FILE_TYPES:
                yield _Member(name, None)


def _exactly(stream: _Stream, size: int) -> bytes:
    content = stream.read(size)
    if len(content) < size:
        raise _Damaged("it ends too early")
    return content


def _check_header(header: bytes) -> None:
    if len(header) < _BLOCK:
        raise _Damaged("it ends too early")
    checksum = sum(header[:148]) + 8 * ord(" ") + sum(header[156:])
    if checksum != _number(header[148:156]):
        raise _Damaged("it is no tar, or damaged")


def _number(field: bytes) -> int:
    """Returns a number in octal digits, or in binary where its first bit says so."""
    if field[0] & 0x80:
        number = int.from_bytes(bytes((field[0] & 0x7F,)) + field[1:], "big")
    else:
        digits = field.strip(b" \x00")
        if not all(digit in b"01234567" for digit in digits):
            raise _Damaged("it is no tar, or damaged")
        number = int(digits or b"0", 8)
    if number >= 1 << 62:
        raise _Damaged("it is no tar, or damaged")
    return number


def _header_name(header: bytes) -> str:
    name = header[:100].partition(b"\x00")[0]
    prefix = header[345:500].partition(b"\x00")[0] if header[257:263] == b"ustar\x00" else b""
    return (prefix + b"/" + name if prefix else name).decode(errors="replace")


def _pax_path(content: bytes) -> bytes | None:
    """Returns the name in an extended header: lines of a length, a key and a value."""
    while content:
        digits, _, rest = content.partition(b" ")
        length = int(digits) if digits.isdigit() and len(digits) < 9 else 0
        line = content[:length]
        key, _, value = line[len(digits) + 1 :].partition(b"=")
        if not length or not rest:
            raise _Damaged("an extended header is damaged")
        if key == b"path":
            return value.removesuffix(b"\n")
        content = content[length:]
    return None
