"""Segments of optimizer state for offload: the parts of a rank's flat shards whose state is in one storage.

Without offload a flat shard is one segment. With offload the first part of all elements is cut into short segments, which are stored
in host memory or on disk and swapped to the device one after the other; the rest stays on the device, one segment per flat shard. A
segment is again a flat shard (`sharding/flat_shard.py`), so checkpoints and norms do not depend on offload.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from torch import Tensor

from petatron.sharding.flat_shard import FlatShard, ParameterGroup

CHUNK_ELEMENTS = 1 << 23
"""Elements of an offloaded segment: 32 MiB of float32. A transfer of that takes far longer than it takes to start it, and page-
locked memory, which torch hands out in powers of two, has no waste."""
_ALIGNMENT = 64  # elements; segments begin where vector loads of any dtype may


@dataclass(frozen=True, slots=True)
class SegmentRange:
    """Elements `begin` to `end` of the flat shard of index `flat_shard_index`."""

    flat_shard_index: int
    begin: int
    end: int
    offloaded: bool

    @property
    def length(self) -> int:
        return self.end - self.begin


@dataclass(frozen=True, slots=True)
class StateSegment:
    """A range with its state; `state` is the moments in the rule's order, after the master weights where these are separate.

    start: the index of its first element among the group's elements on this rank.
    """

    range: SegmentRange
    group: ParameterGroup
    flat_shard: FlatShard
    master: Tensor
    moments: tuple[Tensor, ...]
    has_master_weights: bool
    start: int

    @property
    def state(self) -> tuple[Tensor, ...]:
        return (self.master, *self.moments) if self.has_master_weights else self.moments

    def slice_of(self, tensors: Sequence[Tensor]) -> Tensor:
        """Returns its elements of a quantity given as one tensor per flat shard."""
        return tensors[self.range.flat_shard_index][self.range.begin : self.range.end]


def plan_ranges(lengths: Sequence[int], fraction: float, chunk: int = CHUNK_ELEMENTS) -> Iterator[SegmentRange]:
    """Cuts flat shards of these lengths so that the first `fraction` of all elements is offloaded, `chunk` at a time.

    >>> [(r.flat_shard_index, r.begin, r.end, r.offloaded) for r in plan_ranges([100, 900], 0.5, chunk=256)]
    [(0, 0, 100, True), (1, 0, 256, True), (1, 256, 384, True), (1, 384, 900, False)]
    """
    budget = round(fraction * sum(lengths))
    for index, length in enumerate(lengths):
        away = length if budget >= length else budget - budget % _ALIGNMENT
        budget = budget - away if away == length else 0
        for begin in range(0, away, chunk):
            yield SegmentRange(index, begin, min(begin + chunk, away), True)
        if away < length:
            yield SegmentRange(index, away, length, False)


def slice_flat_shard(flat_shard: FlatShard, begin: int, end: int) -> FlatShard:
    """Returns elements `begin` to `end` of a flat shard as a flat shard."""
    if (begin, end) == (0, flat_shard.length):
        return flat_shard
    parts = []
    for part in flat_shard.param_ranges:
        low, high = max(part.offset, begin), min(part.offset + part.end - part.begin, end)
        if low < high:
            shift = part.begin - part.offset
            parts.append(replace(part, begin=low + shift, end=high + shift, offset=low - begin))
    first, last = (min(max(bound, begin), end) - begin for bound in flat_shard.replica_share)
    return FlatShard(end - begin, tuple(parts), (first, last))
