"""Language identification: the languages of a text, by naive Bayes on character n-grams.

The model is `samples/`: twenty sentences in each of 24 languages, of which the n-grams of one to five characters are counted when it is
first used (words in lower case, a space at both ends). A segment of text has for each language the naive Bayes score

    sum over its n-grams g of log((count_L(g) + a) / (total_L + a V)),

without the n-grams that are in no sample. Scores are divided by the number of orders (lengths of n-grams), since n-grams of different
lengths at the same place are not independent evidence.
The segment's shares are the softmax of its scores. A segment is `UNKNOWN` if few of its trigrams are in the sample of the best
language: it is in a language that the model does not have, or in none. A text has the mean of its segments, weighted by length.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from petatron.data.curate.word_hashes import Hashes, mix

UNKNOWN = "unknown"
LANGUAGES = tuple(sorted(path.stem for path in (Path(__file__).parent / "samples").glob("*.txt")))
"""ISO 639-1 codes."""
_ORDERS = (1, 2, 3, 4, 5)
_KNOWN_ORDER = 3
_SMOOTHING = 0.05
_TABLE_BITS = 19
_SEGMENT_CHARS = 100
_MAX_SEGMENTS = 16
"""The most segments, spread evenly, that a longer text is judged by."""
_MIN_KNOWN, _MIN_KNOWN_CHARACTERS = 0.3, 0.5
"""The share of a segment's trigrams that must be in the sample of its language; of its characters, where there are thousands of them."""
_MANY_CHARACTERS = ("ja", "zh")
_HANGUL, _HAN, _HAN_SIGN = re.compile("[\uac00-\ud7a3]+"), re.compile("[\u3400-\u4dbf\u4e00-\u9fff]"), "\u4e00"
Characters = NDArray[np.uint32]
_NO_WORD = re.compile(r"[^\w\u0300-\u036f\u0591-\u05c7\u064b-\u065f\u0900-\u0963]+|[\d_]+")


def language_shares(text: str) -> dict[str, float]:
    """Returns the share of a text in each language that has one, the largest first.

    >>> next(iter(language_shares("The weather was fine, and so we went out.")))
    'en'
    >>> language_shares("1234 !!")
    {'unknown': 1.0}
    """
    characters, segments = _segments(text)
    if not len(characters):
        return {UNKNOWN: 1.0}
    lengths = np.bincount(segments)
    shares = lengths / lengths.sum() @ _model().shares(characters, segments)
    names = (*LANGUAGES, UNKNOWN)
    order = np.argsort(-shares, kind="stable")
    return {names[index]: round(float(shares[index]), 4) for index in order if shares[index] >= 5e-5}


