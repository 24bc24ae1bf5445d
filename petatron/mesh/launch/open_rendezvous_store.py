"""Opens the store through which the ranks of a launch meet, in one of three places.

Ranks that our launcher starts on one machine share a file in its private folder (`RankEnvironment.store_file`). All others share the
store that a server beside rank 0 holds (`rendezvous_store_server.py`), which answers only who knows the secret of the run: at the master
address and port, or, where torchrun's agent has its own store there, at a free port that rank 0 publishes in that store. What else is in
torchrun's store is nothing that we rely on: whoever writes another port there leads ranks to a server that cannot prove itself.

The server listens where it is needed: on the loopback interface where all ranks are on one machine, at the master address where that is
an address of this machine, and on all interfaces where it is a name, which other machines may resolve differently.
"""

from __future__ import annotations

import contextlib
import errno
import ipaddress
import os
import socket
import time
import weakref
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path

import torch.distributed as dist

from petatron.base.errors import LaunchError
from petatron.base.log import get_logger
from petatron.base.safe_files import is_private_folder
from petatron.mesh.launch.environment import STORE_FILE, RankEnvironment, joined_store_from_env
from petatron.mesh.launch.rendezvous_store_client import RendezvousStoreClient
from petatron.mesh.launch.rendezvous_store_server import StoreServerProcess, bind_listener, own_identity
from petatron.mesh.launch.shared_secret import (
    SECRET_VARIABLE,
    find_secret_folder,
    secret_folder,
    wait_for_secret,
    write_secret,
)

_log = get_logger(__name__)
_LOOPBACK = "127.0.0.1"
_PORT_KEY = "port"
_OWN_SERVER_TIMEOUT, _SERVER_START_TIMEOUT = timedelta(seconds=2), timedelta(seconds=60)
_PORT_IN_USE_S = 5.0
_AGENT_POLL_S = 0.05


def open_store(environment: RankEnvironment, timeout: timedelta) -> dist.Store:
    """Opens the store; rank 0 starts the server where there is none yet. Waits for rank 0 for at most `timeout`.

    A process that has joined a run opens the store of that run and no other, also where a new run has taken its address.
    """
    if environment.store_file is not None:
        return _open_file(environment.store_file, timeout)
    agent = None if environment.restart_count is None else _open_agent_store(environment, timeout)
    secret = _SecretReader(environment, timeout)
    if environment.rank == 0:
        store = _open_server(environment, agent, secret)
    else:
        identity = joined_store_from_env(environment)
        store = RendezvousStoreClient(_locator(environment, agent, timeout), secret, timeout, identity=identity)
    store.set_timeout(timeout)
    return store


def _open_file(path: str, timeout: timedelta) -> dist.Store:
    if not is_private_folder(Path(path).parent):
        raise LaunchError(
            f"The folder of {path} ({STORE_FILE}) is open to other users, who could pass for a rank. "
            "Its mode has to be 0700, and its owner you."
        )
    store = dist.FileStore(path)
    store.set_timeout(timeout)
    return store


def _open_agent_store(environment: RankEnvironment, timeout: timedelta) -> dist.Store:
    """Connects to the store of torchrun's agent, in a part of it that belongs to this attempt."""
    store = dist.TCPStore(
        environment.master_addr,
        environment.master_port,
        is_master=False,
        timeout=timeout,
        multi_tenant=True,
        wait_for_workers=False,
    )
    return dist.PrefixStore(f"petatron/attempt-{environment.restart_count}", store)


class _SecretReader:
    """The secret of the run, read again each time: one of an earlier run may lie where rank 0 will leave its own."""

    def __init__(self, environment: RankEnvironment, timeout: timedelta) -> None:
        self._environment = environment
        self._secret = _secret_of(environment, timeout_s=timeout.total_seconds())

    def __call__(self) -> str:
        if self._environment.rank:
            with contextlib.suppress(LaunchError):  # it is gone once all ranks have joined
                self._secret = _secret_of(self._environment, timeout_s=0.0)
        return self._secret


