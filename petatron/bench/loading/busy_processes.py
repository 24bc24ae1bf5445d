"""Keeps a machine busy while something is measured: processes that compute until they are stopped, or until their parent is gone.

Each is in a session of its own, like a job of somebody else. Where the kernel shares the CPU between sessions (autogroup) or control
groups, a measured program then gets the share of one process, however many threads it has.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from petatron.base.errors import ConfigError, LaunchError, Problem

# Nobody may be left to stop it, so it looks every few milliseconds whether its parent is still there.
_PROGRAM = """
import os, sys
while os.getppid() == int(sys.argv[1]):
    for _ in range(100_000):
        pass
"""


@contextmanager
def busy_processes(count: int) -> Iterator[Callable[[], None]]:
    """Runs so many of them; what it yields raises if one has ended, for what was measured then is something else."""
    processes: list[subprocess.Popen[bytes]] = []

    def check_running() -> None:
        for process in processes:
            if (code := process.poll()) is not None:
                raise LaunchError(
                    f"A busy process of --load ended during the measurement, with exit code {code}. Nothing may stop them: run it again."
                )

    try:
        for number in range(count):
            try:
                processes.append(_start())
            except OSError as error:
                rule = f"is more than can be started here: {error.strerror or error} after {number}"
                raise ConfigError([Problem("--load", str(count), rule, "Use fewer.")]) from error
        yield check_running
    finally:
        for process in processes:
            process.kill()
        for process in processes:
            process.wait()


def _start() -> subprocess.Popen[bytes]:
    command = [sys.executable, "-I", "-S", "-c", _PROGRAM, str(os.getpid())]
    return subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, start_new_session=True)