class _NgramModel:
    """Log-probabilities of the n-grams in the samples, [n-gram, language]."""

    def __init__(self, samples: Mapping[str, str]) -> None:
        grams = [np.concatenate(_ngram_hashes(_characters(text))) for text in samples.values()]
        known = np.unique(np.concatenate(grams))
        counts = np.stack([np.bincount(np.searchsorted(known, of), minlength=len(known)) for of in grams], axis=1)
        totals = counts.sum(axis=0)
        self._logs = np.log((counts + _SMOOTHING) / (totals + _SMOOTHING * len(known))).astype(np.float32)
        self._occurs = counts > 0
        self._known = known
        # Of n-grams with the same first bits the most frequent one is stored.
        by_frequency = np.argsort(counts.sum(axis=1), kind="stable")
        self._rows = np.zeros(1 << _TABLE_BITS, np.int32)
        self._rows[_table_index(known[by_frequency])] = by_frequency

    def shares(self, characters: Characters, segments: NDArray[np.int64]) -> NDArray[np.float64]:
        """Returns the shares of languages and of none of them, [segment, language]; `segments` is the segment of each character."""
        scores = np.zeros((int(segments[-1]) + 1, len(LANGUAGES)))
        orders = [self._lookup(grams, segments, order) for order, grams in zip(_ORDERS, _ngram_hashes(characters))]
        for known in orders:
            firsts = np.flatnonzero(np.diff(known.segments, prepend=-1))
            if len(firsts):
                scores[known.segments[firsts]] += np.add.reduceat(self._logs[known.rows], firsts)
        shares = np.exp((scores - scores.max(axis=1, keepdims=True)) / len(_ORDERS))
        shares /= shares.sum(axis=1, keepdims=True)
        is_unknown = self._unknown(orders, scores.argmax(axis=1))
        return np.column_stack((shares * ~is_unknown[:, None], is_unknown.astype(np.float64)))

    def _lookup(self, grams: Hashes, segments: NDArray[np.int64], order: int) -> _KnownNgrams:
        of = segments[: len(grams)]
        inside = of == segments[order - 1 :]
        rows = self._rows[_table_index(grams)]
        is_known = inside & (self._known[rows] == grams)
        return _KnownNgrams(rows[is_known], of[is_known], np.bincount(of[inside], minlength=int(segments[-1]) + 1))

    def _unknown(self, orders: Sequence[_KnownNgrams], best: NDArray[np.int64]) -> NDArray[np.bool_]:
        """Returns which segments have few of their n-grams in the sample of their best language."""
        shares: list[NDArray[np.float64]] = []
        characters, longer = orders[0], orders[_KNOWN_ORDER - 1]
        for known in (characters, longer):
            occurs = self._occurs[known.rows, best[known.segments]]
            num_known = np.bincount(known.segments[occurs], minlength=len(best))
            shares.append(num_known / np.maximum(known.num_grams, 1))
        many_characters = np.isin(best, [LANGUAGES.index(name) for name in _MANY_CHARACTERS])
        by_characters = many_characters | (longer.num_grams == 0)
        return np.where(by_characters, shares[0] < _MIN_KNOWN_CHARACTERS, shares[1] < _MIN_KNOWN)


@dataclass(frozen=True, slots=True)
class _KnownNgrams:
    """Of one order: the rows of the n-grams that the model knows, the segment of each, and the number of all n-grams of each segment."""

    rows: NDArray[np.integer]
    segments: NDArray[np.int64]
    num_grams: NDArray[np.int64]


def _table_index(hashes: Hashes) -> NDArray[np.int64]:
    return (hashes >> np.uint64(64 - _TABLE_BITS)).astype(np.int64)


@lru_cache(maxsize=1)
def _model() -> _NgramModel:
    folder = Path(__file__).parent / "samples"
    return _NgramModel({name: (folder / f"{name}.txt").read_text(encoding="utf-8") for name in LANGUAGES})


def _characters(text: str) -> Characters:
    """Returns the characters of the words of a text, with one space between and at both ends.

    Korean syllables are divided into their parts, and before each Chinese character is a sign for all of them: single ones are rare.
    """
    joined = f" {_NO_WORD.sub(' ', text.lower()).strip()} "
    if not joined.isascii():
        joined = _HANGUL.sub(lambda match: unicodedata.normalize("NFD", match[0]), joined)
        joined = _HAN.sub(rf"{_HAN_SIGN}\g<0>", joined)
    return np.frombuffer(joined.encode("utf-32-le", "surrogatepass"), np.uint32)


def _segments(text: str) -> tuple[Characters, NDArray[np.int64]]:
    """Returns the characters that are judged, and the segment of each; none for a text without words."""
    characters = _characters(text)
    if len(characters) <= 2:
        return characters[:0], np.zeros(0, np.int64)
    count = -(-len(characters) // _SEGMENT_CHARS)
    size = -(-len(characters) // count)
    segments = np.arange(len(characters)) // size
    if count > _MAX_SEGMENTS:
        chosen = np.isin(segments, np.linspace(0, count - 1, _MAX_SEGMENTS).astype(int))
        characters = characters[chosen]
        segments = np.unique(segments[chosen], return_inverse=True)[1]
    return characters, segments


def _ngram_hashes(characters: Characters) -> list[Hashes]:
    """Returns the hashes of the n-grams of each order."""
    numbers = characters.astype(np.uint64)
    hashes = np.zeros(len(numbers), np.uint64)
    orders: list[Hashes] = []
    for order in _ORDERS:
        # Appends the next character to the n-grams of the order before.
        count = max(len(numbers) - order + 1, 0)
        hashes = mix(
            hashes[:count] * np.uint64(0x100000001B3) + numbers[order - 1 : order - 1 + count] + np.uint64(order)
        )
        orders.append(hashes)
    return orders
