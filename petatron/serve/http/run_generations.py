"""Runs the sequences of a request to their end, unless the client leaves or time is up: then they are cancelled.

JSON of answers that may be large is made and written beside the event loop, in pieces, so that other threads run meanwhile.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

from fastapi import Request, Response
from fastapi.responses import JSONResponse
from starlette.types import Receive, Scope, Send

from petatron.base.log import get_logger
from petatron.infer.engine_outputs import Completion, TokenEvent
from petatron.serve.generation_handle import Generation, Inbox
from petatron.serve.http.api_error import ApiError, to_api_error
from petatron.serve.http.server_state import ServerState

_SLICE_ITEMS = 1024
_STRICT_JSON = json.JSONEncoder(ensure_ascii=False, separators=(",", ":"), allow_nan=False)
DEADLINE = "petatron.deadline_s"
"""In a request's scope: when its answer must be complete, on the event loop's clock."""
KEY_NAME = "petatron.key_name"
"""In a request's scope: a name of the key that it came with, which does not tell the key."""
_LAST = "data: [DONE]\n\n"
_JSON = json.JSONEncoder(ensure_ascii=False, separators=(",", ":"))
_MANY_LOGPROBS = 1024
_log = get_logger(__name__)


def _prepare(request: Request, state: ServerState, generations: Sequence[Generation]) -> None:
    """Refuses what costs too much, and names the key: its share is counted, and prompts of other keys or salts are kept apart.

    Log-probabilities pass through everybody's steps and streams. A few thousand bytes may ask for a hundred alternatives of every token of
    hundreds of prompts: gigabytes to compute, to carry and to write.
    """
    asked, most = reported_logprobs(generations), state.options.limits.max_logprobs
    if asked > most:
        text = (
            f"The request asks for {asked} log-probabilities (tokens x alternatives x sequences), more than the "
            f"{most} that this server reports to one. Ask for fewer alternatives or tokens, or in several requests."
        )
        raise ApiError(400, text, param="logprobs", code="too_costly")
    key = request.scope.get(KEY_NAME) or ""
    group = "" if state.options.share_prefixes else key
    for generation in generations:
        salt = generation.params.prefix_group
        if key or salt:
            prefix_group = f"{group}\n{salt}" if salt else group
            generation.params = replace(generation.params, owner=key, prefix_group=prefix_group)


def reported_logprobs(generations: Sequence[Generation]) -> int:
    """Returns how many log-probabilities the answers have at most."""
    total = 0
    for generation in generations:
        params = generation.params
        if params.logprobs is not None:
            total += params.max_new_tokens * (1 + params.logprobs)
        if params.prompt_logprobs is not None:
            total += len(generation.prompt_ids) * (1 + params.prompt_logprobs)
    return total


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
    _prepare(request, state, generations)
    left = asyncio.ensure_future(_wait_for_disconnect(request.receive))
    try:
        async with asyncio.timeout_at(request.scope[DEADLINE]):
            await state.check_constraints(generations)
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
                failed = [future for future in futures if future.done() and future.exception() is not None]
                return [future.result() for future in failed or futures]
    finally:
        left.cancel()


async def answer_of(generations: Sequence[Generation], make: Callable[[], dict[str, Any]]) -> Response:
    """Returns the JSON of an answer: beside the event loop where it has many log-probabilities."""
    if reported_logprobs(generations) > _MANY_LOGPROBS:
        return await large_answer(make)
    return JSONResponse(make())


class TokenStream(Response):
    """Server-sent events of sequences that share an inbox.

    The request is submitted before the answer begins, so that a refusal still has its status code. An error after that is an event, the
    last one. text(index, text): the JSON of an event with nothing but new text, the common case; None: there is none.
    chunk(generation, event): the JSON of any other, or of several.
    """

    media_type = "text/event-stream"

    def __init__(
        self,
        state: ServerState,
        generations: Sequence[Generation],
        inbox: Inbox,
        *,
        begin: Sequence[dict[str, Any]],
        text: Callable[[int, str], dict[str, Any]] | None,
        chunk: Callable[[Generation, TokenEvent], dict[str, Any] | list[dict[str, Any]] | None],
        end: Callable[[list[Completion]], Sequence[dict[str, Any]]],
        joins: bool = True,
        named: bool = False,
    ) -> None:
        """joins: tokens that wait already may become one event. named: each event has its type as a name, and none marks the end."""
        super().__init__(None, headers={"Cache-Control": "no-store", "X-Accel-Buffering": "no"})
        del self.headers["content-length"]
        self._state, self._generations, self._inbox = state, generations, inbox
        self._begin, self._chunk, self._end, self._joins = begin, chunk, end, joins
        self._format, self._last = (_named_event, "") if named else (_event, _LAST)
        self._texts = None if text is None else TextEvents(text)

    async def prepare(self, request: Request) -> TokenStream:
        """Submits the sequences and waits for the first event, or for the refusal, which it raises; a client may leave meanwhile."""
        _prepare(request, self._state, self._generations)
        async with asyncio.timeout_at(request.scope[DEADLINE]):
            await self._state.check_constraints(self._generations)
        self._submission = _submitted(self._state, self._generations)
        self._submission.__enter__()
        first = asyncio.ensure_future(self._inbox.take_all())
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
                await self._write_tokens(send, before="".join(map(self._format, self._begin)))
                completions = [await generation.done for generation in self._generations]
                await _send_body(send, "".join(map(self._format, self._end(completions))) + self._last, last=True)
        except asyncio.CancelledError:
            raise
        except Exception as error:
            answer = to_api_error(error)
            if answer.status == 500:
                _log.error("a stream failed", exc_info=error)
            await _send_body(send, self._format(answer.content()) + self._last, last=True)

    async def _write_tokens(self, send: Send, *, before: str) -> None:
        """Sends everything there is at once: one write for all tokens of a step, and of all steps while the client does not read; the
        first begins with the text `before` them."""
        unfinished, ready = len(self._generations), self._first
        while True:
            events = joined_texts(ready) if self._joins else list(ready)
            unfinished -= sum(event.finish_reason is not None for _, event in events)
            await _send_body(send, before + "".join([self._event(*item) for item in events]))
            before = ""
            if not unfinished:
                return
            ready = await self._inbox.take_all()

    def _event(self, generation: Generation, event: TokenEvent) -> str:
        if self._texts is not None and event.finish_reason is None and event.logprob is None:
            return self._texts.event(generation.index, event.text) if event.text else ""
        content = self._chunk(generation, event)
        events = content if isinstance(content, list) else [] if content is None else [content]
        return "".join(map(self._format, events))


