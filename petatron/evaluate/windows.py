"""Windows over texts that are longer than a model's context."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Window:
    """Scores tokens[start:stop] and counts those from `counted_from` on, each predicted by the ones before it in the window."""

    start: int
    stop: int
    counted_from: int

    @property
    def num_counted(self) -> int:
        return self.stop - self.counted_from


def sliding_windows(num_tokens: int, *, length: int, stride: int, extend_last: bool = True) -> Iterator[Window]:
    """Yields windows of `length` inputs that count every token but the first once.

    The first one counts all its tokens, each further one its last `stride`. The last one is shorter; `extend_last` extends it to
    the left to full length instead, which only adds context.

    >>> [(w.start, w.stop, w.counted_from) for w in sliding_windows(10, length=4, stride=4)]
    [(0, 5, 1), (4, 9, 5), (5, 10, 9)]
    >>> [(w.start, w.stop, w.counted_from) for w in sliding_windows(10, length=4, stride=2, extend_last=False)]
    [(0, 5, 1), (2, 7, 5), (4, 9, 7), (6, 10, 9)]
    """
    assert 1 <= stride <= length, (stride, length)
    counted, start = 1, 0
    while counted < num_tokens:
        stop = min(start + length + 1, num_tokens)
        first = max(0, stop - length - 1) if extend_last else start
        yield Window(first, stop, counted)
        counted, start = stop, start + stride
