"""Processes of other users cannot become ranks: not on one machine, where ranks meet in a private folder, and not across machines,
where they prove that they know the secret of the run."""

from __future__ import annotations

import dataclasses
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from pathlib import Path

import pytest
import torch.distributed as dist

from petatron.base.errors import LaunchError, PeerFailure
from petatron.mesh.launch import rendezvous
from petatron.mesh.launch.environment import (
    SINGLE_PROCESS,
    RankEnvironment,
    rank_variables,
    read_environment,
    secret_from_env,
)
from petatron.mesh.launch.rendezvous import Rendezvous
from petatron.mesh.launch.rendezvous_store_client import RendezvousStoreClient
from petatron.mesh.launch.shared_secret import (
    SECRET_VARIABLE,
    find_secret_folder,
    secret_folder,
    wait_for_secret,
    write_secret,
)
from tests.forked_python import ForkedPython, run_forked
from tests.load_deadline import Deadline, scaled

ROOT = Path(__file__).resolve().parents[2]
SECRET, OTHER = "correct horse battery", "staple staple staple"
SOON, LATE = timedelta(seconds=1), timedelta(seconds=20)
NOBODY = 65534


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


@pytest.fixture
def world(monkeypatch: pytest.MonkeyPatch) -> Callable[..., RankEnvironment]:
    """Two ranks over TCP that know a secret."""
    monkeypatch.setenv(SECRET_VARIABLE, SECRET)  # a rendezvous leaves it there
    port = free_port()
    return lambda rank, secret=SECRET: dataclasses.replace(
        SINGLE_PROCESS, rank=rank, world_size=2, master_port=port, secret=secret
    )


def test_a_stranger_is_not_admitted_and_keeps_nobody_out(
    world: Callable[..., RankEnvironment], caplog: pytest.LogCaptureFixture
) -> None:
    """Also one that sends what is no text: that once ended the roll call."""
    first = Rendezvous(world(0))
    waiting = threading.Thread(target=first.wait_for_all_ranks, args=(LATE,), daemon=True)
    waiting.start()
    for words in (b"present/1", b"petatr01" + "\u00e4\u20ac".encode() * 20, bytes(range(256))):
        with socket.create_connection(("127.0.0.1", world(0).master_port)) as stranger, suppress(ConnectionError):
            stranger.sendall(words)
            assert stranger.recv(8) == b"petatr01"
            while stranger.recv(4096):
                pass
    assert waiting.is_alive(), "somebody without the secret was taken for rank 1"
    Rendezvous(world(1)).wait_for_all_ranks(LATE)
    waiting.join()
    assert "connections without the secret of this run were refused" in caplog.text


def test_a_rank_with_another_secret_is_not_admitted(world: Callable[..., RankEnvironment]) -> None:
    first, ended = Rendezvous(world(0)), []

    def join() -> None:
        try:
            Rendezvous(world(1, OTHER), timeout=SOON)
        except LaunchError as error:
            ended.append(str(error))

    other = threading.Thread(target=join)
    other.start()
    with pytest.raises(LaunchError, match="for rank 1"):
        first.wait_for_all_ranks(SOON)
    other.join()
    assert ended and "Rank 1 of 2 could not join the others" in ended[0] and "has another secret" in ended[0]


def test_a_false_rank_0_is_not_believed(world: Callable[..., RankEnvironment]) -> None:
    """Neither a store of torch's, which says nothing first, nor a server with another secret."""
    false = dist.TCPStore("127.0.0.1", world(0).master_port, is_master=True, wait_for_workers=False)
    false.set("admitted", "you are welcome")
    with pytest.raises(
        LaunchError, match=r"Rank 1 of 2 could not join the others .* Nobody answers there as rank 0 would"
    ):
        Rendezvous(world(1), timeout=SOON)


