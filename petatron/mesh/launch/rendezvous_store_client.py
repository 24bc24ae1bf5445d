"""The client of the rendezvous store: a `torch.distributed.Store` whose requests go through encrypted channels.

torch's own TCPStore serves whoever reaches its port, and lists all keys. This client talks to `rendezvous_store_server.py`, which serves
only clients that know the secret. gloo and NCCL call the store from C++ and from several threads, so each request takes a connection from
a pool: a request that waits for a key blocks no other.
"""

from __future__ import annotations

import contextlib
import errno
import os
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta

import torch.distributed as dist

from petatron.base.errors import LaunchError
from petatron.mesh.launch.encrypted_channel import ChannelError, ClientChannel
from petatron.mesh.launch.rendezvous_store_protocol import IDENTIFIER_BYTES, Operation, decode_fields, encode_request

_HANDSHAKE_S = 10.0
_RECONNECT_S = 5.0
_PAUSE_S = (0.02, 0.5)
_READ_BYTES = 1 << 18


class _Connection:
    """One connection, after both ends have proven that they know the secret."""

    def __init__(self, address: tuple[str, int], secret: str, timeout_s: float) -> None:
        self._socket = socket.create_connection(address, timeout=timeout_s)
        self._channel = ClientChannel(secret)
        try:
            if self._socket.getsockname() == self._socket.getpeername():
                # Nobody listens yet, and the kernel chose the server's port for this end, so TCP connected the socket with itself. The
                # port would stay in use for a minute after a usual close, and rank 0 could not listen on it: close with a reset.
                self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
                raise ConnectionRefusedError(errno.ECONNREFUSED, os.strerror(errno.ECONNREFUSED))
            self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
            deadline = time.monotonic() + min(timeout_s, _HANDSHAKE_S)
            while not self._channel.is_established:
                self._receive(deadline)
        except BaseException:
            self._socket.close()
            raise

    def request(self, message: bytes, deadline: float) -> list[bytes]:
        """Returns the fields of the answer."""
        self._channel.send(message)
        self._flush(deadline)
        answers: list[bytes] = []
        while not answers:
            answers = self._receive(deadline)
        return decode_fields(answers[0])

    @property
    def server_identity(self) -> bytes:
        return self._channel.server_identity

    @property
    def own_address(self) -> str:
        return self._socket.getsockname()[0]

    def close(self) -> None:
        self._socket.close()

    def _receive(self, deadline: float) -> list[bytes]:
        self._socket.settimeout(max(0.001, deadline - time.monotonic()))
        data = self._socket.recv(_READ_BYTES)
        if not data:
            raise ConnectionResetError("the connection was closed by the other end")
        payloads = self._channel.receive(data)
        self._flush(deadline)
        return payloads

    def _flush(self, deadline: float) -> None:
        if self._channel.outgoing:
            self._socket.settimeout(max(0.001, deadline - time.monotonic()))
            self._socket.sendall(self._channel.outgoing)
            self._channel.outgoing.clear()


@dataclass(frozen=True, slots=True)
class StoreStatus:
    """The status that the server reports."""

    num_refused: int
    last_refused: str
    seen_address: str
    """The address of this process as the server sees it."""


