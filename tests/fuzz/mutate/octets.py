"""Mutations that know nothing of a format: bits, numbers of some width, cuts, repetitions."""

from __future__ import annotations

import random

Mutated = tuple[bytes, str]
"""The new content, and in a few words what was done."""
NUMBERS = (0, 1, 2, 7, 0x7F, 0x80, 0xFF, 0x7FFF, 0xFFFF, (1 << 31) - 1, 1 << 31, (1 << 32) - 1, 1 << 40, (1 << 62), (1 << 63) - 1, 1 << 63,
           (1 << 64) - 1)  # fmt: skip
_LONGEST = 1 << 20
"""Content grows no further: a case takes milliseconds."""


class NotOfThisFormat(Exception):
    """The content cannot be taken apart (any more)."""


def mutate(content: bytes, rng: random.Random) -> Mutated:
    """One of them."""
    if not content:
        return bytes(rng.randrange(256) for _ in range(rng.randrange(1, 64))), "random bytes"
    return rng.choice((_flip, _flip, _overwrite, _number, _number, _cut, _drop, _repeat, _insert))(content, rng)


def splice(content: bytes, other: bytes, rng: random.Random) -> Mutated:
    """The beginning of one file and the end of another."""
    at, on = rng.randrange(len(content) + 1), rng.randrange(len(other) + 1)
    return (content[:at] + other[on:])[:_LONGEST], f"spliced at {at} with another from {on}"


def put_number(content: bytes, at: int, width: int, rng: random.Random) -> bytes:
    """A number of some width becomes a special one, or one nearby."""
    old = int.from_bytes(content[at : at + width], "little")
    near = [old + step for step in (-8, -1, 1, 8)] + [old * 2, old // 2, -old]
    new = rng.choice((*NUMBERS, *near)) % (1 << (8 * width))
    return content[:at] + new.to_bytes(width, "little") + content[at + width :]


def _place(content: bytes, rng: random.Random) -> int:
    """Anywhere; rather often in the header or at the end, where the structure is."""
    choice = rng.random()
    if choice < 0.3:
        return rng.randrange(min(len(content), 64))
    if choice < 0.4:
        return len(content) - 1 - rng.randrange(min(len(content), 64))
    return rng.randrange(len(content))


def _flip(content: bytes, rng: random.Random) -> Mutated:
    changed = bytearray(content)
    count = rng.choice((1, 1, 1, 2, 8, 64))
    for _ in range(count):
        changed[_place(content, rng)] ^= 1 << rng.randrange(8)
    return bytes(changed), f"{count} bits flipped"


def _overwrite(content: bytes, rng: random.Random) -> Mutated:
    at, size = _place(content, rng), rng.choice((1, 4, 16, 256))
    filler = bytes([rng.choice((0, 0x20, 0x22, 0x5B, 0x7B, 0x7F, 0x80, 0xFF))])
    return content[:at] + filler * min(size, len(content) - at) + content[at + size :], f"{size} bytes set at {at}"


def _number(content: bytes, rng: random.Random) -> Mutated:
    width = min(rng.choice((1, 2, 4, 8)), len(content))
    at = min(_place(content, rng), len(content) - width)
    return put_number(content, at, width, rng), f"a number of {width} bytes at {at}"


def _cut(content: bytes, rng: random.Random) -> Mutated:
    at = rng.choice((_place(content, rng), len(content) - 1))
    return content[:at], f"cut at {at}"


def _drop(content: bytes, rng: random.Random) -> Mutated:
    at, size = _place(content, rng), rng.choice((1, 8, 100))
    return content[:at] + content[at + size :], f"{size} bytes dropped at {at}"


def _repeat(content: bytes, rng: random.Random) -> Mutated:
    at, size, count = _place(content, rng), rng.choice((1, 8, 100, len(content))), rng.choice((1, 2, 50))
    return (content[:at] + content[at : at + size] * (count + 1) + content[at + size :])[
        :_LONGEST
    ], f"{size} bytes {count} times more"


def _insert(content: bytes, rng: random.Random) -> Mutated:
    at = _place(content, rng)
    new = bytes(rng.randrange(256) for _ in range(rng.choice((1, 8, 64))))
    return content[:at] + new + content[at:], f"{len(new)} bytes inserted at {at}"
