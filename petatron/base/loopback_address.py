"""Addresses that only this machine reaches."""

from __future__ import annotations

import ipaddress

_DEFAULT_LOOPBACK = ("localhost", "127.0.0.1", "::1")


def is_default_loopback(host: str) -> bool:
    """Whether this is what every machine calls itself; other loopback addresses are typed for several launchers on one machine.

    >>> [is_default_loopback(host) for host in ("localhost", "127.0.0.1", "127.0.0.2", "node7")]
    [True, True, False, False]
    """
    return host.strip("[]") in _DEFAULT_LOOPBACK


def is_loopback(host: str) -> bool:
    """Whether only this machine reaches a listener there. A name other than localhost may resolve to anything.

    >>> [is_loopback(host) for host in ("127.0.0.1", "localhost", "::1", "0.0.0.0", "::", "", "node7")]
    [True, True, True, False, False, False, False]
    """
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return False
