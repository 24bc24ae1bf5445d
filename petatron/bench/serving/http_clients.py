"""HTTP clients with little overhead: asyncio protocols that write prepared bytes and parse only the end of an answer.

They run in a process that is not the server's. Nothing of an answer is parsed while it streams: the first byte of the body is its first
token, as the server sends both together, and its last bytes tell the number of tokens.
"""

from __future__ import annotations

import asyncio
import json
import random
import re
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from urllib.parse import urlsplit

from petatron.base.errors import LaunchError

_TOKENS = re.compile(rb'"completion_tokens":\s*(\d+)')
_LENGTH = re.compile(rb"\r\ncontent-length:\s*(\d+)", re.IGNORECASE)
_TAIL_BYTES = 2048


@dataclass(frozen=True, slots=True)
class BenchRequest:
    """A prompt of token ids and the number of tokens to make."""

    prompt_ids: Sequence[int]
    new_tokens: int

    def body(self, *, stream: bool) -> bytes:
        content = {"prompt": list(self.prompt_ids), "max_tokens": self.new_tokens, "temperature": 0, "ignore_eos": True}
        if stream:
            content |= {"stream": True, "stream_options": {"include_usage": True}}
        return json.dumps(content).encode()


@dataclass(frozen=True, slots=True)
class HttpAnswer:
    """Times in seconds since the request was due; tokens as the server counted them."""

    first_token_s: float
    end_s: float
    tokens: int


class HttpClients:
    """Sends requests to one server and keeps its connections open."""

    def __init__(self, url: str, *, api_key: str | None = None) -> None:
        parts = urlsplit(url)
        if parts.scheme != "http" or not parts.hostname:
            raise LaunchError(f"{url!r} is no address of a server. Give one such as http://127.0.0.1:8000")
        self._url, self._host, self._port = url, parts.hostname, parts.port or 80
        key = f"Authorization: Bearer {api_key}\r\n" if api_key else ""
        self._head = (
            f"POST /v1/completions HTTP/1.1\r\nHost: {parts.netloc}\r\n{key}Content-Type: application/json\r\n"
            "Content-Length: "
        ).encode()
        self._idle: list[_Connection] = []

    async def ask(self, request: BenchRequest, *, stream: bool, due_s: float | None = None) -> HttpAnswer:
        """Returns an answer; `LaunchError` for one that is not 200, or does not come. due_s: of `time.perf_counter`, now if None."""
        body = request.body(stream=stream)
        due_s = time.perf_counter() if due_s is None else due_s
        try:
            while self._idle and self._idle[-1].closed:  # a server closes those that were idle for long
                self._idle.pop()
            connection = self._idle.pop() if self._idle else None
            if connection is None:
                _, connection = await asyncio.get_running_loop().create_connection(_Connection, self._host, self._port)
            await connection.ask(b"".join((self._head, str(len(body)).encode(), b"\r\n\r\n", body)))
        except OSError as error:
            raise LaunchError(f"{self._url} does not answer: {error}. Is the server running?") from error
        status, tail = connection.status, connection.tail
        if status != 200 or not (counts := _TOKENS.findall(tail)):
            text = tail[-300:].decode(errors="replace")
            raise LaunchError(f"{self._url} answered {status} to a request of the bench: {text}")
        self._idle.append(connection)
        return HttpAnswer(connection.first_s - due_s, connection.end_s - due_s, int(counts[-1]))

    async def ask_all(
        self, requests: Sequence[BenchRequest], *, clients: int, stream: bool
    ) -> tuple[float, list[HttpAnswer]]:
        """Returns the seconds and the answers of clients that each send the next request as soon as they have an answer."""
        waiting, answers = list(reversed(requests)), []

        async def client() -> None:
            while waiting:
                answers.append(await self.ask(waiting.pop(), stream=stream))

        began = time.perf_counter()
        async with _first_failure(), asyncio.TaskGroup() as group:
            for _ in range(clients):
                group.create_task(client())
        return time.perf_counter() - began, answers

    async def ask_at_random_times(
        self, requests: Sequence[BenchRequest], *, per_s: float, seed: int
    ) -> list[HttpAnswer]:
        """Sends streams at the times of a Poisson process, however many are open, and returns their answers."""
        chance, due_s, tasks = random.Random(seed), time.perf_counter(), []
        async with _first_failure(), asyncio.TaskGroup() as group:
            for request in requests:
                due_s += chance.expovariate(per_s)
                await asyncio.sleep(due_s - time.perf_counter())
                tasks.append(group.create_task(self.ask(request, stream=True, due_s=due_s)))
        return [task.result() for task in tasks]

    def close(self) -> None:
        for connection in self._idle:
            connection.close()
        self._idle.clear()


@asynccontextmanager
async def _first_failure() -> AsyncIterator[None]:
    """Raises the first of several clients' errors alone: they say the same."""
    try:
        yield
    except ExceptionGroup as group:
        raise group.exceptions[0] from None


class _Connection(asyncio.Protocol):
    """One request at a time."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport, self.closed = transport, False
        self._done: asyncio.Future[None] | None = None

    async def ask(self, request: bytes) -> None:
        self.status, self.tail, self.first_s, self.end_s = 0, b"", 0.0, 0.0
        self._left: int | None = None
        self._done = asyncio.get_running_loop().create_future()
        self._transport.write(request)
        await self._done

    def close(self) -> None:
        self._transport.close()

    def data_received(self, data: bytes) -> None:
        self.tail = self.tail[-_TAIL_BYTES:] + data
        if not self.status:
            head, separator, body = self.tail.partition(b"\r\n\r\n")
            if not separator:
                return
            self.status, length = int(head.split(None, 2)[1]), _LENGTH.search(head)
            self._left = None if length is None else int(length[1])
            self.tail = data = body
        if data and not self.first_s:
            self.first_s = time.perf_counter()
        if self._left is not None:
            self._left -= len(data)
        if self._left == 0 if self._left is not None else self.tail.endswith(b"0\r\n\r\n"):
            self._end(None)

    def connection_lost(self, exc: Exception | None) -> None:
        self.closed = True
        self._end(exc or ConnectionResetError("the connection was closed"))

    def _end(self, error: Exception | None) -> None:
        if self._done is None or self._done.done():
            return
        self.end_s = time.perf_counter()
        if error is None:
            self._done.set_result(None)
        else:
            self._done.set_exception(error)
