"""Signals that a subcommand handles itself, to clean up or to say how to go on."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager


@contextmanager
def handled_signal(number: signal.Signals, handler: Callable[[int, object], None]) -> Iterator[None]:
    """Handles a signal while entered; nothing happens outside the main thread, which alone can."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(number, handler)
    try:
        yield
    finally:
        signal.signal(number, before if before is not None else signal.SIG_DFL)


def sigterm_raises() -> AbstractContextManager[None]:
    """Makes SIGTERM a `SystemExit`, as Ctrl-C is a `KeyboardInterrupt`."""

    def end(number: int, _: object) -> None:
        raise SystemExit(128 + number)

    return handled_signal(signal.SIGTERM, end)
