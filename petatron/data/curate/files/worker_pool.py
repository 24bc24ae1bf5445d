"""Runs functions over items in worker processes and yields the results in the order of the items.

Only a few items per worker are in flight, so that memory does not depend on how many there are, and the result does not depend on
the number of workers.
"""

from __future__ import annotations

import signal
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from multiprocessing import get_context
from typing import TypeVar

from petatron.base.errors import DataError

_Item = TypeVar("_Item")
_Result = TypeVar("_Result")
_ITEMS_PER_WORKER = 4


class WorkerPool:
    """Processes for one pass after the other; with one worker the work is done in this process.

    >>> with WorkerPool(1) as pool:
    ...     [result for _, result in pool.ordered_results(abs, [-1, 2])]
    [1, 2]
    """

    def __init__(self, workers: int) -> None:
        self._workers = workers
        # spawn: a forked copy of a process with threads may hang.
        spawn = get_context("spawn")
        self._executor = None if workers == 1 else ProcessPoolExecutor(workers, spawn, _ignore_interrupts)

    def __enter__(self) -> WorkerPool:
        return self

    def __exit__(self, *_: object) -> None:
        if self._executor is not None:
            self._executor.shutdown(wait=True, cancel_futures=True)

    def ordered_results(
        self, function: Callable[[_Item], _Result], items: Iterable[_Item]
    ) -> Iterator[tuple[_Item, _Result]]:
        """Yields every item with its result. The function and what it takes and returns must be picklable."""
        if self._executor is None:
            for item in items:
                yield item, function(item)
            return
        waiting: deque[tuple[_Item, Future[_Result]]] = deque()
        try:
            for item in items:
                waiting.append((item, self._executor.submit(function, item)))
                if len(waiting) >= _ITEMS_PER_WORKER * self._workers:
                    first, future = waiting.popleft()
                    yield first, future.result()
            while waiting:
                first, future = waiting.popleft()
                yield first, future.result()
        except BrokenProcessPool as error:
            raise DataError(
                "A worker process died; the system may have run out of memory. Try fewer --workers."
            ) from error


def _ignore_interrupts() -> None:
    """Leaves Ctrl-C to the parent, which ends its workers."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
