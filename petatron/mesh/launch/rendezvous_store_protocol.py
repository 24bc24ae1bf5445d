"""The wire protocol of the rendezvous store: the operations, and how requests and answers are encoded as bytes.

A request is an operation, an identifier of 16 random bytes and its fields; an answer is its fields. A field is its length and its bytes.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from enum import IntEnum

from petatron.mesh.launch.encrypted_channel import ChannelError

IDENTIFIER_BYTES = 16
_LENGTH = struct.Struct(">I")


class Operation(IntEnum):
    """What a request wants of the table."""

    SET = 1
    GET = 2
    """The values of all keys, as soon as all are set."""
    CHECK = 3
    ADD = 4
    COMPARE_SET = 5
    DELETE = 6
    COUNT = 7
    APPEND = 8
    WAIT = 9
    STATUS = 10
    """How many connections the server has refused, the address of the last of them, and the address of the client that asks."""


def encode_request(operation: Operation, identifier: bytes, fields: Sequence[bytes]) -> bytes:
    """Returns the message of a request."""
    return bytes((operation,)) + identifier + encode_fields(fields)


def encode_fields(fields: Sequence[bytes]) -> bytes:
    """Returns the fields with their lengths.

    >>> decode_fields(encode_fields([b"key", b""]))
    [b'key', b'']
    """
    return b"".join(_LENGTH.pack(len(field)) + field for field in fields)


def decode_fields(message: bytes) -> list[bytes]:
    """Returns the fields of a message."""
    fields: list[bytes] = []
    at = 0
    while at < len(message):
        end = at + _LENGTH.size
        if end > len(message):
            raise ChannelError("A message to the rendezvous store ends within a length.")
        (size,) = _LENGTH.unpack_from(message, at)
        at = end + size
        if at > len(message):
            raise ChannelError("A message to the rendezvous store is shorter than its fields.")
        fields.append(message[end:at])
    return fields
