"""An engine in a process of its own, driven over a pipe.

Python runs one thread of a process at a time, and an engine's thread gives way at each of its hundreds of operations. In one process
with it, whatever the event loop does for a token (an event, its JSON, a write to a socket) makes a step longer by as much. So the server
keeps the event loop, and the engine steps elsewhere.

The pipe carries messages of JSON. One to the engine has commands (requests and cancellations), or asks for another checkpoint's weights or
the end; of every step one comes back, with the events of all sequences, finished answers and counts. The engine steps on while it has
work, and takes what has come between two steps; who waits for a step is woken by a new command, and sends it at once. So a request never
misses a step that begins after it came, and a server that is late with its answers holds up nothing until they fill the pipe. A thread
empties the pipe on the engine's side, so that the two never wait for each other to read. What a model cannot serve is found here, where it
was asked.
"""

from __future__ import annotations

import base64
import gc
import json
import queue
import signal
import socket
import threading
import weakref
from array import array
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, fields
from multiprocessing import get_context
from multiprocessing.connection import Connection, wait
from operator import attrgetter
from pathlib import Path
from typing import Any

from petatron.base import errors
from petatron.base.errors import ConfigError, LaunchError, PetatronError, Problem
from petatron.base.log import configure_logging
from petatron.data.tokenizer import Tokenizer
from petatron.infer.check_request import check_request
from petatron.infer.engine_options import EngineOptions
from petatron.infer.engine_outputs import Completion, EngineStats, TokenEvent, TokenLogprob
from petatron.infer.sampling_params import SamplingParams
from petatron.mesh.launch.environment import read_environment
from petatron.mesh.launch.process_group import stop_process_group
from petatron.serve.open_engine import CheckpointEngine, ModelSettings, model_settings

_END_TIMEOUT_S, _MOST_WAKES = 30.0, 4096
_stats_content = attrgetter(*(field.name for field in fields(EngineStats)))
"""The counts of an engine, in the order of `EngineStats`: `asdict` would take longer than the events of a step."""


