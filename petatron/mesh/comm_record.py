"""The record of communication, for failure reports and tests: every collective of a rank, in order, in a ring buffer.

Volume tests, the hang report, traces and the planner's calibration all read this one record. An event has the bytes of
the full (unsharded) side of the operation: the buffer of an all-reduce, the output of an all-gather, the input of a reduce-scatter.
"""

from __future__ import annotations

import sys
import threading
import time
from collections import deque
from dataclasses import dataclass
from types import FrameType
from typing import NamedTuple, Protocol

import torch

_TORCH_FOLDER = torch.__path__[0]
# Files that only pass a call on: its caller is above them.
_PASS_THROUGH_FILES = (
    "mesh/collectives.py",
    "mesh/json_collectives.py",
    "mesh/overlapped_all_to_all.py",
    "mesh/comm_record.py",
    "base/autograd_op.py",
    "layers/ops/linear_op.py",
    "layers/ops/recompute_output.py",
    "parallel/tensor_parallel.py",
    "parallel/data/fsdp_all_gather_reduce_scatter.py",
)


CONTROL_AXES = ("control", "background_control")
"""Axes over gloo in every run; the second belongs to a thread that communicates during training."""


class Communicator(NamedTuple):
    """The ranks of an operation, and the axis that has a communicator of its own there ("" is the shared one)."""

    owner: str
    ranks: tuple[int, ...]


class RecordedAxis(Protocol):
    """What the record needs to know of an axis."""

    @property
    def name(self) -> str: ...
    @property
    def communicator(self) -> Communicator: ...


# Two ranks of an axis start the same collectives, but not the same transfers.
_SEND_RECV_OPS = ("send", "receive")


@dataclass(slots=True, eq=False)
class CommEvent:
    """One operation, numbered from the start of the run; sends and receives have a `peer` (its global rank).

    Those that are started together have the same `batch`. Not frozen: that would double the time to create one, and every call
    creates one.
    """

    sequence_number: int
    axis: str
    op: str
    elements: int
    bytes: int
    dtype: torch.dtype
    caller: str
    started_s: float
    """When it was started, on the monotonic clock."""
    communicator: Communicator
    peer: int | None = None
    batch: int | None = None
    host_in_call: bool = False
    """Whether the host is in the call now, or waits for its completion."""

    def __str__(self) -> str:
        kind = f"{self.op} of {self.elements} {str(self.dtype).removeprefix('torch.')} over {self.axis}"
        return f"{kind} at {self.caller.partition(' ')[0]}"


class CommRecord:
    """Ring buffer of the latest events of a rank, and its axes.

    Threads may add events, and read them at any time.
    """

    def __init__(self, capacity: int = 8192, *, rank: int = 0) -> None:
        self.rank = rank
        self._events: deque[CommEvent] = deque(maxlen=capacity)
        self.count = 0
        """Of all events so far; pass it as `since` later to get those after it."""
        self._lock = threading.Lock()  # an async save communicates during training
        self._collective_counts: dict[str, int] = {}
        self._axes: dict[str, tuple[tuple[int, ...], float]] = {}

    def add(
        self,
        axis: RecordedAxis,
        op: str,
        *,
        elements: int,
        dtype: torch.dtype,
        peer: int | None = None,
        batch: int | None = None,
    ) -> CommEvent:
        size, caller, communicator, name = elements * dtype.itemsize, _caller(), axis.communicator, axis.name
        with self._lock:
            self.count += 1
            if op not in _SEND_RECV_OPS:
                self._collective_counts[name] = self._collective_counts.get(name, 0) + 1
            event = CommEvent(
                self.count, name, op, elements, size, dtype, caller, time.monotonic(), communicator, peer, batch
            )
            self._events.append(event)
        return event

    def register_axis(self, axis: str, ranks: tuple[int, ...], *, timeout_s: float) -> None:
        """Registers the ranks of an axis and the time limit of its operations."""
        self._axes[axis] = ranks, timeout_s

    def ranks_of(self, axis: str) -> tuple[int, ...]:
        return self._axes[axis][0] if axis in self._axes else ()

    def timeout_of(self, axis: str) -> float:
        """Returns the time limit, in seconds, of an operation over an axis."""
        return self._axes[axis][1] if axis in self._axes else float("inf")

    @property
    def has_peers(self) -> bool:
        return any(len(ranks) > 1 for ranks, _ in self._axes.values())

    def collective_counts(self) -> dict[str, int]:
        """Returns how many collectives this rank has started over each axis."""
        return dict(self._collective_counts)

    def latest(self) -> CommEvent | None:
        return self._events[-1] if self._events else None

    def events(self, *, since: int = 0) -> list[CommEvent]:
        """Returns the events still in the buffer with a number above `since`."""
        events = list(self._events)  # a copy: another thread may add to it
        return [event for event in events if event.sequence_number > since]


def _caller() -> str:
    """Returns the code that called for communication, as file:line function.

    That is the first frame outside the communication files and outside torch, whose autograd and module code is between a layer
    and its calls.
    """
    frame = sys._getframe(2)
    while frame.f_back is not None and (
        (file := frame.f_code.co_filename).endswith(_PASS_THROUGH_FILES) or file.startswith(_TORCH_FOLDER)
    ):
        frame = frame.f_back
    return frame_location(frame)


def frame_location(frame: FrameType) -> str:
    """Formats a frame as file:line function."""
    code = frame.f_code
    return f"{'/'.join(code.co_filename.rsplit('/', 2)[-2:])}:{frame.f_lineno} {code.co_name}"
