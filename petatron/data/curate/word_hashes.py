"""Hashes of words and of word n-grams, for many texts at once and without a loop over words.

A word's hash is a polynomial in its bytes b, modulo 2^64:

    h(word) = mix(sum_j T[b_j] * M^j),   j from the word's first byte,

with a table T of 256 random numbers and an odd M. The sums of all words are differences of one running sum over the buffer, divided by
the power of M at the word's start, which is possible because M is odd. An n-gram's hash is again a polynomial, in the hashes of its
words. `mix` is the finalizer of SplitMix64, a bijection, so that every bit of a hash depends on every word.

The constants are fixed: hashes are the same in every process and on every machine.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from petatron.data.curate.normalize_text import word_bytes

Hashes = NDArray[np.uint64]
_TABLE_SEED, _NGRAM_SEED = 0x5EED, 0xA5A5
_MULTIPLIER = 0x9E3779B97F4A7C15
_CHUNK_BYTES = 1 << 19
"""Bytes hashed at a time; a word is never divided."""
_SPACE = 32


def mix(numbers: Hashes) -> Hashes:
    """Returns the finalizer of SplitMix64 of each number."""
    mixed = numbers ^ (numbers >> np.uint64(30))
    mixed *= np.uint64(0xBF58476D1CE4E5B9)
    mixed ^= mixed >> np.uint64(27)
    mixed *= np.uint64(0x94D049BB133111EB)
    return mixed ^ (mixed >> np.uint64(31))


def random_numbers(seed: int, count: int) -> Hashes:
    """Returns the first numbers of SplitMix64 with a seed.

    >>> [hex(number) for number in random_numbers(0, 1).tolist()]
    ['0xe220a8397b1dcdaf']
    """
    steps = np.arange(1, count + 1, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)
    return mix(steps + np.uint64(seed % (1 << 64)))


@dataclass(frozen=True, slots=True)
class NgramHashes:
    """The n-grams of several texts: their hashes one text after the other, and how many each text has."""

    hashes: Hashes
    counts: NDArray[np.int64]

    @property
    def starts(self) -> NDArray[np.int64]:
        """The first n-gram of each text."""
        return np.cumsum(self.counts) - self.counts


def word_ngrams(texts: Sequence[str], n: int, *, keep_short: bool) -> NgramHashes:
    """Hashes the n-grams of consecutive words of each text; a shorter text has one of all its words, or none without `keep_short`.

    >>> grams = word_ngrams(["To be, or not to be", "To be", ""], 2, keep_short=True)
    >>> grams.counts.tolist(), int(grams.hashes[0]) == int(grams.hashes[4]) == int(grams.hashes[5])
    ([5, 1, 0], True)
    """
    parts, num_words = _hashes_of_words([word_bytes(text) for text in texts])
    # Behind the words of a text are n - 1 zeros, so that no n-gram reaches into the next text.
    padded_starts = np.cumsum(num_words + n - 1) - (num_words + n - 1)
    padded = np.zeros(int(num_words.sum()) + len(texts) * (n - 1) + n - 1, np.uint64)
    padded[_ranges(padded_starts, num_words)] = parts
    counts = np.maximum(num_words - n + 1, np.minimum(num_words, 1) if keep_short else 0)
    places = _ranges(padded_starts, counts)
    factors = random_numbers(_NGRAM_SEED, n) | np.uint64(1)
    hashes = np.zeros(len(places), np.uint64)
    for offset in range(n):
        hashes += padded[places + offset] * factors[offset]
    return NgramHashes(mix(hashes), counts)


def _ranges(starts: NDArray[np.int64], counts: NDArray[np.int64]) -> NDArray[np.int64]:
    """Returns start, start + 1, ... of each start, as many as its count says.

    >>> _ranges(np.array([5, 9]), np.array([2, 1])).tolist()
    [5, 6, 9]
    """
    before = np.cumsum(counts) - counts
    return np.repeat(starts - before, counts) + np.arange(int(counts.sum()))


def _hashes_of_words(texts: Sequence[bytes]) -> tuple[Hashes, NDArray[np.int64]]:
    """Returns the hashes of all words, and the number of words of each text."""
    content = b" ".join(texts)
    buffer = np.frombuffer(content, np.uint8)
    is_word = buffer != _SPACE
    edges = np.flatnonzero(np.diff(is_word.view(np.int8), prepend=np.int8(0), append=np.int8(0)))
    starts, ends = edges[::2], edges[1::2]
    lengths = np.fromiter(map(len, texts), np.int64, len(texts)) + 1
    bounds = np.searchsorted(starts, np.cumsum(lengths) - lengths)
    num_words = np.diff(bounds, append=len(starts))
    hashes = np.empty(len(starts), np.uint64)
    first = 0
    while first < len(starts):
        limit = int(starts[first]) + _CHUNK_BYTES
        last = max(int(np.searchsorted(ends, limit, side="right")), first + 1)
        hashes[first:last] = _hash_chunk(buffer, starts[first:last], ends[first:last])
        first = last
    return hashes, num_words


def _hash_chunk(buffer: NDArray[np.uint8], starts: NDArray[np.int64], ends: NDArray[np.int64]) -> Hashes:
    begin = int(starts[0])
    piece = buffer[begin : int(ends[-1])]
    table, powers, inverses = _constants(max(len(piece).bit_length(), 10))
    sums = np.zeros(len(piece) + 1, np.uint64)
    np.cumsum(table[piece] * powers[: len(piece)], out=sums[1:])
    starts, ends = starts - begin, ends - begin
    return mix((sums[ends] - sums[starts]) * inverses[starts])


@lru_cache(maxsize=2)
def _constants(bits: int) -> tuple[Hashes, Hashes, Hashes]:
    """Returns T, the powers of M up to 2^bits, and their inverses modulo 2^64."""
    length = 1 << bits
    inverse = pow(_MULTIPLIER, -1, 1 << 64)
    powers, inverses = (np.full(length, number, np.uint64) for number in (_MULTIPLIER, inverse))
    powers[0] = inverses[0] = 1
    return random_numbers(_TABLE_SEED, 256), np.cumprod(powers), np.cumprod(inverses)
