"""First weights are a function of (seed, name, index) and of nothing else; dropout streams are shared where they must be."""

from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from petatron.mesh.mesh import ParallelMesh
from petatron.mesh.rank_layout import Layout
from petatron.mesh.rng import RandomStreams, stable_seed
from petatron.sharding import initial_values
from petatron.sharding.initial_values import draw_normal_shard
from petatron.sharding.shard_spec import TensorShard
from tests.dist import RankPool


def box(
    shape: tuple[int, ...], start: tuple[int, ...], size: tuple[int, ...], name: str = "layers.0.weight"
) -> TensorShard:
    return TensorShard(name, shape, start, size, (0,) * len(shape), True)


def whole(shape: tuple[int, ...], name: str = "layers.0.weight", *, seed: int = 1, std: float = 1.0) -> Tensor:
    return draw_normal_shard(box(shape, (0,) * len(shape), shape, name), seed=seed, std=std)


@st.composite
def boxes(draw) -> TensorShard:
    shape = tuple(draw(st.lists(st.integers(1, 9), min_size=2, max_size=3)))
    start = tuple(draw(st.integers(0, size - 1)) for size in shape)
    return box(shape, start, tuple(draw(st.integers(1, size - at)) for size, at in zip(shape, start)))


@settings(max_examples=80, deadline=None)
@given(piece=boxes(), block=st.sampled_from([1, 2, 5, 1024]))
def test_any_box_equals_the_slice_of_the_whole(piece: TensorShard, block: int):
    with patch.object(initial_values, "_BLOCK", block):
        everything = whole(piece.logical_shape)
        assert torch.equal(draw_normal_shard(piece, seed=1, std=1.0), everything[piece.logical_slices()])


def test_boxes_across_real_blocks_and_their_spread():
    shape = (3000, 700)  # three blocks of rows
    everything = whole(shape, std=0.02)
    for start, size in (((1490, 0), (20, 700)), ((0, 350), (3000, 350)), ((2999, 699), (1, 1))):
        piece = box(shape, start, size)
        assert torch.equal(draw_normal_shard(piece, seed=1, std=0.02), everything[piece.logical_slices()])
    assert abs(float(everything.mean())) < 1e-4
    assert abs(float(everything.std()) / 0.02 - 1.0) < 5e-3
    assert not torch.equal(everything[:1000], everything[1498:2498]), "blocks repeat"


@pytest.mark.parametrize("cores", [1, 2, 40])
def test_the_number_of_cores_changes_nothing(cores: int):
    """Every block is written once, to its own place, whoever draws it; 40 cores are more than there are threads."""
    piece = box((3, 50, 33), (1, 7, 5), (2, 40, 28))
    with (
        patch.object(initial_values, "_BLOCK", 4),
        patch.object(initial_values.os, "sched_getaffinity", lambda pid: set(range(cores))),
    ):
        found = draw_normal_shard(piece, seed=1, std=0.1)
        expected = torch.full((2, 40, 28), torch.nan)
        for index, matrix in enumerate(expected):
            for row in range(40):
                line = box((50, 33), (7 + row, 5), (1, 28), f"layers.0.weight[{index + 1}]")
                matrix[row] = draw_normal_shard(line, seed=1, std=0.1)[0]
    assert torch.equal(found, expected)


def test_name_seed_and_spread_matter():
    base = whole((6, 5))
    assert not torch.equal(base, whole((6, 5), "layers.1.weight"))
    assert not torch.equal(base, whole((6, 5), seed=2))
    assert torch.equal(base * 0.5, whole((6, 5), std=0.5))


def test_seeds_never_change():
    """Runs of today must start from the weights of tomorrow: these numbers are part of the promise."""
    assert stable_seed(1234, "layers.0.attention.q.weight", 0) == 1488620610971598655
    assert stable_seed("a", 1) != stable_seed("a1") and 0 <= stable_seed("a") < 2**63


def _draws(layout: Layout) -> dict[str, Any]:
    mesh = ParallelMesh(layout, dist.get_rank())
    streams = RandomStreams.seeded(7, mesh)
    return {"own": torch.rand(4).tolist(), "shared": torch.rand(4, generator=streams.tp_shared).tolist()}


@pytest.mark.parametrize("layout", [Layout(tp=2, dp_shard=2), Layout(tp=2, cp=2), Layout(tp=2, pp=2)], ids=str)
def test_streams_over_ranks(ranks: RankPool, layout: Layout):
    found = ranks.run(_draws, 4, layout)
    own, shared = ([tuple(result[kind]) for result in found] for kind in ("own", "shared"))
    assert len(set(own)) == 4, "the own stream differs on every rank"
    assert shared[0] == shared[1] and shared[2] == shared[3], "ranks of a tensor-parallel group draw alike"
    assert shared[0] != shared[2], "other replicas, parts of a sequence and stages drop other elements"
    assert not set(own) & set(shared)


def test_state_brings_both_streams_back():
    streams = RandomStreams.seeded(7, ParallelMesh.single())
    torch.rand(3), torch.rand(3, generator=streams.tp_shared)
    state = {name: value.clone() for name, value in streams.state().items()}
    expected = torch.rand(5), torch.rand(5, generator=streams.tp_shared)
    torch.rand(11), torch.rand(2, generator=streams.tp_shared)
    streams.restore(state)
    again = torch.rand(5), torch.rand(5, generator=streams.tp_shared)
    assert torch.equal(expected[0], again[0]) and torch.equal(expected[1], again[1])
    assert all(value.dtype == torch.uint8 for value in state.values())


def test_start_depends_on_the_seed():
    first = torch.rand(4, generator=RandomStreams.seeded(1, ParallelMesh.single()).tp_shared)
    assert not torch.equal(first, torch.rand(4, generator=RandomStreams.seeded(2, ParallelMesh.single()).tp_shared))


def test_going_back_to_a_mark_and_on_from_where_it_was_left():
    streams = RandomStreams.seeded(7, ParallelMesh.single())
    torch.rand(3), torch.rand(3, generator=streams.tp_shared)
    mark = streams.snapshot()
    first = torch.rand(5), torch.rand(5, generator=streams.tp_shared)
    with streams.at_snapshot(mark):
        again = torch.rand(5), torch.rand(5, generator=streams.tp_shared)
        torch.rand(9)
    after = torch.rand(5)
    assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))
    streams.restore(mark)
    torch.rand(5)
    assert torch.equal(torch.rand(5), after), "what was drawn inside does not count"
    with pytest.raises(ValueError, match="inside"), streams.at_snapshot(mark):
        torch.rand(1)
        raise ValueError("inside")


def test_streams_that_nobody_draws_from_are_not_asked(monkeypatch: pytest.MonkeyPatch):
    streams = RandomStreams.seeded(7, ParallelMesh.single(), used_in_step=False)

    def asked(*args: object) -> Any:
        raise AssertionError("a step that is being recorded cannot answer")

    monkeypatch.setattr(RandomStreams, "state", asked)
    monkeypatch.setattr(RandomStreams, "restore", asked)
    mark = streams.snapshot()
    with streams.at_snapshot(mark):
        inside = torch.rand(3)
    assert mark == {} and not torch.equal(torch.rand(3), inside), "nothing is put back"
