"""Contiguous ranges as boxes of logical tensors: nothing lost, nothing twice, whatever the cut."""

import itertools
import math

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from petatron.mesh.comm_record import CommRecord
from petatron.mesh.mesh import Axis
from petatron.sharding.flat_shard import FlatShard, ParamRange, range_boxes, rank_share
from petatron.sharding.shard_spec import ModelParallelCoordinate, Section, Shard, compute_placement

shapes = st.lists(st.integers(1, 5), min_size=0, max_size=4).map(tuple)


@settings(max_examples=200, deadline=None)
@given(shape=shapes, cuts=st.tuples(st.integers(0, 700), st.integers(0, 700)))
def test_boxes_are_the_range(shape: tuple[int, ...], cuts: tuple[int, int]):
    size = math.prod(shape)
    begin, end = sorted(min(cut, size) for cut in cuts)
    whole = torch.arange(size).view(shape)
    found, at = [], 0
    for start, box, skipped in range_boxes(shape, begin, end):
        assert skipped == at, "boxes come in the order of memory"
        at += math.prod(box)
        found += whole[tuple(slice(a, a + n) for a, n in zip(start, box))].flatten().tolist()
    assert found == list(range(begin, end))


def test_a_range_is_a_handful_of_boxes():
    assert len(list(range_boxes((64, 64, 64), 70, 200_001))) <= 2 * 3 - 1


EXPERTS = Shard(ep=0, tp=1, sections=(Section("gate", 6, 6), Section("up", 6, 6)))


@settings(max_examples=100, deadline=None)
@given(cut=st.lists(st.integers(0, 200), max_size=4), tp=st.sampled_from([1, 2]), ep=st.sampled_from([1, 2]))
def test_pieces_of_all_flat_shards_and_ranks_tile_the_logical_tensors(cut: list[int], tp: int, ep: int):
    """A stack of 4 experts' fused matrices, split over ep and etp, each part cut again at arbitrary elements."""
    gate, up = torch.full((4, 6, 3), -1.0), torch.full((4, 6, 3), -1.0)
    for ep_rank in range(ep):
        for etp_rank in range(tp):
            split = ModelParallelCoordinate(ep_size=ep, ep_rank=ep_rank, etp_size=tp, etp_rank=etp_rank)
            placement = compute_placement("layers.0.mlp.experts.gate_up.weight", (4, 12, 3), EXPERTS, split)
            size = math.prod(placement.shape)
            bounds = sorted({0, size, *(c for c in cut if c < size)})
            for begin, end in itertools.pairwise(bounds):
                shard = FlatShard(end - begin, (ParamRange(placement, begin, end, 0),), (0, end - begin))
                values = torch.arange(begin, end, dtype=torch.float32)
                for piece, view in shard.tensor_shards(values):
                    target = {"gate": gate, "up": up}[piece.name.split(".")[-2]][piece.logical_slices()]
                    assert (target == -1.0).all(), "no element twice"
                    target.copy_(view)
                    assert view.shape == piece.shape
    assert (gate >= 0).all() and (up >= 0).all(), "no element missing"


def test_primary_ranges_leave_out_replicas_padding_and_other_ranks_shares():
    vocabulary = Shard(tp=0, pad_to=4)
    placement = compute_placement("embedding.weight", (6, 2), vocabulary, ModelParallelCoordinate(tp_size=2, tp_rank=1))
    assert placement.shape == (4, 2)
    whole = FlatShard(8, (ParamRange(placement, 0, 8, 0),), (0, 8))
    assert whole.primary_ranges() == [(0, 4)], "rows 4 and 5 are real, two rows are padding"
    assert FlatShard(8, (ParamRange(placement, 0, 8, 0),), (3, 8)).primary_ranges() == [(3, 4)]
    norm = compute_placement(
        "norm.weight", (3,), Shard(partial_grad="sequence"), ModelParallelCoordinate(tp_size=2, tp_rank=1)
    )
    assert FlatShard(3, (ParamRange(norm, 0, 3, 0),), (0, 3)).primary_ranges() == [], "rank 0 has the primary replica"


def test_neighboring_parameters_are_one_range():
    placement = compute_placement("a.weight", (2, 3), Shard(), ModelParallelCoordinate())
    shard = FlatShard(12, (ParamRange(placement, 0, 6, 0), ParamRange(placement, 0, 6, 6)), (0, 12))
    assert shard.primary_ranges() == [(0, 12)]


@given(length=st.integers(0, 1000), size=st.integers(1, 9))
def test_shares_of_all_ranks_are_the_whole(length: int, size: int):
    shares = [
        rank_share(length, Axis("dp", size, rank, tuple(range(size)), None, CommRecord())) for rank in range(size)
    ]
    assert [begin for begin, _ in shares] == [0, *[end for _, end in shares[:-1]]] and shares[-1][1] == length
