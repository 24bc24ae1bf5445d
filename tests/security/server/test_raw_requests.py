"""Odd HTTP on raw connections: requests sent ahead, bodies that lie about their size, answers that nobody reads, upgrades."""

from __future__ import annotations

import json
import socket
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from petatron.serve.serve_options import ServeLimits
from tests.load_deadline import Deadline, within
from tests.longform import diagonal
from tests.serve.fake_engine import FakeEngine
from tests.serve.live_server import LiveServer, live_server

KEY = "a-key-of-some-length-0123456789"
LIMITS = ServeLimits(max_header_bytes=4096, max_body_bytes=100_000, header_timeout_s=1.0)
HEALTH = b"GET /healthz HTTP/1.1\r\nHost: localhost\r\n\r\n"
POST = f"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nAuthorization: Bearer {KEY}\r\n"


@pytest.fixture(scope="module")
def server() -> Iterator[LiveServer]:
    with live_server(FakeEngine(step_s=0.03, max_length=4000), limits=LIMITS, api_keys=(KEY,)) as found:
        yield found


def _connect(server: LiveServer, *, receive_bytes: int | None = None) -> socket.socket:
    host, port = server.url.removeprefix("http://").split(":")
    raw = socket.socket()
    if receive_bytes is not None:
        raw.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_bytes)
    raw.settimeout(20)
    raw.connect((host, int(port)))
    return raw


def _post(body: dict) -> bytes:
    content = json.dumps(body).encode()
    return POST.encode() + f"Content-Length: {len(content)}\r\n\r\n".encode() + content


def _answer(raw: socket.socket) -> bytes:
    """Returns what comes until the connection ends."""
    content = b""
    try:
        while part := raw.recv(65536):
            content += part
    except ConnectionResetError:  # it had sent more than was read
        pass
    return content


def _is_closed(raw: socket.socket, *, seconds: float) -> bool:
    deadline = Deadline(seconds)
    raw.settimeout(0.05)
    while not deadline.is_over:
        try:
            if not raw.recv(65536):
                return True
        except TimeoutError:
            continue
        except OSError:
            return True
    return False


def _resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096


def test_requests_sent_ahead_are_not_collected(server: LiveServer):
    """Each became an object of kilobytes, and a further chunk of thousands was read with every answer."""
    before = _resident_bytes()
    with _connect(server) as raw:
        raw.settimeout(0.5)
        sent = 0
        with suppress(OSError):  # nobody reads them
            for _ in range(40):
                raw.sendall(HEALTH * 5000)
                sent += 5000
        assert _resident_bytes() - before < 60 << 20, f"{sent} requests were sent ahead"
    with server.client() as http:
        assert http.get("/healthz").status_code == 200


def test_a_request_sent_ahead_ends_the_connection_after_the_first_answer(server: LiveServer):
    with _connect(server) as raw:
        raw.sendall(HEALTH + HEALTH)
        assert _answer(raw).count(b"HTTP/1.1 200") == 1


def test_a_client_that_leaves_behind_a_request_sent_ahead_is_noticed(server: LiveServer):
    """It is the first request of its connection, and not the last, that has to know."""
    with _connect(server) as raw:
        raw.sendall(_post({"prompt": "a", "max_tokens": 3900, "stream": True, "ignore_eos": True}))
        assert raw.recv(100).startswith(b"HTTP/1.1 200")
        raw.sendall(HEALTH)
        time.sleep(0.1)
        assert server.thread.num_open == 1
    server.wait_until(server.is_idle, timeout_s=1.5)


@pytest.mark.parametrize(
    ("begin", "parts"),
    [
        ("GET /healthz", b"1;" + b"a" * 1000),
        ("GET /healthz", b"0\r\nX: " + b"a" * 1000),
        ("GET /healthz", b"5\r\nhello\r\n"),
        ("POST", b"0\r\nX: " + b"a" * 1000),
        ("POST", b"1;" + b"a" * 1000),
    ],
    ids=["extension", "trailer", "body", "trailer after the key", "extension after the key"],
)
def test_what_follows_headers_without_end_is_cut_off(server: LiveServer, begin: str, parts: bytes):
    """Extensions of chunks and trailers are no body, and had no bound of bytes or time."""
    head = POST if begin == "POST" else f"{begin} HTTP/1.1\r\nHost: localhost\r\n"
    with _connect(server) as raw:
        raw.sendall(f"{head}Transfer-Encoding: chunked\r\n\r\n".encode() + parts)
        sent = 0
        with pytest.raises(OSError):
            for _ in range(2000):
                raw.sendall(b"a" * 1000)
                sent += 1000
                time.sleep(0.0005)
        assert sent < 2_000_000


