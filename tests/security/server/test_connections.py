"""Strangers without a key, on raw connections: headers without end, connections that never speak, bodies for nobody, foreign names."""

from __future__ import annotations

import socket
import time
from collections.abc import Iterator
from contextlib import ExitStack

import pytest

from petatron.serve.serve_options import ServeLimits
from tests.serve.fake_engine import FakeEngine
from tests.serve.live_server import LiveServer, live_server

KEY = "a-key-of-some-length-0123456789"
LIMITS = ServeLimits(max_header_bytes=4096, max_headers=20, header_timeout_s=1.0, max_connections_per_address=30)


@pytest.fixture(scope="module")
def server() -> Iterator[LiveServer]:
    with live_server(FakeEngine(), limits=LIMITS, api_keys=(KEY,), allowed_hosts=("model.example",)) as found:
        yield found


def _connect(server: LiveServer) -> socket.socket:
    host, port = server.url.removeprefix("http://").split(":")
    return socket.create_connection((host, int(port)), timeout=20)


def _status(raw: socket.socket) -> int:
    """Returns the status of the answer, which ends the connection."""
    content = b""
    while part := raw.recv(65536):
        content += part
    return int(content.split(b" ")[1])


def _is_well(server: LiveServer) -> bool:
    with server.client() as http:
        return http.get("/v1/models", headers={"Authorization": f"Bearer {KEY}"}).status_code == 200


@pytest.mark.parametrize(
    "head",
    [
        b"GET / HTTP/1.1\r\nHost: localhost\r\n" + b"".join(b"X-%d: a\r\n" % n for n in range(40)) + b"\r\n",
        b"GET / HTTP/1.1\r\nHost: localhost\r\nX: " + b"a" * 5000 + b"\r\n\r\n",
        b"GET / HTTP/1.1\r\nHost: localhost\r\nX: " + b"a" * 5000,
        b"GET /" + b"a" * 5000 + b" HTTP/1.1\r\nHost: localhost\r\n\r\n",
    ],
    ids=["many", "long", "without an end", "a long address"],
)
def test_headers_are_bounded(server: LiveServer, head: bytes):
    with _connect(server) as raw:
        raw.sendall(head)
        assert _status(raw) == 431
    assert _is_well(server)


def test_headers_without_end_cost_nothing(server: LiveServer):
    """They are cut off long before they are what was sent."""
    sent = 0
    with _connect(server) as raw:
        raw.sendall(b"GET / HTTP/1.1\r\nHost: localhost\r\n")
        with pytest.raises(OSError):
            for _ in range(4000):
                raw.sendall(b"X-A: " + b"a" * 1000 + b"\r\n")
                sent += 1000
        assert sent < 4_000_000
    assert _is_well(server)


@pytest.mark.parametrize("begin", [b"", b"GET / HTTP/1.1\r\nHost: localhost\r\n"], ids=["silent", "half a request"])
def test_a_connection_that_says_nothing_is_closed(server: LiveServer, begin: bytes):
    with _connect(server) as raw:
        began = time.monotonic()
        raw.sendall(begin)
        assert _status(raw) == 408 and time.monotonic() - began >= 0.9


def test_a_second_request_of_a_connection_has_its_own_time(server: LiveServer):
    ask = b"GET /healthz HTTP/1.1\r\nHost: localhost\r\n\r\n"
    with _connect(server) as raw:
        for _ in range(2):
            raw.sendall(ask)
            assert raw.recv(65536).startswith(b"HTTP/1.1 200")
            time.sleep(1.2)  # longer than headers may take: it is idle, and asks again
        raw.sendall(ask[:20])
        assert raw.recv(65536).startswith(b"HTTP/1.1 408")


def test_connections_of_one_address_are_bounded(server: LiveServer):
    with ExitStack() as stack:
        for _ in range(LIMITS.max_connections_per_address):
            stack.enter_context(_connect(server))
        server.wait_until(lambda: _refused(server))
    server.wait_until(lambda: not _refused(server))
    assert _is_well(server)


def _refused(server: LiveServer) -> bool:
    with _connect(server) as raw:
        raw.sendall(b"GET /healthz HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n")
        try:
            return _status(raw) == 503
        except ConnectionResetError:  # it was closed before the request was sent
            return True


@pytest.mark.parametrize("path", ["/", "/healthz", "/v1/completions"])
def test_no_body_is_read_without_a_key(server: LiveServer, path: str):
    """It is answered before the body has come, and nothing waits for the rest."""
    with _connect(server) as raw:
        head = f"POST {path} HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\nContent-Length: 8000000\r\n\r\n"
        raw.sendall(head.encode())
        assert _status(raw) in (401, 405)


@pytest.mark.parametrize(
    ("host", "status"),
    [
        ("evil.example", 421),
        ("evil.example:8000", 421),
        ("localhost.evil.example", 421),
        ("model.example", 200),
        ("Model.Example.:80", 200),
        ("localhost", 200),
        ("127.0.0.1:1", 200),
        ("[::1]:8000", 200),
        ("192.168.1.7", 200),
    ],
)
def test_a_name_that_is_not_the_servers_is_refused(server: LiveServer, host: str, status: int):
    with server.client() as http:
        for path in ("/", "/healthz", "/metrics", "/v1/models"):
            answer = http.get(path, headers={"Host": host, "Authorization": f"Bearer {KEY}"})
            assert answer.status_code == status
        assert status == 200 or answer.json()["error"]["code"] == "misdirected_request"
