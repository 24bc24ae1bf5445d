"""place(): over all ranks, the boxes of each logical tensor cover it exactly once, and each rank's heads fit together."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from petatron.sharding.shard_spec import (
    ModelParallelCoordinate,
    Placement,
    Section,
    Shard,
    compute_placement,
    section_name,
)

QKV = "layers.3.attention.qkv.weight"
MANY = settings(max_examples=80, deadline=None)


def over_ranks(name: str, shape: tuple[int, ...], shard: Shard, tp: int, *, sequence: bool = False) -> list[Placement]:
    return [compute_placement(name, shape, shard, ModelParallelCoordinate(tp, rank, sequence)) for rank in range(tp)]


def check_tiling(placements: list[Placement], logical: dict[str, tuple[int, ...]]) -> None:
    """Primary boxes cover each logical tensor once; all boxes cover it equally often; local boxes never overlap."""
    once = {name: torch.zeros(shape, dtype=torch.int64) for name, shape in logical.items()}
    often = {name: torch.zeros(shape, dtype=torch.int64) for name, shape in logical.items()}
    assert len({placement.shape for placement in placements}) == 1, "local shapes differ between ranks"
    for placement in placements:
        local = torch.zeros(placement.shape, dtype=torch.int64)
        for piece in placement.tensor_shards:
            assert piece.logical_shape == logical[piece.name]
            assert local[piece.local_slices()].shape == once[piece.name][piece.logical_slices()].shape == piece.shape
            local[piece.local_slices()] += 1
            once[piece.name][piece.logical_slices()] += piece.primary
            often[piece.name][piece.logical_slices()] += 1
        assert local.max() <= 1
    for name in logical:
        assert bool((once[name] == 1).all()), name
        assert bool((often[name] == often[name].max()).all()), name


@st.composite
def attention_shapes(draw) -> tuple[int, int, int, int, int]:
    """tp, query heads, key/value heads, head width, hidden; key/value heads a multiple or a divisor of tp."""
    tp = draw(st.sampled_from([1, 2, 3, 4, 6, 8]))
    divisors = [n for n in range(1, tp + 1) if tp % n == 0]
    groups = draw(st.one_of(st.sampled_from(divisors), st.integers(1, 3).map(lambda n: n * tp)))
    heads = math.lcm(tp, groups) * draw(st.integers(1, 3))
    return tp, heads, groups, draw(st.integers(1, 4)), draw(st.integers(1, 5))


def qkv_shard(heads: int, groups: int, width: int) -> Shard:
    sections = (("q", heads), ("k", groups), ("v", groups))
    return Shard(tp=0, sections=tuple(Section(name, count * width, count) for name, count in sections))


@MANY
@given(attention_shapes(), st.booleans())
def test_fused_heads(shape, bias: bool):
    tp, heads, groups, width, hidden = shape
    tail = () if bias else (hidden,)
    rows = (heads + 2 * groups) * width
    placements = over_ranks(QKV, (rows, *tail), qkv_shard(heads, groups, width), tp)
    names = {part: f"layers.3.attention.{part}.weight" for part in "qkv"}
    check_tiling(
        placements,
        {names["q"]: (heads * width, *tail), names["k"]: (groups * width, *tail), names["v"]: (groups * width, *tail)},
    )
    local_heads, local_groups = heads // tp, max(1, groups // tp)
    for placement in placements:
        assert placement.section_rows == (local_heads * width, local_groups * width, local_groups * width)
        assert placement.shape[0] == sum(placement.section_rows)
        at = 0
        for piece, size, part in zip(placement.tensor_shards, placement.section_rows, "qkv"):
            assert (piece.name, piece.local_start[0], piece.shape[0]) == (names[part], at, size)
            replicated = part != "q" and groups < tp
            shared_by = tp // groups
            assert piece.grad_reduce_axis == (
                None if not replicated else "tp" if shared_by == tp else f"tp/{shared_by}"
            )
            at += size


@MANY
@given(attention_shapes())
def test_each_query_head_finds_its_key_head_on_its_own_rank(shape):
    """Local query head i attends to local key head i // (local heads per key head); that must be the global one."""
    tp, heads, groups, width, hidden = shape
    shard = qkv_shard(heads, groups, width)
    for placement in over_ranks(QKV, ((heads + 2 * groups) * width, hidden), shard, tp):
        q, k, _ = placement.tensor_shards
        first_head, first_group = q.start[0] // width, k.start[0] // width
        local_heads, local_groups = q.shape[0] // width, k.shape[0] // width
        for index in range(local_heads):
            wanted = (first_head + index) * groups // heads
            assert first_group + index * local_groups // local_heads == wanted


@MANY
@given(st.integers(1, 200), st.sampled_from([1, 2, 3, 4, 8]), st.sampled_from([1, 2, 8, 16]), st.integers(1, 3))
def test_vocabulary_padding_stays_outside(vocabulary: int, tp: int, pad_to: int, hidden: int):
    placements = over_ranks("embedding.weight", (vocabulary, hidden), Shard(tp=0, pad_to=pad_to), tp)
    check_tiling(placements, {"embedding.weight": (vocabulary, hidden)})
    rows = placements[0].shape[0]
    assert rows % pad_to == 0 and vocabulary <= rows * tp < vocabulary + pad_to * tp
    for rank, placement in enumerate(placements):
        real = min(max(vocabulary - rank * rows, 0), rows)
        assert [piece.shape[0] for piece in placement.tensor_shards] == ([real] if real else [])
        assert all(piece.local_start == (0, 0) and piece.grad_reduce_axis is None for piece in placement.tensor_shards)


