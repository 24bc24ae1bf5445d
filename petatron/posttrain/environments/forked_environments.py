"""Environments of a Python file: a process that has imported it, and one forked from it for each episode."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from petatron.base.errors import TrainError
from petatron.posttrain.environments.environment import (
    EnvironmentProperties,
    Observation,
    TurnResult,
    read_observation,
    read_result,
)
from petatron.posttrain.rewards.function_pool import RewardFailure

_START_TIMEOUT_S = 120.0
"""A file may import torch."""
_FORK_TIMEOUT_S = 30.0
_CLOSE_TIMEOUT_S = 5.0
_MAX_LINE_BYTES = 1 << 26


class ForkedEnvironments:
    """Starts with its first use. name: of the class; "": functions of the file are tools, called in the format `form`."""

    def __init__(self, file: Path, name: str, *, form: str = "", timeout_s: float) -> None:
        self._file, self._name, self._form, self._timeout_s = file, name, form, timeout_s
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._control: socket.socket | None = None
        self._properties: EnvironmentProperties | None = None

    @property
    def properties(self) -> EnvironmentProperties:
        with self._lock:
            if self._properties is None:
                self._start()
        assert self._properties is not None
        return self._properties

    def open(self) -> ForkedEpisode:
        ours, theirs = socket.socketpair()
        with self._lock, theirs:
            if self._process is not None and self._process.poll() is not None:
                self.close()  # the system may have ended it, for want of memory
            socket.send_fds(self._start(), [b"+"], [theirs.fileno()])
        return ForkedEpisode(ours, self._timeout_s)

    def close(self) -> None:
        if self._process is not None and self._control is not None:
            self._control.close()
            self._process.kill()
            self._process.wait()
            self._process = self._control = None

    def _start(self) -> socket.socket:
        if self._control is not None:
            return self._control
        ours, theirs = socket.socketpair()
        arguments = [str(theirs.fileno()), str(self._file), self._name, self._form]
        command = [sys.executable, "-m", "petatron.posttrain.environments.environment_process", *arguments]
        self._process = subprocess.Popen(command, stdin=subprocess.DEVNULL, pass_fds=[theirs.fileno()])
        theirs.close()
        self._control = ours
        try:
            first: dict[str, Any] = _LineReader(ours).read(_START_TIMEOUT_S)
        except RewardFailure as failure:
            first = {"error": str(failure)}
        if "ready" not in first:
            self.close()
            target = f"{self._file}:{self._name}" if self._name else f"tools:{self._file}"
            raise TrainError(f"--environment {target} cannot be used: {first.get('error')}.")
        self._properties = EnvironmentProperties.from_json(first["ready"])
        return ours


class ForkedEpisode:
    """An `EpisodeSession` with a process of its own."""

    def __init__(self, connection: socket.socket, timeout_s: float) -> None:
        self._connection, self._timeout_s = connection, timeout_s
        self._lines = _LineReader(connection)
        self._pid: int | None = None

    def reset(self, record: Mapping[str, Any], seed: int) -> Observation | None:
        self._pid = self._read(_FORK_TIMEOUT_S)["pid"]
        return read_observation(self._ask({"reset": dict(record), "seed": seed})["observation"])

    def step(self, answer: str) -> TurnResult:
        values = self._ask({"step": answer})
        return read_result((values["observation"], values["reward"], values["done"]))

    def close(self) -> None:
        with suppress(OSError, RewardFailure):
            self._send({"close": True})
            self._lines.read_to_end(_CLOSE_TIMEOUT_S)
        self._end()

    def _ask(self, job: Mapping[str, Any]) -> dict[str, Any]:
        try:
            self._send(job)
        except OSError as error:
            raise RewardFailure("the process of the environment has ended") from error
        answer = self._read(self._timeout_s)
        if "error" in answer:
            raise RewardFailure(str(answer["error"]))
        return answer

    def _send(self, job: Mapping[str, Any]) -> None:
        self._connection.settimeout(self._timeout_s)
        self._connection.sendall(json.dumps(job).encode() + b"\n")

    def _read(self, timeout_s: float) -> dict[str, Any]:
        try:
            return self._lines.read(timeout_s)
        except RewardFailure:
            self._end()
            raise

    def _end(self) -> None:
        """Ends the process and those that it started, and closes the socket."""
        if self._pid is not None:
            with suppress(ProcessLookupError, PermissionError):
                os.killpg(self._pid, signal.SIGKILL)
            self._pid = None
        self._connection.close()


class _LineReader:
    """Reads messages from a socket, each within a time limit."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection, self._pending = connection, b""

    def read(self, timeout_s: float) -> dict[str, Any]:
        self._connection.settimeout(timeout_s)
        while b"\n" not in self._pending:
            try:
                part = self._connection.recv(1 << 16)
            except TimeoutError as error:
                raise RewardFailure(f"the environment did not answer within {timeout_s:g} s") from error
            except OSError:
                part = b""
            if not part:
                raise RewardFailure("the process of the environment has ended")
            self._pending += part
            if len(self._pending) > _MAX_LINE_BYTES:
                raise RewardFailure(f"the environment answered with more than {_MAX_LINE_BYTES:,} bytes")
        line, _, self._pending = self._pending.partition(b"\n")
        return json.loads(line)

    def read_to_end(self, timeout_s: float) -> None:
        self._connection.settimeout(timeout_s)
        while self._connection.recv(1 << 16):
            pass
