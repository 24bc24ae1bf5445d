"""Chooses the n-grams of words that are masked: a pure function of tokens and random draws.

Words are visited in a random order. Each draws how many words its n-gram has, and the n-gram is shortened until the budget of masked
tokens has room for it. It is skipped if even the word alone has no room, or if one of its tokens is masked already. A word is a token
and the pieces that continue it (`##` of WordPiece), or each token by itself. Special tokens between sentences are never masked.

The rules and the draws, in their order, are those of Megatron's masked datasets; `MaskingRandom` draws single numbers as numpy's legacy
generator does, at a fraction of the cost.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from petatron.data.masked.masking_vocabulary import MaskingVocabulary

NgramLengths = Literal["short", "long", "geometric"]
_GEOMETRIC = 0.2
"""The probability of a span's end after each of its words (Joshi et al., 2020, "SpanBERT", section 3.1)."""
_MASKED, _RANDOM = 0.8, 0.5
"""A masked token becomes the mask token, else with equal probability a random one or stays as it is (Devlin et al., 2019, "BERT")."""

Draw = Callable[[], int]


class MaskingRandom:
    """The random numbers of samples: each sample seeds a generator of its thread, so that its draws depend on its number alone."""

    def __init__(self, seed: int) -> None:
        self._seed, self._local = seed, threading.local()

    def of_sample(self, index: int) -> np.random.RandomState:
        """Returns the generator of a sample; it is valid until the thread asks for another."""
        if not hasattr(self._local, "state"):
            self._local.state = np.random.RandomState(0)  # building one takes longer than a sample
        state: np.random.RandomState = self._local.state
        state.seed((self._seed + index) % (1 << 32))
        return state


@dataclass(frozen=True)
class NgramRule:
    """How many words an n-gram has: probabilities proportional to 1/n, the same the other way around, or SpanBERT's geometric ones."""

    max_ngram: int
    lengths: NgramLengths

    @cached_property
    def _cumulated(self) -> list[float]:
        weights = 1.0 / np.arange(1, self.max_ngram + 1)
        weights = weights / weights.sum(keepdims=True)
        if self.lengths == "long":
            weights = weights[::-1]
        # Both are divided again, as numpy's choice and its caller do: the last bits decide between neighbors.
        sums = (weights / weights.sum(keepdims=True)).cumsum()
        return (sums / sums[-1]).tolist()

    @property
    def mean_length(self) -> float:
        """The mean number of words of the n-grams that are drawn."""
        numbers = np.arange(1, self.max_ngram + 1)
        if self.lengths == "geometric":  # the chance that an n-gram has a word: the longest ones are cut
            return float(((1 - _GEOMETRIC) ** (numbers - 1)).sum())
        weights = 1.0 / (numbers if self.lengths == "short" else numbers[::-1])
        return float((numbers * weights).sum() / weights.sum())

    def drawing(self, random: np.random.RandomState) -> Draw:
        """Returns a function that draws lengths from a generator."""
        if self.lengths == "geometric":
            return lambda: min(int(random.geometric(_GEOMETRIC)), self.max_ngram)
        cumulated, uniform = self._cumulated, random.random_sample

        def draw() -> int:
            number = uniform()
            for place, bound in enumerate(cumulated):
                if number < bound:
                    return place + 1
            return len(cumulated)

        return draw


@dataclass(frozen=True, slots=True)
class MaskableWords:
    """The words of a text that may be masked: positions of their tokens, and where each word begins among them."""

    positions: list[int]
    starts: list[int]

    @staticmethod
    def of(tokens: NDArray[np.int64], vocabulary: MaskingVocabulary, *, whole_words: bool) -> MaskableWords:
        """whole_words: pieces that continue a word belong to it."""
        special = [vocabulary.special_ids[role] for role in ("cls", "sep") if role in vocabulary.special_ids]
        is_word = np.ones(len(tokens), np.bool_)
        for number in special:
            is_word &= tokens != number
        positions = np.flatnonzero(is_word)
        starts = np.arange(len(positions))
        if whole_words and len(positions):
            begins = ~vocabulary.continues[tokens[positions]]
            begins[0] = True
            starts = np.flatnonzero(begins)
        return MaskableWords(positions.tolist(), [*starts.tolist(), len(positions)])

    def __len__(self) -> int:
        return len(self.starts) - 1


def masked_budget(num_tokens: int, probability: float, target: int) -> float:
    """Returns how many tokens of a text are masked at most, one at least."""
    return min(probability * target, max(1, round(num_tokens * probability)))


def choose_ngrams(
    maskable: MaskableWords,
    budget: float,
    rule: NgramRule,
    random: np.random.RandomState,
    on_token: Callable[[int], Any] | None = None,
) -> list[list[int]]:
    """Returns the positions of each n-gram, in the order in which they are drawn; `on_token` is told each when it is chosen."""
    order = np.arange(len(maskable))
    random.shuffle(order)
    draw = rule.drawing(random)
    starts, count = maskable.starts, len(maskable)
    taken = bytearray(len(maskable.positions))
    chosen: list[list[int]] = []
    masked = 0
    for word in order.tolist():
        if masked + 1 > budget:  # not even one more token: what Megatron draws from here on masks nothing
            break
        size, first = draw(), starts[word]
        while size and masked + starts[min(word + size, count)] - first > budget:
            size -= 1
        stop = starts[min(word + size, count)]
        if not size or any(taken[first:stop]):
            continue
        taken[first:stop] = b"\1" * (stop - first)
        positions = maskable.positions[first:stop]
        if on_token is not None:
            for position in positions:
                on_token(position)
        chosen.append(positions)
        masked += stop - first
    return chosen


def mask_in_place(
    tokens: NDArray[np.int64],
    maskable: MaskableWords,
    budget: float,
    rule: NgramRule,
    random: np.random.RandomState,
    vocabulary: MaskingVocabulary,
) -> list[int]:
    """Masks tokens and returns their positions; what is masked becomes the mask token, a random one, or stays."""
    mask, size = vocabulary["mask"], vocabulary.size
    uniform = random.random_sample

    def replace(position: int) -> None:
        if uniform() < _MASKED:
            tokens[position] = mask
        elif uniform() >= _RANDOM:
            tokens[position] = random.randint(0, size)

    return [position for ngram in choose_ngrams(maskable, budget, rule, random, replace) for position in ngram]