class EngineProcess:
    """A `CheckpointEngine` elsewhere; what a server drives and reloads. One thread calls all but `wake`."""

    def __init__(self, settings: ModelSettings) -> None:
        """Returns when the engine is open; raises what its process raised."""
        self.tokenizer: Tokenizer | None = settings.tokenizer
        self.vocab_size = settings.vocab_size
        self._wake_reader, self._wake_writer = socket.socketpair()
        self._wake_writer.setblocking(False)
        self._pipe, other = get_context("spawn").Pipe()
        arguments = (other, settings.folder, settings.flags, settings.options, settings.weights)
        self._process = get_context("spawn").Process(target=_run_engine, args=arguments, daemon=True)
        self._process.start()
        other.close()
        # It obeys no signal but this one, and the interpreter waits at its end for processes it has started.
        self._kill = weakref.finalize(self, self._process.kill)
        try:
            self._learn(self._receive())
        except BaseException:
            self._kill()
            raise

    @property
    def pid(self) -> int | None:
        return self._process.pid

    @property
    def has_work(self) -> bool:
        return bool(self._commands) or self._works

    def submit(self, prompt_ids: Sequence[int], params: SamplingParams) -> int:
        check_request(prompt_ids, params, self)
        request, self._next_request = self._next_request, self._next_request + 1
        self._prompts[request] = list(prompt_ids)
        self._commands.append({"request": request, "prompt": _packed(prompt_ids), "params": asdict(params)})
        return request

    def cancel(self, request: int) -> None:
        self._commands.append({"request": request})

    def step(self) -> list[TokenEvent]:
        """Returns nothing if it is woken before the step has ended: a request must be there when the next one begins."""
        if self._commands or not self._works:
            commands, self._commands = self._commands, []
            self._send({"commands": commands})
            self._num_sent, self._works = self._num_sent + 1, True
        if self._pipe not in wait([self._pipe, self._wake_reader]):
            self._wake_reader.recv(_MOST_WAKES)
            return []
        answer = self._receive()
        self._works = answer["works"] or answer["num_taken"] < self._num_sent
        self.stats = EngineStats(*answer["stats"])
        for request, outcome in answer["completions"]:
            prompt = self._prompts.pop(request)
            self._finished[request] = (
                _read_error(outcome["error"]) if "error" in outcome else _read_completion(outcome, prompt)
            )
        events = [TokenEvent(*content) for content in answer["events"]]
        return [
            event if event.logprob is None else event._replace(logprob=_read_logprob(event.logprob)) for event in events
        ]

    def wake(self) -> None:
        with suppress(OSError):  # it is closed, or as many wakes wait already as there is room for
            self._wake_writer.send(b"w")

    def take(self, request: int) -> Completion:
        finished = self._finished.pop(request)
        if isinstance(finished, PetatronError):
            raise finished
        return finished

    def reload(self, step: Path) -> EngineProcess:
        """Loads another step on all ranks, while nothing runs; `step_number` then tells which one it is."""
        self._send({"reload": str(step)})
        self._learn(self._receive())
        return self

    def check_alive(self) -> None:
        if not self._process.is_alive():
            raise self._gone()

    def close(self) -> None:
        """Ends the engines of all ranks, and the process."""
        if self._process.is_alive():
            with suppress(LaunchError):  # it may end by itself meanwhile
                self._send({"close": True})
                while "closed" not in self._receive():
                    pass
        # The answer is the last that it does, and an interpreter with torch takes a second to end by itself.
        self._kill()
        self._process.join(_END_TIMEOUT_S)
        for end in (self._pipe, self._wake_reader, self._wake_writer):
            end.close()

    def _learn(self, properties: Mapping[str, Any]) -> None:
        """Takes the properties of an engine that has just been opened, which counts requests from 0."""
        self.step_number: int | None = properties["step_number"]
        self.stop_ids: tuple[int, ...] = tuple(properties["stop_ids"])
        self.max_length: int = properties["max_length"]
        self.stats = EngineStats(*properties["stats"])
        self._works, self._num_sent, self._next_request = False, properties["num_taken"], 0
        self._commands: list[dict[str, Any]] = []
        self._prompts: dict[int, list[int]] = {}
        self._finished: dict[int, Completion | PetatronError] = {}

    def _send(self, message: Mapping[str, Any]) -> None:
        try:
            _send(self._pipe, message)
        except OSError as error:
            raise self._gone() from error

    def _receive(self) -> dict[str, Any]:
        try:
            answer = json.loads(self._pipe.recv_bytes())
        except (EOFError, OSError) as error:
            raise self._gone() from error
        if "error" in answer:
            raise _read_error(answer["error"])
        return answer

    def _gone(self) -> LaunchError:
        self._process.join(_END_TIMEOUT_S)
        return LaunchError(
            f"The engine's process has ended with exit code {self._process.exitcode}. Its output says why."
        )


def _run_engine(
    pipe: Connection, checkpoint: Path, flags: Sequence[str], options: EngineOptions | None, weights: str | None
) -> None:
    """The process: opens the engine and obeys until it is told to close, or the server is gone."""
    for number in (signal.SIGTERM, signal.SIGINT):  # the server drains, and then ends this process
        signal.signal(number, signal.SIG_IGN)
    configure_logging(rank=read_environment().rank)
    try:
        engine = CheckpointEngine(model_settings(checkpoint, flags, options=options, weights=weights))
    except PetatronError as error:
        _send(pipe, {"error": _error_content(error)})
        return
    try:
        _exempt_from_collections()
        _send(pipe, _properties(engine, num_taken=0))
        _serve_commands(pipe, engine)
    except (EOFError, BrokenPipeError, ConnectionResetError):
        return  # the server was killed


def _serve_commands(pipe: Connection, engine: CheckpointEngine) -> None:
    """Steps while there is work. Each answer tells how many messages of commands had been taken before its step."""
    messages: queue.SimpleQueue[dict[str, Any] | None] = queue.SimpleQueue()
    threading.Thread(target=_read_messages, args=(pipe, messages), daemon=True).start()
    num_taken = 0
    while True:
        while not messages.empty() or not engine.has_work:
            message = messages.get()
            if message is None:
                return  # the server was killed
            if "close" in message:
                engine.close()
                stop_process_group()
                _send(pipe, {"closed": True})
                return
            if "reload" in message:
                _reload(pipe, engine, Path(message["reload"]), num_taken)
                continue
            num_taken += 1
            _take_commands(engine, message["commands"])
            if messages.empty():
                break
        _send(pipe, _step(engine) | {"num_taken": num_taken})


