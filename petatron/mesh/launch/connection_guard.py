"""Cuts connections to gloo's listeners that no rank of the run has opened.

gloo accepts whoever connects first and sends the number of a rank; nothing proves that it is one, and its TLS transport is in no wheel of
torch. A listener is known to everybody on its machine (/proc/net/tcp) and to whoever scans ports. What a stranger cannot do is own the
other end of a connection that a rank has opened. So while ranks connect, this guard looks at the connections of its process:

- The other end is on this machine: the kernel tells whose socket it is. It has to be this user's.
- It is on another machine: the rank that opened the connection claims its two ends in the store of the launch, which only ranks can write
  to. A connection that nobody claims within `_CLAIM_S` is not a rank's, unless it comes from a network that the user trusts, as is
  needed where addresses are translated on the way (`nat_and_trusted_networks.py`).

All others are shut down. gloo drops one that has not said which rank it is; where a stranger had already taken the place of a rank, the
first collective with it fails, and so does the run, instead of going on with a stranger in it.

gloo connects two ranks when they first communicate (TORCH_GLOO_LAZY_INIT), and asks the store for the address just before. This is
the moment to look: `GuardedStore` passes everything on, remembers which addresses gloo has published and asked for, and wakes the guard,
which rests again when as many connections are open as were asked for. Linux only, as the table of sockets is.
"""

from __future__ import annotations

import ipaddress
import os
import socket
import stat
import struct
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch.distributed as dist

from petatron.base.log import get_logger
from petatron.mesh.launch.nat_and_trusted_networks import Network, advice, is_trusted

_log = get_logger(__name__)
_CLAIM_S = 10.0
_POLL_S = (0.01, 0.2)
Endpoint = tuple[str, int]
_NETLINK_SOCK_DIAG = 4
_SOCK_DIAG_BY_FAMILY = 20
_ALL_STATES = _NO_COOKIE = 0xFFFF_FFFF
_LISTENING = 10
_HEADER = struct.Struct("=IHHII")
"""Length, type, flags, sequence number and port of a netlink message."""
_OWNER_AT = _HEADER.size + 4 + 48 + 12
"""Where an answer has the user id and the inode: after family, state and timers, the two ends, and three counts."""


@dataclass(slots=True)
class _Connection:
    """A connection of this process, and the end of it that this process has."""

    inode: int
    descriptor: int
    local: Endpoint
    other: Endpoint
    seen_s: float = field(default_factory=time.monotonic)

    @property
    def claim(self) -> str:
        """The key by which the rank that opened the connection claims it."""
        return f"connection/{_format_end(self.local)}/{_format_end(self.other)}"

    @property
    def claim_of_other_end(self) -> str:
        return f"connection/{_format_end(self.other)}/{_format_end(self.local)}"

    @property
    def is_within_machine(self) -> bool:
        return self.local[0] == self.other[0] or self.other[0].startswith("127.") or self.other[0] == "::1"


