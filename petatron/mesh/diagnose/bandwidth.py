"""Measures the bandwidth of collectives over an axis, and checks their results.

Bus bandwidth is what each link would have to carry if the operation were ideal, so it can be compared with the hardware's and
between operations and group sizes (the convention of NCCL's own tests): an all-reduce of b bytes over n ranks in t seconds has
2 (n-1) / n * b / t, a gather, scatter or all-to-all (n-1) / n * b / t with b the bytes of the full side, a transfer b / t.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from petatron.mesh import collectives
from petatron.mesh.mesh import Axis

_TARGET_TIME_S = 0.15
_MAX_REPEATS = 20
_WARM_UP_CALLS = 2


@dataclass(frozen=True, slots=True)
class BandwidthResult:
    """One operation over one axis: its full bytes, the time of one call, and the bus bandwidth."""

    axis: str
    ranks: int
    op: str
    bytes: int
    seconds: float
    bus_gb_s: float
    correct: bool


@dataclass(frozen=True, slots=True)
class _CollectiveTrial:
    op: str
    bus_factor: float
    """The bytes a call moves over each link, as a fraction of its full bytes."""
    call: Callable[[], Tensor]
    expected: float | tuple[float, ...]


def measure_axis(axis: Axis, sizes_bytes: tuple[int, ...], device: torch.device) -> Iterator[BandwidthResult]:
    """Measures every collective over an axis at every size; all its ranks call it."""
    for size in sizes_bytes:
        for trial in _trials(axis, size, device):
            yield _measure(axis, trial, size, device)


def _trials(axis: Axis, size: int, device: torch.device) -> Iterator[_CollectiveTrial]:
    n = axis.size
    rows = max(1, size // 4 // n) * n
    full = torch.zeros(rows, dtype=torch.float32, device=device)
    part = torch.full((rows // n,), float(axis.rank + 1), device=device)
    ones = torch.ones_like(full)
    scattered, local = torch.empty_like(part), torch.full((rows,), float(axis.rank + 1), device=device)
    counts, shifted = [rows // n] * n, torch.empty_like(local)
    all_ranks, in_order = float(n), tuple(float(rank + 1) for rank in range(n))
    share, previous = (n - 1) / n, float((axis.rank - 1) % n + 1)

    def reduce() -> Tensor:
        return collectives.all_reduce(full.copy_(ones), axis)

    def gather() -> Tensor:
        collectives.start_all_gather(full, part, axis).wait()
        return full

    def scatter() -> Tensor:
        collectives.start_reduce_scatter(scattered, ones, axis).wait()
        return scattered

    def exchange() -> Tensor:
        return collectives.all_to_all(local, axis, send=counts, receive=counts)

    def shift() -> Tensor:
        for handle in collectives.start_ring_shift([shifted], [local], axis):
            handle.wait()
        return shifted

    yield _CollectiveTrial("all_reduce", 2 * share, reduce, all_ranks)
    yield _CollectiveTrial("all_gather", share, gather, in_order)
    yield _CollectiveTrial("reduce_scatter", share, scatter, all_ranks)
    yield _CollectiveTrial("all_to_all", share, exchange, in_order)
    yield _CollectiveTrial("shift", 1.0, shift, previous)


def measure_send_recv(axis: Axis, sizes_bytes: tuple[int, ...], device: torch.device) -> Iterator[BandwidthResult]:
    """Measures transfers from each rank of an axis to the next one over their channel, as in a pipeline."""
    for size in sizes_bytes:
        x = torch.full((max(1, size // 4),), float(axis.rank + 1), device=device)
        out = torch.full_like(x, float(axis.rank))
        last = axis.rank == axis.size - 1

        def send(x: Tensor = x, out: Tensor = out, last: bool = last) -> Tensor:
            sends = [] if last else [(x, axis.rank + 1)]
            receives = [(out, axis.rank - 1)] if axis.rank else []
            sent, received = collectives.start_send_recv(axis, sends=sends, receives=receives)
            for handle in (*sent, *received):
                handle.wait()
            return out

        yield _measure(axis, _CollectiveTrial("send", 1.0, send, float(axis.rank)), size, device)


def _measure(axis: Axis, trial: _CollectiveTrial, size: int, device: torch.device) -> BandwidthResult:
    for _ in range(_WARM_UP_CALLS):
        trial.call()
    once, _ = _timed(trial.call, 1, device)
    slowest = float(collectives.all_reduce(torch.tensor([once], device=device), axis, op="max"))
    repeats = max(2, min(_MAX_REPEATS, int(_TARGET_TIME_S / max(slowest, 1e-6))))  # the same on all ranks
    total, result = _timed(trial.call, repeats, device)
    seconds = total / repeats
    expected = trial.expected if isinstance(trial.expected, tuple) else (trial.expected,)
    correct = all(bool((part == value).all()) for part, value in zip(result.view(len(expected), -1), expected))
    return BandwidthResult(
        axis.name, axis.size, trial.op, size, seconds, trial.bus_factor * size / seconds / 1e9, correct
    )


def _timed(call: Callable[[], Tensor], repeats: int, device: torch.device) -> tuple[float, Tensor]:
    """Returns the seconds of all calls, and the result of the last."""
    _synchronize(device)
    started, result = time.perf_counter(), torch.empty(0)
    for _ in range(repeats):
        result = call()
    _synchronize(device)
    return time.perf_counter() - started, result


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
