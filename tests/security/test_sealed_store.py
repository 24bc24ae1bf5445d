"""The store of ranks across machines against whoever reaches its port or sits between: nothing is learned, changed, repeated or added, and
a flood of connections keeps no rank out."""

from __future__ import annotations

import dataclasses
import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from datetime import timedelta
from pathlib import Path

import pytest
import torch.distributed as dist

from petatron.mesh.launch.encrypted_channel import MAX_FRAME_BYTES, ChannelError, ClientChannel, ServerChannel
from petatron.mesh.launch.environment import SINGLE_PROCESS, RankEnvironment
from petatron.mesh.launch.rendezvous import Rendezvous
from petatron.mesh.launch.rendezvous_store_client import RendezvousStoreClient
from petatron.mesh.launch.rendezvous_store_protocol import Operation, encode_request
from petatron.mesh.launch.rendezvous_store_server import StoreServerProcess, bind_listener
from petatron.mesh.launch.shared_secret import SECRET_VARIABLE
from tests.longform import diagonal

SECRET = "correct horse battery"
LATE = timedelta(seconds=30)
IDENTIFIER = bytes(16)


@pytest.fixture
def server() -> Iterator[tuple[str, int]]:
    """The address of a server."""
    listener = bind_listener("127.0.0.1", 0)
    address = listener.getsockname()
    process = StoreServerProcess(listener, SECRET)
    yield address
    process.close()


def open_store(address: tuple[str, int], secret: str = SECRET, timeout: timedelta = LATE) -> RendezvousStoreClient:
    return RendezvousStoreClient(lambda: address, lambda: secret, timeout)


class Between:
    """Whoever sits between a rank and the server: `change` gets whether bytes come from the rank, and the bytes, and returns those that
    are passed on."""

    def __init__(self, address: tuple[str, int], change: Callable[[bool, bytes], bytes]) -> None:
        self.listener = socket.create_server(("127.0.0.1", 0))
        self.address, self._to, self._change = self.listener.getsockname(), address, change
        self.seen: list[tuple[bool, bytes]] = []
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        while True:
            try:
                near, _ = self.listener.accept()
            except OSError:
                return
            far = socket.create_connection(self._to)
            for source, target, is_up in ((near, far, True), (far, near, False)):
                threading.Thread(target=self._pass_on, args=(source, target, is_up), daemon=True).start()

    def _pass_on(self, source: socket.socket, target: socket.socket, is_up: bool) -> None:
        try:
            while data := source.recv(65_536):
                self.seen.append((is_up, data))
                target.sendall(self._change(is_up, data))
        except OSError:
            pass
        for end in (source, target):
            with socket.socket(fileno=os.dup(end.fileno())) as copy, suppress(OSError):
                copy.shutdown(socket.SHUT_RDWR)


def test_it_is_a_store_as_torch_has_them(server: tuple[str, int]) -> None:
    """Every operation against torch's own store in memory."""
    said: list[list[object]] = []
    for inner in (open_store(server), dist.HashStore()):
        store = dist.PrefixStore("x", inner)
        store.set_timeout(timedelta(seconds=0.2))
        store.set("a", "1")
        results: list[object] = [
            store.get("a"),
            store.add("n", 3),
            store.add("n", -1),
            store.get("n"),
            store.num_keys(),
        ]
        results += [store.check(["a", "n"]), store.check(["a", "b"]), store.delete_key("a"), store.delete_key("a")]
        results += [store.compare_set("c", "", "new"), store.compare_set("c", "old", "newer")]
        results += [store.compare_set("c", "new", "newest"), store.compare_set("d", "old", "new"), store.check(["d"])]
        store.append("c", "!")
        store.multi_set(["p", "q"], ["\x00\x01", ""])
        results += [store.multi_get(["c", "p", "q"]), store.has_extended_api()]
        with pytest.raises(dist.DistStoreError, match="timeout"):
            store.get("nothing")
        with pytest.raises(dist.DistStoreError, match="timeout"):
            store.wait(["c", "nothing"], timedelta(seconds=0.1))
        store.wait(["c"])
        said.append(results)
    assert said[0] == said[1]


def test_a_thread_that_waits_blocks_no_other(server: tuple[str, int]) -> None:
    store = open_store(server)
    with ThreadPoolExecutor() as pool:
        waiting = [pool.submit(store.get, "late"), pool.submit(store.wait, ["late", "later"], LATE)]
        assert store.add("n", 1) == 1
        store.multi_set(["late", "later"], [b"x", b"y"])
        assert waiting[0].result() == b"x"
        waiting[1].result()


