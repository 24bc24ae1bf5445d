"""Launchers whose ranks import nothing: `ForkedPython([sys.executable, "-m", "tests.forking_launcher", "torch.distributed.run", ...])`.

Such a launcher is forked with torch loaded, and forks its ranks from itself instead of starting them anew. They are its children, in
sessions of their own where it wants that, with the environment and the signal handlers of new processes.
"""

from __future__ import annotations

import os
import runpy
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from types import SimpleNamespace
from typing import NoReturn

from torch.distributed.elastic.multiprocessing.subprocess_handler import subprocess_handler

from petatron.mesh.launch import local_launcher
from tests.forked_python import run_command


class ForkedRank:
    """Has of `subprocess.Popen` what launchers use, for `python SCRIPT`; streams are inherited."""

    def __init__(
        self,
        args: Sequence[str],
        *,
        env: Mapping[str, str],
        stdin: int | None = None,
        stdout: None = None,
        stderr: None = None,
        start_new_session: bool = True,
        preexec_fn: Callable[[], None] | None = None,
    ) -> None:
        assert args[0] == sys.executable and stdin in (None, subprocess.DEVNULL) and start_new_session
        assert stdout is None and stderr is None
        self.returncode: int | None = None
        sys.stdout.flush()
        sys.stderr.flush()
        self.pid = os.fork()
        if not self.pid:
            _run([word for word in args[1:] if word != "-u"], dict(env), preexec_fn)
        while self.poll() is None and os.getpgid(self.pid) != self.pid:
            time.sleep(0.001)  # whoever starts a process may signal its group

    def poll(self) -> int | None:
        if self.returncode is None:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            self.returncode = os.waitstatus_to_exitcode(status) if pid else None
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        until = None if timeout is None else time.monotonic() + timeout
        while (code := self.poll()) is None:
            if until is not None and time.monotonic() > until:
                raise subprocess.TimeoutExpired("forked rank", timeout or 0.0)
            time.sleep(0.01)
        return code

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)


def _run(words: list[str], env: dict[str, str], preexec_fn: Callable[[], None] | None) -> NoReturn:
    """In the forked process, which never returns to what its launcher was doing."""
    code = 1
    try:
        for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT):
            signal.signal(number, signal.SIG_DFL)
        signal.signal(signal.SIGINT, signal.default_int_handler)
        if preexec_fn is not None:
            preexec_fn()
        run_command(words, env, os.getcwd(), 1, 2, True)
        code = 0
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else int(end.code is not None)
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def fork_ranks() -> None:
    """Has torchrun and our launcher fork their ranks, in this process."""
    subprocess_handler.Popen = ForkedRank  # type: ignore[misc]
    local_launcher.subprocess = SimpleNamespace(Popen=ForkedRank, DEVNULL=subprocess.DEVNULL)  # type: ignore[assignment]


if __name__ == "__main__":
    fork_ranks()
    del sys.argv[0]
    runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
