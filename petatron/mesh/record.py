"""The record of communication: every collective of a rank, in order, in a ring buffer.

Volume tests, the hang report, traces and the planner's calibration all read this one record. An event holds the bytes of
the full (unsharded) side of the operation: the buffer of an all-reduce, the output of a gather, the input of a scatter.
"""

from __future__ import annotations

import sys
from collections import deque
from dataclasses import dataclass

import torch

_TORCH = torch.__path__[0]
# Files that only pass a call on: what asked for it stands above them.
_DOOR = (
    "mesh/collectives.py",
    "mesh/exchange.py",
    "mesh/record.py",
    "layers/product.py",
    "layers/remade.py",
    "parallel/tensor.py",
    "parallel/fsdp_comm.py",
)


@dataclass(frozen=True, slots=True)
class Event:
    """One communication call, numbered from the start of the run."""

    number: int
    axis: str
    op: str
    elements: int
    bytes: int
    dtype: torch.dtype
    caller: str


class Record:
    """Ring buffer of the latest events."""

    def __init__(self, capacity: int = 8192) -> None:
        self._events: deque[Event] = deque(maxlen=capacity)
        self._count = 0

    def add(self, axis: str, op: str, *, elements: int, dtype: torch.dtype) -> None:
        self._count += 1
        self._events.append(Event(self._count, axis, op, elements, elements * dtype.itemsize, dtype, _caller()))

    def events(self, *, since: int = 0) -> list[Event]:
        """The events still in the buffer with a number above `since`."""
        return [event for event in self._events if event.number > since]

    @property
    def count(self) -> int:
        """How many events there have been; pass it as `since` later to see what came after."""
        return self._count


def _caller() -> str:
    """The code that asked for communication, as file:line function.

    That is the first frame outside the communication files and outside torch, whose autograd and module machinery stands
    between a layer and what it calls.
    """
    frame = sys._getframe(2)
    while frame.f_back is not None and _passes_on(frame.f_code.co_filename):
        frame = frame.f_back
    code = frame.f_code
    return f"{'/'.join(code.co_filename.rsplit('/', 2)[-2:])}:{frame.f_lineno} {code.co_name}"


def _passes_on(file: str) -> bool:
    return file.endswith(_DOOR) or file.startswith(_TORCH)
