"""Ranks find each other, or learn why they do not: who is missing, and who failed before it could join."""

from __future__ import annotations

import concurrent.futures
import dataclasses
import os
import socket
import sys
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path

import pytest
import torch.distributed as dist

from petatron.base.errors import LaunchError, PeerFailure
from petatron.mesh.launch import open_rendezvous_store, rendezvous, shared_secret
from petatron.mesh.launch.environment import (
    SINGLE_PROCESS,
    STORE_FILE,
    RankEnvironment,
    rank_variables,
    read_environment,
)
from petatron.mesh.launch.rank_exit import is_echo
from petatron.mesh.launch.rendezvous import Rendezvous, notify_peers
from petatron.mesh.launch.shared_secret import write_secret
from tests.forked_python import ForkedPython
from tests.load_deadline import scaled, within

ROOT = Path(__file__).resolve().parents[3]
SOON, LATE = timedelta(seconds=0.5), timedelta(seconds=20)


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


@pytest.fixture(params=["file", "tcp"])
def world(request: pytest.FixtureRequest, tmp_path: Path) -> Callable[[int], RankEnvironment]:
    """Two ranks, over a file or over TCP."""
    tmp_path.chmod(0o700)
    port, file = free_port(), str(tmp_path / "store") if request.param == "file" else None
    return lambda rank: dataclasses.replace(SINGLE_PROCESS, rank=rank, world_size=2, master_port=port, store_file=file)


def test_all_come(world: Callable[[int], RankEnvironment]) -> None:
    first = Rendezvous(world(0))
    other = threading.Thread(target=lambda: Rendezvous(world(1)).wait_for_all_ranks(LATE))
    other.start()
    first.wait_for_all_ranks(LATE)
    other.join()
    assert first.first_failure() is None


def test_who_does_not_come_is_named(world: Callable[[int], RankEnvironment]) -> None:
    with pytest.raises(LaunchError, match=r"Rank 0 of 2 waited \d+ s at .* for rank 1\. Check"):
        Rendezvous(world(0)).wait_for_all_ranks(SOON)


@pytest.mark.parametrize("failing", [0, 1])
def test_a_rank_that_fails_before_joining_ends_the_others_at_once(
    world: Callable[[int], RankEnvironment], failing: int
) -> None:
    started = time.monotonic()
    teller = threading.Thread(target=notify_peers, args=(world(failing), "no such file: corpus.bin"))
    teller.start()
    with pytest.raises(PeerFailure, match=rf"Rank {failing} of 2 failed:\nno such file: corpus.bin") as caught:
        Rendezvous(world(1 - failing), timeout=LATE).wait_for_all_ranks(LATE)
    teller.join()
    assert is_echo(caught.value), "another rank is to blame"
    assert time.monotonic() - started < scaled(5)


def test_only_the_first_failure_counts(
    world: Callable[[int], RankEnvironment], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rendezvous, "_LINGER_S", 0.2)
    first = Rendezvous(world(0))
    first.report_failure("the cause")
    first.report_failure("a consequence")
    assert first.first_failure() == "Rank 0 of 2 failed:\nthe cause"


def test_telling_nobody_takes_no_longer_than_a_moment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rendezvous, "_LINGER_S", 0.3)
    with within(5, "telling nobody"):
        notify_peers(dataclasses.replace(SINGLE_PROCESS, rank=1, world_size=2, master_port=free_port()), "a cause")


def test_a_folder_that_others_can_open_is_refused(tmp_path: Path) -> None:
    tmp_path.chmod(0o755)
    place = dataclasses.replace(SINGLE_PROCESS, world_size=2, store_file=str(tmp_path / "store"))
    with pytest.raises(LaunchError, match="open to other users, who could pass for a rank"):
        Rendezvous(place)


def test_where_ranks_meet_is_passed_on() -> None:
    place = dataclasses.replace(
        SINGLE_PROCESS, world_size=2, local_world_size=2, master_port=5, launcher="torchrun", store_file="/x/s"
    )
    assert read_environment(rank_variables(place, base={STORE_FILE: "/outer"})) == place
    bare = dataclasses.replace(place, store_file=None)
    assert read_environment(rank_variables(bare, base={STORE_FILE: "/outer"})) == bare


def test_torchruns_own_store_is_used_where_it_has_one() -> None:
    env = dict.fromkeys(("RANK", "LOCAL_RANK"), "1") | {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}
    env |= {"MASTER_ADDR": "h", "MASTER_PORT": "5"}
    assert read_environment(env).restart_count is None
    env |= {"TORCHELASTIC_USE_AGENT_STORE": "True", "TORCHELASTIC_RESTART_COUNT": "3"}
    assert read_environment(env).restart_count == 3


