"""Who am I: torchrun's variables, SLURM's, or alone; and which of these to distrust."""

from __future__ import annotations

import dataclasses

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st

from petatron.base.errors import LaunchError
from petatron.mesh.launch import environment
from petatron.mesh.launch.environment import SINGLE_PROCESS, expand_hosts, rank_variables, read_environment
from petatron.mesh.launch.process_group import local_device_index, start_process_group, stop_process_group
from petatron.mesh.launch.rank_exit import is_echo

TORCHRUN = {
    "RANK": "5",
    "LOCAL_RANK": "1",
    "WORLD_SIZE": "8",
    "LOCAL_WORLD_SIZE": "4",
    "MASTER_ADDR": "node0",
    "MASTER_PORT": "29500",
}
SLURM = {
    "SLURM_JOB_ID": "123456",
    "SLURM_STEP_ID": "0",
    "SLURM_PROCID": "6",
    "SLURM_LOCALID": "2",
    "SLURM_NODEID": "1",
    "SLURM_NTASKS": "7",
    "SLURM_TASKS_PER_NODE": "4,3",
    "SLURM_JOB_NODELIST": "gpu[003-010,12]",
}


def without(env: dict[str, str], *names: str) -> dict[str, str]:
    return {name: value for name, value in env.items() if name not in names}


def test_nothing_set_is_a_single_process() -> None:
    assert read_environment({}) == SINGLE_PROCESS
    assert read_environment({"WORLD_SIZE": "1", "MASTER_ADDR": "x"}) == SINGLE_PROCESS


def test_torchrun() -> None:
    found = read_environment(TORCHRUN | SLURM)
    assert (found.rank, found.local_rank, found.world_size, found.local_world_size) == (5, 1, 8, 4)
    assert (found.master_addr, found.master_port, found.launcher) == ("node0", 29500, "torchrun")


@pytest.mark.parametrize("name", sorted(TORCHRUN))
def test_an_incomplete_torchrun_environment_names_what_is_missing(name: str) -> None:
    with pytest.raises(LaunchError, match=rf"{name} not"):
        read_environment(without(TORCHRUN, name))


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"RANK": "8"}, "rank 8 is not below the world size 8"),
        ({"LOCAL_RANK": "-1"}, "local rank -1"),
        ({"LOCAL_WORLD_SIZE": "9"}, "local world size 9 exceeds the world size 8"),
        ({"MASTER_PORT": "70000"}, "port 70000"),
        ({"RANK": "five"}, "RANK='five' is not a whole number"),
    ],
)
def test_contradictions(change: dict[str, str], words: str) -> None:
    with pytest.raises(LaunchError, match=words):
        read_environment(TORCHRUN | change)


def test_slurm_step() -> None:
    found = read_environment(SLURM)
    assert (found.rank, found.local_rank, found.world_size, found.local_world_size) == (6, 2, 7, 3)
    assert found.launcher == "slurm"
    assert found.master_addr == "gpu003"
    assert 1024 < found.master_port < 32768  # below the range the kernel hands out by itself


def test_slurm_ranks_agree_on_the_meeting_point() -> None:
    addresses = set()
    for rank in range(7):
        node, local = divmod(rank, 4)
        env = SLURM | {"SLURM_PROCID": str(rank), "SLURM_NODEID": str(node), "SLURM_LOCALID": str(local)}
        found = read_environment(env)
        addresses.add((found.master_addr, found.master_port))
    assert len(addresses) == 1
    other_step = read_environment(SLURM | {"SLURM_STEP_ID": "1"})
    assert other_step.master_port != next(iter(addresses))[1]


def test_slurm_step_variables_win_over_the_jobs() -> None:
    step = {"SLURM_STEP_NUM_TASKS": "2", "SLURM_STEP_NODELIST": "gpu009", "SLURM_STEP_TASKS_PER_NODE": "2"}
    found = read_environment(SLURM | step | {"SLURM_PROCID": "1", "SLURM_LOCALID": "1", "SLURM_NODEID": "0"})
    assert (found.world_size, found.local_world_size, found.master_addr) == (2, 2, "gpu009")


def test_slurm_takes_an_exported_meeting_point_and_ignores_an_exported_world_size() -> None:
    exports = {"MASTER_ADDR": "10.0.0.1", "MASTER_PORT": "4242", "WORLD_SIZE": "7"}
    found = read_environment(SLURM | exports)
    assert (found.master_addr, found.master_port, found.launcher) == ("10.0.0.1", 4242, "slurm")


@pytest.mark.parametrize("step", [None, "4294967290", "4294967291", "batch"])
def test_a_shell_inside_a_slurm_job_is_a_single_process(step: str | None) -> None:
    env = without(SLURM, "SLURM_STEP_ID") | ({"SLURM_STEP_ID": step} if step else {})
    assert read_environment(env) == SINGLE_PROCESS