@MANY
@given(st.integers(1, 6), st.integers(1, 6), st.sampled_from([1, 2, 4]), st.booleans())
def test_row_split_matrix_and_its_whole_bias(outputs: int, unit: int, tp: int, sequence: bool):
    shard = Shard(tp=1)
    weights = over_ranks("mlp.down.weight", (outputs, unit * tp), shard, tp, sequence=sequence)
    check_tiling(weights, {"mlp.down.weight": (outputs, unit * tp)})
    assert all(
        w.shape == (outputs, unit) and w.tensor_shards[0].grad_reduce_axis is None and w.tensor_shards[0].primary
        for w in weights
    )
    biases = over_ranks("mlp.down.bias", (outputs,), shard, tp, sequence=sequence)
    check_tiling(biases, {"mlp.down.bias": (outputs,)})
    assert [bias.tensor_shards[0].primary for bias in biases] == [rank == 0 for rank in range(tp)]
    # Added to a sequence-split activation, the bias sees only this rank's tokens.
    assert all((bias.tensor_shards[0].grad_reduce_axis == "tp") == (sequence and tp > 1) for bias in biases)


@pytest.mark.parametrize(
    ("partial", "tp", "sequence", "expected"),
    [
        ("never", 2, True, False),
        ("sequence", 2, True, True),
        ("sequence", 2, False, False),
        ("sequence", 1, True, False),
        ("always", 2, False, True),
        ("always", 2, True, True),
        ("always", 1, True, False),
    ],
)
def test_when_a_replicated_gradient_is_a_summand(partial, tp, sequence, expected):
    placements = over_ranks("norm.weight", (8,), Shard(partial_grad=partial), tp, sequence=sequence)
    check_tiling(placements, {"norm.weight": (8,)})
    assert [placement.tensor_shards[0].grad_reduce_axis == "tp" for placement in placements] == [expected] * tp


def test_heads_that_neither_divide_nor_are_divided_are_refused():
    with pytest.raises(AssertionError, match="3 units cannot be split over 2"):
        compute_placement(QKV, (18, 4), qkv_shard(3, 3, 2), ModelParallelCoordinate(2, 0))


def test_sections_must_add_up():
    with pytest.raises(AssertionError, match="do not add up"):
        compute_placement(QKV, (20, 4), qkv_shard(3, 3, 2), ModelParallelCoordinate())


def test_section_name_replaces_the_module():
    assert section_name("layers.0.attention.qkv.bias", "k") == "layers.0.attention.k.bias"


@pytest.mark.parametrize("ep", [1, 2, 4])
@pytest.mark.parametrize("etp", [1, 2, 4])
def test_experts_are_split_over_both_of_their_axes(ep: int, etp: int):
    """4 experts of 8 x 3: whole experts over ep, rows of each over etp; the bias of the way out is whole on each etp rank."""
    gate_up = Shard(ep=0, tp=1, sections=(Section("gate", 8, 8), Section("up", 8, 8)))
    seen = {"gate": torch.zeros(4, 8, 3), "up": torch.zeros(4, 8, 3), "bias": torch.zeros(4, 3)}
    for ep_rank in range(ep):
        for etp_rank in range(etp):
            split = ModelParallelCoordinate(
                ep_size=ep, ep_rank=ep_rank, etp_size=etp, etp_rank=etp_rank, tp_size=3, tp_rank=2
            )
            weight = compute_placement("layers.0.mlp.experts.gate_up.weight", (4, 16, 3), gate_up, split)
            bias = compute_placement("layers.0.mlp.experts.down.bias", (4, 3), Shard(ep=0, tp=2), split)
            assert weight.expert and bias.expert
            assert weight.shape == (4 // ep, 16 // etp, 3) and bias.shape == (4 // ep, 3)
            assert weight.section_rows == (8 // etp, 8 // etp)
            for piece in weight.tensor_shards:
                assert piece.grad_reduce_axis is None and piece.primary
                seen[piece.name.split(".")[-2]][piece.logical_slices()] += 1
            [piece] = bias.tensor_shards
            assert piece.grad_reduce_axis == ("etp" if etp > 1 else None) and piece.primary == (etp_rank == 0)
            seen["bias"][piece.logical_slices()] += float(piece.primary)
    assert all(bool((counts == 1).all()) for counts in seen.values())


def test_a_tied_head_on_another_rank_is_a_copy_of_the_embedding():
    embedding, head = (
        Shard(tp=0, pad_to=4, shared_embedding=True),
        Shard(tp=0, pad_to=4, shared_embedding=True, replica_of="embedding.weight"),
    )
    first = compute_placement("embedding.weight", (6, 2), embedding, ModelParallelCoordinate())
    last = compute_placement("head.weight", (6, 2), head, ModelParallelCoordinate())
    assert [(p.name, p.primary, p.grad_reduce_axis) for p in first.tensor_shards] == [
        ("embedding.weight", True, "ends")
    ]
    assert [(p.name, p.primary, p.grad_reduce_axis) for p in last.tensor_shards] == [
        ("embedding.weight", False, "ends")
    ]
