"""Denoisers: ways to choose the spans of a text, of which a mixture is drawn from (Tay et al., 2022, "UL2").

    R:3:0.15    regular: spans of 3 tokens on average, which have 15 % of the text
    X:32:0.5    extreme: long spans, or many
    S:0.25      sequential: one span, the last quarter of the text

`@2` after one doubles its weight. `ul2` is the paper's mixture. The number of tokens in spans and of spans is that of T5's preprocessing:
the share of the text, and that divided by the mean length. Lengths and places are drawn uniformly from all that have these
numbers and leave a token between two spans.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

import numpy as np

from petatron.data.masked.masking_vocabulary import MaskingVocabulary
from petatron.data.masked.span_corruption import Ids, SpanCounts, Spans

Mode = Literal["R", "S", "X"]
MODES: tuple[Mode, ...] = get_args(Mode)
UL2 = "R:3:0.15,R:8:0.15,S:0.25,X:3:0.5,X:8:0.5,X:64:0.15,X:64:0.5"
_DEFAULTS = {"R": "3:0.15", "X": "32:0.5", "S": "0.25"}


@dataclass(frozen=True, slots=True)
class Denoiser:
    """A mode, the mean length of its spans, the share of tokens that are in spans, and its weight in the mixture."""

    mode: Mode
    mean_span: float
    rate: float
    weight: float = 1.0

    def __str__(self) -> str:
        """
        >>> str(Denoiser("R", 3.0, 0.15)), str(Denoiser("S", 0.0, 0.25))
        ('R:3:0.15', 'S:0.25')
        """
        return f"S:{self.rate:g}" if self.mode == "S" else f"{self.mode}:{self.mean_span:g}:{self.rate:g}"

    def counts(self, num_tokens: int) -> SpanCounts:
        """
        >>> Denoiser("R", 3.0, 0.15).counts(512)
        SpanCounts(corrupted=77, spans=26)
        """
        corrupted = min(max(1, round(num_tokens * self.rate)), max(1, num_tokens - 1))
        if self.mode == "S":
            return SpanCounts(corrupted, 1)
        spans = min(max(1, round(corrupted / self.mean_span)), num_tokens - corrupted + 1)
        return SpanCounts(corrupted, spans)

    def choose(self, tokens: Ids, target: int, vocabulary: MaskingVocabulary, random: np.random.RandomState) -> Spans:
        """Draws spans. More of them than the vocabulary has sentinels become fewer and longer ones."""
        length = len(tokens)
        if not length:
            return []
        corrupted, spans = self.counts(length)
        if self.mode == "S":
            return [list(range(length - corrupted, length))]
        spans = min(spans, len(vocabulary.sentinel_ids))
        sizes = np.diff([0, *_distinct(corrupted - 1, spans - 1, random) + 1, corrupted])
        # Before a token that stays, or at the end: each span has another place.
        places = _distinct(length - corrupted + 1, spans, random)
        starts = places + np.cumsum(sizes) - sizes
        return [list(range(start, start + size)) for start, size in zip(starts.tolist(), sizes.tolist())]


def _distinct(total: int, count: int, random: np.random.RandomState) -> Ids:
    """Draws different numbers below `total`, in order."""
    return np.sort(random.permutation(total)[:count]).astype(np.int64)


def parse_denoisers(text: str) -> list[Denoiser]:
    """Returns the denoisers of a setting; raises `ValueError` with what is wrong.

    >>> [str(denoiser) for denoiser in parse_denoisers("R,X:3:0.5@2")], parse_denoisers("R,X:3:0.5@2")[1].weight
    (['R:3:0.15', 'X:3:0.5'], 2.0)
    """
    return [_parse_denoiser(item.strip()) for item in (UL2 if text == "ul2" else text).split(",")]


def _parse_denoiser(item: str) -> Denoiser:
    numbers, at, weight = item.partition("@")
    mode, colon, rest = numbers.partition(":")
    if mode not in MODES:
        raise ValueError(f"{item!r} begins with none of {', '.join(MODES)}")
    values = (rest if colon else _DEFAULTS[mode]).split(":")
    expected = 1 if mode == "S" else 2
    if len(values) != expected:
        raise ValueError(f"{item!r} has not the form {'S:RATE' if mode == 'S' else f'{mode}:MEAN_SPAN:RATE'}")
    try:
        mean_span, rate = [0.0, *map(float, values)][-2:]
        parsed = Denoiser(mode, mean_span, rate, float(weight) if at else 1.0)
    except ValueError:
        raise ValueError(f"{item!r} has something that is no number") from None
    if not 0 < rate < 1:
        raise ValueError(f"the rate of {item!r} is not between 0 and 1")
    if mode != "S" and not 1 <= mean_span < float("inf"):
        raise ValueError(f"the mean span of {item!r} is not a number from 1 on")
    if not 0 < parsed.weight < float("inf"):
        raise ValueError(f"the weight of {item!r} is not above 0")
    return parsed