def test_slurm_without_task_counts_needs_an_even_split() -> None:
    even = without(SLURM, "SLURM_TASKS_PER_NODE") | {"SLURM_NTASKS": "27"}
    assert read_environment(even).local_world_size == 3  # nine hosts
    with pytest.raises(LaunchError, match="7 tasks on 9 nodes"):
        read_environment(without(SLURM, "SLURM_TASKS_PER_NODE"))


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"SLURM_TASKS_PER_NODE": "4(y2)"}, "not a list of task counts"),
        ({"SLURM_NODEID": "2"}, "SLURM_NODEID=2 is outside"),
        ({"SLURM_LOCALID": ""}, "SLURM_LOCALID not"),
        ({"SLURM_JOB_NODELIST": "gpu[a-b]"}, "Cannot read 'a-b'"),
        ({"SLURM_JOB_NODELIST": ","}, "names no host"),
        ({"SLURM_PROCID": "7"}, "contradict"),
    ],
)
def test_slurm_errors(change: dict[str, str], words: str) -> None:
    with pytest.raises(LaunchError, match=words):
        read_environment(SLURM | change)


def test_host_lists() -> None:
    assert expand_hosts("gpu[003-005,12],login")[0:5] == ["gpu003", "gpu004", "gpu005", "gpu12", "login"]
    assert expand_hosts("r[1-2]n[09-10]-ib") == ["r1n09-ib", "r1n10-ib", "r2n09-ib", "r2n10-ib"]
    assert expand_hosts("a.b.c") == ["a.b.c"]


@settings(max_examples=50, deadline=None)
@given(st.integers(0, 990), st.integers(0, 8), st.integers(1, 4), st.sampled_from(["gpu", "n-", "rack1-"]))
def test_a_range_counts_every_host_with_its_padding(first: int, more: int, width: int, prefix: str) -> None:
    low, high = str(first).zfill(width), str(first + more).zfill(width)
    hosts = expand_hosts(f"{prefix}[{low}-{high}]")
    assert hosts == [prefix + str(number).zfill(len(low)) for number in range(first, first + more + 1)]


def test_rank_environment_reads_back_and_keeps_the_users_choices() -> None:
    place = dataclasses.replace(read_environment(TORCHRUN), local_world_size=8)
    env = rank_variables(place, error_file="/x/e.json", base={"OMP_NUM_THREADS": "3", "PATH": "/bin"})
    assert read_environment(env) == place
    assert (env["OMP_NUM_THREADS"], env["PATH"], env[environment.ERROR_FILE]) == ("3", "/bin", "/x/e.json")
    inherited = {environment.ERROR_FILE: "outer", "TORCHELASTIC_USE_AGENT_STORE": "True"}
    bare = rank_variables(place, base=inherited)
    assert environment.ERROR_FILE not in bare and "TORCHELASTIC_USE_AGENT_STORE" not in bare
    assert int(bare["OMP_NUM_THREADS"]) >= 1


def test_threads_are_shared_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(environment, "usable_cores", lambda: 16)
    four = dataclasses.replace(read_environment(TORCHRUN), world_size=8, local_world_size=4)
    assert rank_variables(four, base={})["OMP_NUM_THREADS"] == "4"
    many = dataclasses.replace(four, world_size=64, local_world_size=64)
    assert rank_variables(many, base={})["OMP_NUM_THREADS"] == "1"
    assert "GLOO_SOCKET_IFNAME" not in rank_variables(four, base={})  # another machine has to reach us


def test_device_index() -> None:
    assert [local_device_index(rank, 4) for rank in range(4)] == [0, 1, 2, 3]
    assert local_device_index(3, 1) == 0
    with pytest.raises(LaunchError, match="Local rank 2 has no CUDA device: 2 are visible"):
        local_device_index(2, 2)


def test_a_world_of_one_needs_no_group() -> None:
    start_process_group(SINGLE_PROCESS)
    assert not dist.is_initialized()
    stop_process_group()


def test_nccl_without_cuda_is_refused() -> None:
    place = dataclasses.replace(SINGLE_PROCESS, world_size=2)
    with pytest.raises(LaunchError, match="nccl needs CUDA"):
        start_process_group(place, backend="nccl", device_type="cpu")


def test_the_fake_backend_pretends_to_be_any_rank() -> None:
    place = dataclasses.replace(SINGLE_PROCESS, rank=4000, world_size=4096)
    start_process_group(place, backend="fake")
    try:
        assert (dist.get_rank(), dist.get_world_size()) == (4000, 4096)
        dist.all_reduce(torch.ones(2))
    finally:
        stop_process_group()
    assert not dist.is_initialized()


def test_unreachable_peers_are_explained() -> None:
    # Rank 1 of 2 waits for a rank 0 that nobody started; port 9 (discard) is closed.
    place = dataclasses.replace(SINGLE_PROCESS, rank=1, world_size=2, master_port=9)
    with pytest.raises(LaunchError, match=r"Rank 1 of 2 could not join the others at 127\.0\.0\.1:9") as caught:
        start_process_group(place, timeout_minutes=0.5 / 60)
    assert is_echo(caught.value)


def test_usable_cores_is_positive() -> None:
    assert environment.usable_cores() >= 1
