"""Swaps offloaded optimizer state, stored in host memory or on disk, to the device for each update, one segment after another.

Swapping copies the state to the device and back (12 bytes per parameter each way with float32 moments, 8 with bfloat16 ones), which takes
0.24 s per billion parameters (12 bytes at 50 GB/s, both directions at once). The result equals that without offload, bit for bit.

The alternative is an update by the CPU: gradients are copied to the host (4 bytes per parameter) and weights back (2). It moves less over
PCIe, and is not used here: it reads and writes 30 bytes per parameter in host memory, for which 16 cores need as long as PCIe for 12 bytes;
the ranks of a machine share those cores; the host must wait for the gradient norm; and a kernel for the CPU rounds differently.

Three device buffers rotate. While the update works on one, the next is filled and the last is written back:

    copy in   | copy 2 | copy 3 | copy 4 |
    compute            | work 2 | work 3 | ...
    copy out                    | copy 2 | copy 3 | ...

Each line is a CUDA stream, whose work runs in order; events order work across streams. A buffer is filled after its last write-back,
updated after it is filled, and written back after the update. A step reads host memory after the last step has written it.

State on disk is staged in page-locked memory, which one thread fills from the file and another writes back.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

NUM_BUFFERS = 3
"""Device buffers, used in rotation."""


class SwapStream:
    """A CUDA stream; None means the current one."""

    def __init__(self, device: torch.device, stream: torch.cuda.Stream | None) -> None:
        self._device = device
        self._stream = stream

    def _cuda_stream(self) -> torch.cuda.Stream:
        return torch.cuda.current_stream(self._device) if self._stream is None else self._stream

    def run(self, work: Callable[[], None]) -> None:
        with torch.cuda.stream(self._cuda_stream()):
            work()

    def record(self) -> torch.cuda.Event:
        return self._cuda_stream().record_event()

    def wait(self, event: torch.cuda.Event) -> None:
        self._cuda_stream().wait_event(event)


@dataclass(frozen=True, slots=True)
class SwapStreams:
    swap_in: SwapStream
    compute: SwapStream
    swap_out: SwapStream

    @classmethod
    def cuda(cls, device: torch.device) -> SwapStreams:
        """Returns a copy stream for each direction; updates run on the current stream, as all other computation."""
        inward, outward = torch.cuda.Stream(device), torch.cuda.Stream(device)
        return cls(SwapStream(device, inward), SwapStream(device, None), SwapStream(device, outward))


@dataclass(frozen=True, slots=True)
class SwapTask:
    """The stored state of a segment, and the update to run on its copy on the device."""

    state: tuple[Tensor, ...]
    update: Callable[[tuple[Tensor, ...]], None]


class PinnedStaging:
    """Stages nothing: state that is stored in page-locked memory is copied to the device from there, and back to there."""

    def __init__(self) -> None:
        self._tasks: Sequence[SwapTask] = ()

    def start(self, tasks: Sequence[SwapTask]) -> None:
        self._tasks = tasks

    def fetch(self, index: int) -> tuple[Tensor, ...]:
        """Returns the state of a task in page-locked memory, into which the new state is copied after the update."""
        return self._tasks[index].state

    def swapped_out(self, index: int, event: torch.cuda.Event) -> None:
        """Is called once per task; when the event has occurred, the memory that `fetch` returned holds the new state."""

    def synchronize(self) -> None:
        """Waits until all new state is in its storage."""


class DiskStaging(PinnedStaging):
    """Stages state of a mapped file: one thread prefetches it into page-locked memory, another writes it back."""

    def __init__(
        self, dtypes: Sequence[torch.dtype], length: int, *, pinned: bool, num_buffers: int = NUM_BUFFERS
    ) -> None:
        super().__init__()
        self._staging_buffers = [
            tuple(torch.empty(length, dtype=dtype, pin_memory=pinned) for dtype in dtypes) for _ in range(num_buffers)
        ]
        self._reader = ThreadPoolExecutor(1, thread_name_prefix="optimizer-read")
        self._writer = ThreadPoolExecutor(1, thread_name_prefix="optimizer-write")
        self._reads: dict[int, Future[None]] = {}
        self._writes: dict[int, Future[None]] = {}

    def start(self, tasks: Sequence[SwapTask]) -> None:
        self.synchronize()
        self._tasks = tasks
        for number in range(min(len(self._staging_buffers), len(tasks))):
            self._read_ahead(number)

    def _staging_views(self, index: int) -> tuple[Tensor, ...]:
        stored = self._tasks[index].state
        return tuple(
            part[: state.numel()]
            for part, state in zip(self._staging_buffers[index % len(self._staging_buffers)], stored)
        )

    def _read_ahead(self, index: int) -> None:
        before = self._writes.get(index - len(self._staging_buffers))

        def read(stage: tuple[Tensor, ...], stored: tuple[Tensor, ...]) -> None:
            if before is not None:
                before.result()
            for part, state in zip(stage, stored):
                part.copy_(state)

        self._reads[index] = self._reader.submit(read, self._staging_views(index), self._tasks[index].state)

    def fetch(self, index: int) -> tuple[Tensor, ...]:
        self._reads.pop(index).result()
        return self._staging_views(index)

    def swapped_out(self, index: int, event: torch.cuda.Event) -> None:
        def write(stage: tuple[Tensor, ...], stored: tuple[Tensor, ...]) -> None:
            event.synchronize()
            for part, state in zip(stage, stored):
                state.copy_(part)

        self._writes[index] = self._writer.submit(write, self._staging_views(index), self._tasks[index].state)
        if index + len(self._staging_buffers) < len(self._tasks):
            self._read_ahead(index + len(self._staging_buffers))

    def synchronize(self) -> None:
        for write in self._writes.values():
            write.result()
        self._writes.clear()


class StateSwapper:
    """Swaps state to the device and back, with copies in both directions overlapping the updates."""

    def __init__(
        self,
        streams: SwapStreams,
        staging: PinnedStaging,
        dtypes: Sequence[torch.dtype],
        length: int,
        device: torch.device,
        *,
        num_buffers: int = NUM_BUFFERS,
    ) -> None:
        """`length` is that of the longest task."""
        self._streams = streams
        self._staging = staging
        self._buffers = [
            tuple(torch.empty(length, dtype=dtype, device=device) for dtype in dtypes) for _ in range(num_buffers)
        ]
        self._free_events: list[torch.cuda.Event | None] = [None] * num_buffers
        self._last_event: torch.cuda.Event | None = None

    def run(self, tasks: Sequence[SwapTask]) -> None:
        """Queues all tasks, and returns before they are done (for state on disk, before the last few are)."""
        inward, compute, outward = self._streams.swap_in, self._streams.compute, self._streams.swap_out
        # Earlier kernels may still use the memory that became the buffers, and the last run may still write back.
        inward.wait(compute.record())
        inward.wait(outward.record())
        self._staging.start(tasks)
        for number, task in enumerate(tasks):
            at = number % len(self._buffers)
            buffers = tuple(buffer[: state.numel()] for buffer, state in zip(self._buffers[at], task.state))
            host = self._staging.fetch(number)
            free = self._free_events[at]
            if free is not None:
                inward.wait(free)
            inward.run(partial(_copy, buffers, host))
            compute.wait(inward.record())
            compute.run(partial(task.update, buffers))
            outward.wait(compute.record())
            outward.run(partial(_copy, host, buffers))
            self._free_events[at] = self._last_event = outward.record()
            self._staging.swapped_out(number, self._last_event)

    def synchronize(self) -> None:
        """Blocks the host until all state is in its storage."""
        if self._last_event is not None:
            self._last_event.synchronize()
        self._staging.synchronize()


def _copy(targets: Sequence[Tensor], sources: Sequence[Tensor]) -> None:
    for target, source in zip(targets, sources):
        target.copy_(source, non_blocking=True)
