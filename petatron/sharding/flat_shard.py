"""Flat shards: consecutive elements in memory that one rank updates, seen as boxes of logical tensors.

However state is sharded, what a rank owns is a contiguous range of some parameters' elements: all of a flat buffer, its
part of each bucket of one (distributed optimizer), or its rows of a parameter (FSDP). A contiguous range of an
N-dimensional tensor is a handful of N-dimensional boxes:

    [..]     a part of the first row
    [....]   whole rows
    [.]      a part of the last row

so everything that works by logical tensor (checkpoints, comparisons, norms) works on any sharding without a gather.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

from torch import Tensor

from petatron.mesh.mesh import Axis
from petatron.sharding.optimizer_group_spec import GroupSpec
from petatron.sharding.shard_spec import Placement, Shape, TensorShard

ALIGNMENT = 64
"""Shards start at multiples of this many elements: vector loads, and the widest message units of NCCL."""


@dataclass(frozen=True, slots=True)
class ParamRange:
    """Elements `begin` to `end` of one parameter, at `offset` of a flat shard."""

    placement: Placement
    begin: int
    end: int
    offset: int


@dataclass(frozen=True, slots=True)
class OwnedRange:
    """Elements `begin` to `end` of a parameter, owned by rank `rank` of the axis that shards optimizer state."""

    rank: int
    begin: int
    end: int


@dataclass(frozen=True, slots=True)
class FlatShard:
    """Consecutive elements this rank updates; `replica_share` is the range it is primary for when replicas of it exist."""

    length: int
    param_ranges: tuple[ParamRange, ...]
    replica_share: tuple[int, int]

    def tensor_shards(
        self, flat: Tensor, *, wanted: Callable[[TensorShard], bool] | None = None
    ) -> Iterator[tuple[TensorShard, Tensor]]:
        """Yields every logical box inside the flat shard, or those wanted, with its view into a tensor of the same length."""
        for part in self.param_ranges:
            pieces = part.placement.tensor_shards if wanted is None else [*filter(wanted, part.placement.tensor_shards)]
            if not pieces:
                continue
            for start, shape, skipped in range_boxes(part.placement.shape, part.begin, part.end):
                at = part.offset + skipped
                box = flat[at : at + math.prod(shape)].view(shape)
                for piece in pieces:
                    common = _intersect(piece, start, shape)
                    if common is not None:
                        yield common[0], box[common[1]]

    def primary_ranges(self) -> list[tuple[int, int]]:
        """Returns the ranges of the flat shard that this rank is primary for: primary shards, no padding, in its share."""
        ranges = []
        for part in self.param_ranges:
            for piece in part.placement.tensor_shards:
                if piece.primary:
                    for begin, end in element_ranges(piece, part.placement.shape):
                        low, high = max(begin, part.begin), min(end, part.end)
                        shift = part.offset - part.begin
                        low, high = max(low + shift, self.replica_share[0]), min(high + shift, self.replica_share[1])
                        if low < high:
                            ranges.append((low, high))
        return _merge_adjacent(ranges)

    def trained_ranges(self, frozen: Collection[int]) -> list[tuple[int, int]]:
        """Returns the ranges of parameters that are trained; `frozen` are the identities of the other parameters' placements."""
        parts = (part for part in self.param_ranges if id(part.placement) not in frozen)
        return _merge_adjacent([(part.offset, part.offset + part.end - part.begin) for part in parts])


class ParameterGroup(Protocol):
    """Parameters with one update rule, as far as this rank updates them: one tensor per flat shard of each quantity.

    `replica_axis` is the axis over which other ranks own the same flat shards.
    """

    @property
    def spec(self) -> GroupSpec: ...

    @property
    def flat_shards(self) -> Sequence[FlatShard]: ...

    @property
    def replica_axis(self) -> Axis: ...

    @property
    def placements(self) -> Sequence[Placement]:
        """Returns those of all its parameters, also of those that other ranks own."""
        ...

    def frozen(self) -> list[Placement]:
        """Returns those of parameters that require no gradient now: no update changes them, nor their state."""
        ...

    def shard_axis(self, placement: Placement) -> Axis:
        """Returns the ranks that shard the optimizer state of a parameter."""
        ...

    def owned_ranges(self, placement: Placement) -> Sequence[OwnedRange]:
        """Returns which elements of a parameter each rank of `shard_axis` owns, in the order of ranks."""
        ...

    def weights(self) -> list[Tensor]:
        """Returns the owned weights in the model's precision, in memory order."""
        ...

    def grads(self) -> list[Tensor]:
        """Returns the owned gradients, reduced over all ranks; in at least float32."""
        ...

    def sync_fp8_scales(self) -> None:
        """Reduces the scales of weights that are all-gathered in FP8."""

    def all_gather_params(self) -> None:
        """All-gathers updated weights on every rank that computes with them."""


