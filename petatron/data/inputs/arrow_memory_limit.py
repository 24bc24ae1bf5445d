"""Limits the memory that the batches of an arrow file take, which their messages say before the library reads them.

Each compressed buffer begins with its length when it is decompressed, which the library allocates: a few bytes can ask for any amount,
and a few kilobytes can fill it. The messages are flatbuffers, of which only the parts are read that say where the buffers are
(Arrow's columnar format, "Serialization and Interprocess Communication").

A table of flatbuffers begins with the distance back to its vtable, which has the offset of each field in the table, 0 where a field is
not there. A vector, or a table in a field, is named by its distance from the field.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from typing import Any, NamedTuple

MAX_BATCH_BYTES = 1 << 31
_MAGIC_BYTES, _CONTINUATION = 6, 0xFFFFFFFF
_MESSAGE_HEADER_TYPE, _MESSAGE_HEADER, _MESSAGE_BODY_LENGTH = 1, 2, 3
_DICTIONARY_BATCH, _RECORD_BATCH = 2, 3
_DICTIONARY_DATA, _BATCH_BUFFERS, _BATCH_COMPRESSION = 1, 2, 3
_FOOTER_DICTIONARIES, _FOOTER_BATCHES = 2, 3
_BLOCK = struct.Struct("<qi4xq")
_BUFFER = struct.Struct("<qq")


class MessageBlock(NamedTuple):
    """Where a message is in a file, and how long its two halves are."""

    offset: int
    metadata_bytes: int
    body_bytes: int


class _Table:
    """A table of a flatbuffer."""

    def __init__(self, data: bytes, place: int) -> None:
        self.data, self._place = data, place
        self._vtable = place - _number("<i", data, place)
        self._vtable_bytes = _number("<H", data, self._vtable)

    @staticmethod
    def root(data: bytes) -> _Table:
        return _Table(data, _number("<I", data, 0))

    def field(self, index: int) -> int | None:
        """Returns where a field is; None where it is not there."""
        entry = 4 + 2 * index
        offset = _number("<H", self.data, self._vtable + entry) if entry < self._vtable_bytes else 0
        return self._place + offset if offset else None

    def number(self, index: int, form: str) -> int:
        place = self.field(index)
        return 0 if place is None else _number(form, self.data, place)

    def table(self, index: int) -> _Table | None:
        place = self.field(index)
        return None if place is None else _Table(self.data, place + _number("<I", self.data, place))

    def structs(self, index: int, form: struct.Struct) -> Iterator[tuple[int, ...]]:
        """Yields the structures of a vector."""
        place = self.field(index)
        if place is not None:
            start = place + _number("<I", self.data, place)
            for number in range(_number("<I", self.data, start)):
                yield form.unpack_from(self.data, _checked(start + 4 + form.size * number))


def _number(form: str, data: bytes, place: int) -> int:
    return struct.unpack_from(form, data, _checked(place))[0]


def _checked(place: int) -> int:
    if place < 0:  # which would count from the end
        raise ValueError("an offset is below 0")
    return place


def check_stream_batch(source: Any, size: int) -> None:
    """Checks what the library reads for the next batch of a stream of `size` bytes, and leaves the position as it was."""
    start = source.tell()
    while (kind := _check_message(source, size)) is not None and kind != _RECORD_BATCH:
        pass
    source.seek(start)


def check_block(source: Any, block: MessageBlock, size: int) -> None:
    """Checks a message of a file with an index."""
    if max(block) > size:
        raise ValueError("its index says that it is longer than it is")
    source.seek(_checked(block.offset))
    _check_message(source, size)


def file_blocks(source: Any, size: int) -> tuple[list[MessageBlock], list[MessageBlock]]:
    """Returns where the index at the end of a file says that dictionaries are, and batches."""
    source.seek(max(size - _MAGIC_BYTES - 4, 0))
    length = _number("<i", source.read(4), 0)
    source.seek(_checked(size - _MAGIC_BYTES - 4 - length))
    footer = _Table.root(source.read(length))
    dictionaries, batches = (
        [MessageBlock(*values) for values in footer.structs(index, _BLOCK)]
        for index in (_FOOTER_DICTIONARIES, _FOOTER_BATCHES)
    )
    return dictionaries, batches


def _check_message(source: Any, size: int) -> int | None:
    """Checks the message at a position and goes to the next; returns its kind, None at the end."""
    head = source.read(4)
    if len(head) == 4 and _number("<I", head, 0) == _CONTINUATION:
        head = source.read(4)
    length = _number("<i", head, 0) if len(head) == 4 else 0
    if length <= 0:
        return None
    message = _Table.root(source.read(length))
    body, body_bytes = source.tell(), message.number(_MESSAGE_BODY_LENGTH, "<q")
    if body_bytes > size - body:
        raise ValueError("it ends too early")
    kind = message.number(_MESSAGE_HEADER_TYPE, "<B")
    header = message.table(_MESSAGE_HEADER)
    if header is not None and kind == _DICTIONARY_BATCH:
        header = header.table(_DICTIONARY_DATA)
    if header is not None and kind in (_DICTIONARY_BATCH, _RECORD_BATCH):
        _check_buffers(source, header, body)
    source.seek(_checked(body + body_bytes))
    return kind


def _check_buffers(source: Any, batch: _Table, body: int) -> None:
    if batch.field(_BATCH_COMPRESSION) is None:
        return
    total = 0
    for offset, length in batch.structs(_BATCH_BUFFERS, _BUFFER):
        if length >= 8:
            source.seek(_checked(body + offset))
            total += max(_number("<q", source.read(8), 0), 0)  # -1: it is not compressed
        if total > MAX_BATCH_BYTES:
            raise ValueError(f"a batch has more than {MAX_BATCH_BYTES:,} bytes when it is decompressed")
