"""The server of the rendezvous store: a process beside rank 0 that admits whoever knows the secret of the run and drops all others.

It is a process of its own, so that neither a thousand ranks that poll nor a flood of connections take time from rank 0's interpreter; it
starts without torch, in a moment, on a port that rank 0 has bound before. It ends with rank 0: its input is a pipe from there.

A stranger costs one accepted connection and no more. Who sends a wrong byte in the handshake is dropped at that byte, who sends nothing
after `_HANDSHAKE_S`, and when `_MAX_UNPROVEN` connections are unproven, the oldest of them: a rank proves itself within a round trip, so
a flood would have to open as many within that time, and a rank that is dropped all the same connects again. Connections that
have proven themselves are served first.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import resource
import selectors
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from petatron.mesh.launch.encrypted_channel import IDENTITY_BYTES, ChannelError, ServerChannel
from petatron.mesh.launch.rendezvous_store_table import StoreTable

_BACKLOG = 4096
_HANDSHAKE_S = 10.0
_MAX_UNPROVEN = 512
_ACCEPT_AT_ONCE = 256
_PARENT_POLL_S = 1.0
_READ_BYTES = 1 << 18
_BOOT = (
    "import sys; sys.path.insert(0, sys.argv[1]); from petatron.mesh.launch.rendezvous_store_server import main; main()"
)


def bind_listener(host: str, port: int) -> socket.socket:
    """Binds and listens at an address of this machine, or at all of them where `host` is empty."""
    if host:
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        return socket.create_server((host, port), family=family, backlog=_BACKLOG)
    dual = socket.has_dualstack_ipv6()
    family = socket.AF_INET6 if dual else socket.AF_INET
    return socket.create_server(("", port), family=family, backlog=_BACKLOG, dualstack_ipv6=dual)


def own_identity() -> bytes:
    """Returns what names the servers of this process: its id, which containers of a machine may have in common, and since when it runs."""
    parts = [str(os.getpid())]
    with contextlib.suppress(OSError):  # not Linux
        started = Path("/proc/self/stat").read_text().rpartition(")")[2].split()[19]
        parts += [started, os.readlink("/proc/self/ns/pid"), Path("/proc/sys/kernel/random/boot_id").read_text()]
    return hashlib.sha256("/".join(parts).encode()).digest()[:IDENTITY_BYTES]


class StoreServerProcess:
    """The server as its parent sees it. It lives until `close`, or until the parent is gone."""

    def __init__(self, listener: socket.socket, secret: str) -> None:
        """Starts the process on a listening socket, which is closed here."""
        root = str(Path(__file__).resolve().parents[3])
        # Isolated and without site-packages: it needs the standard library and this package.
        command = [sys.executable, "-I", "-S", "-c", _BOOT, root, str(listener.fileno()), str(os.getpid())]
        command.append(own_identity().hex())
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, pass_fds=[listener.fileno()], cwd="/"
        )
        listener.close()
        assert self._process.stdin is not None
        # The secret never is an argument, which every user of a machine can list.
        self._process.stdin.write(secret.encode() + b"\0")
        self._process.stdin.flush()

    def close(self) -> None:
        """Ends the server."""
        assert self._process.stdin is not None
        with contextlib.suppress(OSError):
            self._process.stdin.close()
        self._process.wait()


class _Connection:
    """One connection; `is_listening_for_write` says whether the selector waits for room to send."""

    def __init__(self, sock: socket.socket, channel: ServerChannel, peer: str) -> None:
        self.sock, self.peer, self.channel = sock, peer, channel
        self.opened_s = time.monotonic()
        self.is_listening_for_write = False


class StoreServer:
    """Accepts connections, admits those that prove themselves, and answers their requests from one table."""

    def __init__(self, listener: socket.socket, secret: str, *, host_process: int, identity: bytes) -> None:
        """`host_process` is the process id of rank 0, with which the server ends; by `identity` rank 0 recognizes it."""
        self._listener, self._secret, self._host_process, self._identity = listener, secret, host_process, identity
        self._selector = selectors.DefaultSelector()
        self._unproven: dict[_Connection, None] = {}
        self._num_refused, self._last_refused = 0, ""
        self._table = StoreTable(self._answer, self._status)
        listener.setblocking(False)
        self._selector.register(listener, selectors.EVENT_READ, None)

    def serve(self, parent: int) -> None:
        """Serves until the pipe `parent` is closed at its other end, or the parent process has gone."""
        self._selector.register(parent, selectors.EVENT_READ, None)
        while os.getppid() == self._host_process:
            events = self._selector.select(_PARENT_POLL_S)
            if any(key.fd == parent for key, _ in events):
                return
            connections = [(key.data, mask) for key, mask in events if key.data is not None]
            for connection, mask in sorted(connections, key=lambda event: event[0] in self._unproven):
                self._serve_connection(connection, mask)
            if len(connections) < len(events):
                self._accept()
            self._drop_late()

    def _accept(self) -> None:
        for _ in range(_ACCEPT_AT_ONCE):
            try:
                sock, address = self._listener.accept()
            except BlockingIOError:
                return
            except ConnectionError:
                continue  # it was gone before it was accepted
            except OSError:  # no descriptor is left: one stranger makes room, or everybody waits a moment
                if not self._unproven:
                    time.sleep(0.01)
                    return
                self._refuse(next(iter(self._unproven)))
                continue
            sock.setblocking(False)
            connection = _Connection(sock, ServerChannel(self._secret, self._identity), str(address[0]))
            self._unproven[connection] = None
            if len(self._unproven) > _MAX_UNPROVEN:
                self._refuse(next(iter(self._unproven)))
            self._selector.register(sock, selectors.EVENT_READ, connection)
            self._flush(connection)

    def _drop_late(self) -> None:
        """Drops connections that have not proven themselves in time; the oldest are the first of the dictionary."""
        now = time.monotonic()
        while self._unproven:
            connection = next(iter(self._unproven))
            if now - connection.opened_s < _HANDSHAKE_S:
                return
            self._refuse(connection)

    def _serve_connection(self, connection: _Connection, mask: int) -> None:
        if connection.sock.fileno() < 0:  # dropped since the selector returned
            return
        if mask & selectors.EVENT_WRITE:
            self._flush(connection)
        if not mask & selectors.EVENT_READ or connection.sock.fileno() < 0:
            return
        try:
            data = connection.sock.recv(_READ_BYTES)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        if not data:
            self._drop(connection)
            return
        try:
            payloads = connection.channel.receive(data)
            if connection in self._unproven and connection.channel.is_established:
                del self._unproven[connection]
                connection.sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                connection.sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
            for payload in payloads:
                self._table.request(connection, payload)
        except ChannelError:
            self._refuse(connection)
            return
        self._flush(connection)

    def _answer(self, session: object, message: bytes) -> None:
        assert isinstance(session, _Connection)
        try:
            session.channel.send(message)
        except ChannelError:  # too long an answer ends its own connection, not that of whoever set the last key
            self._drop(session)
            return
        self._flush(session)

    def _flush(self, connection: _Connection) -> None:
        """Sends what can be sent, and has the selector wait for room where something is left."""
        outgoing = connection.channel.outgoing
        try:
            while outgoing:
                del outgoing[: connection.sock.send(outgoing)]
        except BlockingIOError:
            pass
        except OSError:
            self._drop(connection)
            return
        if bool(outgoing) != connection.is_listening_for_write and connection.sock.fileno() >= 0:
            connection.is_listening_for_write = bool(outgoing)
            mask = selectors.EVENT_READ | (selectors.EVENT_WRITE if outgoing else 0)
            self._selector.modify(connection.sock, mask, connection)

    def _refuse(self, connection: _Connection) -> None:
        self._num_refused += 1
        self._last_refused = connection.peer
        self._drop(connection)

    def _drop(self, connection: _Connection) -> None:
        if connection.sock.fileno() < 0:
            return
        self._unproven.pop(connection, None)
        self._table.forget(connection)
        with contextlib.suppress(KeyError):  # not registered yet
            self._selector.unregister(connection.sock)
        connection.sock.close()

    def _status(self, session: object) -> Sequence[bytes]:
        assert isinstance(session, _Connection)
        return b"%d" % self._num_refused, self._last_refused.encode(), session.peer.encode()


def main() -> None:
    """Serves the listening socket whose descriptor is the second argument, for the process in the third, under the name in the fourth; its
    input has the secret."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)  # job managers signal every process; this one ends with rank 0
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    secret = bytearray()
    while not secret.endswith(b"\0"):
        read = os.read(0, 1)
        if not read:
            return
        secret += read
    listener, host_process = socket.socket(fileno=int(sys.argv[2])), int(sys.argv[3])
    identity = bytes.fromhex(sys.argv[4])
    StoreServer(listener, secret[:-1].decode(), host_process=host_process, identity=identity).serve(0)
