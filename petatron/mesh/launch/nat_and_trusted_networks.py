"""Trusted networks (PETATRON_TRUSTED_NETWORKS), and ranks whose addresses a network translates on the way (NAT).

gloo proves nothing, so a connection between machines counts as a rank's when the rank that opened it has claimed its two ends
(`connection_guard.py`). Behind source NAT the listening rank sees another address, and often another port, than was claimed. No property of
the connection itself that a program may read at both ends would tell it from a stranger's behind the same NAT, so nothing is guessed:
ranks notice the translation in the roll call, and say what to do. Where the network admits nobody but the ranks from some addresses, the
user says so with PETATRON_TRUSTED_NETWORKS.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Sequence

from petatron.base.errors import LaunchError
from petatron.mesh.diagnose.failure_report import format_ranks

NETWORKS_VARIABLE = "PETATRON_TRUSTED_NETWORKS"
Network = ipaddress.IPv4Network | ipaddress.IPv6Network
_MAX_NAMED = 4


def parse_networks(text: str) -> tuple[Network, ...]:
    """Returns the networks of a comma-separated list; a plain address is a network of one.

    >>> [str(network) for network in parse_networks("10.1.0.0/16, 192.168.3.4")]
    ['10.1.0.0/16', '192.168.3.4/32']
    """
    networks: list[Network] = []
    problems: list[str] = []
    for word in filter(None, (part.strip() for part in text.split(","))):
        try:
            networks.append(ipaddress.ip_network(word))
        except ValueError as error:
            problems.append(f"  {word}: {error}")
    if problems:
        raise LaunchError(
            f"{NETWORKS_VARIABLE} is a list of networks such as 10.1.0.0/16,192.168.3.4; this is none:\n"
            + "\n".join(problems)
        )
    return tuple(networks)


def plain_address(host: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address:
    """Returns an address without its zone, and as IPv4 where it is that in IPv6.

    >>> str(plain_address("::ffff:10.1.0.2")), str(plain_address("fe80::1%eth0"))
    ('10.1.0.2', 'fe80::1')
    """
    address = ipaddress.ip_address(host.partition("%")[0])
    return getattr(address, "ipv4_mapped", None) or address


def is_trusted(host: str, networks: Sequence[Network]) -> bool:
    """Whether an address is in one of the networks."""
    address = plain_address(host)
    return any(address in network for network in networks)


def advice(seen_addresses: Sequence[str]) -> str:
    """Returns what to do about connections that arrive from these addresses."""
    return (
        "Let the machines of the run reach each other without address translation (choose the interface with GLOO_SOCKET_IFNAME), or, "
        f"if nobody but ranks can reach their ports from there, export {NETWORKS_VARIABLE}={','.join(seen_addresses)} on all machines."
    )


def describe_translations(lines: Sequence[str], networks: Sequence[Network]) -> str | None:
    """Returns a warning for rank 0 from lines `RANK OWN_ADDRESS SEEN_ADDRESS` of the ranks; None where all are trusted."""
    ranks: dict[tuple[str, str], list[int]] = {}
    for line in lines:
        rank, local, seen = line.split()
        if not is_trusted(seen, networks):
            ranks.setdefault((local, seen), []).append(int(rank))
    if not ranks:
        return None
    named = [
        f"{'rank' if len(of_pair) == 1 else 'ranks'} {format_ranks(sorted(of_pair))} of {local} as {seen}"
        for (local, seen), of_pair in list(ranks.items())[:_MAX_NAMED]
    ]
    more = f" and {len(ranks) - _MAX_NAMED} more" if len(ranks) > _MAX_NAMED else ""
    seen_addresses = sorted({seen for _, seen in ranks})
    return (
        f"addresses are translated on the way to rank 0 (NAT); it sees {'; '.join(named)}{more}. If gloo's connections take the same way, "
        f"they will be taken for strangers' and cut. {advice(seen_addresses)}"
    )
