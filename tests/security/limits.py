"""A limit on the time and the memory of what a test does: an attack that works must fail the test, not take the machine."""

from __future__ import annotations

import resource
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tests.load_deadline import scaled

STATM = Path("/proc/self/statm")


class TooSlow(BaseException):
    """Past every `except Exception`."""


@contextmanager
def limited(seconds: int = 5, growth_bytes: int = 1 << 30) -> Iterator[None]:
    """Raises `TooSlow` after some seconds of an idle machine, and lets this process have so much more address space than it has."""

    def late(number: int, frame: object) -> None:
        raise TooSlow(f"{seconds} seconds were not enough")

    before_alarm = signal.signal(signal.SIGALRM, late)
    before = resource.getrlimit(resource.RLIMIT_AS)
    if STATM.exists():  # elsewhere, time alone is limited
        used = int(STATM.read_text().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (used + growth_bytes, before[1]))
    signal.setitimer(signal.ITIMER_REAL, scaled(seconds))
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before_alarm)
        resource.setrlimit(resource.RLIMIT_AS, before)
