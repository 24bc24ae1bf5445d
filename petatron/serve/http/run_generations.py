"""Runs the sequences of a request to their end, unless the client leaves or time is up: then they are cancelled."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from fastapi import Request, Response
from starlette.types import Receive, Scope, Send

from petatron.base.log import get_logger
from petatron.infer.completion import Completion, TokenEvent
from petatron.serve.generation import Generation, Inbox
from petatron.serve.http.api_error import to_api_error
from petatron.serve.http.server_state import ServerState

DEADLINE = "petatron.deadline_s"
"""In a request's scope: when its answer must be complete, on the event loop's clock."""
_log = get_logger(__name__)


class ClientLeft(Exception):
    """The client has closed its connection; there is nobody to answer."""


@contextmanager
def _submitted(state: ServerState, generations: Sequence[Generation]) -> Iterator[None]:
    """Whatever is not finished at the end is cancelled."""
    state.thread.submit(generations)
    try:
        yield
    finally:
        for generation in generations:
            if not generation.done.done():
                state.thread.cancel(generation)


async def complete(request: Request, state: ServerState, generations: Sequence[Generation]) -> list[Completion]:
    """Returns all completions; raises the first failure."""
    left = asyncio.ensure_future(_wait_for_disconnect(request.receive))
    try:
        async with asyncio.timeout_at(request.scope[DEADLINE]):
            with _submitted(state, generations):
                futures = [generation.done for generation in generations]
                # `wait` leaves the futures alone when it is cancelled; `gather` would cancel them.
                waiting = asyncio.ensure_future(asyncio.wait(futures, return_when=asyncio.FIRST_EXCEPTION))
                try:
                    await asyncio.wait((waiting, left), return_when=asyncio.FIRST_COMPLETED)
                    if not waiting.done():
                        raise ClientLeft
                finally:
                    waiting.cancel()
                failed = [one for one in futures if one.done() and one.exception() is not None]
                return [one.result() for one in failed or futures]
    finally:
        left.cancel()


class TokenStream(Response):
    """Server-sent events of sequences that share an inbox.

    The request is submitted before the answer begins, so that a refusal still has its status code. An error after that is an event, the
    last one.
    """

    media_type = "text/event-stream"

    def __init__(
        self,
        state: ServerState,
        generations: Sequence[Generation],
        inbox: Inbox,
        *,
        begin: Sequence[dict[str, Any]],
        chunk: Callable[[Generation, TokenEvent], dict[str, Any] | None],
        end: Callable[[list[Completion]], Sequence[dict[str, Any]]],
    ) -> None:
        super().__init__(None, headers={"Cache-Control": "no-store", "X-Accel-Buffering": "no"})
        del self.headers["content-length"]
        self._state, self._generations, self._inbox = state, generations, inbox
        self._begin, self._chunk, self._end = begin, chunk, end

    async def prepare(self, request: Request) -> TokenStream:
        """Submits the sequences and waits for the first event, or for the refusal, which it raises; a client may leave meanwhile."""
        self._submission = _submitted(self._state, self._generations)
        self._submission.__enter__()
        first = asyncio.ensure_future(self._next())
        self._left = asyncio.ensure_future(_wait_for_disconnect(request.receive))
        try:
            async with asyncio.timeout_at(request.scope[DEADLINE]):
                await asyncio.wait((first, self._left), return_when=asyncio.FIRST_COMPLETED)
            if not first.done():
                raise ClientLeft
            self._first = first.result()
        except BaseException:
            first.cancel()
            self._left.cancel()
            self._submission.__exit__(None, None, None)
            raise
        return self

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        writing = asyncio.ensure_future(self._write(send, scope[DEADLINE]))
        try:
            await asyncio.wait((writing, self._left), return_when=asyncio.FIRST_COMPLETED)
            if writing.done():
                writing.result()
        finally:
            for task in (writing, self._left):
                task.cancel()
            await asyncio.gather(writing, self._left, return_exceptions=True)
            self._submission.__exit__(None, None, None)

    async def _write(self, send: Send, deadline_s: float) -> None:
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        try:
            async with asyncio.timeout_at(deadline_s):
                await _send_data(send, self._begin)
                async for chunks in self._chunks():
                    await _send_data(send, chunks)
                completions = [await generation.done for generation in self._generations]
                await _send_data(send, self._end(completions), last=True)
        except asyncio.CancelledError:
            raise
        except Exception as error:
            answer = to_api_error(error)
            if answer.status == 500:
                _log.error("a stream failed", exc_info=error)
            await _send_data(send, [answer.content()], last=True)

    async def _chunks(self) -> AsyncIterator[list[dict[str, Any]]]:
        """Yields everything there is at once: one write for all tokens of a step."""
        unfinished = len(self._generations)
        ready = [self._first]
        while True:
            while not self._inbox.empty():
                ready.append(await self._next())
            unfinished -= sum(event.finish_reason is not None for _, event in ready)
            yield [chunk for one in joined_texts(ready) if (chunk := self._chunk(*one)) is not None]
            if not unfinished:
                return
            ready = [await self._next()]

    async def _next(self) -> tuple[Generation, TokenEvent]:
        """Returns the next event; raises where a sequence has failed."""
        generation, event = await self._inbox.get()
        if isinstance(event, Exception):
            raise event
        return generation, event


def joined_texts(ready: Sequence[tuple[Generation, TokenEvent]]) -> list[tuple[Generation, TokenEvent]]:
    """Joins the events of a sequence that wait already into one, with all their text; those with log-probabilities stay apart.

    A server that keeps up sends every token by itself. One that is late has less to write, and catches up.
    """
    joined: dict[Generation, int] = {}
    events: list[tuple[Generation, TokenEvent]] = []
    for generation, event in ready:
        place = joined.get(generation)
        if place is not None and event.logprob is None:
            events[place] = generation, event._replace(text=events[place][1].text + event.text)
            continue
        if event.logprob is None:
            joined[generation] = len(events)
        else:
            joined.pop(generation, None)
        events.append((generation, event))
    return events


async def _send_data(send: Send, chunks: Sequence[dict[str, Any]], *, last: bool = False) -> None:
    parts = [f"data: {json.dumps(chunk, ensure_ascii=False, separators=(',', ':'))}\n\n" for chunk in chunks]
    body = "".join([*parts, "data: [DONE]\n\n"] if last else parts)
    if body:
        await send({"type": "http.response.body", "body": body.encode(), "more_body": not last})


async def _wait_for_disconnect(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
