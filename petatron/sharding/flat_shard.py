"""Stretches: consecutive elements in memory that one rank updates, seen as boxes of logical tensors.

However state is sharded, what a rank owns is a contiguous range of some parameters' elements: all of a flat buffer, its
part of each bucket of one (distributed optimizer), or its rows of a parameter (FSDP). A contiguous range of an
N-dimensional tensor is a handful of N-dimensional boxes:

    [..]     a piece of the first row
    [....]   whole rows
    [.]      a piece of the last row

so everything that asks by logical tensor (checkpoints, comparisons, norms) works on any sharding without a gather.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

from torch import Tensor

from petatron.mesh.mesh import Axis
from petatron.sharding.shard_spec import Piece, Placement, Shape


@dataclass(frozen=True, slots=True)
class Part:
    """Elements `begin` to `end` of one parameter, at `offset` of a stretch."""

    placement: Placement
    begin: int
    end: int
    offset: int


@dataclass(frozen=True, slots=True)
class Stretch:
    """Consecutive elements this rank updates; `share` is the range it speaks for when replicas of it exist."""

    length: int
    parts: tuple[Part, ...]
    share: tuple[int, int]

    def pieces(self, flat: Tensor, *, wanted: Callable[[Piece], bool] | None = None) -> Iterator[tuple[Piece, Tensor]]:
        """Every logical box inside the stretch, or those wanted, with its view into a tensor of the stretch's length."""
        for part in self.parts:
            pieces = part.placement.pieces if wanted is None else [*filter(wanted, part.placement.pieces)]
            if not pieces:
                continue
            for start, shape, skipped in range_boxes(part.placement.shape, part.begin, part.end):
                at = part.offset + skipped
                box = flat[at : at + math.prod(shape)].view(shape)
                for piece in pieces:
                    found = _meet(piece, start, shape)
                    if found is not None:
                        narrowed, inside = found
                        yield narrowed, box[inside]

    def spoken_for(self) -> list[tuple[int, int]]:
        """Ranges of the stretch whose elements this rank alone speaks for: primary pieces, no padding, in its share."""
        ranges = []
        for part in self.parts:
            for piece in part.placement.pieces:
                if piece.primary:
                    for begin, end in _piece_ranges(piece, part.placement.shape):
                        low, high = max(begin, part.begin), min(end, part.end)
                        shift = part.offset - part.begin
                        low, high = max(low + shift, self.share[0]), min(high + shift, self.share[1])
                        if low < high:
                            ranges.append((low, high))
        return _joined(ranges)


class ParameterGroup(Protocol):
    """Parameters with one update rule, as far as this rank updates them: one tensor per stretch of each quantity.

    `copies` is the axis over which other ranks own the same stretches.
    """

    @property
    def decay(self) -> bool: ...

    @property
    def stretches(self) -> Sequence[Stretch]: ...

    @property
    def copies(self) -> Axis: ...

    def weights(self) -> list[Tensor]:
        """The owned weights in the model's precision, as they lie in memory."""
        ...

    def grads(self) -> list[Tensor]:
        """The owned gradients, reduced over all ranks; in at least float32."""
        ...

    def agree(self) -> None:
        """Exchange what publishing needs to know and has to wait for."""
        ...

    def publish(self) -> None:
        """Make changed weights known to every rank that computes with them."""
        ...


def publish(groups: Sequence[ParameterGroup]) -> None:
    """Make all groups' changed weights known; nothing that is waited for stands behind weights under way."""
    for group in groups:
        group.agree()
    for group in groups:
        group.publish()


def share_of(length: int, axis: Axis) -> tuple[int, int]:
    """This rank's part of a range that every rank of an axis holds."""
    return length * axis.rank // axis.size, length * (axis.rank + 1) // axis.size


def group_pieces(
    group: ParameterGroup, tensors: Sequence[Tensor], *, wanted: Callable[[Piece], bool] | None = None
) -> Iterator[tuple[Piece, Tensor]]:
    """Every logical box, or those wanted, of a quantity given as one tensor per stretch."""
    for stretch, tensor in zip(group.stretches, tensors, strict=True):
        yield from stretch.pieces(tensor, wanted=wanted)


def range_boxes(shape: Shape, begin: int, end: int) -> Iterator[tuple[Shape, Shape, int]]:
    """The boxes (start, shape) that make up elements begin..end of a tensor, and how far into the range each begins.

    >>> list(range_boxes((4, 3), 2, 10))
    [((0, 2), (1, 1), 0), ((1, 0), (2, 3), 1), ((3, 0), (1, 1), 7)]
    """
    if begin >= end:
        return
    if not shape:
        yield (), (), 0
        return
    row = math.prod(shape[1:])
    at = begin
    while at < end:
        index, inside = divmod(at, row)
        if inside or end - at < row:
            stop = min(end, (index + 1) * row)
            for start, size, skipped in range_boxes(shape[1:], inside, stop - index * row):
                yield (index, *start), (1, *size), at - begin + skipped
        else:
            rows = (end - at) // row
            stop = at + rows * row
            yield (index, *(0 for _ in shape[1:])), (rows, *shape[1:]), at - begin
        at = stop


def _meet(piece: Piece, start: Shape, shape: Shape) -> tuple[Piece, tuple[slice, ...]] | None:
    """The part of a piece inside a box of the local parameter, and where it lies in that box."""
    low = tuple(map(max, piece.local_start, start))
    high = tuple(min(a + n, b + m) for a, n, b, m in zip(piece.local_start, piece.shape, start, shape))
    if any(a >= b for a, b in zip(low, high)):
        return None
    narrowed = replace(
        piece,
        start=tuple(at + a - b for at, a, b in zip(piece.start, low, piece.local_start)),
        shape=tuple(b - a for a, b in zip(low, high)),
        local_start=low,
    )
    return narrowed, tuple(slice(a - at, b - at) for a, b, at in zip(low, high, start))


def _piece_ranges(piece: Piece, shape: Shape) -> Iterator[tuple[int, int]]:
    """The contiguous ranges of a parameter's elements that a piece covers."""
    dim = len(shape)  # from here on the piece spans the whole parameter
    while dim > 0 and piece.shape[dim - 1] == shape[dim - 1]:
        dim -= 1
    inner = math.prod(shape[dim:])
    if dim == 0:
        yield 0, inner
        return
    last = dim - 1
    for index in range(math.prod(piece.shape[:last])):
        row = 0
        for d in range(last):
            step = math.prod(piece.shape[d + 1 : last])
            row = row * shape[d] + piece.local_start[d] + index // step % piece.shape[d]
        begin = (row * shape[last] + piece.local_start[last]) * inner
        yield begin, begin + piece.shape[last] * inner


def _joined(ranges: list[tuple[int, int]]) -> list[tuple[int, int]]:
    """Sorted, neighbours made one."""
    out: list[tuple[int, int]] = []
    for begin, end in sorted(ranges):
        if out and out[-1][1] == begin:
            out[-1] = (out[-1][0], end)
        else:
            out.append((begin, end))
    return out
