"""Slots: attributes of a module that `parallel/` fills, and that do nothing on one device. A module declares which it has.

Tensor parallelism fills what a module names in `tensor_slots`, by what it names (`TensorSlot`), and context parallelism what it names in
`context_slots` (`ContextSlot`). So a new kind of layer needs no change in `parallel/`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal, Protocol

from torch import Tensor

CommSlot = Callable[[Tensor], Tensor]
"""A function of a tensor that communicates, the identity on one device."""

TensorSlot = Literal[
    "linear",
    "column linear",
    "sections",
    "whole sequence",
    "sequence shard",
    "gathered sequence shards",
    "summed output",
    "sum of sequence shards",
    "tensor rank",
    "shared generator",
    "weight-gradient target",
    "vocabulary shard",
]
"""What tensor parallelism puts into a slot:

linear: the linear op that follows from the shard of the module's `weight`. column linear: that of a weight sharded along its output.
sections: the rows of each section of `weight` on this rank, where it is sharded along them.
whole sequence: a `CommSlot` from this rank's part of a sequence, or from what all ranks have, to a tensor that all ranks use.
sequence shard: a `CommSlot` from a whole sequence to this rank's part of it, where sequences are sharded.
gathered sequence shards: a `CommSlot` from this rank's part of a sequence to the whole of it, of which every rank uses a part, where
sequences are sharded.
summed output: a `CommSlot` that adds what the ranks have, and returns this rank's part of the sequence where sequences are sharded.
sum of sequence shards: a `CommSlot` that adds what ranks computed of their parts of a sequence, where sequences are sharded, to a tensor
that all ranks use alike.
tensor rank: this rank and the number of ranks, `TensorRank`.
shared generator: the RNG stream of what all ranks have, where they have the same activations; else it stays as it is.
weight-gradient target: where the gradient of a weight goes instead of autograd, if there is one.
vocabulary shard: the rows of the vocabulary of this rank.

`group_sum_slots` are a mapping of their own, of slots to numbers: a `CommSlot` adds, in place, what ranks have of each group of
channels, and the number is how many groups there are.
"""

ContextSlot = Literal["attention", "sequence parts", "keys of all ranks"]
"""What context parallelism puts into a slot:

attention: an `AttentionOp` over sequences of which every rank has a part, in any order.
sequence parts: `SequenceParts`, where every rank has one contiguous part of a sequence; else it stays None.
keys of all ranks: `KeysOfAllRanks` over sequences of which every rank has a part, in any order.
"""

TensorRank = tuple[int, int]
"""This rank, and the number of ranks."""


class SequenceParts(Protocol):
    """What ranks that have one contiguous part of every sequence each can do with the others. All is differentiable."""

    @property
    def rank(self) -> int: ...

    def local(self, x: Tensor) -> Tensor:
        """Returns this rank's part of a tensor of whole sequences, along its first dimension."""
        ...

    def from_previous(self, x: Tensor) -> Tensor:
        """Sends a tensor to the next rank, and returns that of the rank before; zeros on the first."""
        ...

    def gather(self, x: Tensor) -> Tensor:
        """Concatenates the tensors of all ranks along the first dimension."""
        ...


class KeysOfAllRanks(Protocol):
    """How queries of one rank meet the keys of all, where these are all-gathered."""

    @property
    def num_ranks(self) -> int: ...

    def positions(self, length: int) -> tuple[range, ...]:
        """Returns the positions of this rank's tokens in sequences of so many."""
        ...

    def gather(self, x: Tensor) -> Tensor:
        """Returns what all ranks have along the first dimension, sorted by position; differentiable."""
        ...


class OneRankKeys:
    """`KeysOfAllRanks` of one rank, which has them all."""

    num_ranks = 1

    def positions(self, length: int) -> tuple[range, ...]:
        return (range(length),)

    def gather(self, x: Tensor) -> Tensor:
        return x


def identity(x: Tensor) -> Tensor:
    return x
