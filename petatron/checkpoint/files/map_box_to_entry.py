"""Maps boxes of logical tensors to the layout of file entries: fewer leading dimensions, maybe transposed, maybe interleaved.

An entry may have more trailing dimensions than the boxes refer to: these are one (the weights of a convolution, as a matrix).

Where `count` tensors alternate along a dimension of an entry, `interleaved` is (dimension, count), and the entry is addressed as if that
dimension were two, [size / count, count].
"""

from __future__ import annotations

import math
from typing import Protocol

from torch import Tensor

from petatron.sharding.boxes import Box
from petatron.sharding.shard_spec import Shape


class EntryPlace(Protocol):
    """Where a box of a logical tensor is in an entry: `StoredBox`, `EntryRegion`."""

    @property
    def start_in_entry(self) -> Shape: ...
    @property
    def transposed(self) -> bool: ...
    @property
    def interleaved(self) -> Shape: ...


def addressed_shape(shape: Shape, place: EntryPlace) -> Shape:
    """Returns the dimensions that a box of an entry refers to; its own if it cannot be interleaved so.

    >>> from petatron.models.hf.folder_entries import EntryRegion
    >>> addressed_shape((4, 6), EntryRegion("w", (0, 0), (4, 3), (0, 0, 0), interleaved=(1, 2)))
    (4, 3, 2)
    >>> addressed_shape((4, 6, 2, 2), EntryRegion("w", (0, 0), (4, 24), (0, 0)))
    (4, 24)
    """
    interleaved, dims = place.interleaved, len(place.start_in_entry)
    if not interleaved and len(shape) > dims > 0:
        return (*shape[: dims - 1], math.prod(shape[dims - 1 :]))
    if not interleaved or len(shape) <= interleaved[0] or shape[interleaved[0]] % interleaved[1]:
        return shape
    dim, count = interleaved
    return (*shape[:dim], shape[dim] // count, count, *shape[dim + 1 :])


def to_entry_layout(values: Tensor, num_dims: int, place: EntryPlace) -> Tensor:
    """Views a box's values with the addressed dimensions of an entry of `num_dims`; those it lacks are leading ones of size 1."""
    for _ in range(values.dim() - num_dims):
        values = values.squeeze(0)
    values = values.transpose(-1, -2) if place.transposed else values
    return values.unsqueeze(place.interleaved[0] + 1) if place.interleaved else values


def entry_box(box: Box, stored_start: Shape, place: EntryPlace) -> Box:
    """Maps a sub-box to coordinates of an entry that stores the box beginning at `stored_start` from `start_in_entry` on.

    >>> from petatron.models.hf.folder_entries import EntryRegion
    >>> region = EntryRegion("w", (2, 0, 0), (1, 2, 3), start_in_entry=(0, 8), transposed=True)
    >>> entry_box(Box((2, 1, 0), (1, 2, 3)), region.start, region)
    Box(start=(0, 9), shape=(3, 2))
    """
    dropped = len(box.shape) - len(place.start_in_entry) + bool(place.interleaved)
    inner = [a - b for a, b in zip(box.start[dropped:], stored_start[dropped:])]
    shape = list(box.shape[dropped:])
    if place.transposed:
        inner[-2:], shape[-2:] = inner[:-3:-1], shape[:-3:-1]
    if place.interleaved:
        inner.insert(place.interleaved[0] + 1, 0)
        shape.insert(place.interleaved[0] + 1, 1)
    return Box(tuple(base + offset for base, offset in zip(place.start_in_entry, inner)), tuple(shape))