def test_a_false_server_learns_nothing_it_can_use(world: Callable[..., RankEnvironment]) -> None:
    """It gets a proof, cannot give one, and what it got is worth nothing at the real server."""
    seen, false = [], socket.create_server(("127.0.0.1", 0))
    real = Rendezvous(world(0))

    def serve() -> None:
        taken, _ = false.accept()
        with taken, socket.create_connection(("127.0.0.1", world(0).master_port)) as other:
            taken.sendall(
                b"petatr01" + bytes(32)
            )  # a nonce of its own: it cannot use the real server's and be asked first
            seen.append(taken.recv(4096))
            other.recv(4096)
            other.sendall(seen[0])
            seen.append(other.recv(4096))
            taken.sendall(seen[0][-32:])

    server = threading.Thread(target=serve)
    server.start()
    with pytest.raises(dist.DistNetworkError):
        RendezvousStoreClient(lambda: false.getsockname(), lambda: SECRET, timedelta(0))
    server.join()
    false.close()
    assert len(seen[0]) == 72 and seen[1] == b"" and SECRET.encode() not in seen[0]
    assert real.first_failure() is None


def test_a_true_word_of_a_failure_does(world: Callable[..., RankEnvironment], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rendezvous, "_LINGER_S", 0.1)
    first = Rendezvous(world(0))
    Rendezvous(world(1)).report_failure("no space left")
    with pytest.raises(PeerFailure, match="no space left"):
        first.raise_if_peer_failed()


def test_the_secret_lies_where_only_its_owner_can_read_it(tmp_path: Path) -> None:
    folder = tmp_path / "home" / ".petatron"
    first = write_secret("run", folder)
    assert (folder.stat().st_mode & 0o777, (folder / "run").stat().st_mode & 0o777) == (0o700, 0o600)
    assert wait_for_secret("run", folder, timeout_s=0) == first and len(first) == 32
    assert write_secret("run", folder) != first, "an earlier run's is replaced"
    assert [path.name for path in folder.iterdir()] == ["run"]


def test_a_planted_link_is_replaced_and_not_followed(tmp_path: Path) -> None:
    folder, victim = tmp_path / "secrets", tmp_path / "victim"
    folder.mkdir(mode=0o700)
    victim.write_text("precious")
    (folder / "run").symlink_to(victim)
    write_secret("run", folder)
    assert victim.read_text() == "precious" and not (folder / "run").is_symlink()


def test_a_folder_of_secrets_that_others_can_open_is_refused(tmp_path: Path) -> None:
    tmp_path.chmod(0o755)
    with pytest.raises(LaunchError, match="open to other users"):
        write_secret("run", tmp_path)
    (tmp_path / "run").write_text(SECRET)
    with pytest.raises(LaunchError, match="open to other users"):
        wait_for_secret("run", tmp_path, timeout_s=0)


