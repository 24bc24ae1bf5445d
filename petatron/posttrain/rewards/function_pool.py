"""Processes that compute the rewards of a Python function, each job within a time limit.

An exception, a crash or a time-out is the failure of that answer alone; a process that was ended is followed by another.
"""

from __future__ import annotations

import json
import queue
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

from petatron.base.errors import TrainError

_START_TIMEOUT_S = 120.0
"""A module of rewards may import torch."""


class RewardFailure(Exception):
    """An answer that could not be rewarded, and why."""


class _Worker:
    """One process, and a thread that reads what it writes."""

    def __init__(self, file: Path, function: str) -> None:
        command = [sys.executable, "-m", "petatron.posttrain.rewards.function_worker", str(file), function]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self._lines: queue.SimpleQueue[str] = queue.SimpleQueue()
        threading.Thread(target=self._read, name="petatron-reward", daemon=True).start()
        first = self._next(_START_TIMEOUT_S)
        if "ready" not in first:
            self.close()
            raise TrainError(f"--rewards {file}:{function} cannot be used: {first.get('error', 'it does not start')}.")

    def compute(self, job: Mapping[str, Any], timeout_s: float) -> float:
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps(job) + "\n")
            self._process.stdin.flush()
        except OSError as error:
            self._process.wait()
            raise RewardFailure("the process of the reward function has ended") from error
        answer = self._next(timeout_s)
        if "reward" not in answer:
            raise RewardFailure(str(answer.get("error")))
        return float(answer["reward"])

    @property
    def has_ended(self) -> bool:
        return self._process.poll() is not None

    def close(self) -> None:
        self._process.kill()
        self._process.wait()
        for stream in (self._process.stdin, self._process.stdout):
            if stream is not None:
                with suppress(OSError):
                    stream.close()

    def _read(self) -> None:
        assert self._process.stdout is not None
        with suppress(ValueError):  # closed while it is read
            for line in self._process.stdout:
                self._lines.put(line)
        self._lines.put("")

    def _next(self, timeout_s: float) -> dict[str, Any]:
        try:
            line = self._lines.get(timeout=timeout_s)
        except queue.Empty:
            self._process.kill()
            self._process.wait()
            return {"error": f"no reward within {timeout_s:g} s"}
        if line:
            return json.loads(line)
        self._process.wait()
        return {"error": "the process of the reward function has ended"}


class FunctionPool:
    """Computes the rewards of a function in several processes, which start with the first answers."""

    def __init__(self, file: Path, function: str, *, workers: int, timeout_s: float) -> None:
        self._file, self._function, self._timeout_s = file, function, timeout_s
        self._threads = ThreadPoolExecutor(workers, "petatron-rewards")
        self._idle: queue.SimpleQueue[_Worker | None] = queue.SimpleQueue()
        for _ in range(workers):
            self._idle.put(None)

    def rewards(self, jobs: Sequence[Mapping[str, Any]]) -> list[float | RewardFailure]:
        """Returns the reward of each answer, or why it has none, in their order."""
        return list(self._threads.map(self._reward, jobs))

    def close(self) -> None:
        self._threads.shutdown(wait=True)
        while True:
            try:
                worker = self._idle.get_nowait()
            except queue.Empty:
                return
            if worker is not None:
                worker.close()

    def _reward(self, job: Mapping[str, Any]) -> float | RewardFailure:
        worker = self._idle.get()
        try:
            if worker is None:
                worker = _Worker(self._file, self._function)
            return worker.compute(job, self._timeout_s)
        except RewardFailure as failure:
            if worker is not None and worker.has_ended:
                worker.close()
                worker = None
            return failure
        finally:
            self._idle.put(worker)
