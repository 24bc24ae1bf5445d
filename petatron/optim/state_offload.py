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

NUM_BUFFERS = 3
"""Buffers that take turns."""


class EventLike(Protocol):
    def synchronize(self) -> None:
        """Let the host wait until everything before the mark is done."""
        ...


class StreamLike(Protocol):
    """Work that happens in the order it was given, beside that of other lanes."""

    def run(self, work: Callable[[], None]) -> None: ...

    def record(self) -> EventLike: ...

    def wait(self, event: EventLike) -> None: ...


@dataclass(frozen=True, slots=True)
class SwapStreams:
    swap_in: StreamLike
    compute: StreamLike
    swap_out: StreamLike

    @classmethod
    def cuda(cls, device: torch.device) -> SwapStreams:
        """Streams of their own for both directions; computing stays on the stream that everything else uses."""
        inward, outward = torch.cuda.Stream(device), torch.cuda.Stream(device)
        return cls(_CudaStream(device, inward), _CudaStream(device, None), _CudaStream(device, outward))


class _CudaStream:
    """A CUDA stream as a lane; None means the current one."""

    def __init__(self, device: torch.device, stream: torch.cuda.Stream | None) -> None:
        self._device = device
        self._stream = stream

    def _own(self) -> torch.cuda.Stream:
        return torch.cuda.current_stream(self._device) if self._stream is None else self._stream

    def run(self, work: Callable[[], None]) -> None:
        with torch.cuda.stream(self._own()):
            work()

    def record(self) -> EventLike:
        return self._own().record_event()

    def wait(self, event: EventLike) -> None:
        assert isinstance(event, torch.cuda.Event)
        self._own().wait_event(event)


@dataclass(frozen=True, slots=True)
class SwapTask:
    """State at home, and what to do while it is on the device; the work gets tensors of the same shapes."""

    state: tuple[Tensor, ...]
    update: Callable[[tuple[Tensor, ...]], None]


class HostStaging(Protocol):
    """Where visits start and end: memory that the device can copy from and to."""

    def start(self, tasks: Sequence[SwapTask]) -> None: ...

    def fetch(self, index: int) -> tuple[Tensor, ...]:
        """The state of a visit in page-locked memory, there to be overwritten too."""
        ...

    def swapped_out(self, index: int, event: EventLike) -> None:
        """After the mark, the memory that was fetched holds the new state."""
        ...

    def synchronize(self) -> None:
        """Wait until everything that landed is at home."""
        ...


class PinnedStaging:
    """State is at home in page-locked memory: there is nothing to do on this side."""

    def __init__(self) -> None:
        self._tasks: Sequence[SwapTask] = ()

    def start(self, tasks: Sequence[SwapTask]) -> None:
        self._tasks = tasks

    def fetch(self, index: int) -> tuple[Tensor, ...]:
        return self._tasks[index].state

    def swapped_out(self, index: int, event: EventLike) -> None:
        """It is at home already."""

    def synchronize(self) -> None:
        """Nothing is under way."""


class DiskStaging:
    """State is at home in a mapped file; one thread reads ahead into page-locked memory, another writes back."""

    def __init__(
        self, dtypes: Sequence[torch.dtype], length: int, *, pinned: bool, num_buffers: int = NUM_BUFFERS
    ) -> None:
        self._staging_buffers = [
            tuple(torch.empty(length, dtype=dtype, pin_memory=pinned) for dtype in dtypes) for _ in range(num_buffers)
        ]
        self._reader = ThreadPoolExecutor(1, thread_name_prefix="optimizer-read")
        self._writer = ThreadPoolExecutor(1, thread_name_prefix="optimizer-write")
        self._tasks: Sequence[SwapTask] = ()
        self._reads: dict[int, Future[None]] = {}
        self._writes: dict[int, Future[None]] = {}

    def start(self, tasks: Sequence[SwapTask]) -> None:
        self.synchronize()
        self._tasks = tasks
        for number in range(min(len(self._staging_buffers), len(tasks))):
            self._read_ahead(number)

    def _staging_views(self, index: int) -> tuple[Tensor, ...]:
        home = self._tasks[index].state
        return tuple(
            part[: state.numel()]
            for part, state in zip(self._staging_buffers[index % len(self._staging_buffers)], home)
        )

    def _read_ahead(self, index: int) -> None:
        before = self._writes.get(index - len(self._staging_buffers))

        def read(stage: tuple[Tensor, ...], home: tuple[Tensor, ...]) -> None:
            if before is not None:
                before.result()
            for part, state in zip(stage, home):
                part.copy_(state)

        self._reads[index] = self._reader.submit(read, self._staging_views(index), self._tasks[index].state)

    def fetch(self, index: int) -> tuple[Tensor, ...]:
        self._reads.pop(index).result()
        return self._staging_views(index)

    def swapped_out(self, index: int, event: EventLike) -> None:
        def write(stage: tuple[Tensor, ...], home: tuple[Tensor, ...]) -> None:
            event.synchronize()
            for part, state in zip(stage, home):
                state.copy_(part)

        self._writes[index] = self._writer.submit(write, self._staging_views(index), self._tasks[index].state)
        if index + len(self._staging_buffers) < len(self._tasks):
            self._read_ahead(index + len(self._staging_buffers))

    def synchronize(self) -> None:
        for write in self._writes.values():
            write.result()
        self._writes.clear()


class StateSwapper:
    """Takes state to the device and back, so that copies in both directions and the work overlap."""

    def __init__(
        self,
        streams: SwapStreams,
        staging: HostStaging,
        dtypes: Sequence[torch.dtype],
        length: int,
        device: torch.device,
        *,
        num_buffers: int = NUM_BUFFERS,
    ) -> None:
        """`length` is that of the longest visit."""
        self._streams = streams
        self._staging = staging
        self._buffers = [
            tuple(torch.empty(length, dtype=dtype, device=device) for dtype in dtypes) for _ in range(num_buffers)
        ]
        self._free_events: list[EventLike | None] = [None] * num_buffers
        self._last_event: EventLike | None = None

    def run(self, tasks: Sequence[SwapTask]) -> None:
        """Queue all visits. The host goes on before they are done (from disk: before the last few are)."""
        inward, compute, outward = self._streams.swap_in, self._streams.compute, self._streams.swap_out
        # What computed before may still use the memory that became the buffers, and the last run may still write home.
        inward.wait(compute.record())
        inward.wait(outward.record())
        self._staging.start(tasks)
        for number, visit in enumerate(tasks):
            at = number % len(self._buffers)
            buffers = tuple(buffer[: state.numel()] for buffer, state in zip(self._buffers[at], visit.state))
            host = self._staging.fetch(number)
            free = self._free_events[at]
            if free is not None:
                inward.wait(free)
            inward.run(partial(_copy, buffers, host))
            compute.wait(inward.record())
            compute.run(partial(visit.update, buffers))
            outward.wait(compute.record())
            outward.run(partial(_copy, host, buffers))
            self._free_events[at] = self._last_event = outward.record()
            self._staging.swapped_out(number, self._last_event)

    def synchronize(self) -> None:
        """Let the host wait until all state is at home."""
        if self._last_event is not None:
            self._last_event.synchronize()
        self._staging.synchronize()


def _copy(targets: Sequence[Tensor], sources: Sequence[Tensor]) -> None:
    for target, source in zip(targets, sources):
        target.copy_(source, non_blocking=True)