def test_a_home_that_others_can_open_holds_no_secrets(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    folder = secret_folder()
    assert folder == tmp_path / ".petatron" / "rendezvous"
    folder.chmod(0o755)
    assert find_secret_folder() is None
    with pytest.raises(LaunchError, match="only you can open"):
        secret_folder()


def test_a_secret_that_does_not_come_is_explained(tmp_path: Path) -> None:
    with pytest.raises(LaunchError, match=f"export {SECRET_VARIABLE} with one random value for all"):
        wait_for_secret("run", tmp_path, timeout_s=0.3)


def test_a_secret_that_can_be_guessed_is_refused() -> None:
    with pytest.raises(LaunchError, match="has 6 characters; give at least 16"):
        secret_from_env({SECRET_VARIABLE: "secret"})


def test_the_secret_is_passed_on_and_not_shown() -> None:
    place = dataclasses.replace(
        SINGLE_PROCESS, world_size=4, local_world_size=2, master_port=5, launcher="torchrun", secret=SECRET
    )
    assert read_environment(rank_variables(place, base={SECRET_VARIABLE: OTHER * 2})) == place
    assert SECRET not in repr(place)


SLOW = """
import sys, time
from petatron.cli import train
rank = train.train_rank
def later(argv):
    time.sleep({delay} if {rank_of} else 0)
    return rank(argv)
train.train_rank = later
sys.exit(train.main(sys.argv[1:]))
"""
ATTACK = """
import os, sys, json
from datetime import timedelta
import torch.distributed as dist
os.setgid({nobody}); os.setuid({nobody})
found = {{"read": [], "joined": []}}
for path in {paths!r}:
    try:
        open(path, "rb").read(); found["read"].append(path)
    except OSError:
        pass
for port in {ports!r}:
    try:
        store = dist.TCPStore("127.0.0.1", port, is_master=False, wait_for_workers=False, timeout=timedelta(seconds=1))
        store.set_timeout(timedelta(seconds=1)); store.set("present/1", "x"); store.get("present/1")
        found["joined"].append(port)
    except Exception:
        pass
print(json.dumps(found))
"""


def listening(pids: list[int]) -> list[tuple[str, int]]:
    """Addresses (in /proc's hexadecimal) and ports that these processes listen at."""
    inodes = set()
    for pid in pids:
        for link in Path(f"/proc/{pid}/fd").glob("*"):
            try:
                inodes.add(os.readlink(link).removeprefix("socket:[").removesuffix("]"))
            except OSError:
                continue
    found = []
    for table in ("tcp", "tcp6"):
        for line in Path(f"/proc/net/{table}").read_text().splitlines()[1:]:
            local, state, inode = (line.split()[index] for index in (1, 3, 9))
            if state == "0A" and inode in inodes:
                address, port = local.split(":")
                found.append((address, int(port, 16)))
    return found


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_a_run_on_one_machine_can_be_reached_by_nobody_else(tmp_path: Path) -> None:
    """The attack that once worked: find the port before the second rank joins, join in its place."""
    script = tmp_path / "slow.py"
    script.write_text(SLOW.format(delay=2, rank_of="__import__('os').environ['RANK'] == '1'"))
    flags = "tiny-llama --mock-data --train-iters 2 --lr 1e-3 --dp 2 --device cpu --live off --eval-iters 0".split()
    launch = (
        "import sys; from tests.forking_launcher import fork_ranks; fork_ranks();"
        "from petatron.mesh.launch.local_launcher import run_ranks;"
        f"sys.exit(run_ranks([sys.executable, {str(script)!r}, *{flags!r}, '--save', {str(tmp_path / 'out')!r}], nproc=2))"
    )
    env = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "TMPDIR": str(tmp_path)}
    run = ForkedPython(
        [sys.executable, "-c", launch], env=env, cwd=ROOT, start_new_session=True, stdout=subprocess.DEVNULL
    )
    try:
        deadline = Deadline(20)
        while not (stores := list(tmp_path.glob("petatron-ranks-*/store"))):
            assert not deadline.is_over and run.poll() is None
            time.sleep(0.1)
        ranks = [int(pid) for pid in Path(f"/proc/{run.pid}/task/{run.pid}/children").read_text().split()]
        sockets = listening([run.pid, *ranks])
        assert all(address in ("0100007F", "0" * 24 + "01000000") for address, _ in sockets), sockets
        assert (stores[0].parent.stat().st_mode & 0o777) == 0o700
        if os.getuid() == 0:
            tmp_path.chmod(0o755)
            open_to_all = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
            ports = [open_to_all.port, *(port for _, port in sockets)]
            code = ATTACK.format(nobody=NOBODY, paths=[str(stores[0])], ports=ports)
            done = run_forked([sys.executable, "-c", code], cwd=ROOT)
            # A store of the old kind is joined, so the attack works; the run's is neither read nor joined.
            assert json.loads(done.stdout) == {"read": [], "joined": [open_to_all.port]}, done.stderr
        assert run.wait(timeout=scaled(60)) == 0, "and the run itself goes on"
    finally:
        if run.poll() is None:
            os.killpg(run.pid, signal.SIGKILL)
            run.wait()
