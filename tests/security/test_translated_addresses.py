"""Ranks behind source NAT: their connections to gloo come from other addresses than they claim. They are cut as strangers' with a word that
says why, and taken where the user trusts the network. Between network namespaces (root only) a proxy with another address plays the
NAT."""

from __future__ import annotations

import os
import shutil
import socket
import struct
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path

import pytest
import torch.distributed as dist

from petatron.base.errors import LaunchError
from petatron.mesh.launch import connection_guard
from petatron.mesh.launch.connection_guard import ConnectionGuard
from petatron.mesh.launch.environment import RankEnvironment
from petatron.mesh.launch.nat_and_trusted_networks import NETWORKS_VARIABLE, describe_translations, parse_networks
from petatron.mesh.launch.rendezvous import Rendezvous
from petatron.mesh.launch.rendezvous_store_client import RendezvousStoreClient
from tests.load_deadline import scaled
from tests.security.test_rank_takeover import TOTALS, needs_linux
from tests.security.test_sealed_store import four_ranks
from tests.security.test_two_machines import PORT, finish, ip, listeners, start_ranks, wait_for

__all__ = ["four_ranks"]


def published(address: tuple[str, int]) -> bytes:
    """What gloo publishes of a listener."""
    name, there = b"node", connection_guard._as_sockaddr(socket.AF_INET, address).ljust(136, b"\0")
    return struct.pack("=Q", len(name)) + name + struct.pack("=Q", len(there)) + there


@pytest.fixture
def far_apart(monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[socket.socket, socket.socket]]:
    """Both ends of a connection that counts as one between machines, and is late."""
    monkeypatch.setattr(connection_guard._Connection, "is_within_machine", False)
    monkeypatch.setattr(connection_guard, "_CLAIM_S", -1.0)
    with socket.create_server(("127.0.0.1", 0)) as listener, socket.socket() as near:
        near.connect(listener.getsockname())
        far, _ = listener.accept()
        with far:
            yield near, far


def is_cut(near: socket.socket) -> bool:
    near.settimeout(0.05)
    try:
        return near.recv(1) == b""
    except TimeoutError:
        return False


def listening_guard(store: dist.Store, far: socket.socket, networks: str = "") -> ConnectionGuard:
    """A guard of the listening rank, whose connecting rank's socket is in this process too and is not looked at."""
    guard = ConnectionGuard(store, parse_networks(networks))
    guard.note_published(published(far.getsockname()))
    return guard


@needs_linux
@pytest.mark.parametrize("is_claimed", [True, False])
def test_a_claimed_connection_stays_and_another_is_cut(
    far_apart: tuple[socket.socket, socket.socket], is_claimed: bool, caplog: pytest.LogCaptureFixture
) -> None:
    near, far = far_apart
    store = dist.HashStore()
    if is_claimed:
        claiming = ConnectionGuard(store)
        claiming._classify(0, near.fileno(), b"", [published(far.getsockname())])
    listening_guard(store, far)._check_connections()
    assert is_cut(near) is not is_claimed
    assert ("is no rank of this run" in caplog.text) is not is_claimed and "NAT" not in caplog.text


@needs_linux
def test_a_claim_that_arrives_from_elsewhere_is_explained(
    far_apart: tuple[socket.socket, socket.socket], caplog: pytest.LogCaptureFixture
) -> None:
    """The rank says 10.88.0.2, and it comes from 127.0.0.1."""
    near, far = far_apart
    store = dist.HashStore()
    own = f"{far.getsockname()[0]}:{far.getsockname()[1]}"
    store.set(f"connection/10.88.0.2:41000/{own}", "")
    store.append(f"connections/{own}", "10.88.0.2:41000 ")
    listening_guard(store, far)._check_connections()
    assert is_cut(near)
    assert "Ranks have opened connections to this port from 10.88.0.2:41000, and none arrived from there" in caplog.text
    assert f"export {NETWORKS_VARIABLE}=127.0.0.1 on all machines" in caplog.text


@needs_linux
def test_a_connection_from_a_trusted_network_needs_no_claim(far_apart: tuple[socket.socket, socket.socket]) -> None:
    near, far = far_apart
    listening_guard(dist.HashStore(), far, "10.0.0.0/8,127.0.0.0/30")._check_connections()
    assert not is_cut(near)


def test_networks_are_parsed_and_all_wrong_ones_named() -> None:
    assert [str(network) for network in parse_networks(" 10.0.0.0/8,,fd00::/8,10.1.2.3 ")] == [
        "10.0.0.0/8",
        "fd00::/8",
        "10.1.2.3/32",
    ]
    with pytest.raises(LaunchError, match=r"(?s)PETATRON_TRUSTED_NETWORKS.*10\.0\.0\.1/8.*everybody"):
        parse_networks("10.0.0.1/8,10.0.0.0/8,everybody")


def test_translations_are_described_by_address() -> None:
    lines = ["3 10.88.0.2 10.77.0.9", "2 10.88.0.2 10.77.0.9", "5 10.88.0.3 10.77.0.10"]
    text = describe_translations(lines, ())
    assert text is not None and "it sees ranks 2-3 of 10.88.0.2 as 10.77.0.9; rank 5 of 10.88.0.3 as 10.77.0.10" in text
    assert f"{NETWORKS_VARIABLE}=10.77.0.10,10.77.0.9 on all" in text
    assert describe_translations(lines, parse_networks("10.77.0.0/24")) is None