def test_srun_ranks_find_the_secret_that_the_first_one_leaves(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where an earlier run left another one; and when all have joined it is gone."""
    for module, name in ((shared_secret, "find_secret_folder"), (open_rendezvous_store, "secret_folder")):
        monkeypatch.setattr(module, name, lambda: tmp_path / "secrets")
    monkeypatch.setattr(rendezvous, "set_default_variables", lambda wanted: None)
    port = free_port()
    places = [
        dataclasses.replace(SINGLE_PROCESS, rank=rank, world_size=2, master_port=port, secret_name="job")
        for rank in (0, 1)
    ]
    write_secret("job", tmp_path / "secrets")
    stale = threading.Thread(target=lambda: Rendezvous(places[1]).wait_for_all_ranks(LATE))
    stale.start()
    time.sleep(0.3)
    first = Rendezvous(places[0])
    first.wait_for_all_ranks(LATE)
    stale.join(timeout=scaled(10))
    assert not stale.is_alive() and not list((tmp_path / "secrets").iterdir())


@pytest.fixture
def over_tcp() -> Callable[..., RankEnvironment]:
    port = free_port()
    return lambda rank, **changes: dataclasses.replace(
        SINGLE_PROCESS, rank=rank, world_size=2, master_port=port, **changes
    )


def test_rank_0_starts_one_server_however_often_it_opens_the_store(over_tcp: Callable[..., RankEnvironment]) -> None:
    """The watchdog opens it again."""
    first, again = Rendezvous(over_tcp(0)), Rendezvous(over_tcp(0))
    first.store.set("a", "1")
    assert again.store.get("a") == b"1"


def test_a_port_of_another_program_is_named(
    over_tcp: Callable[..., RankEnvironment], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(open_rendezvous_store, "_PORT_IN_USE_S", 0.2)
    monkeypatch.setattr(open_rendezvous_store, "_OWN_SERVER_TIMEOUT", timedelta(seconds=0.2))
    words = r"cannot listen at 127\.0\.0\.1, port \d+: Address already in use\. Another run"
    with socket.create_server(("127.0.0.1", over_tcp(0).master_port)), pytest.raises(LaunchError, match=words):
        Rendezvous(over_tcp(0))


def test_ranks_of_worlds_of_different_sizes_are_told(over_tcp: Callable[..., RankEnvironment]) -> None:
    first = Rendezvous(over_tcp(0))
    first.store.set("present/1", "4")
    with pytest.raises(LaunchError, match="Rank 1 was started as one of 4 ranks, rank 0 as one of 2"):
        first.wait_for_all_ranks(LATE)


def test_under_torchrun_ranks_meet_at_a_port_that_its_store_tells(over_tcp: Callable[..., RankEnvironment]) -> None:
    """Nothing else is there, and what others write there leads nowhere."""
    agent = dist.TCPStore("127.0.0.1", over_tcp(0).master_port, is_master=True, wait_for_workers=False)
    agent.set("petatron/attempt-3/port", "1")
    with concurrent.futures.ThreadPoolExecutor() as pool:
        places = [over_tcp(rank, restart_count=3, secret="correct horse battery") for rank in range(2)]
        other = pool.submit(Rendezvous, places[1], timeout=LATE)
        first = Rendezvous(places[0], timeout=LATE)
        pool.submit(other.result().wait_for_all_ranks, LATE)
        first.wait_for_all_ranks(LATE)
    assert sorted(key.split("/")[-1] for key in agent.list_keys() if "petatron" in key) == ["port"]


FAILS = """
import sys
from petatron.base.errors import DataError
from petatron.cli import train
if "{rank}" == "{failing}":
    def fail(argv): raise DataError("cannot read corpus.idx here")
    train.train_rank = fail
sys.exit(train.main(sys.argv[1:]))
"""


@pytest.mark.parametrize("failing", [0, 1])
def test_under_srun_a_rank_that_fails_early_ends_the_other(tmp_path: Path, failing: int) -> None:
    """Nobody but the ranks themselves is there: no launcher, no agent."""
    slurm = {"SLURM_STEP_ID": "0", "SLURM_JOB_ID": "7", "SLURM_NTASKS": "2", "SLURM_JOB_NODELIST": "here"}
    slurm |= {
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(free_port()),
        "PYTHONPATH": str(ROOT),
        "HOME": str(tmp_path),
    }
    flags = "tiny-llama --mock-data --train-iters 2 --lr 1e-3 --dp 2 --device cpu --live off".split()
    ranks = [
        ForkedPython(
            [sys.executable, "-c", FAILS.format(rank=rank, failing=failing), *flags, "--save", str(tmp_path / "out")],
            env={**os.environ, **slurm, "SLURM_PROCID": str(rank), "SLURM_LOCALID": str(rank)},
            stderr=(tmp_path / f"said-{rank}").open("w"),
        )
        for rank in range(2)
    ]
    try:
        codes = [rank.wait(timeout=scaled(50)) for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
    said = [(tmp_path / f"said-{rank}").read_text() for rank in range(2)]
    assert codes == [1, 1], said
    assert "cannot read corpus.idx here" in said[failing]
    assert f"Rank {failing} of 2 failed:\ncannot read corpus.idx here" in said[1 - failing]
