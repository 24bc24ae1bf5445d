"""`petatron serve` in a process of its own, on a free port of this machine."""

from __future__ import annotations

import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from petatron.base.errors import LaunchError

_START_TIMEOUT_S, _END_TIMEOUT_S, _LOOK_S = 600.0, 30.0, 0.1
_ADDRESS = re.compile(r" at (http://\S+) ")


@contextmanager
def server_process(checkpoint: str, flags: Sequence[str], *, timeout_s: float = _START_TIMEOUT_S) -> Iterator[str]:
    """Starts a server and yields its address; `LaunchError` with the end of its output if it does not start."""
    command = [sys.executable, "-m", "petatron", "serve", checkpoint, "--host", "127.0.0.1", "--port", "0", *flags]
    with tempfile.TemporaryFile() as log:
        process = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL)
        try:
            end = time.monotonic() + timeout_s
            while (address := _ADDRESS.search(_text(log))) is None:
                if process.poll() is not None or time.monotonic() > end:
                    why = "has ended" if process.poll() is not None else f"has not started within {timeout_s:.0f} s"
                    raise LaunchError(f"The server {why}. It said: {_text(log)[-2000:].strip() or 'nothing'}")
                time.sleep(_LOOK_S)
            yield address[1]
        finally:
            process.terminate()
            try:
                process.wait(_END_TIMEOUT_S)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def _text(log) -> str:
    log.seek(0)
    return log.read().decode(errors="replace")
