"""Boxes (rectangular regions) of a logical tensor: where two overlap, and whether a set of them tiles the whole.

A box is a start and a shape. What a rank saves and what another rank loads are boxes of the same logical tensor, and any
layout can load from any other because the only question ever asked is where two boxes overlap.
"""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

Shape = tuple[int, ...]
_MAX_SPLIT_DIMS = 8
_MAX_COMPARED_BOXES = 1000


@dataclass(frozen=True, slots=True)
class Box:
    """A block of a logical tensor; a scalar is the box with no dimensions and volume 1."""

    start: Shape
    shape: Shape

    def __post_init__(self) -> None:
        assert len(self.start) == len(self.shape), f"box start {self.start} and shape {self.shape} differ in length"

    @property
    def stop(self) -> Shape:
        return tuple(at + size for at, size in zip(self.start, self.shape))

    @property
    def volume(self) -> int:
        return math.prod(self.shape)

    def slices(self) -> tuple[slice, ...]:
        """Returns the slices of this box in the whole tensor."""
        return tuple(slice(at, at + size) for at, size in zip(self.start, self.shape))

    def slices_in(self, outer: Box) -> tuple[slice, ...]:
        """Returns the slices of this box in a tensor that holds the outer box.

        >>> Box((4, 2), (2, 3)).slices_in(Box((4, 0), (8, 8)))
        (slice(0, 2, None), slice(2, 5, None))
        """
        return tuple(slice(at - base, at - base + size) for at, base, size in zip(self.start, outer.start, self.shape))


def overlap(a: Box, b: Box) -> Box | None:
    """Returns the box that two boxes have in common, or None.

    >>> overlap(Box((0, 0), (4, 4)), Box((2, 3), (4, 4)))
    Box(start=(2, 3), shape=(2, 1))
    """
    start = tuple(map(max, a.start, b.start))
    shape = tuple(end - at for end, at in zip(map(min, a.stop, b.stop), start))
    return None if any(size <= 0 for size in shape) else Box(start, shape)


def tiling_problem(logical_shape: Shape, boxes: Sequence[Box]) -> str | None:
    """Returns why these boxes do not hold every element of a tensor exactly once; None when they do."""
    tensor = Box((0,) * len(logical_shape), logical_shape)
    for box in boxes:
        if len(box.shape) != len(logical_shape) or (box.volume and overlap(box, tensor) != box):
            return f"the box at {list(box.start)} of shape {list(box.shape)} reaches outside {list(logical_shape)}"
    held = sum(box.volume for box in boxes)
    if held == tensor.volume and _covers_exactly_once(logical_shape, boxes):
        return None
    twice = _find_overlapping_pair(boxes) if len(boxes) <= _MAX_COMPARED_BOXES else None
    if twice is not None:
        return f"the box at {list(twice.start)} of shape {list(twice.shape)} is there twice"
    if held >= tensor.volume:
        return "some of its elements are there twice"
    return f"{tensor.volume - held} of {tensor.volume} elements are missing"


def _covers_exactly_once(logical_shape: Shape, boxes: Sequence[Box]) -> bool:
    """Whether boxes inside a tensor hold every element once, in time linear in their number, whoever chose them.

    Corners of a box with alternating signs (+ at the start and - at the stop of each dimension) are the differences of the function
    that is 1 in it, and differences determine a function that ends somewhere. So the function that counts how often an
    element is held is 1 everywhere exactly if all corners but those of the whole cancel out.
    """
    kept = [box for box in boxes if box.volume]
    cut = [
        dim
        for dim, size in enumerate(logical_shape)
        if any(box.start[dim] != 0 or box.shape[dim] != size for box in kept)
    ]
    if not cut or len(cut) > _MAX_SPLIT_DIMS:
        return len(kept) <= 1
    # Coordinates along a dimension are indexed, and a corner is one integer: unlike hashes of tuples, these cannot be made to collide.
    kept.append(Box((0,) * len(logical_shape), logical_shape))
    bounds = [sorted({end for box in kept for end in (box.start[d], box.start[d] + box.shape[d])}) for d in cut]
    numbers = [{place: number for number, place in enumerate(places)} for places in bounds]
    corners: dict[int, int] = {}
    for at, box in enumerate(kept):
        signed = [(0, -1 if at == len(kept) - 1 else 1)]
        for dim, number in zip(cut, numbers):
            first, last = number[box.start[dim]], number[box.start[dim] + box.shape[dim]]
            signed = [
                place
                for base, sign in signed
                for place in ((base * len(number) + first, sign), (base * len(number) + last, -sign))
            ]
        for corner, sign in signed:
            corners[corner] = corners.get(corner, 0) + sign
    return not any(corners.values())


def _find_overlapping_pair(boxes: Sequence[Box]) -> Box | None:
    """Returns some box that two of these have in common.

    Sweeps along the dimension with the most distinct starts, so that the usual splits (one cut dimension) compare only
    neighbors and a thousand shards do not cost a million comparisons.
    """
    if not boxes or not boxes[0].shape:
        return boxes[0] if len(boxes) > 1 else None
    dim = max(range(len(boxes[0].shape)), key=lambda d: len({box.start[d] for box in boxes}))
    open_boxes: list[Box] = []
    for box in sorted(boxes, key=lambda box: box.start[dim]):
        open_boxes = [other for other in open_boxes if other.stop[dim] > box.start[dim]]
        for other in open_boxes:
            if (common := overlap(box, other)) is not None:
                return common
        open_boxes.append(box)
    return None


class BoxIndex:
    """Finds which of many boxes overlap another one without asking each of them.

    >>> BoxIndex([Box((row, 0), (1, 4)) for row in range(100)]).overlaps(Box((41, 1), (2, 2)))
    [(41, Box(start=(41, 1), shape=(1, 2))), (42, Box(start=(42, 1), shape=(1, 2)))]
    """

    def __init__(self, boxes: Sequence[Box]) -> None:
        self._boxes = boxes
        dims = range(len(boxes[0].shape)) if len(boxes) > 1 else ()
        self._dim = max(dims, key=lambda d: len({box.start[d] for box in boxes}), default=None)
        self._order = list(range(len(boxes)))
        if self._dim is not None:
            dim = self._dim
            self._order.sort(key=lambda n: boxes[n].start[dim])
            self._starts = [boxes[n].start[dim] for n in self._order]
            self._furthest = list(accumulate((boxes[n].stop[dim] for n in self._order), max))

    def overlaps(self, box: Box) -> list[tuple[int, Box]]:
        """Returns the indices of the boxes that overlap this one, in their order, and the box in common."""
        numbers = self._order
        if self._dim is not None:
            first = bisect_right(self._furthest, box.start[self._dim])
            numbers = sorted(numbers[first : bisect_left(self._starts, box.stop[self._dim])])
        overlaps = ((number, overlap(self._boxes[number], box)) for number in numbers)
        return [(number, common) for number, common in overlaps if common is not None]