@pytest.mark.parametrize("networks", ["", "127.0.0.1"])
def test_the_roll_call_notices_a_translation(
    four_ranks: Callable[[], list[RankEnvironment]],
    networks: str,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Two ranks whose own address is another than the one that the server sees."""
    monkeypatch.setenv(NETWORKS_VARIABLE, networks)
    places = four_ranks()
    first = Rendezvous(places[0])
    others = [Rendezvous(place) for place in places[1:]]
    for other in others[1:]:
        assert isinstance(other.store, RendezvousStoreClient) and other.store.own_address == "127.0.0.1"
        other.store.own_address = "10.88.0.2"
    late = timedelta(seconds=scaled(30))
    with ThreadPoolExecutor() as pool:
        joining = [pool.submit(other.wait_for_all_ranks, late) for other in others]
        first.wait_for_all_ranks(late)
        for one in joining:
            one.result()
    warned = "it sees ranks 2-3 of 10.88.0.2 as 127.0.0.1. If gloo's connections take the same way" in caplog.text
    assert warned is not bool(networks), caplog.text


NAT = "10.77.0.9"
SIDES = ("pt-side0", "pt-side1")
"""Namespaces of the router: each is the other machine for one rank."""
PROXY = """
import ctypes, os, socket, sys, threading
libc = ctypes.CDLL(None, use_errno=True)
def enter(name):
    with open(f"/run/netns/{name}") as space:
        assert libc.setns(space.fileno(), 0x40000000) == 0
def pump(source, target):
    try:
        while data := source.recv(65536):
            target.sendall(data)
    except OSError:
        pass
    for end in (source, target):
        try:
            end.shutdown(socket.SHUT_RDWR)
        except OSError:
            pass
def serve(listener, far_side, address, nat):
    enter(far_side)
    while True:
        near, _ = listener.accept()
        try:
            far = socket.create_connection((address, listener.getsockname()[1]), source_address=(nat, 0))
        except OSError:
            near.close()
            continue
        for ends in ((near, far), (far, near)):
            threading.Thread(target=pump, args=ends, daemon=True).start()
nat, rules = sys.argv[1], [rule.split("/") for rule in sys.argv[2:]]
for near_side, far_side, address, port in rules:
    enter(near_side)
    listener = socket.create_server((address, int(port)))
    threading.Thread(target=serve, args=(listener, far_side, address, nat), daemon=True).start()
print("passes on", flush=True)
sys.stdin.read()
"""


@pytest.fixture
def translated_machines() -> Iterator[None]:
    """Two machines at 10.77.0.1 and 10.77.0.2, each of which sees the other at 10.77.0.9."""
    if os.getuid() or shutil.which("ip") is None:
        pytest.skip("only root can make network namespaces, with ip")
    machines = ("pt-zero", "pt-one")
    try:
        for number, (machine, side) in enumerate(zip(machines, SIDES)):
            for name in (machine, side):
                ip("netns", "add", name)
                ip("-n", name, "link", "set", "lo", "up")
            ip("-n", machine, "link", "add", "net0", "type", "veth", "peer", "name", "net0", "netns", side)
            ip("-n", machine, "address", "add", f"10.77.0.{number + 1}/24", "dev", "net0")
            for address in (f"10.77.0.{2 - number}", NAT):
                ip("-n", side, "address", "add", f"{address}/24", "dev", "net0")
            for name in (machine, side):
                ip("-n", name, "link", "set", "net0", "up")
        yield
    except subprocess.CalledProcessError as error:
        pytest.skip(f"no network namespaces here: {error.stderr}")
    finally:
        for name in (*machines, *SIDES):
            subprocess.run(["ip", "netns", "delete", name], capture_output=True)


def pass_on(ports: list[tuple[int, int]]) -> subprocess.Popen[str]:
    """Passes connections to ports of machines (0 or 1) on from the other one, with another address; ends with its input."""
    rules = [f"{SIDES[1 - machine]}/{SIDES[machine]}/10.77.0.{machine + 1}/{port}" for machine, port in ports]
    router = subprocess.Popen(
        [sys.executable, "-c", PROXY, NAT, *rules], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert router.stdout is not None and router.stdout.readline() == "passes on\n"
    return router


@pytest.mark.slow
@pytest.mark.usefixtures("translated_machines")
@pytest.mark.parametrize("networks", ["", f"{NAT}/32"], ids=["unknown", "trusted"])
def test_ranks_behind_nat_join_where_the_network_is_trusted(
    tmp_path: Path, networks: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(NETWORKS_VARIABLE, networks)
    routers, ranks = [pass_on([(0, PORT)])], start_ranks(tmp_path)
    try:
        wait_for(tmp_path, ranks, "joined-0", "joined-1")
        ports = [(machine, port) for machine in range(2) for _, port in listeners(machine) if port != PORT]
        routers.append(pass_on(ports))
        (tmp_path / "go").touch()
        wait_for(tmp_path, ranks, "totals-0", "totals-1")
        time.sleep(0 if networks else connection_guard._CLAIM_S + 2)
        codes, said = finish(tmp_path, ranks)
    finally:
        for process in (*ranks, *routers):
            process.kill()
            process.wait()
    if networks:
        assert codes == [0, 0] and "NAT" not in said and "no rank" not in said, said
        assert (tmp_path / "totals-0").read_text() == (tmp_path / "totals-1").read_text() == str(TOTALS)
    else:
        assert f"it sees rank 1 of 10.77.0.2 as {NAT}" in said, said
        assert "its address was translated on the way (NAT)" in said and f"{NETWORKS_VARIABLE}={NAT} on all" in said