class ConnectionGuard:
    """Watches the connections of gloo in this process."""

    def __init__(self, store: dist.Store, trusted_networks: Sequence[Network] = ()) -> None:
        """`store` is that of the launch, for the claims."""
        self._store, self._trusted_networks, self._wake = store, trusted_networks, threading.Event()
        self._lock, self._check_lock = threading.Lock(), threading.Lock()
        self._published, self._asked = b"", list[bytes]()
        self._known: dict[int, bool] = {}
        """Sockets that need no further look, by inode: whether they are connections of gloo to ranks."""
        self._num_opened = 0
        self._pending: dict[int, _Connection] = {}
        self._thread: threading.Thread | None = None

    def note_published(self, value: bytes) -> None:
        """Notes a value of the store, which may have the address of a listener of this process."""
        if is_address_of_gloo(value):
            with self._lock:
                self._published += value

    def note_asked(self, values: Sequence[bytes]) -> None:
        """Notes that connections to the addresses in these values will be opened, by either end; cuts those of strangers before that."""
        with self._lock:
            addresses = [value for value in values if is_address_of_gloo(value) and value not in self._published]
            if not addresses:
                return
            self._asked += addresses
            if self._thread is None:
                self._thread = threading.Thread(target=self._watch, name="connection guard", daemon=True)
                self._thread.start()
        self._check_connections()
        self._wake.set()

    def _watch(self) -> None:
        while True:
            self._wake.wait()
            self._wake.clear()
            pause = _POLL_S[0]
            time.sleep(pause)
            while not self._check_connections():
                time.sleep(pause)
                pause = _POLL_S[0] if self._wake.is_set() else min(_POLL_S[1], 1.3 * pause)
                self._wake.clear()

    def _check_connections(self) -> bool:
        """Checks all connections that are new; returns whether as many are open as were asked for, and all are ranks'."""
        with self._check_lock:
            with self._lock:
                published, asked = self._published, list(self._asked)
            present = set[int]()
            for inode, descriptor in _sockets():
                present.add(inode)
                if inode not in self._known and inode not in self._pending:
                    self._classify(inode, descriptor, published, asked)
            for inode in [*self._known.keys() - present, *self._pending.keys() - present]:  # closed meanwhile
                self._known.pop(inode, None)
                self._pending.pop(inode, None)
            for connection in list(self._pending.values()):
                self._verify(connection)
            return not self._pending and self._num_opened >= len(asked)

    def _settle(self, inode: int, is_of_rank: bool) -> None:
        self._known[inode] = is_of_rank
        self._num_opened += is_of_rank

    def _classify(self, inode: int, descriptor: int, published: bytes, asked: list[bytes]) -> None:
        try:
            ends = _ends(descriptor)
        except OSError:  # closed, or not connected yet
            return
        if ends is None:
            self._known[inode] = False
            return
        local, other, local_bytes, other_bytes = ends
        connection = _Connection(inode, descriptor, local, other)
        if local_bytes in published:
            self._pending[inode] = connection
        elif any(other_bytes in value for value in asked):
            if not connection.is_within_machine:
                self._store.set(connection.claim, "")
                self._store.append(_claims_key(other), f"{_format_end(local)} ")
            self._settle(inode, True)
        else:
            self._settle(inode, False)

    def _verify(self, connection: _Connection) -> None:
        is_late = time.monotonic() - connection.seen_s > _CLAIM_S
        if connection.is_within_machine:
            owner = owner_of_socket(connection.other, connection.local)  # none: it has ended there
            is_of_rank, is_settled = owner == os.geteuid(), owner is not None or is_late
        elif is_trusted(connection.other[0], self._trusted_networks):
            is_of_rank = is_settled = True
        else:
            is_of_rank = self._store.check([connection.claim_of_other_end])
            is_settled = is_of_rank or is_late
        if not is_settled:
            return
        del self._pending[connection.inode]
        self._settle(connection.inode, is_of_rank)
        if not is_of_rank:
            _log.error(self._describe_stranger(connection))
            with suppress(OSError), socket.socket(fileno=os.dup(connection.descriptor)) as copy:
                copy.shutdown(socket.SHUT_RDWR)  # unless it has ended by itself

    def _describe_stranger(self, connection: _Connection) -> str:
        address, port = connection.other[0], connection.local[1]
        text = f"a process at {address} that is no rank of this run connected to gloo's port {port}; the connection was cut"
        if connection.is_within_machine or not self._store.check([_claims_key(connection.local)]):
            return text
        arrived = {_format_end(other) for local, other in _connections() if local == connection.local}
        absent = set(self._store.get(_claims_key(connection.local)).decode().split()) - arrived
        if not absent:
            return text
        return (
            f"{text}. Ranks have opened connections to this port from {', '.join(sorted(absent))}, and none arrived from there: if it was "
            f"one of these, its address was translated on the way (NAT). {advice([address])}"
        )


def _sockets() -> Iterator[tuple[int, int]]:
    """Yields the inodes and descriptors of this process's sockets."""
    for name in os.listdir("/proc/self/fd"):
        try:
            status = os.fstat(int(name))
        except OSError:
            continue
        if stat.S_ISSOCK(status.st_mode):
            yield status.st_ino, int(name)


def _connections() -> Iterator[tuple[Endpoint, Endpoint]]:
    """Yields both ends of this process's TCP connections."""
    for _, descriptor in _sockets():
        with suppress(OSError):
            if (ends := _ends(descriptor)) is not None:
                yield ends[:2]


def _format_end(end: Endpoint) -> str:
    return f"{end[0]}:{end[1]}"


def _claims_key(listener: Endpoint) -> str:
    """Returns the key of all claims to connections with a listener."""
    return f"connections/{_format_end(listener)}"


def _ends(descriptor: int) -> tuple[Endpoint, Endpoint, bytes, bytes] | None:
    """Returns both ends of a TCP connection, also in the form of `struct sockaddr`; None for any other socket."""
    with socket.socket(fileno=os.dup(descriptor)) as copy:
        is_stream = copy.family in (socket.AF_INET, socket.AF_INET6) and copy.type == socket.SOCK_STREAM
        if not is_stream or copy.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
            return None
        local, other = copy.getsockname()[:2], copy.getpeername()[:2]
        local_bytes, other_bytes = (_as_sockaddr(copy.family, end) for end in (local, other))
        return local, other, local_bytes, other_bytes


def _as_sockaddr(family: int, end: Endpoint) -> bytes:
    """Returns the beginning of the `struct sockaddr` of an address; gloo publishes the whole one.

    >>> _as_sockaddr(socket.AF_INET, ("127.0.0.1", 258))[2:].hex()
    '01027f000001'
    """
    head = struct.pack("=H", family) + struct.pack(">H", end[1])
    flow_info = b"" if family == socket.AF_INET else bytes(4)
    return head + flow_info + socket.inet_pton(family, end[0])


