"""Box arithmetic against arrays of marks."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from petatron.sharding.boxes import Box, overlap, tiling_problem


@st.composite
def boxes_in(draw, shape: tuple[int, ...]) -> Box:
    start, size = [], []
    for whole in shape:
        at = draw(st.integers(0, whole))
        start.append(at)
        size.append(draw(st.integers(0, whole - at)))
    return Box(tuple(start), tuple(size))


@st.composite
def two_boxes(draw):
    shape = tuple(draw(st.lists(st.integers(1, 6), min_size=0, max_size=3)))
    return shape, draw(boxes_in(shape)), draw(boxes_in(shape))


@st.composite
def tilings(draw):
    """A shape and boxes that tile it: the whole, cut again and again."""
    shape = tuple(draw(st.lists(st.integers(1, 8), min_size=1, max_size=3)))
    boxes = [Box((0,) * len(shape), shape)]
    for _ in range(draw(st.integers(0, 8))):
        box = boxes.pop(draw(st.integers(0, len(boxes) - 1)))
        dim = draw(st.integers(0, len(shape) - 1))
        cut = draw(st.integers(0, box.shape[dim]))
        first = tuple(cut if d == dim else n for d, n in enumerate(box.shape))
        rest = tuple(box.shape[dim] - cut if d == dim else n for d, n in enumerate(box.shape))
        moved = tuple(at + cut if d == dim else at for d, at in enumerate(box.start))
        boxes += [part for part in (Box(box.start, first), Box(moved, rest)) if part.volume]
    return shape, draw(st.permutations(boxes))


def marks(shape, box: Box) -> np.ndarray:
    array = np.zeros(shape, dtype=bool)
    array[box.slices_in(Box((0,) * len(shape), shape))] = True
    return array


@settings(max_examples=150, deadline=None)
@given(two_boxes())
def test_overlap_is_the_common_elements(case):
    shape, a, b = case
    common = overlap(a, b)
    both = marks(shape, a) & marks(shape, b)
    assert overlap(b, a) == common
    if common is None:
        assert not both.any()
    else:
        assert np.array_equal(marks(shape, common), both)


@settings(max_examples=100, deadline=None)
@given(two_boxes())
def test_slices_pick_the_same_elements_from_either_side(case):
    shape, a, b = case
    whole = np.arange(int(np.prod(shape))).reshape(shape)
    origin = Box((0,) * len(shape), shape)
    common = overlap(a, b)
    if common is not None:
        in_a, in_b = whole[a.slices_in(origin)], whole[b.slices_in(origin)]
        assert np.array_equal(in_a[common.slices_in(a)], in_b[common.slices_in(b)])


@settings(max_examples=100, deadline=None)
@given(tilings(), st.data())
def test_tilings_are_accepted_and_any_change_is_not(case, data):
    shape, boxes = case
    assert tiling_problem(shape, boxes) is None
    chosen = data.draw(st.integers(0, len(boxes) - 1))
    without = [box for at, box in enumerate(boxes) if at != chosen]
    assert "elements are missing" in str(tiling_problem(shape, without))
    assert "is there twice" in str(tiling_problem(shape, [*boxes, boxes[chosen]]))
    # One box lost and another doubled: the volume may be right, the tiling is not.
    if without:
        assert tiling_problem(shape, [*without, without[0]]) is not None


def test_scalars_and_strays():
    scalar = Box((), ())
    assert scalar.volume == 1 and overlap(scalar, scalar) == scalar
    assert tiling_problem((), [scalar]) is None
    assert "twice" in str(tiling_problem((), [scalar, scalar]))
    assert "missing" in str(tiling_problem((), []))
    assert "outside" in str(tiling_problem((4,), [Box((2,), (4,))]))
    assert "outside" in str(tiling_problem((4,), [Box((0, 0), (4, 1))]))


def test_many_shards_are_checked_quickly():
    boxes = [Box((0, at), (64, 1)) for at in range(20_000)]  # comparing all pairs would take minutes
    assert tiling_problem((64, 20_000), boxes) is None


def test_start_and_shape_have_the_same_length():
    with pytest.raises(AssertionError, match="differ in length"):
        Box((0,), (1, 2))
