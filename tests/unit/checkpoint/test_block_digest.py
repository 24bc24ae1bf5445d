"""Digests of blocks: what they find, and that older kinds are still checked."""

from __future__ import annotations

import hashlib
import random
import zlib
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from petatron.checkpoint.files.block_digest import block_digest, digest_kind, is_sha256, matches_digest

BLOCK = random.Random(5).randbytes(100_000)


def digest(*parts: bytes, kind: str = "folded") -> str:
    found = block_digest(kind)  # type: ignore[arg-type]
    for part in parts:
        found.update(memoryview(part))
    return found.hexdigest()


DIGEST = digest(BLOCK)


def naive(block: bytes) -> str:
    words = []
    for period in (8192, 8191):
        fold = bytearray(period)
        for at, value in enumerate(block):
            fold[at % period] ^= value
        words.append(zlib.crc32(bytes(fold) + len(block).to_bytes(8, "little")))
    return "{:08x}{:08x}".format(*words)


@settings(max_examples=40, deadline=None)
@given(cuts=st.lists(st.integers(0, len(BLOCK)), max_size=5), length=st.integers(0, len(BLOCK)))
def test_it_does_not_depend_on_how_a_block_is_cut(cuts: list[int], length: int):
    block = BLOCK[:length]
    ends = [0, *sorted(min(cut, length) for cut in cuts), length]
    assert digest(*(block[begin:end] for begin, end in pairwise(ends))) == naive(block)


@settings(max_examples=200, deadline=None)
@given(first=st.integers(0, 8 * len(BLOCK) - 1), second=st.integers(0, 8 * len(BLOCK) - 1))
def test_one_and_two_flipped_bits_are_found(first: int, second: int):
    damaged = bytearray(BLOCK)
    damaged[first // 8] ^= 1 << first % 8
    assert not matches_digest([bytes(damaged)], DIGEST)
    if second != first:
        damaged[second // 8] ^= 1 << second % 8
        assert not matches_digest([bytes(damaged)], DIGEST)


@pytest.mark.parametrize("distance", [8192, 8191, 2 * 8192, 5 * 8191])
def test_flips_that_cancel_in_one_fold_are_found_by_the_other(distance: int):
    damaged = bytearray(BLOCK)
    for at in (77, 77 + distance):
        damaged[at] ^= 4
    found = digest(bytes(damaged))
    assert (found[:8] == DIGEST[:8]) == (distance % 8192 == 0) and (found[8:] == DIGEST[8:]) == (distance % 8191 == 0)
    assert found != DIGEST


def test_zeroed_and_exchanged_pages_and_a_lost_end_are_found():
    page = 4096
    zeroed = BLOCK[:page] + bytes(page) + BLOCK[2 * page :]
    exchanged = BLOCK[2 * page : 4 * page] + BLOCK[: 2 * page] + BLOCK[4 * page :]
    assert len({DIGEST, digest(zeroed), digest(exchanged), digest(BLOCK[:-page]), digest(BLOCK + bytes(page))}) == 5
    assert digest(b"") != digest(b"\0")


def test_kinds_are_told_by_their_length():
    crc, sha = f"{zlib.crc32(BLOCK):08x}", hashlib.sha256(BLOCK).hexdigest()
    for known, kind in ((crc, "crc32"), (DIGEST, "folded"), (sha, "sha256")):
        assert digest_kind(known) == kind and digest(BLOCK[:9], BLOCK[9:], kind=kind) == known
        assert matches_digest([BLOCK], known) and not matches_digest([BLOCK[1:]], known)
    assert is_sha256(sha) and not is_sha256(crc) and not is_sha256(DIGEST)
    with pytest.raises(ValueError, match="a digest has 8 or 16 or 64 digits, not 3"):
        digest_kind("abc")
