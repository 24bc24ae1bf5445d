"""Python commands in processes that have torch loaded from their start.

`ForkedPython([sys.executable, "-m", "petatron", ...])` has of `subprocess.Popen` what the launcher and tests use, and costs no
import: it forks from the server that the rank pool's ranks fork from. Where the start of a process is what a test is about
(`tests/cli/train/test_launch.py`), processes are started as users start them.
"""

from __future__ import annotations

import multiprocessing
import os
import runpy
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from multiprocessing.reduction import DupFd
from pathlib import Path
from typing import IO, Any

from tests.dist import PRELOADED, schedule_as_batch
from tests.quick_disk import skip_flushes


class _Stream:
    """A file descriptor of this process, which a forked one gets a duplicate of."""

    def __init__(self, descriptor: int) -> None:
        self.descriptor = descriptor

    def __reduce__(self) -> tuple[Callable[[Any], int], tuple[Any]]:
        return _detached, (DupFd(self.descriptor),)


def _detached(duplicate: Any) -> int:
    return duplicate.detach()


class ForkedPython:
    """A process that runs `python -m MODULE`, `python -c CODE` or `python SCRIPT`; streams are inherited, a file or DEVNULL."""

    def __init__(
        self,
        command: Sequence[str],
        *,
        env: Mapping[str, str] | None = None,
        cwd: Path | str | None = None,
        stdin: int | None = subprocess.DEVNULL,
        stdout: IO[Any] | int | None = None,
        stderr: IO[Any] | int | None = None,
        start_new_session: bool = False,
        preexec_fn: Callable[[], None] | None = None,
    ) -> None:
        """`preexec_fn` is for the moment between fork and exec, and here is none: whoever starts a process ends it."""
        del preexec_fn
        assert command[0] == sys.executable and stdin == subprocess.DEVNULL
        with open(os.devnull, "wb") as nowhere:
            streams = [_descriptor(1, stdout, nowhere)]
            streams.append(streams[0] if stderr == subprocess.STDOUT else _descriptor(2, stderr, nowhere))
            self._process = _context().Process(
                target=run_command,
                args=(
                    list(command[1:]),
                    dict(os.environ if env is None else env),
                    str(cwd or os.getcwd()),
                    *map(_Stream, streams),
                    start_new_session,
                ),
            )
            self._process.start()
        assert self._process.pid is not None
        self.pid = self._process.pid
        self.returncode: int | None = None

    def poll(self) -> int | None:
        self.returncode = self._process.exitcode
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        self._process.join(timeout)
        code = self.poll()
        if code is None:
            raise subprocess.TimeoutExpired("forked python", timeout or 0.0)
        return code

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


def run_forked(
    command: Sequence[str], *, cwd: Path, env: Mapping[str, str] | None = None, timeout: float = 120.0
) -> subprocess.CompletedProcess[str]:
    """What `subprocess.run(..., capture_output=True, text=True)` returns."""
    with tempfile.TemporaryFile("w+") as out, tempfile.TemporaryFile("w+") as err:
        process = ForkedPython(command, env=env, cwd=cwd, stdout=out, stderr=err)
        try:
            code = process.wait(timeout)
        finally:
            process.kill()
        texts = []
        for stream in (out, err):
            stream.seek(0)
            texts.append(stream.read())
    return subprocess.CompletedProcess(list(command), code, *texts)


def forked_context(method: str | None = None) -> Any:
    """In the place of `multiprocessing.get_context`: processes fork with torch loaded, whatever start is asked for."""
    del method
    return _context()


def _context() -> Any:
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOADED)
    return context


def _descriptor(own: int, wanted: IO[Any] | int | None, nowhere: IO[bytes]) -> int:
    if wanted is None:
        return own
    if isinstance(wanted, int):
        assert wanted == subprocess.DEVNULL
        return nowhere.fileno()
    return wanted.fileno()


def run_command(words: list[str], env: dict[str, str], cwd: str, stdout: int, stderr: int, new_session: bool) -> None:
    """In the forked process: what the interpreter does with its command line."""
    skip_flushes()
    schedule_as_batch()
    if new_session:
        os.setsid()
    for own, stream in ((1, stdout), (2, stderr)):
        os.dup2(stream, own)
    os.environ.clear()
    os.environ.update(env)
    time.tzset()
    tempfile.tempdir = None  # TMPDIR counts, as in a new process
    os.chdir(cwd)
    if words[0] == "-m":
        sys.argv = words[1:]
        runpy.run_module(words[1], run_name="__main__", alter_sys=True)
    elif words[0] == "-c":
        sys.argv = ["-c", *words[2:]]
        exec(compile(words[1], "<string>", "exec"), {"__name__": "__main__"})
    else:
        sys.argv = words
        sys.path.insert(0, str(Path(words[0]).resolve().parent))
        runpy.run_path(words[0], run_name="__main__")