def all_gather_params(param_groups: Sequence[ParameterGroup]) -> None:
    """All-gathers all groups' updated weights; scales are reduced first, so that no small exchange waits behind a gather."""
    for group in param_groups:
        group.sync_fp8_scales()
    for group in param_groups:
        group.all_gather_params()


def rank_share(length: int, axis: Axis) -> tuple[int, int]:
    """Returns this rank's part of a range that every rank of an axis holds."""
    return length * axis.rank // axis.size, length * (axis.rank + 1) // axis.size


def group_tensor_shards(
    group: ParameterGroup, tensors: Sequence[Tensor], *, wanted: Callable[[TensorShard], bool] | None = None
) -> Iterator[tuple[TensorShard, Tensor]]:
    """Yields every logical box, or those wanted, of a quantity given as one tensor per flat shard."""
    for flat_shard, tensor in zip(group.flat_shards, tensors, strict=True):
        yield from flat_shard.tensor_shards(tensor, wanted=wanted)


def range_boxes(shape: Shape, begin: int, end: int) -> Iterator[tuple[Shape, Shape, int]]:
    """Yields the boxes (start, shape) that make up elements begin..end of a tensor, and the offset of each in the range.

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


def _intersect(shard: TensorShard, start: Shape, shape: Shape) -> tuple[TensorShard, tuple[slice, ...]] | None:
    """Returns the part of a shard inside a box of the local parameter, and its slices in that box."""
    low = tuple(map(max, shard.local_start, start))
    high = tuple(min(a + n, b + m) for a, n, b, m in zip(shard.local_start, shard.shape, start, shape))
    if any(a >= b for a, b in zip(low, high)):
        return None
    narrowed = replace(
        shard,
        start=tuple(at + a - b for at, a, b in zip(shard.start, low, shard.local_start)),
        shape=tuple(b - a for a, b in zip(low, high)),
        local_start=low,
    )
    return narrowed, tuple(slice(a - at, b - at) for a, b, at in zip(low, high, start))


def element_ranges(shard: TensorShard, shape: Shape) -> Iterator[tuple[int, int]]:
    """Yields the contiguous ranges of a parameter's elements that a shard covers."""
    dim = len(shape)  # from here on the shard spans the whole parameter
    while dim > 0 and shard.shape[dim - 1] == shape[dim - 1]:
        dim -= 1
    inner = math.prod(shape[dim:])
    if dim == 0:
        yield 0, inner
        return
    last = dim - 1
    for index in range(math.prod(shard.shape[:last])):
        row = 0
        for d in range(last):
            step = math.prod(shard.shape[d + 1 : last])
            row = row * shape[d] + shard.local_start[d] + index // step % shard.shape[d]
        begin = (row * shape[last] + shard.local_start[last]) * inner
        yield begin, begin + shard.shape[last] * inner


def _merge_adjacent(ranges: list[tuple[int, int]]) -> list[tuple[int, int]]:
    """Returns the ranges sorted, adjacent ones merged."""
    out: list[tuple[int, int]] = []
    for begin, end in sorted(ranges):
        if out and out[-1][1] == begin:
            out[-1] = (out[-1][0], end)
        else:
            out.append((begin, end))
    return out


def assign_whole_blocks(sizes: Sequence[int], num_shards: int) -> tuple[list[int], int]:
    """Returns where each block starts, so that none crosses shards of the bucket, and the bucket's length.

    >>> assign_whole_blocks([64, 128, 64], 2)
    ([128, 0, 192], 256)
    """
    filled, places = [(0, part) for part in range(num_shards)], [(0, 0)] * len(sizes)
    for index in sorted(range(len(sizes)), key=lambda at: -sizes[at]):
        least, part = filled[0]
        places[index] = part, least
        heapq.heapreplace(filled, (least + sizes[index], part))
    length = -(-max(filled)[0] // ALIGNMENT) * ALIGNMENT
    return [part * length + offset for part, offset in places], num_shards * length
