"""Keeps a machine busy while something is measured: processes that compute, and that end with this one however it ends.

By default they are in this process's session and control group, like other processes of one job: the kernel gives each thread its share
of the CPU. In sessions of their own they are like jobs of others: where the kernel shares the CPU between sessions (autogroup), this
process then gets the share of one of them, however many threads it has.
"""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager

from petatron.base.errors import ConfigError, LaunchError, Problem

# Each byte on its input starts or pauses it. The system closes the input when the parent is gone, and select and read see that.
_PROGRAM = """
import os, select
while os.read(0, 1):
    while not select.select([0], [], [], 0)[0]:
        for _ in range(100_000):
            pass
    if not os.read(0, 1):
        break
"""
_SETTLE_S = 0.1  # until all of them are in the run queues


class BusyProcesses:
    """`count` processes that compute while `running` is entered, and are paused otherwise."""

    def __init__(self, count: int, *, own_sessions: bool) -> None:
        self._processes: list[subprocess.Popen[bytes]] = []
        self._own_sessions = own_sessions
        for number in range(count):
            try:
                self._processes.append(self._start())
            except OSError as error:
                self.stop()
                rule = f"is more than can be started here: {error.strerror or error} after {number}"
                raise ConfigError([Problem("--busy-processes", str(count), rule, "Use fewer.")]) from error

    def __enter__(self) -> BusyProcesses:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    @contextmanager
    def running(self) -> Iterator[None]:
        """Keeps the machine busy; raises if one has ended, for what was measured then is something else."""
        self._toggle()
        time.sleep(_SETTLE_S if self._processes else 0)
        yield
        self._toggle()

    def stop(self) -> None:
        for process in self._processes:
            process.kill()
        for process in self._processes:
            process.communicate()
        self._processes.clear()

    def _toggle(self) -> None:
        for process in self._processes:
            if (code := process.poll()) is not None:
                raise LaunchError(
                    f"One of --busy-processes ended during the measurement, with exit code {code}. Measure again, and stop none of them."
                )
            assert process.stdin is not None
            process.stdin.write(b"\n")

    def _start(self) -> subprocess.Popen[bytes]:
        return subprocess.Popen(
            [sys.executable, "-I", "-S", "-c", _PROGRAM],
            stdin=subprocess.PIPE,
            bufsize=0,
            start_new_session=self._own_sessions,
        )
