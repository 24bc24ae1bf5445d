"""Runs the generation engine in a process of its own, and exchanges JSON messages with it over a pipe.

The threads of a Python process share one interpreter lock: whatever the server does for a token (an event, its JSON, a socket write)
would lengthen an engine step. So the event loop stays in the server's process, and the engine steps in another.

The server sends commands (requests and cancellations), a reload of another checkpoint's weights, or the end. After every step the engine
sends the events of all sequences, finished completions and counts. It steps as long as it has work, and reads new commands between
steps. A new command wakes a server that waits for a step and is sent at once, so a request never misses the next step. A slow server
delays the engine only when the pipe is full; a thread drains the pipe on the engine's side, so the two cannot deadlock. The server's
side refuses requests that the model cannot serve (`check_request`, `check_prompt_images`).
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
from petatron.infer.prompt_images import PromptImages, check_prompt_images
from petatron.infer.sampling_params import SamplingParams
from petatron.mesh.launch.environment import read_environment
from petatron.mesh.launch.process_group import stop_process_group
from petatron.serve.open_engine import CheckpointEngine, ModelSettings, model_settings

_END_TIMEOUT_S, _MOST_WAKES = 30.0, 4096
_stats_content = attrgetter(*(field.name for field in fields(EngineStats)))
"""The counts of an engine, in the order of `EngineStats`: `asdict` would take longer than the events of a step."""


class EngineProcess:
    """Drives a `CheckpointEngine` in another process. One thread calls all methods but `wake`."""

    def __init__(self, settings: ModelSettings) -> None:
        """Returns when the engine is open; raises what its process raised."""
        self.tokenizer: Tokenizer | None = settings.tokenizer
        self.vocab_size, self.reads_only = settings.vocab_size, settings.reads_only
        self.source_length = settings.source_length
        self._config = settings.loaded.config.model
        self._pipeline_stages = settings.loaded.config.parallel.pipeline_model_parallel_size
        self._wake_reader, self._wake_writer = socket.socketpair()
        self._wake_writer.setblocking(False)
        self._pipe, engine_pipe = get_context("spawn").Pipe()
        arguments = (engine_pipe, settings.folder, settings.flags, settings.options, settings.weights)
        self._process = get_context("spawn").Process(target=_run_engine, args=arguments, daemon=True)
        self._process.start()
        engine_pipe.close()
        # The engine ignores other signals, and at exit the interpreter waits for its child processes.
        self._kill = weakref.finalize(self, self._process.kill)
        try:
            self._set_properties(self._receive())
        except BaseException:
            self._kill()
            raise

    @property
    def pid(self) -> int | None:
        return self._process.pid

    @property
    def has_work(self) -> bool:
        return bool(self._commands) or self._engine_has_work

    def submit(self, prompt_ids: Sequence[int], params: SamplingParams, *, images: PromptImages | None = None) -> int:
        check_request(prompt_ids, params, self)
        check_prompt_images(prompt_ids, images, self._config, pipeline_stages=self._pipeline_stages)
        request, self._next_request = self._next_request, self._next_request + 1
        self._prompts[request] = list(prompt_ids)
        command = {"request": request, "prompt": _encode_ids(prompt_ids), "params": asdict(params)}
        self._commands.append(command if images is None else command | {"images": images.to_json()})
        return request

    def cancel(self, request: int) -> None:
        self._commands.append({"request": request})

    def step(self) -> list[TokenEvent]:
        """Returns the events of a step, or nothing if `wake` is called first: a new request must be sent before the next step begins."""
        if self._commands or not self._engine_has_work:
            commands, self._commands = self._commands, []
            self._send({"commands": commands})
            self._num_sent, self._engine_has_work = self._num_sent + 1, True
        if self._pipe not in wait([self._pipe, self._wake_reader]):
            self._wake_reader.recv(_MOST_WAKES)
            return []
        message = self._receive()
        self._engine_has_work = message["has_work"] or message["num_taken"] < self._num_sent
        self.stats = EngineStats(*message["stats"])
        for request, outcome in message["completions"]:
            prompt = self._prompts.pop(request)
            self._finished[request] = (
                _read_error(outcome["error"]) if "error" in outcome else _read_completion(outcome, prompt)
            )
        events = [TokenEvent(*content) for content in message["events"]]
        return [
            event if event.logprob is None else event._replace(logprob=_read_logprob(event.logprob)) for event in events
        ]

    def wake(self) -> None:
        with suppress(OSError):  # it is closed, or full of wakes that are not read yet
            self._wake_writer.send(b"w")

    def take(self, request: int) -> Completion:
        finished = self._finished.pop(request)
        if isinstance(finished, PetatronError):
            raise finished
        return finished

    def reload(self, step: Path) -> EngineProcess:
        """Loads another step's weights on all ranks while no request runs, and sets `step_number`."""
        self._send({"reload": str(step)})
        self._set_properties(self._receive())
        return self

    def check_alive(self) -> None:
        if not self._process.is_alive():
            raise self._ended_error()

    def close(self) -> None:
        """Ends the engines of all ranks, and the process."""
        if self._process.is_alive():
            with suppress(LaunchError):  # it may end by itself meanwhile
                self._send({"close": True})
                while "closed" not in self._receive():
                    pass
        # The engine is closed; an interpreter with torch would take another second to exit.
        self._kill()
        self._process.join(_END_TIMEOUT_S)
        for end in (self._pipe, self._wake_reader, self._wake_writer):
            end.close()

    def _set_properties(self, properties: Mapping[str, Any]) -> None:
        """Sets the properties of an engine that has just been opened; it numbers requests from 0."""
        self.step_number: int | None = properties["step_number"]
        self.stop_ids: tuple[int, ...] = tuple(properties["stop_ids"])
        self.max_length: int = properties["max_length"]
        self.stats = EngineStats(*properties["stats"])
        self._engine_has_work, self._num_sent, self._next_request = False, properties["num_taken"], 0
        self._commands: list[dict[str, Any]] = []
        self._prompts: dict[int, list[int]] = {}
        self._finished: dict[int, Completion | PetatronError] = {}

    def _send(self, message: Mapping[str, Any]) -> None:
        try:
            _send(self._pipe, message)
        except OSError as error:
            raise self._ended_error() from error

    def _receive(self) -> dict[str, Any]:
        try:
            message = json.loads(self._pipe.recv_bytes())
        except (EOFError, OSError) as error:
            raise self._ended_error() from error
        if "error" in message:
            raise _read_error(message["error"])
        return message

    def _ended_error(self) -> LaunchError:
        self._process.join(_END_TIMEOUT_S)
        return LaunchError(
            f"The engine's process has ended with exit code {self._process.exitcode}. Its output says why."
        )