def _secret_of(environment: RankEnvironment, *, timeout_s: float) -> str:
    """Returns the secret; empty where nothing but torchrun's variables says how ranks belong together."""
    if environment.secret is not None:
        return environment.secret
    can_do_without = environment.restart_count is not None  # as torchrun itself does
    folder = find_secret_folder() if can_do_without or environment.secret_name is None else secret_folder()
    if environment.secret_name is None or folder is None:
        if environment.rank == 0 and timeout_s:
            _log.warning("there is no %s: whoever reaches rank 0's port can join this run", SECRET_VARIABLE)
        return ""
    if environment.rank == 0:
        return write_secret(environment.secret_name, folder)
    return wait_for_secret(environment.secret_name, folder, timeout_s=timeout_s)


def _locator(
    environment: RankEnvironment, agent: dist.Store | None, timeout: timedelta
) -> Callable[[], tuple[str, int]]:
    """Returns a function that says where the server is."""
    host = _LOOPBACK if environment.is_on_one_machine else environment.master_addr
    if agent is None:
        return lambda: (host, environment.master_port)
    deadline = time.monotonic() + timeout.total_seconds()

    def locate() -> tuple[str, int]:
        while (port := _published_port(agent)) is None:
            if time.monotonic() > deadline:
                raise LaunchError("Rank 0 has not said in torchrun's store where it listens.")
            time.sleep(_AGENT_POLL_S)
        return host, port

    return locate


def _published_port(agent: dist.Store) -> int | None:
    """Returns the port that rank 0, or whoever else can write to torchrun's store, has published there."""
    text = agent.get(_PORT_KEY).decode(errors="replace") if agent.check([_PORT_KEY]) else ""
    return int(text) if text.isascii() and text.isdecimal() and 0 < int(text) < 65_536 else None


def _open_server(
    environment: RankEnvironment, agent: dist.Store | None, secret: Callable[[], str]
) -> RendezvousStoreClient:
    """On rank 0: starts the server, unless this process has started it before; it ends with this process, or with the store."""
    published = None if agent is None else _published_port(agent)
    if published is not None and (store := _own_store(environment, published, secret)) is not None:
        return store
    port, host, deadline = environment.master_port if agent is None else 0, _bind_host(environment), None
    while True:
        try:
            listener = bind_listener(host, port)
            break
        except OSError as error:
            if error.errno == errno.EADDRINUSE and (store := _own_store(environment, port, secret)) is not None:
                return store
            deadline = deadline or time.monotonic() + _PORT_IN_USE_S
            if error.errno == errno.EADDRNOTAVAIL and host:
                host = ""  # the address belongs to a router in front of this machine
            elif error.errno != errno.EADDRINUSE or time.monotonic() > deadline:
                reason = os.strerror(error.errno or 0)
                raise LaunchError(
                    f"Rank 0 cannot listen at {host or 'any address'}, port {port}: {reason}. Another run may use the port: choose "
                    "another one with --master-port or MASTER_PORT."
                ) from error
            else:
                time.sleep(_PORT_IN_USE_S / 20)  # the server of an earlier attempt may be about to end
    return _start_server(listener, host, agent, secret)


def _start_server(
    listener: socket.socket, host: str, agent: dist.Store | None, secret: Callable[[], str]
) -> RendezvousStoreClient:
    port = listener.getsockname()[1]
    server = StoreServerProcess(listener, secret())
    store = RendezvousStoreClient(lambda: (host or _LOOPBACK, port), secret, _SERVER_START_TIMEOUT)
    weakref.finalize(store, server.close)
    if agent is not None:
        agent.set(_PORT_KEY, str(port))
    return store


def _own_store(environment: RankEnvironment, port: int, secret: Callable[[], str]) -> RendezvousStoreClient | None:
    """Returns the store of the server at this port, if this process has started it."""
    for host in dict.fromkeys((_bind_host(environment) or _LOOPBACK, _LOOPBACK)):
        try:
            return RendezvousStoreClient(
                lambda host=host: (host, port), secret, _OWN_SERVER_TIMEOUT, identity=own_identity()
            )
        except dist.DistError:
            continue
    return None


def _bind_host(environment: RankEnvironment) -> str:
    """Returns the address to listen at; empty: all of this machine."""
    if environment.is_on_one_machine:
        return _LOOPBACK
    try:
        return str(ipaddress.ip_address(environment.master_addr))
    except ValueError:
        return ""