class RendezvousStoreClient(dist.Store):
    """Reads and writes the keys of all ranks."""

    def __init__(
        self,
        locate: Callable[[], tuple[str, int]],
        secret: Callable[[], str],
        timeout: timedelta,
        *,
        identity: bytes | None = None,
    ) -> None:
        """Connects within `timeout`.

        locate, secret: return the server's address and the run's secret; both are called again until a server proves that it knows the
        secret, since an earlier run may have left an address and a secret behind. identity: the server of the run that this process has
        joined; a server with another identity is refused.
        """
        super().__init__()
        self.set_timeout(timeout)
        self._locate, self._ask_secret = locate, secret
        self._proven: tuple[tuple[str, int], str] | None = None
        self.identity: bytes | None = identity
        """The identity of the server; set by the first connection."""
        self.own_address: str = ""
        """The address from which this process reaches the server."""
        self._lock, self._idle = threading.Lock(), list[_Connection]()
        self._idle.append(self._connect(time.monotonic() + timeout.total_seconds()))

    @property
    def secret(self) -> str:
        """The secret that the server knows too."""
        assert self._proven is not None
        return self._proven[1]

    def _connect(self, deadline: float) -> _Connection:
        pause = _PAUSE_S[0]
        while True:
            try:
                address, secret = self._proven or (self._locate(), self._ask_secret())
                connection = _Connection(address, secret, max(0.1, deadline - time.monotonic()))
                if connection.server_identity != (self.identity or connection.server_identity):
                    connection.close()
                    place = f"{address[0]}:{address[1]}"
                    raise dist.DistNetworkError(f"Another run with the same secret listens at {place}.")
                self._proven, self.own_address = (address, secret), connection.own_address
                self.identity = connection.server_identity
                return connection
            except (OSError, LaunchError) as error:
                if time.monotonic() + pause > deadline:
                    raise dist.DistNetworkError(_describe_refusal(error)) from error
            time.sleep(pause)
            pause = min(_PAUSE_S[1], 1.5 * pause)

    @contextmanager
    def _connection(self) -> Iterator[_Connection]:
        """Lends a connection, which returns to the pool unless it failed."""
        with self._lock:
            connection = self._idle.pop() if self._idle else None
        connection = connection or self._connect(time.monotonic() + _RECONNECT_S)
        try:
            yield connection
        except BaseException:
            connection.close()
            raise
        with self._lock:
            self._idle.append(connection)

    def _request(self, operation: Operation, fields: Sequence[bytes], timeout: timedelta | None = None) -> list[bytes]:
        """Sends a request until it is answered, also over new connections; the server executes it once."""
        message = encode_request(operation, os.urandom(IDENTIFIER_BYTES), fields)
        seconds = (timeout or self.timeout).total_seconds()
        deadline = time.monotonic() + seconds
        while True:
            try:
                with self._connection() as connection:
                    return connection.request(message, deadline)
            except TimeoutError:
                keys = ", ".join(field.decode(errors="replace") for field in fields)
                raise dist.DistStoreError(f"wait timeout after {seconds * 1000:.0f}ms, keys: {keys}") from None
            except (OSError, ChannelError) as error:
                if time.monotonic() > deadline:
                    raise dist.DistNetworkError(_describe_refusal(error)) from error
                with self._lock:  # the others are most likely broken too
                    idle, self._idle = self._idle, []
                for other in idle:
                    other.close()
                time.sleep(_PAUSE_S[0])

    def set(self, key: str, value: str | bytes) -> None:
        self._request(Operation.SET, (key.encode(), _as_bytes(value)))

    def get(self, key: str) -> bytes:
        return self._request(Operation.GET, (key.encode(),))[0]

    def add(self, key: str, amount: int) -> int:
        return int(self._request(Operation.ADD, (key.encode(), b"%d" % amount))[0])

    def check(self, keys: list[str]) -> bool:
        return self._request(Operation.CHECK, _as_fields(keys)) == [b"1"]

    def wait(self, keys: list[str], timeout: timedelta | None = None) -> None:
        self._request(Operation.WAIT, _as_fields(keys), timeout)

    def compare_set(self, key: str, expected_value: str | bytes, desired_value: str | bytes) -> bytes:
        values = _as_bytes(expected_value), _as_bytes(desired_value)
        return self._request(Operation.COMPARE_SET, (key.encode(), *values))[0]

    def append(self, key: str, value: str | bytes) -> None:
        self._request(Operation.APPEND, (key.encode(), _as_bytes(value)))

    def multi_get(self, keys: list[str]) -> list[bytes]:
        return self._request(Operation.GET, _as_fields(keys))

    def multi_set(self, keys: list[str], values: list[str] | list[bytes]) -> None:
        pairs = zip(keys, values, strict=True)
        self._request(Operation.SET, [field for key, value in pairs for field in (key.encode(), _as_bytes(value))])

    def delete_key(self, key: str) -> bool:
        return self._request(Operation.DELETE, (key.encode(),)) == [b"1"]

    def num_keys(self) -> int:
        return int(self._request(Operation.COUNT, ())[0])

    deleteKey, getNumKeys = delete_key, num_keys
    """The names by which torch's C++ calls these two."""

    def has_extended_api(self) -> bool:
        """Whether `append`, `multi_get` and `multi_set` exist."""
        return True

    def clone(self) -> RendezvousStoreClient:
        """Returns a store that another thread may use; threads do not block each other here."""
        return self

    def status(self) -> StoreStatus:
        """Asks the server how many strangers it has refused, and where it sees this process."""
        num_refused, last_refused, seen_address = self._request(Operation.STATUS, ())
        return StoreStatus(int(num_refused), *(text.decode(errors="replace") for text in (last_refused, seen_address)))

    def close(self) -> None:
        """Closes the idle connections."""
        with self._lock:
            idle, self._idle = self._idle, []
        for connection in idle:
            with contextlib.suppress(OSError):
                connection.close()


def _as_bytes(value: str | bytes) -> bytes:
    return value.encode() if isinstance(value, str) else bytes(value)


def _as_fields(keys: Sequence[str]) -> list[bytes]:
    return [key.encode() for key in keys]


def _describe_refusal(error: Exception) -> str:
    """Returns why there is no connection, in words that say what may be wrong with the secret."""
    if isinstance(error, ConnectionResetError):
        return (
            "The connection was closed before it was complete, as rank 0 does with whoever has another secret than it."
        )
    if isinstance(error, TimeoutError):
        return "Nobody answers there as rank 0 would."
    return f"{error.strerror or error}." if isinstance(error, OSError) else str(error)
