"""When the device's memory is not enough: what held it, how much was asked for, and the three cheapest changes that fit.

What fits is known by prediction only, and the prediction has just been proved too low or true. Of a run that was predicted to
fit, the real need exceeds the prediction by some unknown amount, so a change must free at least what was asked for in
vain; of one that was not, it must bring the prediction below the device's memory, less a reserve for what is not counted.

    limit = min(capacity - reserve, predicted now - asked for)
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch

from petatron.base.errors import CheckpointError, TrainError
from petatron.config import RunConfig
from petatron.estimate.memory.advice import SuggestedChange, suggest_changes
from petatron.estimate.memory.forecast import format_gigabytes, largest_forecast

RESERVE_BYTES = 2_000_000_000
"""For what no forecast counts: the device's own share, libraries, what a kernel needs while it runs."""

_UNITS = {"bytes": 1, "KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30}
_REQUEST_PATTERN = re.compile(r"Tried to allocate ([\d.]+) (bytes|KiB|MiB|GiB)")
_MAX_SUGGESTIONS = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceMemoryStats:
    """A device at the moment of failure, in bytes.

    allocated_bytes: in tensors. reserved_bytes: taken from the device, with what lies free between tensors. free_bytes: not taken by
    anyone. largest_blocks: of live blocks (size, how many of it), the largest sum first.
    """

    total_bytes: int
    free_bytes: int
    reserved_bytes: int
    allocated_bytes: int
    largest_blocks: tuple[tuple[int, int], ...] = ()

    @property
    def capacity_bytes(self) -> int:
        """What this process could have at most, beside the others on the device."""
        return self.free_bytes + self.reserved_bytes

    @property
    def fragmented_bytes(self) -> int:
        return self.reserved_bytes - self.allocated_bytes


def device_memory_stats(device: torch.device) -> DeviceMemoryStats:
    """Of a CUDA device; reads the allocator's tables and touches no memory."""
    free, total = torch.cuda.mem_get_info(device)
    return DeviceMemoryStats(
        total_bytes=total,
        free_bytes=free,
        reserved_bytes=torch.cuda.memory_reserved(device),
        allocated_bytes=torch.cuda.memory_allocated(device),
        largest_blocks=largest_blocks(torch.cuda.memory_snapshot()),
    )


def largest_blocks(snapshot: list[dict]) -> tuple[tuple[int, int], ...]:
    """The sizes that hold most of the live memory, and how many blocks have each."""
    sizes = Counter(
        block["size"] for segment in snapshot for block in segment["blocks"] if block["state"] == "active_allocated"
    )
    return tuple(sorted(sizes.items(), key=lambda item: -item[0] * item[1])[:_MAX_SUGGESTIONS])


def requested_bytes(error: BaseException) -> int:
    """What the failing allocation wanted; 0 if the message does not say.

    >>> requested_bytes(RuntimeError("CUDA out of memory. Tried to allocate 2.50 GiB. GPU 0 has ..."))
    2684354560
    """
    found = _REQUEST_PATTERN.search(str(error))
    return int(float(found[1]) * _UNITS[found[2]]) if found else 0


@contextmanager
def report_out_of_memory(run: RunConfig, device: torch.device, *, phase: Callable[[], str]) -> Iterator[None]:
    """Ends with the report where an allocation inside fails; `phase` is asked then what was being done.

    What ranks read together fails on all of them at once, as a checkpoint that could not be read; why it could not is behind that.
    """
    try:
        yield
    except (torch.OutOfMemoryError, CheckpointError) as error:
        reason: BaseException | None = error
        while reason is not None and not isinstance(reason, torch.OutOfMemoryError):
            reason = reason.__cause__
        if reason is None:
            raise
        raise out_of_memory_error(reason, run, device_memory_stats(device), phase=phase()) from error


def out_of_memory_error(error: BaseException, run: RunConfig, stats: DeviceMemoryStats, *, phase: str) -> TrainError:
    """The failure in words; `phase` is what was being done, as in `iteration 3`."""
    asked = requested_bytes(error)
    now = largest_forecast(run, device="cuda")
    limit = min(stats.capacity_bytes - RESERVE_BYTES, now.total - asked)
    wanted = f"{format_gigabytes(asked)} GB more were asked for" if asked else "an allocation failed"
    lines = [
        f"The device ran out of memory in {phase}: {wanted}, with {format_gigabytes(stats.allocated_bytes)} of "
        f"{format_gigabytes(stats.total_bytes)} GB in tensors.",
        f"  predicted need: {now.describe()}",
        f"  {_describe_usage(stats)}",
    ]
    changes = suggest_changes(run, limit)[:_MAX_SUGGESTIONS]
    advice = _fragmentation_advice(stats, asked) + [describe_change(change) for change in changes]
    if advice:
        lines.append("What would fit, the cheapest first (predicted):")
        lines += [f"  {number}. {text}" for number, text in enumerate(advice[:_MAX_SUGGESTIONS], start=1)]
    else:
        lines.append(
            "No setting of this run is predicted to fit. Use more devices (--tensor-model-parallel-size, "
            "--pipeline-model-parallel-size), a shorter --seq-length or a smaller model."
        )
    return TrainError("\n".join(lines))


def describe_change(change: SuggestedChange) -> str:
    """One line for people."""
    slower = f"about {100 * change.time_cost:.0f}% slower" if change.time_cost >= 0.005 else "no slower"
    if change.time_cost <= -0.005:
        slower = f"about {-100 * change.time_cost:.0f}% less time"
    remark = f"; {change.remark}" if change.remark else ""
    freed, total = format_gigabytes(change.saved_bytes), format_gigabytes(change.total_bytes)
    return f"{change.flags}: frees {freed} GB, needs {total} GB, {slower}{remark}"


def _describe_usage(stats: DeviceMemoryStats) -> str:
    parts = [f"free but scattered between tensors: {format_gigabytes(stats.fragmented_bytes)} GB"]
    others = stats.total_bytes - stats.capacity_bytes
    if others > RESERVE_BYTES // 2:
        parts.append(f"held by other processes and the driver: {format_gigabytes(others)} GB")
    if stats.largest_blocks:
        blocks = ", ".join(f"{count} x {format_gigabytes(size)} GB" for size, count in stats.largest_blocks)
        parts.append(f"most memory is in blocks of {blocks}")
    return "; ".join(parts)


def _fragmentation_advice(stats: DeviceMemoryStats, requested: int) -> list[str]:
    """If what was asked for lies there in pieces, the allocator can be told to make pieces that grow."""
    if stats.fragmented_bytes < max(requested, RESERVE_BYTES // 2):
        return []
    return [
        "the environment variable PYTORCH_ALLOC_CONF=expandable_segments:True: makes use of the "
        f"{format_gigabytes(stats.fragmented_bytes)} GB between tensors, no slower"
    ]
