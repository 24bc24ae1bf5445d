"""Ranks of two network namespaces, which are two machines as far as sockets go, and a third from which a stranger comes. Root only."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from petatron.mesh.launch.shared_secret import SECRET_VARIABLE
from tests.load_deadline import Deadline, scaled
from tests.security.test_rank_takeover import NOBODY, PROGRAM, TOTALS

ROOT = Path(__file__).resolve().parents[2]
MACHINES = ("pt-zero", "pt-one", "pt-stranger")
BRIDGE = "pt-bridge"
PORT = 29511
ATTACK = """
import os, socket, struct, sys, time
os.setgid({nobody}); os.setuid({nobody})
held = []
for address, port in {listeners!r}:
    for number in (0, 1):
        one = socket.socket()
        one.settimeout(2)
        one.connect((address, port))
        one.sendall(struct.pack("=q", number))
        held.append(one)
print("connected", flush=True)
time.sleep(60)
"""


def ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True)


@pytest.fixture
def machines() -> Iterator[None]:
    if os.getuid() or shutil.which("ip") is None:
        pytest.skip("only root can make network namespaces, with ip")
    try:
        ip("link", "add", BRIDGE, "type", "bridge")
        ip("link", "set", BRIDGE, "up")
        for number, name in enumerate(MACHINES):
            ip("netns", "add", name)
            ip("link", "add", f"{name}-out", "type", "veth", "peer", "name", "net0", "netns", name)
            ip("link", "set", f"{name}-out", "master", BRIDGE, "up")
            ip("-n", name, "address", "add", f"10.77.0.{number + 1}/24", "dev", "net0")
            for device in ("lo", "net0"):
                ip("-n", name, "link", "set", device, "up")
    except subprocess.CalledProcessError as error:
        remove_machines()
        pytest.skip(f"no network namespaces here: {error.stderr}")
    yield
    remove_machines()


def remove_machines() -> None:
    for name in MACHINES:
        subprocess.run(["ip", "netns", "delete", name], capture_output=True)
    subprocess.run(["ip", "link", "delete", BRIDGE], capture_output=True)


def start_ranks(folder: Path) -> list[subprocess.Popen[str]]:
    (folder / "program.py").write_text(PROGRAM)
    env = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "net0"}
    env |= {SECRET_VARIABLE: "correct horse battery", "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "1", "LOCAL_RANK": "0"}
    env |= {"MASTER_ADDR": "10.77.0.1", "MASTER_PORT": str(PORT)}
    command = [sys.executable, str(folder / "program.py"), str(folder)]
    return [
        subprocess.Popen(
            ["ip", "netns", "exec", MACHINES[rank], *command],
            env={**env, "RANK": str(rank)},
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]


def wait_for(folder: Path, ranks: list[subprocess.Popen[str]], *names: str) -> None:
    deadline = Deadline(120)
    while not all((folder / name).exists() for name in names):
        assert not deadline.is_over and all(rank.poll() is None for rank in ranks), names
        time.sleep(0.02)


def listeners(machine: int) -> list[tuple[str, int]]:
    """Where processes of a machine listen."""
    table = subprocess.run(
        ["ip", "netns", "exec", MACHINES[machine], "cat", "/proc/net/tcp"], capture_output=True, text=True, check=True
    )
    rows = [line.split() for line in table.stdout.splitlines()[1:]]
    return [(f"10.77.0.{machine + 1}", int(row[1].split(":")[1], 16)) for row in rows if row[3] == "0A"]


def finish(folder: Path, ranks: list[subprocess.Popen[str]]) -> tuple[list[int], str]:
    (folder / "end").touch()
    said = "".join(rank.communicate(timeout=scaled(120))[1] for rank in ranks)
    return [rank.returncode for rank in ranks], said


@pytest.mark.slow
@pytest.mark.usefixtures("machines")
def test_ranks_of_two_machines_claim_their_connections(tmp_path: Path) -> None:
    ranks = start_ranks(tmp_path)
    (tmp_path / "go").touch()
    try:
        wait_for(tmp_path, ranks, "totals-0", "totals-1")
        time.sleep(1)  # the guard rests when all connections are claimed
        codes, said = finish(tmp_path, ranks)
    finally:
        for rank in ranks:
            rank.kill()
    assert codes == [0, 0] and "no rank" not in said, said
    assert (tmp_path / "totals-0").read_text() == (tmp_path / "totals-1").read_text() == str(TOTALS)


@pytest.mark.slow
@pytest.mark.usefixtures("machines")
def test_a_stranger_of_a_third_machine_is_cut_off(tmp_path: Path) -> None:
    """It has sent the numbers of both ranks to every listener of gloo before they communicate."""
    ranks = start_ranks(tmp_path)
    try:
        wait_for(tmp_path, ranks, "joined-0", "joined-1")
        ports = [one for machine in range(2) for one in listeners(machine) if one[1] != PORT]
        code = ATTACK.format(nobody=NOBODY, listeners=ports)
        stranger = subprocess.Popen(
            ["ip", "netns", "exec", MACHINES[2], sys.executable, "-c", code], stdout=subprocess.PIPE, text=True
        )
        assert stranger.stdout is not None and stranger.stdout.readline() == "connected\n"
        (tmp_path / "go").touch()
        codes, said = finish(tmp_path, ranks)
        stranger.kill()
        stranger.wait()
    finally:
        for rank in ranks:
            rank.kill()
    assert any(codes) and "a process at 10.77.0.3 that is no rank of this run connected to gloo's port" in said, said
    assert not (tmp_path / "totals-0").exists()
