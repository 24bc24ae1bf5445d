"""State that lives in host memory or on disk visits the device, one segment after the other.

Two ways are open. The processor could make the update where the state lies: gradients come down (4 bytes per parameter) and
weights go up (2). Or the state itself goes up and down (12 bytes each way with float32 moments, 8 with bfloat16 ones) and the
device makes the update. The first moves less over PCIe, but a processor then reads and writes 30 bytes per parameter in its own
memory, which on 16 cores takes as long as PCIe takes for 12; ranks of one machine share those cores; the host has to wait for
the gradient norm; and numbers are those of another kernel. Here state goes to the device: 12 bytes at 50 GB/s are 0.24 s per
billion parameters, both directions at the same time, and the result is that of an optimizer without offload, bit for bit.

Three buffers on the device take turns. While the update works on one, the next is being filled and the one before emptied:

    inward    | copy 2 | copy 3 | copy 4 |
    compute            | work 2 | work 3 | ...
    outward                     | copy 2 | copy 3 | ...

Each line is a lane: things on it happen in order. Across lanes, order is made by marks: a lane waits for a mark of another.
What must not overtake what: a buffer is filled after it was emptied, worked on after it was filled, emptied after the work; and
a step reads host memory after the step before has written it.

State on disk takes one more stop, page-locked memory, which two threads fill from the file and write back to it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import Protocol

import torch
from torch import Tensor

DEPTH = 3
"""Buffers that take turns."""


class Mark(Protocol):
    def synchronize(self) -> None:
        """Let the host wait until everything before the mark is done."""
        ...


class Lane(Protocol):
    """Work that happens in the order it was given, beside that of other lanes."""

    def run(self, work: Callable[[], None]) -> None: ...

    def record(self) -> Mark: ...

    def wait(self, mark: Mark) -> None: ...


@dataclass(frozen=True, slots=True)
class Lanes:
    inward: Lane
    compute: Lane
    outward: Lane

    @classmethod
    def cuda(cls, device: torch.device) -> Lanes:
        """Streams of their own for both directions; computing stays on the stream that everything else uses."""
        inward, outward = torch.cuda.Stream(device), torch.cuda.Stream(device)
        return cls(_Stream(device, inward), _Stream(device, None), _Stream(device, outward))


class _Stream:
    """A CUDA stream as a lane; None means the current one."""

    def __init__(self, device: torch.device, stream: torch.cuda.Stream | None) -> None:
        self._device = device
        self._stream = stream

    def _own(self) -> torch.cuda.Stream:
        return torch.cuda.current_stream(self._device) if self._stream is None else self._stream

    def run(self, work: Callable[[], None]) -> None:
        with torch.cuda.stream(self._own()):
            work()

    def record(self) -> Mark:
        return self._own().record_event()

    def wait(self, mark: Mark) -> None:
        assert isinstance(mark, torch.cuda.Event)
        self._own().wait_event(mark)


@dataclass(frozen=True, slots=True)
class Visit:
    """State at home, and what to do while it is on the device; the work gets tensors of the same shapes."""

    home: tuple[Tensor, ...]
    work: Callable[[tuple[Tensor, ...]], None]


class HostSide(Protocol):
    """Where visits start and end: memory that the device can copy from and to."""

    def begin(self, visits: Sequence[Visit]) -> None: ...

    def fetch(self, number: int) -> tuple[Tensor, ...]:
        """The state of a visit in page-locked memory, there to be overwritten too."""
        ...

    def landed(self, number: int, mark: Mark) -> None:
        """After the mark, the memory that was fetched holds the new state."""
        ...

    def settle(self) -> None:
        """Wait until everything that landed is at home."""
        ...


class PinnedSide:
    """State is at home in page-locked memory: there is nothing to do on this side."""

    def __init__(self) -> None:
        self._visits: Sequence[Visit] = ()

    def begin(self, visits: Sequence[Visit]) -> None:
        self._visits = visits

    def fetch(self, number: int) -> tuple[Tensor, ...]:
        return self._visits[number].home

    def landed(self, number: int, mark: Mark) -> None:
        """It is at home already."""

    def settle(self) -> None:
        """Nothing is under way."""


class DiskSide:
    """State is at home in a mapped file; one thread reads ahead into page-locked memory, another writes back."""

    def __init__(self, dtypes: Sequence[torch.dtype], length: int, *, pinned: bool, depth: int = DEPTH) -> None:
        self._stages = [
            tuple(torch.empty(length, dtype=dtype, pin_memory=pinned) for dtype in dtypes) for _ in range(depth)
        ]
        self._reader = ThreadPoolExecutor(1, thread_name_prefix="optimizer-read")
        self._writer = ThreadPoolExecutor(1, thread_name_prefix="optimizer-write")
        self._visits: Sequence[Visit] = ()
        self._reads: dict[int, Future[None]] = {}
        self._writes: dict[int, Future[None]] = {}

    def begin(self, visits: Sequence[Visit]) -> None:
        self.settle()
        self._visits = visits
        for number in range(min(len(self._stages), len(visits))):
            self._read_ahead(number)

    def _stage(self, number: int) -> tuple[Tensor, ...]:
        home = self._visits[number].home
        return tuple(part[: state.numel()] for part, state in zip(self._stages[number % len(self._stages)], home))

    def _read_ahead(self, number: int) -> None:
        before = self._writes.get(number - len(self._stages))

        def read(stage: tuple[Tensor, ...], home: tuple[Tensor, ...]) -> None:
            if before is not None:
                before.result()
            for part, state in zip(stage, home):
                part.copy_(state)

        self._reads[number] = self._reader.submit(read, self._stage(number), self._visits[number].home)

    def fetch(self, number: int) -> tuple[Tensor, ...]:
        self._reads.pop(number).result()
        return self._stage(number)

    def landed(self, number: int, mark: Mark) -> None:
        def write(stage: tuple[Tensor, ...], home: tuple[Tensor, ...]) -> None:
            mark.synchronize()
            for part, state in zip(stage, home):
                state.copy_(part)

        self._writes[number] = self._writer.submit(write, self._stage(number), self._visits[number].home)
        if number + len(self._stages) < len(self._visits):
            self._read_ahead(number + len(self._stages))

    def settle(self) -> None:
        for write in self._writes.values():
            write.result()
        self._writes.clear()


class Shuttle:
    """Takes state to the device and back, so that copies in both directions and the work overlap."""

    def __init__(
        self,
        lanes: Lanes,
        side: HostSide,
        dtypes: Sequence[torch.dtype],
        length: int,
        device: torch.device,
        *,
        depth: int = DEPTH,
    ) -> None:
        """`length` is that of the longest visit."""
        self._lanes = lanes
        self._side = side
        self._buffers = [
            tuple(torch.empty(length, dtype=dtype, device=device) for dtype in dtypes) for _ in range(depth)
        ]
        self._free: list[Mark | None] = [None] * depth
        self._last: Mark | None = None

    def run(self, visits: Sequence[Visit]) -> None:
        """Queue all visits. The host goes on before they are done (from disk: before the last few are)."""
        inward, compute, outward = self._lanes.inward, self._lanes.compute, self._lanes.outward
        # What computed before may still use the memory that became the buffers, and the last run may still write home.
        inward.wait(compute.record())
        inward.wait(outward.record())
        self._side.begin(visits)
        for number, visit in enumerate(visits):
            at = number % len(self._buffers)
            buffers = tuple(buffer[: state.numel()] for buffer, state in zip(self._buffers[at], visit.home))
            host = self._side.fetch(number)
            free = self._free[at]
            if free is not None:
                inward.wait(free)
            inward.run(partial(_copy, buffers, host))
            compute.wait(inward.record())
            compute.run(partial(visit.work, buffers))
            outward.wait(compute.record())
            outward.run(partial(_copy, host, buffers))
            self._free[at] = self._last = outward.record()
            self._side.landed(number, self._last)

    def settle(self) -> None:
        """Let the host wait until all state is at home."""
        if self._last is not None:
            self._last.synchronize()
        self._side.settle()


def _copy(targets: Sequence[Tensor], sources: Sequence[Tensor]) -> None:
    for target, source in zip(targets, sources):
        target.copy_(source, non_blocking=True)