def test_whoever_listens_reads_nothing(server: tuple[str, int]) -> None:
    between = Between(server, lambda is_up, data: data)
    store = open_store(between.address)
    store.set("default_pg/0", "an address of gloo" * 4)
    assert store.get("default_pg/0") == b"an address of gloo" * 4
    wire = b"".join(data for _, data in between.seen)
    assert len(wire) > 300
    assert not any(words in wire for words in (b"default_pg", b"address", b"gloo", SECRET.encode()))
    between.listener.close()


@diagonal(3)
@pytest.mark.parametrize("is_up", [True, False], ids=["request", "answer"])
@pytest.mark.parametrize("byte", [0, 20, 71, 75, 80, 95, -1])
def test_a_changed_bit_ends_the_connection_and_not_the_run(server: tuple[str, int], is_up: bool, byte: int) -> None:
    """At any place of the handshake or of a frame; the rank connects again, and what it counted is counted once."""
    total, changed = [0, 0], []

    def change(direction: bool, data: bytes) -> bytes:
        start, total[direction] = total[direction], total[direction] + len(data)
        place = byte - start if byte >= 0 else len(data) - 1
        if direction is not is_up or changed or not 0 <= place < len(data) or (byte < 0 and start < 100):
            return data
        changed.append(place)
        return data[:place] + bytes((data[place] ^ 0x10,)) + data[place + 1 :]

    between = Between(server, change)
    store = open_store(between.address)
    assert [store.add("count", 1) for _ in range(3)] == [1, 2, 3]
    assert changed, "no bit was changed"
    assert open_store(server).get("count") == b"3"
    between.listener.close()


def test_recorded_bytes_are_of_no_use_later(server: tuple[str, int]) -> None:
    between = Between(server, lambda is_up, data: data)
    store = open_store(between.address)
    store.set("a", "old")
    recorded = b"".join(data for is_up, data in between.seen if is_up)
    store.set("a", "new")
    with socket.create_connection(server) as again:
        again.recv(4096)
        again.sendall(recorded)
        with suppress(ConnectionResetError):
            assert again.recv(4096) == b""
    assert store.get("a") == b"new"
    between.listener.close()


def handshake() -> tuple[ClientChannel, ServerChannel]:
    client, channel = ClientChannel(SECRET), ServerChannel(SECRET)
    for source, target in ((channel, client), (client, channel), (channel, client)):
        target.receive(bytes(source.outgoing))
        source.outgoing.clear()
    assert client.is_established and channel.is_established
    return client, channel


def test_frames_come_once_and_in_order() -> None:
    for order in ([0, 0], [1], [1, 0], [0, 2]):
        client, channel = handshake()
        frames = []
        for number in range(3):
            client.send(b"%d" % number)
            frames.append(bytes(client.outgoing))
            client.outgoing.clear()
        with pytest.raises(ChannelError, match="changed, repeated or left out"):
            for number in order:
                channel.receive(frames[number])


def test_a_frame_is_not_taken_for_one_of_the_other_direction() -> None:
    client, channel = handshake()
    channel.send(b"from the server")
    with pytest.raises(ChannelError):
        channel.receive(bytes(channel.outgoing))
    client.send(b"from the client")
    with pytest.raises(ChannelError):
        client.receive(bytes(client.outgoing))


def test_a_proof_is_not_sent_back() -> None:
    """The client's own proof is none of the server's."""
    client = ClientChannel(SECRET)
    client.receive(bytes(ServerChannel(SECRET).outgoing))
    with pytest.raises(ChannelError, match="does not know the secret"):
        client.receive(bytes(client.outgoing[-32:]))


def test_a_frame_that_announces_too_much_is_not_waited_for() -> None:
    client, channel = handshake()
    with pytest.raises(ChannelError, match="exceeds"):
        client.send(bytes(MAX_FRAME_BYTES + 1))
    assert client._sealer is not None
    with pytest.raises(ChannelError, match="announces"):
        channel.receive(client._sealer.seal(bytes(MAX_FRAME_BYTES + 1))[:40])


@diagonal(2)
@pytest.mark.parametrize(
    "message",
    [
        b"",
        b"\xff",
        encode_request(Operation.ADD, IDENTIFIER, (b"n", b"many")),
        encode_request(Operation.ADD, IDENTIFIER, (b"n",)),
        encode_request(Operation.SET, IDENTIFIER, (b"n",)),
        encode_request(Operation.DELETE, IDENTIFIER, ()),
        encode_request(Operation.SET, IDENTIFIER, (b"n", b"v"))[:-1],
        encode_request(Operation.SET, IDENTIFIER, ()) + b"\xff\xff\xff\xff",
    ],
)
def test_a_message_that_fits_nothing_ends_its_connection_alone(server: tuple[str, int], message: bytes) -> None:
    store, rank = open_store(server), open_store(server)
    with socket.create_connection(server) as raw:
        client = ClientChannel(SECRET)
        while not client.is_established:
            client.receive(raw.recv(4096))
            raw.sendall(client.outgoing)
            client.outgoing.clear()
        client.send(message)
        raw.sendall(client.outgoing)
        assert raw.recv(4096) == b""
    rank.set("a", "1")
    assert store.get("a") == b"1"


