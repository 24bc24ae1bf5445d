"""The HTTP server: listens, answers, and drains on SIGTERM or Ctrl-C, so that what is open finishes and nothing new is accepted.

After `drain_timeout_s` the sequences that are open are cancelled, and their clients told so. A client that does not read its answer is
cut off: its request then ends as that of a client that has left, whereas cancelled tasks would fill the log with tracebacks.
"""

from __future__ import annotations

import asyncio
import math
import socket
import time
from collections.abc import Callable
from types import FrameType

import uvicorn
from fastapi import FastAPI

from petatron.base.errors import LaunchError
from petatron.base.log import get_logger
from petatron.serve.generation_handle import NotServingError
from petatron.serve.http.limited_protocol import limited_protocol
from petatron.serve.http.server_state import ServerState
from petatron.serve.serve_options import ServeOptions

_KEEP_ALIVE_S, _LAST_WRITES_S, _STUCK_S = 30, 0.5, 5
_log = get_logger(__name__)


def open_listener(options: ServeOptions) -> socket.socket:
    """Binds the address; before a model is loaded, so that a port in use is known at once."""
    host, port = options.host.strip("[]"), options.port
    try:
        family, kind, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        # Named as TCP: asyncio turns Nagle's algorithm off on such sockets alone, and streams would wait 40 ms for each token.
        listener = socket.socket(family, kind, socket.IPPROTO_TCP)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
    except OSError as error:
        why = error.strerror or error
        raise LaunchError(
            f"Cannot listen on --host {host} --port {port}: {why}. Choose another port or address."
        ) from error
    return listener


def address_of(listener: socket.socket) -> str:
    host, port = listener.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def build_server(app: FastAPI, *, on_ready: Callable[[], None]) -> DrainingServer:
    """Builds the server of an app; its `run` serves until a signal ends it."""
    state: ServerState = app.state.petatron
    config = uvicorn.Config(
        app,
        http=limited_protocol(state.options.limits),  # type: ignore[arg-type]
        log_config=None,
        access_log=False,
        server_header=False,
        ws="none",
        lifespan="on",
        timeout_keep_alive=_KEEP_ALIVE_S,
        timeout_graceful_shutdown=math.ceil(state.options.limits.drain_timeout_s) + _STUCK_S,
    )
    return DrainingServer(config, state, on_ready)


class DrainingServer(uvicorn.Server):
    """The first signal drains; the second one ends at once."""

    def __init__(self, config: uvicorn.Config, state: ServerState, on_ready: Callable[[], None]) -> None:
        super().__init__(config)
        self._state, self._on_ready = state, on_ready
        self._drain_until_s: float | None = None
        self._loop: asyncio.AbstractEventLoop | None = None

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        self._loop = asyncio.get_running_loop()
        await super().startup(sockets)
        if self.started:
            self._on_ready()

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        if self._drain_until_s is not None:
            if self._loop is not None:
                self._loop.call_soon_threadsafe(self._end_at_once)
            return
        self._drain_until_s = time.monotonic() + self._state.options.limits.drain_timeout_s
        self._state.thread.drain()

    async def on_tick(self, counter: int) -> bool:
        if self._drain_until_s is not None and not self.should_exit:
            if time.monotonic() > self._drain_until_s:
                why = NotServingError("The server shuts down, and this request took longer than it waits.")
                num_cancelled = self._state.thread.cancel_open(why)
                _log.warning("%d sequences are cancelled: draining took too long", num_cancelled)
            self.should_exit = self._state.thread.num_open == 0
        return await super().on_tick(counter)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        left_s = 0.0 if self._drain_until_s is None else self._drain_until_s - time.monotonic()
        cut_off = asyncio.get_running_loop().call_later(max(left_s, _LAST_WRITES_S), self._cut_off_clients)
        await super().shutdown(sockets)
        cut_off.cancel()

    def _end_at_once(self) -> None:
        """As if all clients had left. uvicorn's own way would end tasks and the lifespan in mid-air, with a traceback for each."""
        self.should_exit = True
        self._state.thread.cancel_open(NotServingError("The server was told to end at once."))
        self._cut_off_clients()

    def _cut_off_clients(self) -> None:
        for connection in tuple(self.server_state.connections):
            connection.transport.abort()
