"""The pool of sandboxed worker processes, each with limits of time and memory, as the server sees them.

A crash, an end for want of memory, or a job that takes too long ends a process, is an error of that job alone, and is followed by another
process with the next job. Pools are for one kind of job each: grammars that take long make no chat wait.
"""

from __future__ import annotations

import asyncio
import json
import os
import select
import subprocess
import sys
import threading
import time
from collections import Counter, OrderedDict
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import Any

from petatron.base.errors import DataError
from petatron.base.log import get_logger
from petatron.data.prompt.chat_template import ChatTemplate
from petatron.data.tokenizer import Tokenizer
from petatron.infer.grammar import check_constraint_library
from petatron.infer.sampling_params import Constraint
from petatron.serve.isolation.limited_worker import MAX_RENDERED_CHARS, SentVocabulary

_START_TIMEOUT_S = 60.0
_MAX_ANSWER_BYTES = 8 * MAX_RENDERED_CHARS
_MAX_KNOWN_GRAMMARS = 256
_READ_BYTES = 1 << 20
_log = get_logger(__name__)


class LimitedProcess:
    """One process; one thread at a time gives it jobs."""

    def __init__(self, first: Mapping[str, Any], *, timeout_s: float) -> None:
        """first: what the process is told before any job."""
        self._first, self._timeout_s = first, timeout_s
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def pid(self) -> int | None:
        return None if self._process is None else self._process.pid

    def run(self, job: str, arguments: Mapping[str, Any]) -> Any:
        """Returns the job's result; raises `DataError` where it failed, crashed, or took too long or too much memory."""
        content = json.dumps({"job": job, "arguments": arguments}).encode() + b"\n"
        began = self._process is None
        process = self._started()
        deadline_s = time.monotonic() + self._timeout_s + (_START_TIMEOUT_S if began else 0.0)
        try:
            _write_all(process, content, deadline_s)
            answer = json.loads(_read_line(process, deadline_s))
        except (OSError, ValueError) as error:
            self.close()
            why = f"exit code {process.returncode}" if process.returncode else "time"
            _log.warning("a job to %s ended its process (%s)", job, why)
            raise DataError(
                "It needs more time or memory than this server allows, or cannot be handled. Make it smaller."
            ) from error
        if "error" in answer:
            raise DataError(str(answer["error"]))
        return answer["result"]

    def close(self) -> None:
        process, self._process = self._process, None
        if process is not None:
            if process.poll() is None:
                process.kill()
            process.wait()
            for stream in (process.stdin, process.stdout):
                if stream is not None:
                    stream.close()

    def _started(self) -> subprocess.Popen[bytes]:
        if self._process is not None and self._process.poll() is None:
            return self._process
        self.close()
        # -P: the folder that the server was started in is no place to import from.
        command = [sys.executable, "-P", "-m", "petatron.serve.isolation.limited_worker"]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, bufsize=0)
        for stream in (self._process.stdin, self._process.stdout):
            assert stream is not None
            os.set_blocking(stream.fileno(), False)
        _write_all(self._process, json.dumps(self._first).encode() + b"\n", time.monotonic() + _START_TIMEOUT_S)
        return self._process


def _write_all(process: subprocess.Popen[bytes], content: bytes, deadline_s: float) -> None:
    assert process.stdin is not None
    left = memoryview(content)
    while left:
        _, ready, _ = select.select([], [process.stdin], [], _left_s(deadline_s))
        if ready:
            left = left[os.write(process.stdin.fileno(), left[:_READ_BYTES]) :]


def _read_line(process: subprocess.Popen[bytes], deadline_s: float) -> bytes:
    assert process.stdout is not None
    parts: list[bytes] = []
    size = 0
    while not parts or not parts[-1].endswith(b"\n"):
        ready, _, _ = select.select([process.stdout], [], [], _left_s(deadline_s))
        if not ready:
            continue
        parts.append(os.read(process.stdout.fileno(), _READ_BYTES))
        size += len(parts[-1])
        if not parts[-1] or size > _MAX_ANSWER_BYTES:
            raise OSError("the process has ended, or answers without end")
    return b"".join(parts)


def _left_s(deadline_s: float) -> float:
    left_s = deadline_s - time.monotonic()
    if left_s <= 0:
        raise TimeoutError
    return left_s


