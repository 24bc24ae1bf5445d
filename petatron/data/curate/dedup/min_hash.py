"""MinHash signatures and their bands: short sketches from which the Jaccard similarity of two sets of shingles is estimated.

For a random order of all shingles, two sets have the same first one with probability J, their Jaccard similarity |A and B| / |A or B|
(Broder 1997). A signature has the hash of the first shingle in bands x rows orders, x -> a x + c modulo 2^32 of 32 well-mixed bits.
Two documents are compared if they agree in all rows of some band, which has probability

    1 - (1 - J^rows)^bands.

Of a hash only some low bits are kept, `row_dtype`: as many as make the rows of a band 64 bits together. Unequal minima agree in b
bits with probability 2^-b, which the estimate corrects (Li and König 2010). So a document takes 320 bytes with 40 bands of 8 rows, from
which both the keys of its bands and the estimate are made.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from petatron.data.curate.word_hashes import Hashes, NgramHashes, mix, random_numbers

BANDS, ROWS, NGRAM, SEED, THRESHOLD = 40, 8, 5, 1, 0.8
_STANDARD_ERRORS, _LENIENT_STANDARD_ERRORS = 2.0, 3.5
"""How far below the threshold an estimate may be: 97.7 % of the pairs that have the threshold's similarity pass, and 99.98 %."""
_BLOCK_SHINGLES = 1 << 15
_KEY_SEED = 0xBA2D


@dataclass(frozen=True, slots=True)
class MinHashOptions:
    """The shingles (n-grams of words), the bands of a signature, and the similarity that makes two documents duplicates."""

    bands: int = BANDS
    rows: int = ROWS
    ngram: int = NGRAM
    seed: int = SEED
    threshold: float = THRESHOLD

    @property
    def row_dtype(self) -> np.dtype:
        return np.dtype(np.uint8 if self.rows >= 8 else np.uint16 if self.rows >= 4 else np.uint32)

    @property
    def num_hashes(self) -> int:
        return self.bands * self.rows

    def lowest_estimate(self, *, lenient: bool = False) -> float:
        """Returns the lowest estimate with which a pair counts as similar: the threshold less two standard errors of an estimate.

        lenient: less 3.5 standard errors, for pairs whose exact similarity is computed afterwards.

        >>> round(MinHashOptions().lowest_estimate(), 3), round(MinHashOptions().lowest_estimate(lenient=True), 3)
        (0.755, 0.722)
        """
        error = math.sqrt(self.threshold * (1 - self.threshold) / self.num_hashes)
        return max(0.0, self.threshold - (_LENIENT_STANDARD_ERRORS if lenient else _STANDARD_ERRORS) * error)

    def candidate_probability(self, similarity: float) -> float:
        """Returns the probability that two documents are compared.

        >>> [round(MinHashOptions().candidate_probability(similarity), 3) for similarity in (0.5, 0.7, 0.8)]
        [0.145, 0.907, 0.999]
        """
        return 1 - (1 - similarity**self.rows) ** self.bands

    def estimate(self, agreeing: NDArray[np.floating]) -> NDArray[np.floating]:
        """Returns the similarity from the share of rows that agree."""
        by_chance = 2.0 ** -(8 * self.row_dtype.itemsize)
        return np.clip((agreeing - by_chance) / (1 - by_chance), 0.0, 1.0)


def signatures(shingles: NgramHashes, options: MinHashOptions) -> NDArray[np.unsignedinteger]:
    """Returns [text, band, row] of texts, zeros for those without shingles."""
    result = np.zeros((len(shingles.counts), options.num_hashes), options.row_dtype)
    present = np.flatnonzero(shingles.counts)
    # Some texts at a time, so that what is made of them stays in the cache; the running count of shingles divides them.
    group_of = (shingles.starts[present] // _BLOCK_SHINGLES) if len(present) else present
    bounds = [*np.flatnonzero(np.diff(group_of, prepend=-1)).tolist(), len(present)]
    numbers = random_numbers(options.seed, 2 * options.num_hashes)
    factors = (numbers[: options.num_hashes] >> np.uint64(32)).astype(np.uint32) | np.uint32(1)
    offsets = (numbers[options.num_hashes :] >> np.uint64(32)).astype(np.uint32)
    for first, last in pairwise(bounds):
        texts = present[first:last]
        begin, end = int(shingles.starts[texts[0]]), int(shingles.starts[texts[-1]] + shingles.counts[texts[-1]])
        values = (shingles.hashes[begin:end] >> np.uint64(32)).astype(np.uint32)
        starts = shingles.starts[texts] - begin
        ordered = np.empty_like(values)
        for index in range(options.num_hashes):
            np.multiply(values, factors[index], out=ordered)
            ordered += offsets[index]
            result[texts, index] = np.minimum.reduceat(ordered, starts)
    return result.reshape(len(result), options.bands, options.rows)


def band_keys(rows: NDArray[np.unsignedinteger]) -> Hashes:
    """Returns the key of one band of each document, [document, row]: equal where all rows are."""
    factors = random_numbers(_KEY_SEED, rows.shape[1]) | np.uint64(1)
    keys = np.zeros(len(rows), np.uint64)
    for index, factor in enumerate(factors):
        keys += mix(rows[:, index].astype(np.uint64) + np.uint64(index << 32)) * factor
    return mix(keys)
