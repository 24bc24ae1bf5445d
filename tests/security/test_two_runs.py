"""Two runs of one user with the same secret at the same address and port, at once or one after the other: no rank of one joins the other,
writes to its store or ends it."""

from __future__ import annotations

import dataclasses
import socket
import threading
from collections.abc import Callable, Iterator
from datetime import timedelta

import pytest
import torch.distributed as dist

from petatron.base.errors import LaunchError, OtherRunError
from petatron.mesh.launch import open_rendezvous_store, rendezvous, rendezvous_store_server
from petatron.mesh.launch.environment import JOINED_STORE, SINGLE_PROCESS, RankEnvironment
from petatron.mesh.launch.rank_exit import is_echo
from petatron.mesh.launch.rendezvous import Rendezvous, notify_peers
from petatron.mesh.launch.rendezvous_store_client import RendezvousStoreClient
from petatron.mesh.launch.rendezvous_store_server import StoreServerProcess, bind_listener
from petatron.mesh.launch.shared_secret import SECRET_VARIABLE
from tests.load_deadline import scaled, wait_until

SECRET = "correct horse battery"
Place = Callable[..., RankEnvironment]


@pytest.fixture
def late() -> timedelta:
    return timedelta(seconds=scaled(20))


@pytest.fixture
def place(monkeypatch: pytest.MonkeyPatch) -> Place:
    """Ranks at one address with one secret."""
    monkeypatch.setenv(SECRET_VARIABLE, SECRET)
    monkeypatch.setenv(JOINED_STORE, "")  # a rendezvous leaves its own there
    monkeypatch.setattr(rendezvous, "_LINGER_S", scaled(2))
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    return lambda rank, world_size=2: dataclasses.replace(
        SINGLE_PROCESS, rank=rank, world_size=world_size, master_port=port, secret=SECRET
    )


def join(place: Place, late: timedelta) -> list[Rendezvous]:
    """Two ranks that have joined."""
    ranks = [Rendezvous(place(0)), Rendezvous(place(1))]
    second = threading.Thread(target=ranks[1].wait_for_all_ranks, args=(late,))
    second.start()
    ranks[0].wait_for_all_ranks(late)
    second.join()
    return ranks


def test_a_rank_of_another_run_does_not_take_a_place(place: Place, late: timedelta) -> None:
    """It once wrote its own address over that of the rank."""
    first, second = join(place, late)
    with pytest.raises(OtherRunError, match=r"Another process is rank 1 at .* already") as raised:
        Rendezvous(place(1)).wait_for_all_ranks(late)
    assert is_echo(raised.value), "its end is not reported to the run that goes on"
    assert first.first_failure() is None and second.random_number() == first.random_number()


def test_a_rank_beyond_the_others_is_not_admitted(place: Place, late: timedelta) -> None:
    """Rank 3 of 4, where a run of two is: nobody there looks for a rank 3."""
    first, _ = join(place, late)
    with pytest.raises(OtherRunError, match=r"one of 4 ranks, and rank 0 at .* as one of 2"):
        Rendezvous(place(3, 4)).wait_for_all_ranks(late)
    assert first.first_failure() is None


def test_a_rank_that_waits_does_not_take_the_port_of_rank_0(
    place: Place, late: timedelta, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where nobody listens yet and the kernel chooses that very port for the rank's end, it is connected with itself, and held the port."""
    connect, num_tries = socket.create_connection, []

    def with_itself(address: tuple[str, int], timeout: float) -> socket.socket:
        if num_tries:
            num_tries.append(1)
            return connect(address, timeout)
        one = socket.socket()
        one.bind(address)
        one.connect(address)
        num_tries.append(1)
        return one

    monkeypatch.setattr(socket, "create_connection", with_itself)
    monkeypatch.setattr(open_rendezvous_store, "_PORT_IN_USE_S", 2.0)
    second = threading.Thread(target=lambda: Rendezvous(place(1), timeout=late).wait_for_all_ranks(late), daemon=True)
    second.start()
    wait_until(lambda: len(num_tries) > 0, "the first try")
    first = Rendezvous(place(0))
    first.wait_for_all_ranks(late)
    second.join()
    assert len(num_tries) > 1


@pytest.fixture
def other_process(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[int], StoreServerProcess]]:
    """Starts the server of rank 0 of another run, whose process has the same id as this one, as in another container."""
    servers: list[StoreServerProcess] = []

    def start(port: int) -> StoreServerProcess:
        with monkeypatch.context() as patch:
            patch.setattr(rendezvous_store_server, "own_identity", lambda: bytes(range(16)))
            servers.append(StoreServerProcess(bind_listener("127.0.0.1", port), SECRET))
        return servers[-1]

    yield start
    for server in servers:
        server.close()


def test_a_store_is_not_taken_for_the_next_one_at_its_address(
    place: Place, late: timedelta, other_process: Callable[[int], StoreServerProcess]
) -> None:
    port = place(0).master_port
    earlier = StoreServerProcess(bind_listener("127.0.0.1", port), SECRET)
    store = RendezvousStoreClient(lambda: ("127.0.0.1", port), lambda: SECRET, late)
    store.set("a", "1")
    earlier.close()
    other_process(port)
    with pytest.raises(dist.DistNetworkError, match="Another run with the same secret listens at"):
        store.compare_set("failed", "", "what ended the earlier run")
    assert RendezvousStoreClient(lambda: ("127.0.0.1", port), lambda: SECRET, late).num_keys() == 0


def test_the_end_of_an_earlier_run_does_not_end_the_next_one(
    place: Place, late: timedelta, other_process: Callable[[int], StoreServerProcess]
) -> None:
    """A rank that waited for a time limit after rank 0 was gone reports its failure when the next run has begun."""
    first, second = join(place, late)
    assert isinstance(first.store, RendezvousStoreClient)
    for rank in (first, second):
        rank.store.close()  # type: ignore[attr-defined]
    del first, rank
    port = place(1).master_port
    other_process(port)
    next_run = RendezvousStoreClient(lambda: ("127.0.0.1", port), lambda: SECRET, late)
    notify_peers(place(1), "NCCL's watchdog ended it")
    assert not next_run.check(["failed"]) and not next_run.check(["told"])


def test_rank_0_does_not_take_the_server_of_another_container_for_its_own(
    place: Place, other_process: Callable[[int], StoreServerProcess], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Processes of two containers with the host's network may have the same id."""
    monkeypatch.setattr(open_rendezvous_store, "_PORT_IN_USE_S", 0.2)
    other_process(place(0).master_port)
    with pytest.raises(LaunchError, match=r"Rank 0 cannot listen at .* Another run may use the port"):
        Rendezvous(place(0))
