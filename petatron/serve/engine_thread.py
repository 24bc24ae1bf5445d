"""Drives an engine in a thread of its own, and carries requests to it and events back to the event loop.

The engine is not thread-safe, and a step takes as long as the model needs. So the event loop only puts commands into a queue, which the
thread empties between two steps, and the thread hands over all events of a step in one call of the loop. Whether there is room is decided
in the event loop, by counting open sequences: a full server refuses at once, however long its step takes.

A swap of the model waits until open sequences have finished. Those that arrive meanwhile are held, and submitted to the new engine.
"""

from __future__ import annotations

import asyncio
import queue
import threading
import time
from collections.abc import Callable, Sequence
from typing import Literal, Protocol

from petatron.base.errors import LaunchError, PetatronError, RequestError
from petatron.base.log import get_logger
from petatron.infer.check_request import ServedModel
from petatron.infer.engine_outputs import Completion, EngineStats, TokenEvent
from petatron.infer.prompt_images import PromptImages
from petatron.infer.sampling_params import SamplingParams
from petatron.serve.generation_handle import (
    Generation,
    GenerationCancelled,
    NotServingError,
    QueueFullError,
    ServerError,
)
from petatron.serve.sequence_admission import OpenSequences

EngineState = Literal["serving", "swapping", "draining", "failed"]
_ALIVE_CHECK_S = 0.2
_IDLE_STEP_S = 20.0
"""So often an idle engine makes a step without work, so that its other ranks do not give up waiting."""
_log = get_logger(__name__)


_Swap = tuple[Callable[[], "ServedEngine"], asyncio.Future["ServedEngine"]]
"""What loads an engine, and where it goes."""
_Delivery = tuple[Generation, TokenEvent | None, Completion | Exception | None]


