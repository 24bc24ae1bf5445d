"""Tells which user has the other end of a TCP connection within this machine, as the Linux kernel knows it.

The kernel answers for one socket by its two ends (netlink's SOCK_DIAG, which needs no privilege). Where a sandbox has no such sockets, the
tables in /proc/net say the same; reading them takes milliseconds, since the kernel goes through all places where a socket could be.
"""

from __future__ import annotations

import ipaddress
import socket
import struct
from pathlib import Path

Endpoint = tuple[str, int]
_NETLINK_SOCK_DIAG = 4
_SOCK_DIAG_BY_FAMILY = 20
_ALL_STATES = _NO_COOKIE = 0xFFFF_FFFF
_LISTENING = 10
_HEADER = struct.Struct("=IHHII")
"""Length, type, flags, sequence number and port of a netlink message."""
_OWNER_AT = _HEADER.size + 4 + 48 + 12
"""Where an answer has the user id and the inode: after family, state and timers, the two ends, and three counts."""


def owner_of_socket(local: Endpoint, other: Endpoint) -> int | None:
    """Returns the user id of the socket of this machine whose end is `local` and that is connected to `other`; None if there is none."""
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
