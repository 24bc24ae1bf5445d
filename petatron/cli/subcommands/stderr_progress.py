"""Progress of long work on stderr: in place on a terminal, else a line now and then; nothing for short work."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial

from petatron.base.terminal_escape import printable, raw_stream


class StderrProgress:
    """Called with how far the work is, as `describe` takes it. terminal_s, plain_s: seconds between two texts, or two lines."""

    def __init__(self, describe: Callable[..., str], *, terminal_s: float = 0.5, plain_s: float = 10.0) -> None:
        self._describe = describe
        self._terminal, self._line_open = sys.stderr.isatty(), False
        self._interval_s = terminal_s if self._terminal else plain_s
        self._last_s = time.monotonic()

    def __enter__(self) -> StderrProgress:
        return self

    def __exit__(self, *_: object) -> None:
        if self._line_open:
            print(file=sys.stderr)

    def __call__(self, *progress: object) -> None:
        now = time.monotonic()
        if now - self._last_s < self._interval_s:
            return
        self._last_s, self._line_open = now, self._terminal
        text = self._describe(*progress)
        if self._terminal:
            print(f"\r\x1b[K{printable(text)}", end="", file=raw_stream(sys.stderr), flush=True)
        else:
            print(text, file=sys.stderr, flush=True)


@contextmanager
def progress_bar(title: str, *, transient: bool = False) -> Iterator[Callable[..., None] | None]:
    """Yields what updates a bar (`completed`, `total`, `description`); None where rich is missing or stderr is no terminal."""
    try:
        from rich.console import Console
        from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeRemainingColumn
    except ImportError:
        yield None
        return
    if not sys.stderr.isatty():
        yield None
        return
    columns = (BarColumn(), TaskProgressColumn(), TextColumn("{task.description}"), TimeRemainingColumn())
    with Progress(*columns, console=Console(file=raw_stream(sys.stderr)), transient=transient) as bar:
        yield partial(bar.update, bar.add_task(title))
