"""Whose socket is at the other end of a connection: by the kernel's answer, and by its tables."""

from __future__ import annotations

import os
import socket
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from petatron.mesh.launch import connection_guard
from petatron.mesh.launch.connection_guard import is_address_of_gloo
from tests.forked_python import run_forked

ROOT = Path(__file__).resolve().parents[3]
pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="asks the Linux kernel")
WAYS = {"kernel": connection_guard._ask_kernel, "tables": connection_guard._search_tables}
CONNECT = """
import os, socket, sys
os.setgid(65534); os.setuid(65534)
one = socket.socket()
one.connect(("127.0.0.1", int(sys.argv[1])))
one.recv(1)
"""


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize(
    ("listening", "connecting"),
    [("127.0.0.1", "127.0.0.1"), ("::1", "::1"), ("127.0.0.1", "::ffff:127.0.0.1")],
    ids=["IPv4", "IPv6", "mapped"],
)
def test_the_owner_of_an_open_connection_is_told(way: str, listening: str, connecting: str) -> None:
    families = [socket.AF_INET6 if ":" in address else socket.AF_INET for address in (listening, connecting)]
    try:
        listener = socket.create_server((listening, 0), family=families[0])
    except OSError:
        pytest.skip("no IPv6 here")
    with listener, socket.socket(families[1]) as near:
        near.connect((connecting, listener.getsockname()[1]))
        far, _ = listener.accept()
        with far:
            other, own = far.getpeername()[:2], far.getsockname()[:2]
            assert WAYS[way](other, own) == os.getuid()
            assert WAYS[way]((other[0], 1), own) is None
            assert WAYS[way](own, (other[0], 1)) is None, "a listener is no connection"
            near.close()
            assert WAYS[way](other, own) is None, "what was closed is nobody's"


@pytest.mark.skipif(os.getuid() != 0, reason="only root can act as another user")
@pytest.mark.parametrize("way", WAYS)
def test_the_connection_of_another_user_is_another_users(way: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener, ThreadPoolExecutor() as pool:
        stranger = pool.submit(run_forked, [sys.executable, "-c", CONNECT, str(listener.getsockname()[1])], cwd=ROOT)
        listener.settimeout(60)
        far, _ = listener.accept()
        with far:
            assert WAYS[way](far.getpeername(), far.getsockname()) == 65534
        stranger.result()


def test_what_gloo_publishes_is_told_from_other_values() -> None:
    name, address = b"node-7", bytes(136)
    value = len(name).to_bytes(8, sys.byteorder) + name + len(address).to_bytes(8, sys.byteorder) + address
    assert is_address_of_gloo(value) and is_address_of_gloo(value + bytes(16))
    for other in (b"", b"1", bytes(16), bytes(128), b"\xff" * 128, value[:-1], value + b"1"):
        assert not is_address_of_gloo(other)
