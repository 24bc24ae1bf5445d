"""Digests of file blocks: CRC-32 to find damage, or SHA-256 where a signature covers a checkpoint.

A CRC-32 is fast enough to be always on, but anyone can craft other content with the same one. A reader tells the two by their
length: eight hexadecimal digits, or sixty-four.
"""

from __future__ import annotations

import hashlib
import zlib
from collections.abc import Iterable

_SHA256_DIGITS = 64


class BlockDigest:
    """The incremental digest of a block.

    >>> digest = BlockDigest(sha256=False)
    >>> digest.update(b"ab")
    >>> digest.hexdigest(), matches_digest([b"a", b"b"], digest.hexdigest()), matches_digest([b"ba"], digest.hexdigest())
    ('9e83486d', True, False)
    """

    __slots__ = ("_crc", "_sha")

    def __init__(self, *, sha256: bool) -> None:
        self._sha = hashlib.sha256() if sha256 else None
        self._crc = 0

    def update(self, data: bytes | memoryview) -> None:
        if self._sha is None:
            self._crc = zlib.crc32(data, self._crc)
        else:
            self._sha.update(data)

    def hexdigest(self) -> str:
        return f"{self._crc:08x}" if self._sha is None else self._sha.hexdigest()


def is_sha256(digest: str) -> bool:
    """Whether a digest is collision-resistant."""
    return len(digest) == _SHA256_DIGITS


def matches_digest(parts: Iterable[bytes | memoryview], digest: str) -> bool:
    """Whether these parts, concatenated, have the digest."""
    found = BlockDigest(sha256=is_sha256(digest))
    for part in parts:
        found.update(part)
    return found.hexdigest() == digest
