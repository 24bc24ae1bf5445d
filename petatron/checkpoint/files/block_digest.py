"""Digests of file blocks: folded CRC-32s to find damage, or SHA-256 where a signature covers a checkpoint.

Loading is bound by the CPU where other processes want it too, and a CRC-32 alone (about 2 GB/s of a core) takes longer than reading
from the page cache (about 12). So a block is folded first, which is an exclusive or that vectorizes (about 15 GB/s): byte i of a fold
of period p is

    b[i] ^ b[i + p] ^ b[i + 2 p] ^ ...

The digest is the CRC-32 of the fold of period 8192, followed by the block's length as 8 bytes, and the same of period 8191. Two bytes
that meet in both folds are 8192 x 8191 bytes apart, and a block is shorter. So any changed byte and any two flipped bits are found, as a
CRC-32 alone finds them; pages that changed places change a fold; and of all other damage one in 2^64 is not seen.

Anyone can craft other content with the same folded CRC-32s, and with the same CRC-32, which older checkpoints have. A reader tells
kinds by their length: sixteen hexadecimal digits, eight, or sixty-four.
"""

from __future__ import annotations

import hashlib
import zlib
from collections.abc import Iterable
from typing import Literal, Protocol

import numpy as np

DigestKind = Literal["folded", "crc32", "sha256"]
_KINDS: dict[int, DigestKind] = {16: "folded", 8: "crc32", 64: "sha256"}
_PERIODS = (8192, 8191)


class BlockDigest(Protocol):
    """The incremental digest of a block."""

    def update(self, data: bytes | memoryview, /) -> None: ...
    def hexdigest(self) -> str: ...


class _Folded:
    def __init__(self) -> None:
        self._size = 0
        self._folds = tuple(np.zeros(period, dtype=np.uint8) for period in _PERIODS)

    def update(self, data: bytes | memoryview, /) -> None:
        values = np.frombuffer(data, dtype=np.uint8)
        for fold in self._folds:
            _fold_into(fold, values, self._size)
        self._size += len(values)

    def hexdigest(self) -> str:
        length = self._size.to_bytes(8, "little")
        return "".join(f"{zlib.crc32(length, zlib.crc32(fold.tobytes())):08x}" for fold in self._folds)


def _fold_into(fold: np.ndarray, values: np.ndarray, position: int) -> None:
    """Folds the bytes of a block from `position` on: up to the next multiple of the period, whole periods, and what is left."""
    period = len(fold)
    first = position % period
    head = min(-position % period, len(values))
    fold[first : first + head] ^= values[:head]
    end = head + (len(values) - head) // period * period
    if end > head:
        fold ^= np.bitwise_xor.reduce(values[head:end].reshape(-1, period), axis=0)
    fold[: len(values) - end] ^= values[end:]


class _Crc32:
    def __init__(self) -> None:
        self._crc = 0

    def update(self, data: bytes | memoryview, /) -> None:
        self._crc = zlib.crc32(data, self._crc)

    def hexdigest(self) -> str:
        return f"{self._crc:08x}"


def block_digest(kind: DigestKind) -> BlockDigest:
    """Returns the digest of an empty block.

    >>> digest = block_digest("folded")
    >>> digest.update(b"ab")
    >>> digest.hexdigest(), matches_digest([b"a", b"b"], digest.hexdigest()), matches_digest([b"ba"], digest.hexdigest())
    ('e3335b438a8037fa', True, False)
    """
    match kind:
        case "folded":
            return _Folded()
        case "crc32":
            return _Crc32()
        case "sha256":
            return hashlib.sha256()


def digest_kind(digest: str) -> DigestKind:
    """Returns the kind of a digest; a ValueError if its length is that of none.

    >>> digest_kind("9e83486d")
    'crc32'
    """
    if len(digest) not in _KINDS:
        raise ValueError(f"a digest has {' or '.join(map(str, sorted(_KINDS)))} digits, not {len(digest)}")
    return _KINDS[len(digest)]


def is_sha256(digest: str) -> bool:
    """Whether a digest is collision-resistant."""
    return digest_kind(digest) == "sha256"


def matches_digest(parts: Iterable[bytes | memoryview], digest: str) -> bool:
    """Whether these parts, concatenated, have the digest."""
    computed = block_digest(digest_kind(digest))
    for part in parts:
        computed.update(part)
    return computed.hexdigest() == digest