def test_the_server_ends_with_its_parent(tmp_path: Path) -> None:
    """Also where the parent is killed while a child of it still holds the pipe."""
    code = (
        "import os, sys, time; from petatron.mesh.launch.rendezvous_store_server import *;"
        "s = StoreServerProcess(bind_listener('127.0.0.1', 0), 's' * 16); print(s._process.pid, flush=True);"
        "os.fork() or time.sleep(5); os.close(1); os.kill(os.getpid(), 9)"
    )
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        server = int(parent.stdout.readline())
        parent.kill()
    deadline = time.monotonic() + 20
    while Path(f"/proc/{server}").exists() and "Z" not in _state(server):
        assert time.monotonic() < deadline, "the server outlives rank 0"
        time.sleep(0.05)


def _state(process: int) -> str:
    try:
        return Path(f"/proc/{process}/stat").read_text().rsplit(") ", 1)[1].split()[0]
    except OSError:
        return "Z"


def test_the_secret_is_on_no_command_line(server: tuple[str, int]) -> None:
    lines = [path.read_bytes() for path in Path("/proc").glob("[0-9]*/cmdline") if path.exists()]
    assert not any(SECRET.encode() in line for line in lines)


FLOOD = """
import os, socket, sys, time
if os.getuid() == 0: os.setgid(65534); os.setuid(65534)
address, count, silent = ("127.0.0.1", int(sys.argv[1])), int(sys.argv[2]), []
garbage = [b"GET / HTTP/1.1\\r\\n\\r\\n", bytes(72), b"petatr01" + bytes(64), os.urandom(200), b"petatr01", b"", b"\\xff" * 9]
print("begins", flush=True)
started, refused = time.monotonic(), 0
for number in range(count):
    one = socket.socket()
    one.settimeout(10)
    try:
        one.connect(address)
        one.sendall(garbage[number % len(garbage)])
    except OSError:
        refused += 1
    silent.append(one)
    if len(silent) > 600: silent.pop(0).close()
print(count - refused, time.monotonic() - started, flush=True)
"""


@pytest.fixture
def four_ranks(monkeypatch: pytest.MonkeyPatch) -> Callable[[], list[RankEnvironment]]:
    monkeypatch.setenv(SECRET_VARIABLE, SECRET)

    def places() -> list[RankEnvironment]:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        return [
            dataclasses.replace(SINGLE_PROCESS, rank=rank, world_size=4, master_port=port, secret=SECRET)
            for rank in range(4)
        ]

    return places


def join_all(places: list[RankEnvironment], first: Rendezvous) -> float:
    """Returns how long the others take to join."""
    started = time.monotonic()
    with ThreadPoolExecutor() as pool:
        others = [pool.submit(lambda place=place: Rendezvous(place).wait_for_all_ranks(LATE)) for place in places[1:]]
        first.wait_for_all_ranks(LATE)
        for other in others:
            other.result()
    return time.monotonic() - started


@pytest.mark.parametrize(
    "count", [pytest.param(1_500, id="short"), pytest.param(20_000, id="long", marks=pytest.mark.slow)]
)
def test_a_flood_of_strangers_delays_no_start(
    four_ranks: Callable[[], list[RankEnvironment]], count: int, capfd: pytest.CaptureFixture[str]
) -> None:
    """Garbage, half handshakes and silence, 600 connections held open; the bound grows with the time that the machine takes to send it."""
    places = four_ranks()
    first = Rendezvous(places[0])
    flood = subprocess.Popen(
        [sys.executable, "-c", FLOOD, str(places[0].master_port), str(count)], stdout=subprocess.PIPE, text=True
    )
    assert flood.stdout is not None
    assert flood.stdout.readline() == "begins\n"
    took = join_all(places, first)
    accepted, seconds = map(float, flood.stdout.read().split())
    flood.wait()
    assert accepted == count, "nobody is turned away before being heard"
    assert took < 5 + seconds / 2, f"ranks joined in {took:.1f} s while {count} strangers came in {seconds:.1f} s"
    assert isinstance(first.store, RendezvousStoreClient)
    assert first.store.status().num_refused > count / 2
    assert "Traceback" not in capfd.readouterr().err
