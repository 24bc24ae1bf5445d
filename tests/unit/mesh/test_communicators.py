"""Groups on demand and by name, channels of a pipeline, and what a rank is told before it joins."""

from __future__ import annotations

import dataclasses
import resource

import pytest
import torch
import torch.distributed as dist

from petatron.base.errors import LaunchError
from petatron.estimate.memory.forecast import shared_device_problem
from petatron.mesh import collectives
from petatron.mesh.launch import process_group
from petatron.mesh.launch.environment import SINGLE_PROCESS
from petatron.mesh.launch.nccl_options import env_variables
from petatron.mesh.mesh import ParallelMesh
from petatron.mesh.rank_layout import Layout
from petatron.validate import load_config
from tests.dist import RankPool


def _channels() -> tuple[int, list[str], float]:
    mesh = ParallelMesh(Layout(pp=4), dist.get_rank())
    before = len(mesh.communicators)
    mesh.create_groups(["tp", "pp"])
    rank, came = mesh.pp.rank, torch.zeros(1)
    sends = [(torch.tensor([float(rank)]), rank + 1)] if rank < 3 else []
    receives = [(came, rank - 1)] if rank else []
    for handle in [*collectives.start_send_recv(mesh.pp, sends=sends, receives=receives)]:
        for one in handle:
            one.wait()
    return before, sorted(found.owner for found in mesh.communicators), float(came)


def test_a_pipeline_rank_has_a_channel_per_neighbor_and_direction(ranks: RankPool):
    answers = ranks.run(_channels, 4)
    assert [before for before, _, _ in answers] == [0] * 4, "nothing is made before it is asked for"
    assert answers[1][1] == ["", "pp:0>1", "pp:1>0", "pp:1>2", "pp:2>1"]
    assert answers[3][1] == ["", "pp:0>3", "pp:2>3", "pp:3>0", "pp:3>2"]
    assert [came for _, _, came in answers] == [0.0, 0.0, 1.0, 2.0]


def _uneven() -> float:
    """Ranks with different numbers of groups still meet: torch's own names would count them."""
    mesh = ParallelMesh(Layout(dp_shard=3), dist.get_rank())
    if mesh.rank < 2:
        process_group.new_group("extra", (0, 1), backend="gloo", timeout=mesh._timeout)
    return float(collectives.all_reduce(torch.ones(1), mesh.world))


def test_groups_are_found_by_name_not_by_number(ranks: RankPool):
    assert ranks.run(_uneven, 3) == [3.0] * 3


def test_ranks_that_share_a_device_pass_for_hosts():
    shared = {variable.name: variable.value for variable in env_variables(nccl=True, ranks_per_device=4, rank=3)}
    assert shared["NCCL_HOSTID"] == "rank3" and shared["NCCL_SOCKET_IFNAME"] == "lo"
    assert "NCCL_HOSTID" not in {variable.name for variable in env_variables(nccl=True)}


def test_devices_of_ranks_that_share_them():
    assert [process_group.local_device_index(rank, 2, 2) for rank in range(4)] == [0, 0, 1, 1]
    with pytest.raises(LaunchError, match=r"Start at most 4 ranks.*--ranks-per-device"):
        process_group.local_device_index(4, 2, 2)


def test_a_low_limit_of_open_files_is_said_before_it_is_met(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(resource, "getrlimit", lambda kind: (1024, 1024))
    with pytest.raises(LaunchError, match=r"may open 1,024 files and needs about 12,544 .* 4,096 ranks"):
        process_group._raise_descriptor_limit(dataclasses.replace(SINGLE_PROCESS, world_size=4096))


def test_a_device_used_by_more_ranks_than_meant(monkeypatch: pytest.MonkeyPatch):
    properties = type("Properties", (), {"uuid": "GPU-1"})
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: properties)
    store = dist.HashStore()
    process_group._claim_device(store, SINGLE_PROCESS, 1)
    with pytest.raises(LaunchError, match=r"number 2 on CUDA device 0 \(GPU-1\).*--ranks-per-device"):
        process_group._claim_device(store, dataclasses.replace(SINGLE_PROCESS, rank=1), 1)


def test_ranks_that_share_a_device_must_fit_into_it():
    flags = "--mock-data --lr 1e-3 --train-iters 1 --tp 2 --ranks-per-device 2".split()
    run = load_config(flags, preset="tiny-llama", world_size=2).config
    assert shared_device_problem(run, memory_bytes=10**9) is None
    problem = shared_device_problem(run, memory_bytes=10**6)
    assert problem is not None and "do not fit into" in str(problem)
