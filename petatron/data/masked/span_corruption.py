"""Replaces spans of a text by sentinels: what the encoder reads, and what the decoder fills in.

    text            the cat sat on the mat today
    encoder reads   the <0> on the <1> today
    decoder reads   <bos> <0> cat sat <1> mat
    and predicts    <0> cat sat <1> mat <eos>

(Raffel et al., 2020, "T5"). Spans are n-grams of words as Megatron draws them (`NgramSpans`), or those of a denoiser
(denoisers.py). `<bos>` is the padding of tokenizers that have no first token, as in the published models.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import ceil
from typing import NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from petatron.data.masked.mask_tokens import MaskableWords, NgramRule, choose_ngrams, masked_budget
from petatron.data.masked.masking_vocabulary import MaskingVocabulary

Ids = NDArray[np.int64]
_SPARE_SPANS = 1.25
"""For how many spans a text has room, as a multiple of the mean number of its spans."""
Spans = list[list[int]]
"""The positions of the tokens of each span, in the order of the text."""


class SpanCounts(NamedTuple):
    """How many tokens of a text are in spans, and for how many spans it has room: a few texts in a hundred have more."""

    corrupted: int
    spans: int


class SpanRule(Protocol):
    """Chooses spans of texts."""

    @property
    def mode(self) -> str | None:
        """The mode whose token the encoder reads first, if modes have tokens."""
        ...

    def counts(self, num_tokens: int) -> SpanCounts:
        """Returns the counts of a text of a length."""
        ...

    def choose(
        self, tokens: Ids, target: int, vocabulary: MaskingVocabulary, random: np.random.RandomState
    ) -> Spans: ...


@dataclass(frozen=True, slots=True)
class NgramSpans:
    """Megatron's spans: n-grams of words, as many as the share of corrupted tokens has room for."""

    probability: float
    ngrams: NgramRule
    whole_words: bool
    mode: str | None = None

    def counts(self, num_tokens: int) -> SpanCounts:
        corrupted = int(masked_budget(num_tokens, self.probability, num_tokens))
        spans = ceil(_SPARE_SPANS * corrupted / self.ngrams.mean_length) + 2
        return SpanCounts(corrupted, min(spans, corrupted))

    def choose(self, tokens: Ids, target: int, vocabulary: MaskingVocabulary, random: np.random.RandomState) -> Spans:
        maskable = MaskableWords.of(tokens, vocabulary, whole_words=self.whole_words)
        budget = masked_budget(len(tokens), self.probability, target)
        return sorted(choose_ngrams(maskable, budget, self.ngrams, random))


@dataclass(frozen=True, slots=True)
class EncoderExtras:
    """What the encoder reads beside the corrupted text: the tokens of modes, by mode, and an end-of-text token."""

    mode_ids: dict[str, int]
    end: int | None = None

    def count(self, mode: str | None) -> int:
        return (mode in self.mode_ids) + (self.end is not None)


class CorruptedText(NamedTuple):
    """encoder: ids that the encoder reads. decoder: what the decoder predicts but for the end. left_out: spans without room."""

    encoder: list[int]
    decoder: list[int]
    left_out: int


def corrupt_spans(tokens: Ids, spans: Spans, sentinels: Sequence[int], *, decoder_room: int) -> CorruptedText:
    """Replaces spans by sentinels. Spans for which the decoder has no room, or for which there is no sentinel, stay as they are.

    decoder_room: the tokens of the decoder beside its first.

    >>> corrupt_spans(np.arange(10, 17), [[1, 2], [5]], [98, 99], decoder_room=9)
    CorruptedText(encoder=[10, 98, 13, 14, 99, 16], decoder=[98, 11, 12, 99, 15], left_out=0)
    """
    ids = tokens.tolist()
    encoder: list[int] = []
    decoder: list[int] = []
    done = 0
    for place, positions in enumerate(spans):
        if place == len(sentinels) or len(decoder) + 1 + len(positions) > decoder_room:
            return CorruptedText([*encoder, *ids[done:]], decoder, len(spans) - place)
        encoder += ids[done : positions[0]]
        encoder.append(sentinels[place])
        decoder.append(sentinels[place])
        decoder += [ids[position] for position in positions]
        done = positions[-1] + 1
    return CorruptedText([*encoder, *ids[done:]], decoder, 0)