class LimitedPool:
    """Some processes that are started when they are first needed. Those who find none free wait for one.

    owner: who asks, such as the holder of an API key; "": anybody. An owner has at most all processes but one, so that there is one for
    others, and of those who wait the one whose owner has fewest goes first.
    """

    def __init__(self, first: Mapping[str, Any], *, size: int, timeout_s: float) -> None:
        self._free = [LimitedProcess(first, timeout_s=timeout_s) for _ in range(size)]
        self._all = tuple(self._free)
        self._lock = threading.Lock()
        self._threads = ThreadPoolExecutor(size, thread_name_prefix="petatron-isolation")
        self._closed = False
        # Of the event loop alone:
        self._running: Counter[str] = Counter()
        self._turns: list[tuple[str, asyncio.Future[None]]] = []

    async def run(self, job: str, arguments: Mapping[str, Any], *, owner: str = "") -> Any:
        """A caller who leaves before its turn has come costs nothing."""
        loop = asyncio.get_running_loop()
        turn = loop.create_future()

        def end_turn() -> None:
            with suppress(RuntimeError):  # the loop is closed: nobody waits any more
                loop.call_soon_threadsafe(self._end_turn, owner)

        self._turns.append((owner, turn))
        self._give_turns()
        try:
            await turn
        except asyncio.CancelledError:
            if turn.done() and not turn.cancelled():
                self._end_turn(owner)
            raise
        running = self._threads.submit(self._run, job, arguments)
        # Not when this caller leaves: the job goes on without it.
        running.add_done_callback(lambda _: end_turn())
        return await asyncio.wrap_future(running)

    def _give_turns(self) -> None:
        self._turns = [(owner, turn) for owner, turn in self._turns if not turn.done()]
        while self._running.total() < len(self._all):
            most = max(1, len(self._all) - 1)
            allowed = [entry for entry in self._turns if not entry[0] or self._running[entry[0]] < most]
            if not allowed:
                return
            owner, turn = chosen = min(allowed, key=lambda entry: self._running[entry[0]])
            self._turns.remove(chosen)
            self._running[owner] += 1
            turn.set_result(None)

    def _end_turn(self, owner: str) -> None:
        self._running[owner] -= 1
        self._give_turns()

    def close(self) -> None:
        """Ends all processes, and with them the jobs that run."""
        self._closed = True
        self._threads.shutdown(wait=False, cancel_futures=True)
        for process in self._all:
            process.close()

    def _run(self, job: str, arguments: Mapping[str, Any]) -> Any:
        if self._closed:
            raise DataError("The server is shutting down.")
        with self._lock:
            process = self._free.pop()
        try:
            return process.run(job, arguments)
        finally:
            with self._lock:
                self._free.append(process)
            if self._closed:
                process.close()


class Isolation:
    """What a server does with programs of others; its processes live as long as it does."""

    def __init__(self, tokenizer: Tokenizer | None, *, timeout_s: float, memory_bytes: int) -> None:
        limits = {"memory_bytes": memory_bytes}
        sent = None if tokenizer is None else SentVocabulary.content_of(tokenizer)
        self._grammars = LimitedPool({**limits, "tokenizer": sent}, size=2, timeout_s=timeout_s)
        self._templates = LimitedPool({**limits, "tokenizer": None}, size=2, timeout_s=timeout_s)
        self._known_grammars: OrderedDict[Constraint, None] = OrderedDict()

    async def check_constraint(self, constraint: Constraint, *, owner: str = "") -> None:
        """Raises `DataError` for a grammar that cannot be compiled within the limits; those that could be are remembered."""
        check_constraint_library()
        if constraint not in self._known_grammars:
            await self._grammars.run("compile", {"kind": constraint.kind, "grammar": constraint.grammar}, owner=owner)
            self._known_grammars[constraint] = None
            if len(self._known_grammars) > _MAX_KNOWN_GRAMMARS:
                self._known_grammars.popitem(last=False)

    async def render(self, template: ChatTemplate, arguments: Mapping[str, Any]) -> str:
        """`ChatTemplate.render` with its arguments by name."""
        return str(await self._templates.run("render", {**template.sources(), "arguments": arguments}))

    def close(self) -> None:
        self._grammars.close()
        self._templates.close()
