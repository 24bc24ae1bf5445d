"""`Generation`, the event loop's handle of one sequence that the engine generates."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from dataclasses import dataclass, field

from petatron.base.errors import PetatronError
from petatron.infer.engine_outputs import Completion, TokenEvent
from petatron.infer.prompt_images import PromptImages
from petatron.infer.sampling_params import SamplingParams


@dataclass(slots=True, eq=False)
class Generation:
    """A prompt, how to continue it, and what became of it.

    done: its completion, or why there is none. inbox: where its events go if the answer is streamed; sequences of one HTTP request
    share it. images: those of the prompt. Times are of the engine's thread, in seconds of the monotonic clock.
    """

    prompt_ids: Sequence[int]
    params: SamplingParams
    index: int = field(default=0, kw_only=True)
    inbox: Inbox | None = field(default=None, kw_only=True)
    images: PromptImages | None = field(default=None, kw_only=True)
    done: asyncio.Future[Completion] = field(init=False)
    submitted_s: float = field(default_factory=time.monotonic, init=False)
    first_token_s: float | None = field(default=None, init=False)
    finished_s: float | None = field(default=None, init=False)
    cancelled: bool = field(default=False, init=False)

    def __post_init__(self) -> None:
        self.done = asyncio.get_running_loop().create_future()
        self.done.add_done_callback(_mark_retrieved)

    @property
    def stop(self) -> str | int | None:
        """The text or id that ended it; None before its end."""
        ended = self.done.done() and not self.done.cancelled() and self.done.exception() is None
        return self.done.result().stop if ended else None

    def finish(self, outcome: Completion | Exception) -> None:
        if self.done.done():
            return
        if isinstance(outcome, Exception):
            self.done.set_exception(outcome)
        else:
            self.done.set_result(outcome)


class Inbox:
    """Events of the sequences of one request, for the one who writes its answer: woken once for all that a step brings."""

    __slots__ = ("_events", "_failure", "_waiter")

    def __init__(self) -> None:
        self._events: list[tuple[Generation, TokenEvent]] = []
        self._failure: Exception | None = None
        self._waiter: asyncio.Future[None] | None = None

    def put(self, generation: Generation, event: TokenEvent) -> None:
        self._events.append((generation, event))
        self._wake()

    def fail(self, error: Exception) -> None:
        """Notes that a sequence has ended without an answer: the first error is the request's."""
        self._failure = self._failure or error
        self._wake()

    async def take_all(self) -> list[tuple[Generation, TokenEvent]]:
        """Waits for an event, and returns all there are; raises where a sequence has failed."""
        if not self._events and self._failure is None:
            self._waiter = asyncio.get_running_loop().create_future()
            await self._waiter
        if self._failure is not None:
            raise self._failure
        events, self._events, self._waiter = self._events, [], None
        return events

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)


def _mark_retrieved(done: asyncio.Future[Completion]) -> None:
    """A client that left never asks for the outcome; asyncio would log each such exception."""
    if not done.cancelled():
        done.exception()


class ServerError(PetatronError):
    """The server cannot take or finish a request now; the request itself may be fine."""


class QueueFullError(ServerError):
    """As many sequences are open as the server allows."""


class NotServingError(ServerError):
    """The server is draining, swapping its model, or its engine has failed."""


class GenerationCancelled(ServerError):
    """Nobody waits for the answer any more."""