def test_bodies_in_the_smallest_chunks_are_read(server: LiveServer):
    content = json.dumps({"prompt": "a", "max_tokens": 1, "user": "x" * 3000}).encode()
    chunks = b"".join(b"1\r\n%c\r\n" % one for one in content) + b"0\r\n\r\n"
    with _connect(server) as raw:
        raw.sendall(f"{POST}Transfer-Encoding: chunked\r\nConnection: close\r\n\r\n".encode())
        for begin in range(0, len(chunks), 999):
            raw.sendall(chunks[begin : begin + 999])
        assert _answer(raw).startswith(b"HTTP/1.1 200")


@diagonal(2)
@pytest.mark.parametrize(
    "rest",
    [
        b"Transfer-Encoding: chunked\r\n\r\nzz\r\n",
        b"Transfer-Encoding: chunked\r\n\r\n-1\r\n",
        b"Transfer-Encoding: chunked\r\n\r\n" + b"f" * 40 + b"\r\n",
        b"Transfer-Encoding: chunked\r\n\r\nffffffffffffffff\r\n" + b"a" * 200_000,
        b"Transfer-Encoding: chunked\r\nContent-Length: 5\r\n\r\n0\r\n\r\n",
        b"Content-Length: 5\r\nContent-Length: 6\r\n\r\nhello",
        b"Content-Length: -1\r\n\r\n",
        b"Content-Length: 99999999999999999999\r\n\r\n",
        b"Content-Length: 1_0\r\n\r\n",
        b"Transfer-Encoding: gzip, chunked\r\n\r\n0\r\n\r\n",
    ],
)
def test_bodies_of_wrong_sizes_are_refused(server: LiveServer, rest: bytes):
    with _connect(server) as raw:
        with suppress(OSError):  # it may be refused before it has been sent
            raw.sendall(POST.encode() + rest)
        answer = _answer(raw)
    assert not answer or int(answer.split(b" ")[1]) in (400, 413), answer[:100]
    assert answer.count(b"HTTP/1.1") <= 1


def test_an_upgrade_is_a_plain_request(server: LiveServer):
    upgrade = b"Connection: Upgrade\r\nUpgrade: websocket\r\nSec-WebSocket-Version: 13\r\nSec-WebSocket-Key: x\r\n"
    for path, status in ((b"/healthz", b"200"), (b"/v1/completions", b"401")):
        with _connect(server) as raw:
            raw.sendall(b"GET " + path + b" HTTP/1.1\r\nHost: localhost\r\n" + upgrade + b"\r\n")
            assert raw.recv(65536).startswith(b"HTTP/1.1 " + status)
            raw.sendall(b"\x81\x05hello" * 100)
            assert _is_closed(raw, seconds=5)


def test_an_answer_that_nobody_reads_ends_with_its_time():
    """Its connection too: it was closed when all was sent, which was never. The next one of its address finds the place free."""
    limits = ServeLimits(request_timeout_s=2.0, max_connections_per_address=1)
    ask = _post({"prompt": "a" * 1_000_000}).replace(b"/v1/completions", b"/tokenize", 1)
    engine = FakeEngine(max_length=1_000_001)
    with live_server(engine, limits=limits, api_keys=(KEY,)) as server, _connect(server, receive_bytes=4096) as raw:
        raw.sendall(ask)
        assert raw.recv(100).startswith(b"HTTP/1.1 200")
        with _connect(server) as other:
            assert _answer(other).startswith(b"HTTP/1.1 503")
        server.wait_until(lambda: _is_served(server), timeout_s=5)


def _is_served(server: LiveServer) -> bool:
    with _connect(server) as raw:
        raw.sendall(HEALTH.replace(b"\r\n\r\n", b"\r\nConnection: close\r\n\r\n"))
        return _answer(raw).startswith(b"HTTP/1.1 200")


def test_a_storm_of_scrapes_stops_no_stream(server: LiveServer):
    headers = {"Authorization": f"Bearer {KEY}"}
    with server.client() as http, within(5, "100 scrapes"):
        for _ in range(100):
            assert http.get("/metrics", headers=headers).status_code == 200
        text = http.get("/metrics", headers=headers).text
    assert len(text) < 40_000, "odd addresses and methods make no series of their own"
