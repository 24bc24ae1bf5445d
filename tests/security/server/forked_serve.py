"""`petatron serve`, with an engine that is forked from it: it is a process of its own as ever, and imports torch once less.

Only for tests that are about neither the start nor the end of a server. The engine ends when the server does, whatever ends that.
"""

from __future__ import annotations

import ctypes
import multiprocessing
import os
import signal
import sys

from petatron.cli.main import main
from petatron.serve import engine_process

_PR_SET_PDEATHSIG = 1


def _end_with_parent() -> None:
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


if __name__ == "__main__":
    os.register_at_fork(after_in_child=_end_with_parent)
    engine_process.get_context = lambda method: multiprocessing.get_context("fork")  # type: ignore[assignment,misc]
    sys.exit(main(["serve", *sys.argv[1:]]))
