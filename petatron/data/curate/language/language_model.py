"""Which languages a text is in, by a small model of characters.

The model is `samples/`: twenty sentences in each of 24 languages, of which the n-grams of one to five characters are counted when it is
first used (words in lower case, a space at both ends). A segment of text has for each language the naive Bayes score

    sum over its n-grams g of log((count_L(g) + a) / (total_L + a V)),

n-grams that no sample has left out. Scores are divided by the number of orders, since n-grams of one place are no independent evidence.
The segment's shares are the softmax of its scores. A segment is `UNKNOWN` if few of its trigrams are in the sample of the best
language: it is in a language that the model does not have, or in none. A text has the mean of its segments, weighted by length.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Mapping
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
_SEGMENT_CHARS = 100
_MAX_SEGMENTS = 16
"""Of a longer text so many segments are judged, spread over it."""
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
        self._known = np.unique(np.concatenate(grams))
        counts = np.stack([np.bincount(np.searchsorted(self._known, of), minlength=len(self._known)) for of in grams])
        totals = counts.sum(axis=1)
        self._occurs = counts.T > 0
        logs = np.log((counts.T + _SMOOTHING) / (totals + _SMOOTHING * len(self._known)))
        self._logs = logs.astype(np.float32)

    def shares(self, characters: Characters, segments: NDArray[np.int64]) -> NDArray[np.float64]:
        """Returns the shares of languages and of none of them, [segment, language]; `segments` is the segment of each character."""
        num_segments = int(segments[-1]) + 1
        scores = np.zeros((num_segments, len(LANGUAGES)))
        num_grams, num_known = (np.zeros((len(_ORDERS), num_segments, len(LANGUAGES)), np.int64) for _ in range(2))
        for index, (order, grams) in enumerate(zip(_ORDERS, _ngram_hashes(characters))):
            inside = np.flatnonzero(segments[: len(grams)] == segments[order - 1 :])
            places = np.minimum(np.searchsorted(self._known, grams[inside]), len(self._known) - 1)
            is_known = self._known[places] == grams[inside]
            num_grams[index] = np.bincount(segments[inside], minlength=num_segments)[:, None]
            rows, of = places[is_known], segments[inside][is_known]
            firsts = np.flatnonzero(np.diff(of, prepend=-1))
            if len(firsts):
                scores[of[firsts]] += np.add.reduceat(self._logs[rows], firsts)
                num_known[index, of[firsts]] = np.add.reduceat(self._occurs[rows], firsts, dtype=np.int64)
        shares = np.exp((scores - scores.max(axis=1, keepdims=True)) / len(_ORDERS))
        shares /= shares.sum(axis=1, keepdims=True)
        best = scores.argmax(axis=1)
        short = num_grams[_KNOWN_ORDER - 1, :, 0] == 0
        by_characters = short | np.isin(best, [LANGUAGES.index(name) for name in _MANY_CHARACTERS])
        at = np.where(by_characters, 0, _KNOWN_ORDER - 1), np.arange(num_segments), best
        least = np.where(by_characters, _MIN_KNOWN_CHARACTERS, _MIN_KNOWN)
        is_unknown = num_known[at] < least * num_grams[at]
        return np.column_stack((shares * ~is_unknown[:, None], is_unknown.astype(np.float64)))


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
