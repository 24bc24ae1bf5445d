"""Deadlines that follow the load of the machine.

A bound on wall-clock time in a test says "this must not hang", or "this must not wait for a timeout". On a machine where ten programs share
each core everything takes ten times as long, and a bound of some seconds is missed by work that is right. So bounds here are in seconds
of a machine that is idle: while a test waits, the time counts divided by the programs that wait for each core.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

MAX_FACTOR = 30.0
_LOAD = Path("/proc/loadavg")
_POLL_S = 0.02


def load_factor() -> float:
    """Returns how many programs want each core now or wanted it in the last minute, whichever is more; at least 1."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    wanted = os.getloadavg()[0]
    with suppress(OSError, ValueError, IndexError):  # not Linux
        wanted = max(wanted, float(_LOAD.read_text().split()[3].partition("/")[0]))  # those that run at this moment
    return min(max(1.0, wanted / cores), MAX_FACTOR)


def scaled(seconds: float) -> float:
    """Returns a time limit for a call that takes one number: twice as long as the load of now asks for, which may grow."""
    factor = load_factor()
    return seconds if factor == 1.0 else seconds * min(2 * factor, MAX_FACTOR)


class Deadline:
    """Is over after some seconds of an idle machine; ask often, since the load is looked at when it is asked."""

    def __init__(
        self,
        seconds: float,
        *,
        clock: Callable[[], float] = time.monotonic,
        factor: Callable[[], float] = load_factor,
    ) -> None:
        self._left_s, self._clock, self._factor = seconds, clock, factor
        self._seen_s = clock()

    def left_s(self) -> float:
        now_s = self._clock()
        if now_s > self._seen_s:
            self._left_s -= (now_s - self._seen_s) / self._factor()
            self._seen_s = now_s
        return self._left_s

    @property
    def is_over(self) -> bool:
        return self.left_s() < 0


def wait_until(holds: Callable[[], bool], what: str, seconds: float = 10.0) -> None:
    """Returns when something holds, and fails after some seconds of an idle machine."""
    deadline = Deadline(seconds)
    while not holds():
        assert not deadline.is_over, f"waited {seconds:g} s of an idle machine for {what}"
        time.sleep(_POLL_S)


@contextmanager
def within(seconds: float, what: str = "this") -> Iterator[None]:
    """Fails if what is inside takes longer, by the load of before or after it, whichever is more."""
    before, started_s = load_factor(), time.monotonic()
    yield
    took_s, factor = time.monotonic() - started_s, max(before, load_factor())
    assert took_s <= seconds * factor, (
        f"{what} took {took_s:.1f} s; {seconds:g} s at load factor {factor:.1f} are allowed"
    )
