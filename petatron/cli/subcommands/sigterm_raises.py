"""SIGTERM as an exception, so that a subcommand can clean up or say how to go on."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def sigterm_raises() -> Iterator[None]:
    """Makes SIGTERM a `SystemExit`, as Ctrl-C is a `KeyboardInterrupt`. Only the main thread can handle signals."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def end(number: int, frame: object) -> None:
        raise SystemExit(128 + number)

    before = signal.signal(signal.SIGTERM, end)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before if before is not None else signal.SIG_DFL)
