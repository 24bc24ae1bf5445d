"""Rank arithmetic against its definition: coordinates by repeated division, groups by comparing coordinates."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from petatron.config.schema.parallel import ParallelConfig
from petatron.mesh.rank_layout import AXES, DENSE_DIMS, EXPERT_DIMS, Layout

WORLD = 4096


@st.composite
def layouts(draw) -> Layout:
    room, sizes = WORLD, {}
    for dim in draw(st.permutations(DENSE_DIMS)):
        sizes[dim] = draw(st.integers(1, min(room, 32)))
        room //= sizes[dim]
    per_stage = sizes["dp_shard"] * sizes["cp"] * sizes["tp"]
    etp = draw(st.sampled_from([n for n in range(1, per_stage + 1) if per_stage % n == 0]))
    rest = per_stage // etp
    ep = draw(st.sampled_from([n for n in range(1, rest + 1) if rest % n == 0]))
    return Layout(**sizes, ep=ep, etp=etp)


def coordinates(layout: Layout) -> dict[str, np.ndarray]:
    """Every dimension's coordinate of every rank, fastest dimension first, straight from the definition."""
    found = {}
    for order in (("tp", "cp", "dp_shard", "dp_outer", "pp"), ("etp", "ep", "edp_shard", "dp_outer", "pp")):
        rest = np.arange(layout.world_size)
        for dim in order:
            rest, found[dim] = np.divmod(rest, getattr(layout, dim))
        assert not rest.any()
    return found


def others(axis: str) -> list[str]:
    order = DENSE_DIMS if set(AXES[axis]) <= set(DENSE_DIMS) else EXPERT_DIMS
    return [dim for dim in order if dim not in AXES[axis]]


@settings(max_examples=60, deadline=None)
@given(layout=layouts(), pick=st.integers(0, WORLD))
def test_a_group_is_the_ranks_that_agree_on_all_other_dimensions(layout: Layout, pick: int):
    rank, where = pick % layout.world_size, coordinates(layout)
    for axis in AXES:
        agree = np.ones(layout.world_size, bool)
        for dim in others(axis):
            agree &= where[dim] == where[dim][rank]
        assert layout.group_of(axis, rank) == tuple(np.flatnonzero(agree).tolist()), axis


@settings(max_examples=60, deadline=None)
@given(layout=layouts(), pick=st.integers(0, WORLD))
def test_groups_hold_every_rank_once_and_contain_group_of(layout: Layout, pick: int):
    rank = pick % layout.world_size
    for axis in AXES:
        groups = layout.groups(axis)
        assert sorted(member for group in groups for member in group) == list(range(layout.world_size)), axis
        assert {len(group) for group in groups} == {layout.size(axis)}, axis
        assert [group for group in groups if rank in group] == [layout.group_of(axis, rank)], axis


@settings(max_examples=60, deadline=None)
@given(layout=layouts(), pick=st.integers(0, WORLD))
def test_place_on_an_axis_is_the_coordinate(layout: Layout, pick: int):
    rank, where = pick % layout.world_size, coordinates(layout)
    here = {dim: int(at[rank]) for dim, at in where.items()}
    dp = here["dp_outer"] * layout.dp_shard + here["dp_shard"]
    assert rank == here["tp"] + layout.tp * (here["cp"] + layout.cp * (dp + layout.dp * here["pp"]))
    edp = here["dp_outer"] * layout.edp_shard + here["edp_shard"]
    assert rank == here["etp"] + layout.etp * (here["ep"] + layout.ep * (edp + layout.edp * here["pp"]))
    stage = layout.world_size // layout.pp
    expected = {
        **here,
        "dp": dp,
        "dp_cp": dp * layout.cp + here["cp"],
        "shard": here["dp_shard"] * layout.cp + here["cp"],
        "losses": (here["pp"] * layout.dp + dp) * layout.cp + here["cp"],
        "sequence": here["cp"] * layout.tp + here["tp"],
        "stage": rank % stage,
        "edp": edp,
        "ep_etp": here["ep"] * layout.etp + here["etp"],
        "world": rank,
    }
    assert {axis: layout.group_of(axis, rank).index(rank) for axis in AXES} == expected


def test_every_axis_of_one_large_world():
    """All ranks of 4,096, not a sample of them."""
    layout = Layout(pp=4, dp_outer=2, dp_shard=16, cp=4, tp=8, ep=32, etp=2)
    assert layout.world_size == WORLD and layout.dp == 32 and layout.edp == 16
    for axis in AXES:
        of_group = {rank: group for group in layout.groups(axis) for rank in group}
        assert all(layout.group_of(axis, rank) == of_group[rank] for rank in range(0, WORLD, 41)), axis
        assert len(of_group) == WORLD


def test_sixteen_devices_with_two_way_tensor_and_four_way_pipeline():
    """The worked example that Megatron's documentation gives for 16 GPUs."""
    layout = Layout(tp=2, pp=4, dp_shard=2)
    assert layout.groups("tp") == [(rank, rank + 1) for rank in range(0, 16, 2)]
    assert layout.groups("pp") == [(rank, rank + 4, rank + 8, rank + 12) for rank in range(4)]
    assert layout.groups("dp") == [(0, 2), (1, 3), (4, 6), (5, 7), (8, 10), (9, 11), (12, 14), (13, 15)]
    assert layout.groups("stage") == [(0, 1, 2, 3), (4, 5, 6, 7), (8, 9, 10, 11), (12, 13, 14, 15)]


def test_context_parallel_lies_between_tensor_and_data():
    layout = Layout(tp=2, cp=2, dp_shard=2)
    assert layout.groups("cp") == [(0, 2), (1, 3), (4, 6), (5, 7)]
    assert layout.groups("dp") == [(0, 4), (1, 5), (2, 6), (3, 7)]
    assert layout.groups("dp_cp") == [(0, 2, 4, 6), (1, 3, 5, 7)]


def test_experts_factor_the_same_ranks_again():
    layout = Layout(tp=2, dp_shard=4, pp=2, ep=4, etp=1)
    assert layout.edp == 2
    assert layout.groups("ep") == [(0, 1, 2, 3), (4, 5, 6, 7), (8, 9, 10, 11), (12, 13, 14, 15)]
    assert layout.groups("edp")[:4] == [(0, 4), (1, 5), (2, 6), (3, 7)]
    assert layout.groups("etp") == [(rank,) for rank in range(16)]


def test_expert_ranks_must_divide_a_stage():
    with pytest.raises(AssertionError, match="8 ranks of a stage"):
        Layout(tp=2, dp_shard=4, ep=3)


def test_from_a_derived_config():
    config = ParallelConfig(
        tensor_model_parallel_size=2,
        pipeline_model_parallel_size=3,
        context_parallel_size=5,
        expert_model_parallel_size=7,
        data_parallel_size=14,
        expert_tensor_parallel_size=2,
        num_distributed_optimizer_instances=2,
    )
    assert Layout.from_config(config) == Layout(tp=2, pp=3, cp=5, ep=7, dp_outer=2, dp_shard=7, etp=2)
