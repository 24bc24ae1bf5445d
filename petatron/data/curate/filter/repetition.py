"""Measures how much of a text repeats itself: Gopher's repetition rules (Rae et al. 2021, table A1).

Of lines, paragraphs and n-grams that occur several times, all occurrences but the first are duplicates. The paper does not say so, and
leaves open what is counted; here a share of characters is one of the characters of words or lines, without the blank space between, and
where occurrences overlap each character counts once.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from petatron.data.curate.word_hashes import Hashes, mix, random_numbers

_SEED = 0x9093


@dataclass(frozen=True, slots=True)
class NumberedTokens:
    """Tokens as numbers, equal for equal tokens, and their lengths."""

    numbers: Hashes
    lengths: NDArray[np.int64]

    @classmethod
    def of(cls, tokens: Sequence[str]) -> NumberedTokens:
        known: dict[str, int] = {}
        ids = np.array([known.setdefault(token, len(known)) for token in tokens], np.uint64)
        return cls(mix(ids), np.array([len(token) for token in tokens], np.int64))

    def ngrams(self, n: int) -> Hashes:
        """Returns a number for each n-gram."""
        count = max(len(self.numbers) - n + 1, 0)
        grams = np.zeros(count, np.uint64)
        for offset, factor in enumerate(random_numbers(_SEED, n) | np.uint64(1)):
            grams += self.numbers[offset : offset + count] * factor
        return grams


def duplicate_share(parts: Sequence[str]) -> float:
    """Returns the share of parts that occurred before.

    >>> duplicate_share(["a", "b", "a", "a"]), duplicate_share([])
    (0.5, 0.0)
    """
    return (len(parts) - len(set(parts))) / len(parts) if parts else 0.0


def duplicate_character_share(parts: Sequence[str]) -> float:
    """Returns the share of characters in parts that occurred before.

    >>> duplicate_character_share(["four", "by", "four"])
    0.4
    """
    total = sum(map(len, parts))
    return (total - sum(map(len, set(parts)))) / total if total else 0.0


def top_ngram_share(tokens: NumberedTokens, n: int) -> float:
    """Returns the share of characters in the n-gram that occurs most often; 0 if none occurs twice.

    >>> top_ngram_share(NumberedTokens.of("ab cd ab cd xyz".split()), 2)  # 8 of 11 characters
    0.7272727272727273
    """
    grams = tokens.ngrams(n)
    if not len(grams):
        return 0.0
    _, inverse, counts = np.unique(grams, return_inverse=True, return_counts=True)
    most = counts.max()
    if most < 2:
        return 0.0
    sums = np.convolve(tokens.lengths, np.ones(n, np.int64), "valid")
    candidates = counts[inverse] == most
    longest = np.flatnonzero(candidates)[np.argmax(sums[candidates])]
    return _covered_share(inverse == inverse[longest], tokens.lengths, n)


def duplicate_ngram_share(tokens: NumberedTokens, n: int) -> float:
    """Returns the share of characters in n-grams that occurred before.

    >>> duplicate_ngram_share(NumberedTokens.of("ab cd ab cd xyz".split()), 2)  # the second "ab cd": 4 of 11 characters
    0.36363636363636365
    """
    grams = tokens.ngrams(n)
    _, first = np.unique(grams, return_index=True)
    if len(first) == len(grams):
        return 0.0
    occurred = np.ones(len(grams), bool)
    occurred[first] = False
    return _covered_share(occurred, tokens.lengths, n)


def _covered_share(is_start: NDArray[np.bool_], lengths: NDArray[np.int64], n: int) -> float:
    """Returns the share of characters in the n tokens from each start on."""
    covered = np.convolve(is_start, np.ones(n, np.int64)) > 0
    return float(lengths[covered].sum() / lengths.sum())