class EngineThread:
    """Owns an engine from `start` to `close`. All methods are called from the event loop."""

    def __init__(
        self, engine: ServedEngine, *, max_open: int, on_finish: Callable[[Generation, Completion], None]
    ) -> None:
        self.stats: EngineStats = engine.stats
        self.failure: str | None = None
        self._engine = engine
        self._on_finish = on_finish
        self._commands: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._open = OpenSequences(max_open)
        self._draining = self._swapping = False
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread = threading.Thread(target=self._run, name="petatron-engine", daemon=True)
        # Of the thread alone:
        self._requests: dict[int, Generation] = {}
        self._ids: dict[Generation, int] = {}
        self._held: list[Generation] = []
        self._swap: _Swap | None = None
        self._stopped = False

    def start(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._thread.start()

    @property
    def state(self) -> EngineState:
        if self.failure is not None:
            return "failed"
        if self._draining:
            return "draining"
        return "swapping" if self._swapping else "serving"

    @property
    def num_open(self) -> int:
        """Sequences accepted and not finished."""
        return len(self._open)

    def submit(self, generations: Sequence[Generation]) -> None:
        """Accepts all or none; raises `QueueFullError` or `NotServingError`."""
        if self.state in ("failed", "draining"):
            why = "is shutting down" if self.state == "draining" else "cannot generate: its engine has failed"
            raise NotServingError(f"The server {why}.")
        try:
            giving_way = self._open.add(generations)
        except QueueFullError:
            if self._swapping:
                raise NotServingError("The server is loading a newer model, and its queue is full.") from None
            raise
        if giving_way:
            self._end(giving_way, QueueFullError("Other keys ask for their share of the server. Try again later."))
        self._command(lambda: self._submit(generations))

    def cancel(self, generation: Generation) -> None:
        if not generation.done.done() and not generation.cancelled:
            generation.cancelled = True
            self._command(lambda: self._cancel(generation))

    def cancel_open(self, why: NotServingError) -> int:
        """Ends all open sequences with an error for who waits, without waiting for the step that runs; returns how many."""
        cancelled = tuple(self._open)
        self._end(cancelled, why)
        return len(cancelled)

    def _end(self, generations: Sequence[Generation], why: ServerError) -> None:
        for generation in generations:
            self.cancel(generation)
        self._deliver([(generation, None, why) for generation in generations])

    async def swap(self, load: Callable[[], ServedEngine]) -> ServedEngine:
        """Replaces the engine by what `load` returns, after open sequences have finished.

        `load` runs in the thread, and also closes the former engine, for two rarely fit in memory. Its failure is raised here, and is
        the end of service.
        """
        if self._swapping:
            raise NotServingError("The server is loading another model already.")
        done: asyncio.Future[ServedEngine] = asyncio.get_running_loop().create_future()
        self._swapping = True
        self._command(lambda: setattr(self, "_swap", (load, done)))
        try:
            return await done
        finally:
            self._swapping = False

    def drain(self) -> None:
        """Accepts nothing more; what is open finishes."""
        self._draining = True

    async def close(self, timeout_s: float = 10.0) -> None:
        """Cancels what is open, closes the engine and ends the thread."""
        self._draining = True
        for generation in tuple(self._open):
            self.cancel(generation)
        self._command(self._stop)
        await asyncio.to_thread(self._thread.join, timeout_s)

    def _command(self, command: Callable[[], None]) -> None:
        self._commands.put(command)
        self._engine.wake()

    # In the event loop, called by the thread.

    def _deliver(self, deliveries: list[_Delivery]) -> None:
        for generation, event, outcome in deliveries:
            if event is not None and generation.inbox is not None and not generation.cancelled:
                generation.inbox.put(generation, event)
            if outcome is None:
                continue
            self._open.discard(generation)
            generation.finish(outcome)
            if isinstance(outcome, Exception) and generation.inbox is not None:
                generation.inbox.fail(outcome)
            if isinstance(outcome, Completion):
                self._on_finish(generation, outcome)

    # In the thread.

    def _run(self) -> None:
        while True:
            try:
                self._take_commands()
                if self._stopped:
                    return
                if self.failure is None:
                    self._advance()
            except Exception as error:
                self._fail(error)

    def _advance(self) -> None:
        if self._swap is not None and not self._requests and not self._engine.has_work:
            self._replace_engine(*self._swap)
        elif self._engine.has_work:
            self._step()
        if self.failure is None:
            self.stats = self._engine.stats

    def _take_commands(self) -> None:
        idle = self.failure is not None or (not self._engine.has_work and self._swap is None)
        try:
            command = self._wait_for_command() if idle else self._commands.get_nowait()
        except queue.Empty:
            if idle and self.failure is None:
                self._step()
            return
        while True:
            command()
            try:
                command = self._commands.get_nowait()
            except queue.Empty:
                return

    def _wait_for_command(self) -> Callable[[], None]:
        """Raises `queue.Empty` when an idle step is due, and what the engine raises if it has ended meanwhile: health must say so
        before a request is lost."""
        until_s = time.monotonic() + _IDLE_STEP_S
        while True:
            left_s = max(until_s - time.monotonic(), 0.0)
            try:
                return self._commands.get(timeout=min(left_s, _ALIVE_CHECK_S))
            except queue.Empty:
                if self.failure is None:
                    self._engine.check_alive()
                if left_s <= _ALIVE_CHECK_S:
                    raise

    def _submit(self, generations: Sequence[Generation]) -> None:
        if self.failure is not None:
            failed = NotServingError("The server cannot generate: its engine has failed.")
            self._hand_over([(generation, None, failed) for generation in generations])
            return
        if self._swap is not None:
            self._held += generations
            return
        for generation in generations:
            if generation.cancelled:
                self._hand_over([(generation, None, GenerationCancelled("cancelled"))])
                continue
            try:
                number = self._engine.submit(generation.prompt_ids, generation.params, images=generation.images)
            except Exception as error:  # whatever it is, the engine has not begun this request, and serves on
                why = error
                if isinstance(error, LaunchError) or not isinstance(error, PetatronError):
                    _log.error("a request could not be submitted", exc_info=error)
                    why = RequestError(
                        "The engine failed at this request, and goes on with others. Its log has the cause."
                    )
                self._hand_over([(generation, None, why)])
                continue
            self._requests[number] = generation
            self._ids[generation] = number

    def _cancel(self, generation: Generation) -> None:
        if generation in self._held:
            self._held.remove(generation)
        elif (number := self._ids.pop(generation, None)) is not None:
            del self._requests[number]
            self._engine.cancel(number)
        else:
            return  # finished in the meantime
        self._hand_over([(generation, None, GenerationCancelled("cancelled"))])

    def _step(self) -> None:
        deliveries: list[_Delivery] = []
        events = self._engine.step()
        now = time.monotonic()
        for event in events:
            ended = event.finish_reason is not None
            outcome: Completion | Exception | None = None
            if ended:
                try:
                    outcome = self._engine.take(event.request)
                except PetatronError as error:
                    outcome = error
            generation = self._requests.get(event.request)
            if generation is None:  # cancelled
                continue
            if generation.first_token_s is None:
                generation.first_token_s = now
            if ended:
                generation.finished_s = now
                del self._requests[event.request], self._ids[generation]
            if ended or generation.inbox is not None:
                deliveries.append((generation, None if isinstance(outcome, Exception) else event, outcome))
        self._hand_over(deliveries)

    def _replace_engine(self, load: Callable[[], ServedEngine], done: asyncio.Future[ServedEngine]) -> None:
        assert self._loop is not None
        self._swap = None
        try:
            self._engine = load()
        except Exception as error:
            self._fail(error)
            failed = NotServingError("The engine could not be replaced.")
            self._call_loop(lambda: done.done() or done.set_exception(failed))
            return
        engine, held, self._held = self._engine, self._held, []
        self._call_loop(lambda: done.done() or done.set_result(engine))
        self._submit(held)

    def _fail(self, error: Exception) -> None:
        """A step that raised leaves the engine's memory in an unknown state: nothing is served any more, and health says so."""
        _log.error("the engine has failed; the server must be restarted", exc_info=error)
        self.failure = f"{type(error).__name__}"
        self._requests.clear()
        self._ids.clear()
        self._held = []
        failed = NotServingError("The engine has failed.")  # also those that it has never seen
        self._call_loop(lambda: self._deliver([(generation, None, failed) for generation in tuple(self._open)]))

    def _stop(self) -> None:
        self._stopped = True
        if self.failure is None:
            self._engine.close()

    def _hand_over(self, deliveries: list[_Delivery]) -> None:
        if deliveries:
            self._call_loop(lambda: self._deliver(deliveries))

    def _call_loop(self, call: Callable[[], object]) -> None:
        assert self._loop is not None
        try:
            self._loop.call_soon_threadsafe(call)
        except RuntimeError:  # the loop is closed: nobody waits any more
            _log.debug("an event came after the server's end")


class ServedEngine(ServedModel, Protocol):
    """An engine of `infer/`, or one of a test. One thread calls all but `wake`."""

    @property
    def has_work(self) -> bool: ...
    @property
    def stats(self) -> EngineStats: ...
    def submit(self, prompt_ids: Sequence[int], params: SamplingParams, *, images: PromptImages | None = None) -> int:
        """Returns the request's id; raises `DataError` or `ConfigError` for what cannot be served. What is found later, such as a
        constraint that cannot be compiled, is what `take` raises."""
        ...

    def cancel(self, request: int) -> None: ...
    def step(self) -> list[TokenEvent]: ...
    def wake(self) -> None:
        """Makes a `step` return that only waits for another process; called by any thread."""
        ...

    def take(self, request: int) -> Completion:
        """Returns a finished request, and forgets it; raises the `PetatronError` of one that failed."""
        ...

    def check_alive(self) -> None:
        """Raises `LaunchError` if the engine has ended by itself; asked while there is no work, which would notice it."""
        ...

    def close(self) -> None: ...
