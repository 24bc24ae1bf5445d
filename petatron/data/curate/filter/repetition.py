"""How much of a text repeats itself: measures of Gopher's repetition rules (Rae et al. 2021, table A1).

Of lines, paragraphs and n-grams that occur several times, all occurrences but the first are duplicates. The paper does not say so, and
leaves open what is counted; here a share of characters is one of the characters of words or lines, without the blank space between, and
where occurrences overlap each character counts once.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from petatron.data.curate.word_hashes import Hashes, mix, random_numbers

_SEED = 0x9093


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


def top_ngram_share(tokens: Sequence[str], n: int) -> float:
    """Returns the share of characters in the n-gram that occurs most often; 0 if none occurs twice.

    >>> top_ngram_share("ab cd ab cd xyz".split(), 2)  # 8 of 11 characters
    0.7272727272727273
    """
    grams, lengths = _ngrams(tokens, n)
    if not len(grams):
        return 0.0
    _, inverse, counts = np.unique(grams, return_inverse=True, return_counts=True)
    most = counts.max()
    if most < 2:
        return 0.0
    sums = np.convolve(lengths, np.ones(n, np.int64), "valid")
    candidates = counts[inverse] == most
    longest = np.flatnonzero(candidates)[np.argmax(sums[candidates])]
    return _covered_share(inverse == inverse[longest], lengths, n)


def duplicate_ngram_share(tokens: Sequence[str], n: int) -> float:
    """Returns the share of characters in n-grams that occurred before.

    >>> duplicate_ngram_share("ab cd ab cd xyz".split(), 2)  # the second "ab cd": 4 of 11 characters
    0.36363636363636365
    """
    grams, lengths = _ngrams(tokens, n)
    if not len(grams):
        return 0.0
    occurred = np.ones(len(grams), bool)
    occurred[np.unique(grams, return_index=True)[1]] = False
    return _covered_share(occurred, lengths, n)


def _ngrams(tokens: Sequence[str], n: int) -> tuple[Hashes, NDArray[np.int64]]:
    """Returns a number for each n-gram, and the length of each token."""
    numbers: dict[str, int] = {}
    ids = np.fromiter((numbers.setdefault(token, len(numbers)) for token in tokens), np.uint64, len(tokens))
    lengths = np.fromiter(map(len, tokens), np.int64, len(tokens))
    count = max(len(tokens) - n + 1, 0)
    grams = np.zeros(count, np.uint64)
    for offset, factor in enumerate(random_numbers(_SEED, n) | np.uint64(1)):
        grams += mix(ids[offset : offset + count]) * factor
    return grams, lengths


def _covered_share(is_start: NDArray[np.bool_], lengths: NDArray[np.int64], n: int) -> float:
    """Returns the share of characters in the n tokens from each start on."""
    covered = np.convolve(is_start, np.ones(n, np.int64)) > 0
    return float(lengths[covered].sum() / lengths.sum())
