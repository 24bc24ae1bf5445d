"""Cutting stretches into segments: nothing is lost, nothing twice, and logical boxes stay where they are."""

from __future__ import annotations

from itertools import pairwise

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from petatron.optim.state_segments import plan_ranges, slice_flat_shard
from petatron.sharding.flat_shard import FlatShard, ParamRange
from petatron.sharding.shard_spec import ModelParallelCoordinate, Shard, compute_placement


@settings(max_examples=60, deadline=None)
@given(st.lists(st.integers(0, 700), min_size=1, max_size=5), st.floats(0, 1), st.sampled_from([64, 128, 1024]))
def test_ranges_cover_every_element_once(lengths: list[int], fraction: float, chunk: int):
    ranges = list(plan_ranges(lengths, fraction, chunk))
    seen = [(one.flat_shard_index, at) for one in ranges for at in range(one.begin, one.end)]
    assert seen == [(index, at) for index, length in enumerate(lengths) for at in range(length)]
    away = [one for one in ranges if one.offloaded]
    assert all(one.length <= chunk and one.begin % 64 == 0 for one in away)
    assert ranges[: len(away)] == away or not away, "what is offloaded comes first"
    assert 0 <= round(fraction * sum(lengths)) - sum(one.length for one in away) < 64


def test_nothing_or_everything():
    assert not any(one.offloaded for one in plan_ranges([100, 7], 0.0))
    assert all(one.offloaded for one in plan_ranges([100, 7], 1.0))


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_the_boxes_of_the_cuts_are_those_of_the_whole(data: st.DataObject):
    shapes = [(3, 4), (5,), (2, 3, 2)]
    parts, at = [], 0
    for number, shape in enumerate(shapes):
        placement = compute_placement(str(number), shape, Shard(), ModelParallelCoordinate())
        size = int(torch.tensor(shape).prod())
        parts.append(ParamRange(placement, 0, size, at))
        at += size + number  # padding between some of them
    stretch = FlatShard(at, tuple(parts), (3, at - 2))
    bounds = sorted({0, at, *data.draw(st.lists(st.integers(0, at), max_size=3))})
    flat = torch.arange(at)

    def elements(stretch: FlatShard, flat: torch.Tensor) -> dict[tuple, int]:
        found = {}
        for piece, view in stretch.tensor_shards(flat):
            for inside in torch.ones(view.shape).nonzero().tolist():
                key = (piece.name, *(a + b for a, b in zip(piece.start, inside)))
                assert key not in found
                found[key] = int(view[tuple(inside)])
        return found

    together, spoken = {}, []
    for begin, end in pairwise(bounds):
        one = slice_flat_shard(stretch, begin, end)
        assert one.length == end - begin
        together |= elements(one, flat[begin:end])
        spoken += [place + begin for low, high in one.primary_ranges() for place in range(low, high)]
    assert together == elements(stretch, flat)
    assert spoken == [place for low, high in stretch.primary_ranges() for place in range(low, high)]