def _read_messages(pipe: Connection, messages: queue.SimpleQueue[dict[str, Any] | None]) -> None:
    try:
        while True:
            messages.put(json.loads(pipe.recv_bytes()))
    except (EOFError, OSError):
        messages.put(None)


def _exempt_from_collections() -> None:
    """Lets collections of garbage skip what is there now: to look through torch and a model takes a tenth of a second, in a step."""
    gc.collect()
    gc.freeze()


def _reload(pipe: Connection, engine: CheckpointEngine, step: Path, num_taken: int) -> None:
    gc.unfreeze()  # the model before must be found
    try:
        engine.reload(step)
    except PetatronError as error:
        _send(pipe, {"error": _error_content(error)})
    else:
        _send(pipe, _properties(engine, num_taken=num_taken))
    _exempt_from_collections()


def _take_commands(engine: CheckpointEngine, commands: Sequence[Mapping[str, Any]]) -> None:
    for command in commands:
        if "prompt" in command:
            number = engine.submit(_unpacked(command["prompt"]), SamplingParams.from_json(command["params"]))
            assert number == command["request"], "both sides count requests alike"
        else:
            engine.cancel(command["request"])


def _step(engine: CheckpointEngine) -> dict[str, Any]:
    events = engine.step()
    ended = [event.request for event in events if event.finish_reason is not None]
    return {
        "events": events,
        "completions": [(request, _outcome_content(engine, request)) for request in ended],
        "works": engine.has_work,
        "stats": _stats_content(engine.stats),
    }


def _properties(engine: CheckpointEngine, *, num_taken: int) -> dict[str, Any]:
    return {
        "num_taken": num_taken,
        "step_number": engine.step_number,
        "stop_ids": engine.stop_ids,
        "max_length": engine.max_length,
        "stats": _stats_content(engine.stats),
    }


def _send(pipe: Connection, message: Mapping[str, Any]) -> None:
    pipe.send_bytes(json.dumps(message, separators=(",", ":")).encode())


def _read_logprob(content: Sequence[Any]) -> TokenLogprob:
    token, logprob, top = content
    return TokenLogprob(token, logprob, tuple(map(tuple, top)))


def _packed(ids: Sequence[int]) -> str:
    """Ids as text: JSON of a long prompt would take longer than a step."""
    return base64.b64encode(array("i", ids).tobytes()).decode()


def _unpacked(text: str) -> list[int]:
    ids = array("i")
    ids.frombytes(base64.b64decode(text))
    return ids.tolist()


def _outcome_content(engine: CheckpointEngine, request: int) -> dict[str, Any]:
    """Returns an answer without its prompt, which the other side knows, or the error."""
    try:
        completion = engine.take(request)
    except PetatronError as error:
        return {"error": _error_content(error)}
    names = (field.name for field in fields(completion) if field.name != "prompt_ids")
    return {name: getattr(completion, name) for name in names}


def _read_completion(content: dict[str, Any], prompt_ids: list[int]) -> Completion:
    for name in ("logprobs", "prompt_logprobs"):
        content[name] = [_read_logprob(entry) for entry in content[name]]
    return Completion(prompt_ids, **content)


def _error_content(error: PetatronError) -> dict[str, Any]:
    problems = [asdict(problem) for problem in error.problems] if isinstance(error, ConfigError) else []
    return {"kind": type(error).__name__, "text": str(error), "problems": problems}


def _read_error(content: Mapping[str, Any]) -> PetatronError:
    """Returns the same error on this side; a `LaunchError` for kinds that other modules have."""
    if content["kind"] == ConfigError.__name__:
        return ConfigError([Problem(**problem) for problem in content["problems"]])
    return getattr(errors, content["kind"], LaunchError)(content["text"])
