"""ParallelMesh: axes as each rank sees them, groups that work, and any rank of a large world without the world."""

import pytest
import torch
import torch.distributed as dist

from petatron.mesh import collectives
from petatron.mesh.launch.environment import RankEnvironment
from petatron.mesh.launch.process_group import start_process_group
from petatron.mesh.mesh import ParallelMesh
from petatron.mesh.rank_layout import AXES, Layout
from tests.dist import RankPool


def test_one_process_needs_no_process_group():
    mesh = ParallelMesh.single()
    assert not dist.is_initialized()
    assert {(mesh[name].size, mesh[name].rank, mesh[name].group) for name in AXES} == {(1, 0, None)}
    assert mesh.control is mesh.world
    assert mesh.describe() == "one device (1 rank)"


def _sums_over_every_axis() -> tuple[int, dict[str, int], dict[str, tuple[int, ...]], str]:
    mesh = ParallelMesh(Layout(tp=2, dp_shard=2), dist.get_rank())
    sums = {name: int(collectives.all_reduce(torch.tensor(10**mesh.rank), mesh[name])) for name in AXES}
    sums["blocks"] = int(collectives.all_reduce(torch.tensor(10**mesh.rank), mesh.blocks("world", 2)))
    sums["whole"] = int(collectives.all_reduce(torch.tensor(10**mesh.rank), mesh.blocks("world", 4)))
    sums["alone"] = int(collectives.all_reduce(torch.tensor(10**mesh.rank), mesh.blocks("world", 1)))
    return mesh.rank, sums, {name: mesh[name].ranks for name in AXES}, mesh.describe()


def test_groups_connect_the_ranks_of_each_axis(ranks: RankPool):
    layout = Layout(tp=2, dp_shard=2)
    for rank, sums, members, described in ranks.run(_sums_over_every_axis, 4):
        for name in AXES:
            assert members[name] == layout.group_of(name, rank)
            assert sums[name] == sum(10**member for member in members[name]), name
        assert sums["blocks"] == (11 if rank < 2 else 1100)
        assert sums["whole"] == 1111 and sums["alone"] == 10**rank
        assert described == "tp 2 x dp 2 (4 ranks)"


def test_blocks_must_divide():
    with pytest.raises(AssertionError, match="has no blocks of 2"):
        ParallelMesh.single().blocks("tp", 2)


def _rank_of_a_large_world(rank: int) -> tuple[dict[str, int], int]:
    environment = RankEnvironment(
        rank=rank,
        local_rank=0,
        world_size=4096,
        local_world_size=8,
        master_addr="127.0.0.1",
        master_port=1,
        launcher="torchrun",
    )
    start_process_group(environment, backend="fake")
    mesh = ParallelMesh(Layout(tp=8, cp=2, dp_shard=32, pp=8, ep=8, etp=1), rank)
    x = collectives.all_gather(torch.zeros(3, 2), mesh.tp)
    return {name: mesh[name].rank for name in AXES}, x.shape[0]


def test_any_rank_of_4096_without_the_others(ranks: RankPool):
    rank = 5 + 8 * (1 + 2 * (19 + 32 * 6))
    [(places, rows)] = ranks.run(_rank_of_a_large_world, 1, rank)
    assert (places["tp"], places["cp"], places["dp"], places["pp"]) == (5, 1, 19, 6)
    assert places["world"] == rank and places["dp_cp"] == 39 and places["ep"] == rank % 8
    assert rows == 24
