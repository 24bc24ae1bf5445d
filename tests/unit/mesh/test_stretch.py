"""Contiguous ranges as boxes of logical tensors: nothing lost, nothing twice, whatever the cut."""

import itertools
import math

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from petatron.mesh.comm_record import Record
from petatron.mesh.mesh import Axis
from petatron.sharding.flat_shard import Part, Stretch, range_boxes, share_of
from petatron.sharding.shard_spec import Section, Shard, TensorSplit, place

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
def test_pieces_of_all_stretches_and_ranks_tile_the_logical_tensors(cut: list[int], tp: int, ep: int):
    """A stack of 4 experts' fused matrices, split over ep and etp, each part cut again at arbitrary elements."""
    gate, up = torch.full((4, 6, 3), -1.0), torch.full((4, 6, 3), -1.0)
    for ep_rank in range(ep):
        for etp_rank in range(tp):
            split = TensorSplit(ep_size=ep, ep_rank=ep_rank, etp_size=tp, etp_rank=etp_rank)
            placement = place("layers.0.mlp.experts.gate_up.weight", (4, 12, 3), EXPERTS, split)
            size = math.prod(placement.shape)
            bounds = sorted({0, size, *(c for c in cut if c < size)})
            for begin, end in itertools.pairwise(bounds):
                stretch = Stretch(end - begin, (Part(placement, begin, end, 0),), (0, end - begin))
                values = torch.arange(begin, end, dtype=torch.float32)
                for piece, view in stretch.pieces(values):
                    target = {"gate": gate, "up": up}[piece.name.split(".")[-2]][piece.logical_slices()]
                    assert (target == -1.0).all(), "no element twice"
                    target.copy_(view)
                    assert view.shape == piece.shape
    assert (gate >= 0).all() and (up >= 0).all(), "no element missing"


def test_spoken_for_leaves_out_copies_padding_and_other_ranks_shares():
    vocabulary = Shard(tp=0, pad_to=4)
    placement = place("embedding.weight", (6, 2), vocabulary, TensorSplit(tp_size=2, tp_rank=1))
    assert placement.shape == (4, 2)
    whole = Stretch(8, (Part(placement, 0, 8, 0),), (0, 8))
    assert whole.spoken_for() == [(0, 4)], "rows 4 and 5 are real, two rows are padding"
    assert Stretch(8, (Part(placement, 0, 8, 0),), (3, 8)).spoken_for() == [(3, 4)]
    norm = place("norm.weight", (3,), Shard(partial="sequence"), TensorSplit(tp_size=2, tp_rank=1))
    assert Stretch(3, (Part(norm, 0, 3, 0),), (0, 3)).spoken_for() == [], "rank 0 speaks for it"


def test_neighbouring_parameters_are_one_range():
    placement = place("a.weight", (2, 3), Shard(), TensorSplit())
    stretch = Stretch(12, (Part(placement, 0, 6, 0), Part(placement, 0, 6, 6)), (0, 12))
    assert stretch.spoken_for() == [(0, 12)]


@given(length=st.integers(0, 1000), size=st.integers(1, 9))
def test_shares_of_all_ranks_are_the_whole(length: int, size: int):
    shares = [share_of(length, Axis("dp", size, rank, tuple(range(size)), None, Record())) for rank in range(size)]
    assert [begin for begin, _ in shares] == [0, *[end for _, end in shares[:-1]]] and shares[-1][1] == length
