"""The zigzag order of a sequence over context-parallel ranks (or contiguous), and back to the natural order."""

from __future__ import annotations

import torch
from torch import Tensor

from petatron.models.stage_inputs_outputs import SequenceOrder


def positions_of(order: SequenceOrder, rank: int, size: int, length: int) -> tuple[range, ...]:
    """Returns the positions of a rank's tokens."""
    return (zigzag_positions if order == "zigzag" else contiguous_positions)(rank, size, length)


def zigzag_positions(rank: int, size: int, length: int) -> tuple[range, ...]:
    """Returns the positions of a rank's tokens: an early chunk and its mirror image, or all of them if there is one rank.

    >>> zigzag_positions(1, 4, 16)
    (range(2, 4), range(12, 14))
    """
    if size == 1:
        return (range(length),)
    assert length % (2 * size) == 0, f"{length} tokens cannot be cut into 2 x {size} chunks"
    chunk = length // (2 * size)
    early, late = rank * chunk, (2 * size - 1 - rank) * chunk
    return range(early, early + chunk), range(late, late + chunk)


def contiguous_positions(rank: int, size: int, length: int) -> tuple[range, ...]:
    """Returns the positions of a rank's tokens where each rank has one part, in order: what a scan over the sequence needs.

    >>> contiguous_positions(1, 4, 16)
    (range(4, 8),)
    """
    assert length % size == 0, f"{length} tokens cannot be cut into {size} parts"
    part = length // size
    return (range(rank * part, (rank + 1) * part),)


def sorted_by_position(x: Tensor, ranks: int, *, order: SequenceOrder = "zigzag") -> Tensor:
    """Sorts the concatenated rows of adjacent ranks by position: early chunks ascend with the rank, late ones descend."""
    if ranks == 1 or order == "contiguous":
        return x
    early, late = x.unflatten(0, (ranks, 2, -1)).unbind(1)
    return torch.cat((early, late.flip(0))).flatten(0, 1)


def sorted_by_rank(x: Tensor, ranks: int, *, order: SequenceOrder = "zigzag") -> Tensor:
    """Inverts `sorted_by_position`."""
    if ranks == 1 or order == "contiguous":
        return x
    early, late = x.unflatten(0, (2, ranks, -1)).unbind(0)
    return torch.stack((early, late.flip(0)), dim=1).flatten(0, 2)