def is_address_of_gloo(value: bytes) -> bool:
    """Whether a value is what gloo publishes of a rank: a host name and an address with their lengths, then numbers of 8 bytes."""
    if len(value) < 16:
        return False
    (name_bytes,) = struct.unpack_from("=Q", value)
    if name_bytes > len(value) - 16:
        return False
    (address_bytes,) = struct.unpack_from("=Q", value, 8 + name_bytes)
    rest = len(value) - 16 - name_bytes - address_bytes
    return address_bytes >= 16 and rest >= 0 and rest % 8 == 0


def _passed_on(name: str) -> Callable[..., Any]:
    def call(self: GuardedStore, *arguments: Any) -> Any:
        return getattr(self._store, name)(*arguments)

    return call


class GuardedStore(dist.Store):
    """A store that tells a guard of the addresses that gloo publishes and asks for."""

    def __init__(self, store: dist.Store, trusted_networks: Sequence[Network] = ()) -> None:
        super().__init__()
        self._store, self._guard = store, ConnectionGuard(store, trusted_networks)
        self.set_timeout(store.timeout)

    def set(self, key: str, value: str | bytes) -> None:
        if isinstance(value, bytes):
            self._guard.note_published(value)
        self._store.set(key, value)  # pyright: ignore[reportArgumentType]

    def get(self, key: str) -> bytes:
        value = self._store.get(key)
        self._guard.note_asked([value])
        return value

    def multi_get(self, keys: list[str]) -> list[bytes]:
        values = self._store.multi_get(keys)
        self._guard.note_asked(values)
        return values

    def wait(self, keys: list[str], timeout: timedelta | None = None) -> None:
        self._store.wait(keys, timeout or self.timeout)

    add, check, compare_set = _passed_on("add"), _passed_on("check"), _passed_on("compare_set")
    append, multi_set = _passed_on("append"), _passed_on("multi_set")
    has_extended_api = _passed_on("has_extended_api")
    deleteKey, getNumKeys = _passed_on("delete_key"), _passed_on("num_keys")
    """The names by which torch's C++ calls these two."""

    def clone(self) -> GuardedStore:
        return self


def owner_of_socket(local: Endpoint, other: Endpoint) -> int | None:
    """Returns the user id of the socket of this machine whose end is `local` and that is connected to `other`; None if there is none.

    The kernel answers for one socket by its two ends (netlink's SOCK_DIAG, which needs no privilege). Where a sandbox has no such sockets,
    the tables in /proc/net say the same; reading them takes milliseconds, since the kernel goes through all places where a socket could be.
    """
    try:
        return _ask_kernel(local, other)
    except OSError:
        return _search_tables(local, other)


def _ask_kernel(local: Endpoint, other: Endpoint) -> int | None:
    family = socket.AF_INET6 if ":" in local[0] else socket.AF_INET
    addresses = b"".join(_packed(end).ljust(16, b"\0") for end in (local, other))
    ports = struct.pack(">HH", local[1], other[1])
    ends = ports + addresses + struct.pack("=III", 0, _NO_COOKIE, _NO_COOKIE)
    request = struct.pack("=BBBBI", family, socket.IPPROTO_TCP, 0, 0, _ALL_STATES) + ends
    header = _HEADER.pack(_HEADER.size + len(request), _SOCK_DIAG_BY_FAMILY, 1, 1, 0)
    with socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, _NETLINK_SOCK_DIAG) as kernel:
        kernel.settimeout(1)
        kernel.send(header + request)
        answer = kernel.recv(4096)
    if _HEADER.unpack_from(answer)[1] != _SOCK_DIAG_BY_FAMILY:
        return None
    state = answer[_HEADER.size + 1]
    user, inode = struct.unpack_from("=II", answer, _OWNER_AT)
    return user if inode and state != _LISTENING else None  # a socket that was closed has no inode, and user 0


def _search_tables(local: Endpoint, other: Endpoint) -> int | None:
    for path, is_wide in ((Path("/proc/net/tcp"), False), (Path("/proc/net/tcp6"), True)):
        wanted = [_as_in_table(local, is_wide=is_wide), _as_in_table(other, is_wide=is_wide)]
        for line in path.read_text().splitlines()[1:] if path.exists() else ():
            fields = line.split()
            if fields[1:3] == wanted and fields[9] != "0":
                return int(fields[7])
    return None


def _as_in_table(end: Endpoint, *, is_wide: bool) -> str:
    """Returns an endpoint as the tables write it; `is_wide`: as IPv6.

    >>> _as_in_table(("0.0.0.0", 80), is_wide=False)
    '00000000:0050'
    """
    packed = _packed(end)
    if is_wide and len(packed) == 4:
        packed = bytes(10) + b"\xff\xff" + packed
    return "".join(f"{word:08X}" for (word,) in struct.iter_unpack("=I", packed)) + f":{end[1]:04X}"


def _packed(end: Endpoint) -> bytes:
    return ipaddress.ip_address(end[0].partition("%")[0]).packed