def _run_engine(
    pipe: Connection, checkpoint: Path, flags: Sequence[str], options: EngineOptions | None, weights: str | None
) -> None:
    """Runs in the engine's process: opens the engine and serves commands until the server closes it or dies."""
    for number in (signal.SIGTERM, signal.SIGINT):  # the server drains, and then ends this process
        signal.signal(number, signal.SIG_IGN)
    configure_logging(rank=read_environment().rank)
    try:
        engine = CheckpointEngine(model_settings(checkpoint, flags, options=options, weights=weights))
    except PetatronError as error:
        _send(pipe, {"error": _error_content(error)})
        return
    try:
        _freeze_garbage_collector()
        _send(pipe, _properties(engine, num_taken=0))
        _serve_commands(pipe, engine)
    except (EOFError, BrokenPipeError, ConnectionResetError):
        return  # the server was killed


def _serve_commands(pipe: Connection, engine: CheckpointEngine) -> None:
    """Steps while there is work. Each message after a step says how many command messages the engine had read before that step."""
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


def _freeze_garbage_collector() -> None:
    """Excludes existing objects from garbage collection: traversing torch and a model takes 0.1 s in the middle of a step."""
    gc.collect()
    gc.freeze()


def _reload(pipe: Connection, engine: CheckpointEngine, step: Path, num_taken: int) -> None:
    gc.unfreeze()  # the previous model must be collected
    try:
        engine.reload(step)
    except PetatronError as error:
        _send(pipe, {"error": _error_content(error)})
    else:
        _send(pipe, _properties(engine, num_taken=num_taken))
    _freeze_garbage_collector()


def _take_commands(engine: CheckpointEngine, commands: Sequence[Mapping[str, Any]]) -> None:
    for command in commands:
        if "prompt" in command:
            images = PromptImages.from_json(command["images"]) if "images" in command else None
            params = SamplingParams.from_json(command["params"])
            number = engine.submit(_decode_ids(command["prompt"]), params, images=images)
            assert number == command["request"], "both sides count requests alike"
        else:
            engine.cancel(command["request"])


def _step(engine: CheckpointEngine) -> dict[str, Any]:
    events = engine.step()
    ended = [event.request for event in events if event.finish_reason is not None]
    return {
        "events": events,
        "completions": [(request, _completion_content(engine, request)) for request in ended],
        "has_work": engine.has_work,
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
    token, logprob, top, kept_mass = content
    return TokenLogprob(token, logprob, tuple(map(tuple, top)), kept_mass)


def _encode_ids(ids: Sequence[int]) -> str:
    """Encodes ids in base64: JSON of a long prompt would take longer than a step."""
    return base64.b64encode(array("i", ids).tobytes()).decode()


def _decode_ids(text: str) -> list[int]:
    ids = array("i")
    ids.frombytes(base64.b64decode(text))
    return ids.tolist()


def _completion_content(engine: CheckpointEngine, request: int) -> dict[str, Any]:
    """Returns a completion without its prompt, which the server's side knows, or the error."""
    try:
        completion = engine.take(request)
    except PetatronError as error:
        return {"error": _error_content(error)}
    names = (field.name for field in fields(completion) if field.name != "prompt_ids")
    return {name: getattr(completion, name) for name in names}


def _read_completion(content: dict[str, Any], prompt_ids: list[int]) -> Completion:
    for name in ("logprobs", "prompt_logprobs"):
        content[name] = [_read_logprob(entry) for entry in content[name]]
    content["items"] = [(item, score) for item, score in content["items"]]
    return Completion(prompt_ids, **content)


def _error_content(error: PetatronError) -> dict[str, Any]:
    problems = [asdict(problem) for problem in error.problems] if isinstance(error, ConfigError) else []
    return {"kind": type(error).__name__, "text": str(error), "problems": problems}


def _read_error(content: Mapping[str, Any]) -> PetatronError:
    """Rebuilds an error of `base/errors.py`; an error of another module becomes a `LaunchError`."""
    if content["kind"] == ConfigError.__name__:
        return ConfigError([Problem(**problem) for problem in content["problems"]])
    return getattr(errors, content["kind"], LaunchError)(content["text"])