class TextEvents:
    """Server-sent events that differ in their text alone: the rest is serialized once for each sequence.

    >>> events = TextEvents(lambda index, text: {"choices": [{"index": index, "text": text, "logprobs": None}]})
    >>> events.event(1, 'a "b"')
    'data: {"choices":[{"index":1,"text":"a \\\\"b\\\\"","logprobs":null}]}\\n\\n'
    """

    def __init__(self, content: Callable[[int, str], dict[str, Any]]) -> None:
        """content(index, text): the JSON of an event; the last empty string in that of an empty text must be the text itself."""
        self._content = content
        self._around: dict[int, tuple[str, str]] = {}

    def event(self, index: int, text: str) -> str:
        around = self._around.get(index)
        if around is None:
            before, _, after = _event(self._content(index, "")).rpartition('""')
            around = self._around[index] = before, after
        return f"{around[0]}{_JSON.encode(text)}{around[1]}"


def joined_texts(ready: Sequence[tuple[Generation, TokenEvent]]) -> list[tuple[Generation, TokenEvent]]:
    """Joins the events of a sequence that wait already into one, with all their text; those with log-probabilities stay apart.

    A server that keeps up sends every token by itself. One that is late has less to write, and catches up.
    """
    if len(ready) == 1:
        return list(ready)
    places: dict[Generation, int] = {}  # of the event that the next one of a sequence joins
    groups: list[tuple[Generation, list[TokenEvent]]] = []
    for generation, event in ready:
        place = places.get(generation) if event.logprob is None else None
        if place is not None:
            groups[place][1].append(event)
            continue
        if event.logprob is None:
            places[generation] = len(groups)
        else:
            places.pop(generation, None)
        groups.append((generation, [event]))
    return [
        (generation, last if not before else last._replace(text="".join([event.text for event in (*before, last)])))
        for generation, (*before, last) in groups
    ]


def _event(content: dict[str, Any]) -> str:
    return f"data: {_JSON.encode(content)}\n\n"


def _named_event(content: dict[str, Any]) -> str:
    return f"event: {content.get('type', 'error')}\n{_event(content)}"


async def _send_body(send: Send, text: str, *, last: bool = False) -> None:
    if text:
        await send({"type": "http.response.body", "body": text.encode(), "more_body": not last})


async def _wait_for_disconnect(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


async def large_answer(make: Callable[[], Mapping[str, Any]]) -> Response:
    """Returns the answer that `make` makes, which runs beside the event loop too."""
    return Response(await asyncio.to_thread(lambda: json_bytes(make())), media_type="application/json")


def json_bytes(content: Any) -> bytes:
    """Returns a value as JSON.

    >>> json_bytes({"a": 1, "b": list(range(3)), "c": [], "d": [{"é": [None]}]}).decode()
    '{"a":1,"b":[0,1,2],"c":[],"d":[{"é":[null]}]}'
    """
    return "".join(_pieces(content)).encode()


def _pieces(value: Any) -> Iterator[str]:
    """To encode a large value is one call of C, in which no other thread runs: so it is taken apart."""
    if isinstance(value, Mapping) and value:
        for number, (name, inner) in enumerate(value.items()):
            yield f"{',' if number else '{'}{_STRICT_JSON.encode(name)}:"
            yield from _pieces(inner)
        yield "}"
    elif isinstance(value, list) and len(value) > _SLICE_ITEMS:
        for begin in range(0, len(value), _SLICE_ITEMS):
            yield ("," if begin else "[") + _STRICT_JSON.encode(value[begin : begin + _SLICE_ITEMS])[1:-1]
        yield "]"
    elif isinstance(value, list) and value and isinstance(value[0], Mapping | list):
        for number, inner in enumerate(value):
            yield "," if number else "["
            yield from _pieces(inner)
        yield "]"
    else:
        yield _STRICT_JSON.encode(value)
