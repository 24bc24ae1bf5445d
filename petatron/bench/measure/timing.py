"""Timing of all benches: contenders alternate in both orders, and on a device the host does not wait in between.

What runs before determines the caches and the device's temperature, so no contender always follows the same one: ours, theirs,
theirs, ours, an even number of rounds. A device is timed by events that are queued with the work. Work that is shorter than its
launch on the host would be timed at the host's speed, so the device may be given other work first, a head start.
"""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TypeVar

import torch

from petatron.base.log import get_logger

LOG_INTERVAL_S = 10.0
_CALLS_IN_A_ROW = 2  # of each contender
_HEAD_START_CYCLES = 3_000_000  # about 2 ms
_COPY_BYTES = {"cuda": 1 << 31, "cpu": 1 << 25}  # more than caches hold
_T = TypeVar("_T")
_log = get_logger(__name__)


def alternating_orders(items: Sequence[_T], *, rounds: int) -> Iterator[Sequence[_T]]:
    """Yields the order forwards and backwards in turn, an even number of times, so that no item always follows the same one.

    >>> list(alternating_orders("ab", rounds=3))
    ['ab', 'ba', 'ab', 'ba']
    """
    for number in range(rounds + rounds % 2 if len(items) > 1 else rounds):
        yield items if number % 2 == 0 else items[::-1]


class ProgressLog:
    """Logs a line on stderr only if there was none for a while: often enough to see that a bench continues, and seldom."""

    def __init__(self) -> None:
        self._last = time.perf_counter()

    def __call__(self, text: str) -> None:
        now = time.perf_counter()
        if now - self._last >= LOG_INTERVAL_S:
            self._last = now
            _log.info("%s", text)


def run_rounds(sides: Mapping[str, Callable[[], _T]], *, rounds: int, work: str) -> dict[str, list[_T]]:
    """Calls every side once a round, in both orders by turns, and returns what it gave; `work` says what a call does."""
    orders, news = list(alternating_orders(list(sides), rounds=rounds)), ProgressLog()
    results: dict[str, list[_T]] = {name: [] for name in sides}
    _log.info("timing %d rounds of %s of each: %s", len(orders), work, ", ".join(sides))
    for number, order in enumerate(orders):
        news(f"timed {number} of {len(orders)} rounds")
        for name in order:
            results[name].append(sides[name]())
    return results


def median_ms(
    runs: Sequence[Callable[[], object]], device: torch.device, *, repeat: int, warmup_s: float
) -> list[float]:
    """Returns the median time of each over at least `repeat` rounds in both orders, after all have run twice and for a while."""
    end, rounds = time.monotonic() + warmup_s, 0
    while rounds < 2 or time.monotonic() < end:
        for run in runs:
            run()
        synchronize(device)
        rounds += 1
    times: list[list[float]] = [[] for _ in runs]
    for order in alternating_orders(range(len(runs)), rounds=repeat):
        for number in order:
            times[number].append(mean_ms(runs[number], device, calls=_CALLS_IN_A_ROW))
    return [statistics.median(ms) for ms in times]


def mean_ms(run: Callable[[], object], device: torch.device, *, calls: int, head_start: bool = True) -> float:
    """Returns the time of one call, from some in a row. Without head start for work on its own streams, which would begin during it."""
    synchronize(device)
    if device.type != "cuda":
        return elapsed_seconds(lambda: [run() for _ in range(calls)]) * 1e3 / calls
    first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    if head_start:
        torch.cuda._sleep(_HEAD_START_CYCLES)
    first.record()
    for _ in range(calls):
        run()
    last.record()
    synchronize(device)
    return first.elapsed_time(last) / calls


def elapsed_seconds(action: Callable[[], object]) -> float:
    """Returns how long the host is busy with it."""
    started = time.perf_counter()
    action()
    return time.perf_counter() - started


def paired_speedups(ours: Sequence[Sequence[float]], theirs: Sequence[Sequence[float]]) -> list[float]:
    """Returns how many times as fast as theirs each block of ours was; above 1 ours is faster.

    >>> paired_speedups([[1.0, 1.0, 9.0], [2.0]], [[1.5, 1.5, 1.5], [2.2]])
    [1.5, 1.1]
    """
    return [statistics.median(their) / statistics.median(our) for our, their in zip(ours, theirs, strict=True)]


def synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


@contextmanager
def gc_disabled() -> Iterator[None]:
    """Python's cyclic garbage collector would stop the host at random for longer than a step."""
    was_on = gc.isenabled()
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()


def copy_bandwidth(device: torch.device) -> float:
    """Returns the bytes per second, read and written, of copying a tensor far larger than any cache."""
    copy, moved_bytes = large_copy(device)
    return moved_bytes / (median_ms([copy], device, repeat=5, warmup_s=0.05)[0] / 1e3)


def large_copy(device: torch.device) -> tuple[Callable[[], torch.Tensor], int]:
    """Returns the baseline of memory-bound work: a copy, and the bytes it reads and writes."""
    source = torch.randint(0, 255, (_COPY_BYTES[device.type],), dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    return lambda: target.copy_(source), 2 * source.numel()
