"""An HTTP protocol with limits that hold before any key is checked: bytes and number of headers, time, and connections.

uvicorn bounds none of these. A client that sends headers without end, or never ends them, costs memory or a connection for as long
as it likes; so it is answered and cut off. The same holds for whatever else is no body: extensions of chunks, trailers, what is left of a
body when the answer is complete, and requests that are sent before the one before is answered. Of those uvicorn keeps as many as come, and
tells none but the last of them when the client leaves: so nothing after the first is read, and its answer ends the connection. A client
that reads nothing of an answer is cut off after the time that a request may take.
"""

from __future__ import annotations

import asyncio
import http
from collections import Counter
from collections.abc import Callable
from functools import partial
from typing import Any

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from petatron.serve.http.api_error import ApiError
from petatron.serve.serve_options import ServeLimits

_FRAMED_BYTES = 8
"""The framing bytes that a byte of a body may come with: chunked encoding has six where every chunk is one byte."""


def limited_protocol(limits: ServeLimits) -> Callable[..., asyncio.Protocol]:
    """Returns what makes the protocol of each connection of one server."""
    return partial(LimitedHttpProtocol, limits=limits, addresses=Counter())


class LimitedHttpProtocol(HttpToolsProtocol):
    """addresses: how many connections each has open."""

    def __init__(self, *, limits: ServeLimits, addresses: Counter[str], **settings: Any) -> None:
        super().__init__(**settings)
        self._limits, self._addresses = limits, addresses
        self._address: str | None = None
        self._timers: dict[str, asyncio.TimerHandle] = {}
        self._header_bytes, self._num_headers = 0, 0
        self._in_headers, self._refused = True, False
        self._framing_bytes = 0

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._address = self.client[0] if self.client else ""
        self._addresses[self._address] += 1
        from_address = self._addresses[self._address] > self._limits.max_connections_per_address
        if from_address or len(self.connections) > self._limits.max_connections:
            whose = " from this address" if from_address else ""
            self._refuse(503, f"The server has too many connections open{whose}. Try again later.")
            return
        self._expect_headers()

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_timer("headers")
        self._stop_timer("unread")
        if self._address is not None:
            self._addresses[self._address] -= 1
            if not self._addresses[self._address]:
                del self._addresses[self._address]
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        if self._refused:
            return
        if self._in_headers:
            if "headers" not in self._timers:  # a further request of the same connection
                self._expect_headers()
            self._header_bytes += len(data)
        else:
            self._framing_bytes += len(data)
        super().data_received(data)
        no_body = self._header_bytes if self._in_headers else self._framing_bytes
        if no_body > self._limits.max_header_bytes and not self._refused:
            self._refuse_headers()

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._num_headers = 0

    def on_header(self, name: bytes, value: bytes) -> None:
        self._num_headers += 1
        if self._num_headers > self._limits.max_headers:
            self._refuse_headers()
        if not self._refused:
            super().on_header(name, value)

    def on_headers_complete(self) -> None:
        self._stop_timer("headers")
        self._in_headers, self._framing_bytes = False, 0
        if self.cycle is not None and not self.cycle.response_complete and not self._refused:
            self._refused, self.cycle.keep_alive = True, False
        size = len(self.url) + sum(len(name) + len(value) for name, value in self.headers)
        if size > self._limits.max_header_bytes:
            self._refuse_headers()
        if not self._refused:
            super().on_headers_complete()

    def on_body(self, body: bytes) -> None:
        self._framing_bytes = max(0, self._framing_bytes - _FRAMED_BYTES * len(body))
        if not self._refused:
            super().on_body(body)

    def on_message_complete(self) -> None:
        self._in_headers, self._header_bytes = True, 0
        if not self._refused:
            super().on_message_complete()

    def on_response_complete(self) -> None:
        if self.transport.get_write_buffer_size():
            self._watch_reader()
        super().on_response_complete()
        if not self._in_headers and not self.transport.is_closing():  # nobody reads the rest of its body
            self.transport.close()

    def pause_writing(self) -> None:
        super().pause_writing()
        self._watch_reader()

    def _watch_reader(self) -> None:
        """A transport that is closed waits until all is sent, however long."""
        self._stop_timer("unread")

        def cut_off() -> None:
            if self.transport.get_write_buffer_size():
                self.transport.abort()

        self._timers["unread"] = self.loop.call_later(self._limits.request_timeout_s, cut_off)

    def resume_writing(self) -> None:
        self._stop_timer("unread")
        super().resume_writing()

    def _expect_headers(self) -> None:
        self._stop_timer("headers")
        text = f"The headers were not complete after {self._limits.header_timeout_s:g} seconds."
        self._timers["headers"] = self.loop.call_later(self._limits.header_timeout_s, self._refuse, 408, text)

    def _stop_timer(self, name: str) -> None:
        if (timer := self._timers.pop(name, None)) is not None:
            timer.cancel()

    def _refuse_headers(self) -> None:
        most = f"{self._limits.max_headers} headers or {self._limits.max_header_bytes} bytes of them"
        self._refuse(431, f"The request has more than {most}.")

    def _refuse(self, status: int, text: str) -> None:
        """Answers, unless something else is being answered, and closes the connection."""
        self._refused = True
        self._stop_timer("headers")
        if self.cycle is None or self.cycle.response_complete:
            answer = ApiError(status, text).response()
            lines = [f"HTTP/1.1 {status} {http.HTTPStatus(status).phrase}".encode(), b"connection: close"]
            lines += [name + b": " + value for name, value in answer.raw_headers]
            self.transport.write(b"\r\n".join([*lines, b"", bytes(answer.body)]))
        self.transport.close()
