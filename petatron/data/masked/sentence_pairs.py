"""Two segments of text for BERT: sentences in two groups, which come in their order or not, cut to a joint length.

The label of a pair says whether it is out of order. With `sentence_order` the groups are swapped with probability 1/2 (Lan et al., 2020,
"ALBERT"; Megatron's samples). With `random_next` the second group comes from another document with probability 1/2 (Devlin et al.,
2019, "BERT").

A pair that is too long loses tokens of the longer segment, at random from its beginning or its end, until it fits; segments of equal
length lose tokens in turns. Draws and their order are Megatron's.
"""

from __future__ import annotations

from typing import Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

PairLabel = Literal["sentence_order", "random_next"]
Ids = NDArray[np.int64]


class Segments(NamedTuple):
    """Two segments, of which the second may be empty, and whether they are out of order."""

    first: Ids
    second: Ids
    is_random: bool


def split_sentences(tokens: Ids, ends: NDArray[np.integer], random: np.random.RandomState) -> tuple[Ids, Ids]:
    """Draws how many sentences the first segment has, one at least, and returns both. `ends` are those of the sentences."""
    count = 1 if len(ends) < 3 else int(random.randint(1, len(ends)))
    cut = int(ends[count - 1])
    return tokens[:cut], tokens[cut:]


def truncate_segments(first: Ids, second: Ids, length: int, random: np.random.RandomState) -> tuple[Ids, Ids]:
    """Returns segments of at most `length` tokens together.

    >>> truncated = truncate_segments(np.arange(7), np.arange(10, 13), 4, np.random.RandomState(1))
    >>> [len(segment) for segment in truncated]
    [2, 2]
    """
    excess = len(first) + len(second) - length
    if excess <= 0:
        return first, second
    from_front = random.random_sample(excess) < 0.5
    # The longer one is cut until both are equally long; from there on the second, the first, the second, ...
    difference = min(excess, abs(len(first) - len(second)))
    is_first = np.arange(excess - difference) % 2 == 1
    is_first = np.concatenate([np.full(difference, len(first) > len(second)), is_first])
    return _cut(first, from_front[is_first]), _cut(second, from_front[~is_first])


def _cut(segment: Ids, from_front: NDArray[np.bool_]) -> Ids:
    front = int(from_front.sum())
    return segment[front : len(segment) - (len(from_front) - front)]
