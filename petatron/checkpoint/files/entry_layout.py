"""Maps boxes of logical tensors to the layout of file entries: fewer leading dimensions, maybe transposed."""

from __future__ import annotations

from torch import Tensor

from petatron.sharding.boxes import Box
from petatron.sharding.shard_spec import Shape


def to_entry_layout(values: Tensor, num_dims: int, *, transposed: bool) -> Tensor:
    """Views a box's values with the entry's dimensions; those it lacks are leading ones of size 1."""
    for _ in range(values.dim() - num_dims):
        values = values.squeeze(0)
    return values.transpose(-1, -2) if transposed else values


def entry_box(box: Box, stored_start: Shape, start_in_entry: Shape, *, transposed: bool) -> Box:
    """Maps a sub-box to coordinates of an entry that stores the box beginning at `stored_start` from `start_in_entry` on.

    >>> entry_box(Box((2, 1, 0), (1, 2, 3)), stored_start=(2, 0, 0), start_in_entry=(0, 8), transposed=True)
    Box(start=(0, 9), shape=(3, 2))
    """
    dropped = len(box.shape) - len(start_in_entry)
    inner = [a - b for a, b in zip(box.start[dropped:], stored_start[dropped:])]
    shape = list(box.shape[dropped:])
    if transposed:
        inner[-2:], shape[-2:] = inner[:-3:-1], shape[:-3:-1]
    return Box(tuple(base + offset for base, offset in zip(start_in_entry, inner)), tuple(shape))
