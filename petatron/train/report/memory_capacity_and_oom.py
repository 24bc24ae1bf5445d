"""Refuses a run that will not fit into memory, and explains an out-of-memory error.

It tells what held the memory, how much was requested, and the three cheapest changes that fit. What fits is only predicted, and the
prediction was just shown to be too low, or right. If the run was predicted to fit, the real
need exceeds the prediction by an unknown amount, so a change must free at least what was requested; if not, it must bring the
prediction below the device's memory, less a reserve for what is not counted.

    limit = min(capacity - reserve, predicted now - requested)
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch

from petatron.base.device import DeviceInfo, host_memory_bytes
from petatron.base.errors import CheckpointError, ConfigError, Problem, TrainError
from petatron.base.format_text import count_with_noun
from petatron.config import RunConfig
from petatron.estimate.memory.advice import SuggestedChange
from petatron.estimate.memory.forecast import HostMemory, format_gigabytes, largest_forecast, ranks_per_node
from petatron.estimate.memory.layouts_that_fit import fitting_changes
from petatron.mesh.launch.environment import read_environment

RESERVE_BYTES = 2_000_000_000
"""What no forecast counts: the CUDA context, libraries, kernels' workspaces."""

OVERRIDE_FLAG = "--no-check-memory"
_NOTHING_FITS = (
    "No setting of this run is predicted to fit: use a shorter --seq-length, a smaller --micro-batch-size or model, "
    "or more devices."
)
_UNITS = {"bytes": 1, "KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30}
_REQUEST_PATTERN = re.compile(r"Tried to allocate ([\d.]+) (bytes|KiB|MiB|GiB)")
_MAX_SUGGESTIONS = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceMemoryStats:
    """A device's memory at the moment of failure, in bytes.

    allocated_bytes: in tensors. reserved_bytes: held by the allocator, including free blocks between tensors. free_bytes: not held by
    any process. largest_blocks: of live blocks (size, count), the largest sum first.
    """

    total_bytes: int
    free_bytes: int
    reserved_bytes: int
    allocated_bytes: int
    largest_blocks: tuple[tuple[int, int], ...] = ()

    @property
    def capacity_bytes(self) -> int:
        """The most this process could have, given the other processes on the device."""
        return self.free_bytes + self.reserved_bytes

    @property
    def fragmented_bytes(self) -> int:
        return self.reserved_bytes - self.allocated_bytes


def device_memory_stats(device: torch.device) -> DeviceMemoryStats:
    """Reads the CUDA allocator's statistics without touching device memory."""
    free, total = torch.cuda.mem_get_info(device)
    return DeviceMemoryStats(
        total_bytes=total,
        free_bytes=free,
        reserved_bytes=torch.cuda.memory_reserved(device),
        allocated_bytes=torch.cuda.memory_allocated(device),
        largest_blocks=largest_blocks(torch.cuda.memory_snapshot()),
    )


def largest_blocks(snapshot: list[dict]) -> tuple[tuple[int, int], ...]:
    """Returns the block sizes that make up most of the live memory, with their counts."""
    sizes = Counter(
        block["size"] for segment in snapshot for block in segment["blocks"] if block["state"] == "active_allocated"
    )
    return tuple(sorted(sizes.items(), key=lambda item: -item[0] * item[1])[:_MAX_SUGGESTIONS])


def requested_bytes(error: BaseException) -> int:
    """Returns what the failing allocation requested; 0 if the message does not tell.

    >>> requested_bytes(RuntimeError("CUDA out of memory. Tried to allocate 2.50 GiB. GPU 0 has ..."))
    2684354560
    """
    match = _REQUEST_PATTERN.search(str(error))
    return int(float(match[1]) * _UNITS[match[2]]) if match else 0


@contextmanager
def report_out_of_memory(run: RunConfig, device: torch.device, *, phase: Callable[[], str]) -> Iterator[None]:
    """Raises the report when an allocation inside fails; `phase` then tells what was being done.

    A collective load fails on all ranks at once, as a checkpoint that could not be read; the allocation error is its cause.
    """
    try:
        yield
    except (torch.OutOfMemoryError, CheckpointError) as error:
        reason: BaseException | None = error
        while reason is not None and not isinstance(reason, torch.OutOfMemoryError):
            reason = reason.__cause__
        if reason is None:
            raise
        local_ranks = read_environment().local_world_size
        host = HostMemory(total_bytes=host_memory_bytes(), ranks_per_node=local_ranks)
        raise out_of_memory_error(reason, run, device_memory_stats(device), phase=phase(), host=host) from error


def out_of_memory_error(
    error: BaseException, run: RunConfig, stats: DeviceMemoryStats, *, phase: str, host: HostMemory | None = None
) -> TrainError:
    """Builds the error text; `phase` is what was being done, as in `iteration 3`. Without `host` its memory is no limit."""
    requested = requested_bytes(error)
    now = largest_forecast(run, device="cuda")
    limit = min(stats.capacity_bytes - RESERVE_BYTES, now.total - requested)
    request_text = f"{format_gigabytes(requested)} GB more were asked for" if requested else "an allocation failed"
    lines = [
        f"The device ran out of memory in {phase}: {request_text}, with {format_gigabytes(stats.allocated_bytes)} of "
        f"{format_gigabytes(stats.total_bytes)} GB in tensors.",
        f"  predicted need: {now.describe()}",
        f"  {_describe_usage(stats)}",
    ]
    changes = fitting_changes(run, limit, host)
    sharing = ranks_per_node(run) if host is None else host.ranks_per_node
    advice = _fragmentation_advice(stats, requested) + describe_changes(changes, ranks_per_node=sharing)
    if advice:
        lines.append("What would fit, the cheapest first (predicted):")
        lines += [f"  {number}. {text}" for number, text in enumerate(advice[:_MAX_SUGGESTIONS], start=1)]
    else:
        lines.append(
            "No setting of this run is predicted to fit. Use more devices (--tensor-model-parallel-size, "
            "--pipeline-model-parallel-size), a shorter --seq-length or a smaller model."
        )
    return TrainError("\n".join(lines))


def check_memory_capacity(run: RunConfig, device: DeviceInfo, *, local_ranks: int) -> None:
    """Raises `ConfigError` if the largest rank is predicted not to fit, before anything is allocated; `--no-check-memory` goes on anyway.

    The forecast leaves out what it cannot count (workspaces, buffers of communication, the libraries themselves), so a run above the limit
    would end in an allocation error, or be killed by the kernel, which says nothing. On a CPU all ranks of a machine share its memory.
    """
    sharing = run.launch.ranks_per_device if device.kind == "cuda" else local_ranks
    limit = device.memory_bytes // sharing
    shared_gpu = device.kind == "cuda" and sharing > 1  # has a check of its own
    if shared_gpu or not run.memory.check_memory:
        return
    forecast = largest_forecast(run, device=device.kind)
    if forecast.total <= limit:
        return
    where = "the GPU" if device.kind == "cuda" else "this machine"
    share = f" that {count_with_noun(sharing, 'rank')} share" if sharing > 1 else ""
    rule = f"per rank is more than the {format_gigabytes(device.memory_bytes)} GB of {where}{share}"
    host = HostMemory(total_bytes=host_memory_bytes(), ranks_per_node=local_ranks)
    changes = fitting_changes(run, limit, host, device=device.kind)
    advice = describe_changes(changes, ranks_per_node=local_ranks)
    lines = [f"    {number}. {line}" for number, line in enumerate(advice, start=1)]
    fix = "\n".join(["What would fit, the cheapest first (predicted):", *lines]) if lines else _NOTHING_FITS
    raise ConfigError(
        [Problem("memory forecast", forecast.describe(), rule, f"{fix}\n    {OVERRIDE_FLAG} starts it anyway.")]
    )


def describe_changes(changes: Sequence[SuggestedChange], *, ranks_per_node: int) -> list[str]:
    """Formats changes as one line each. Times are compared with the first, which can run; the run as it is cannot."""
    lines: list[str] = []
    for change in changes:
        slower = (1.0 + change.time_cost) / (1.0 + changes[0].time_cost) - 1.0
        speed = f"about {100 * slower:.0f}% slower than that" if slower >= 0.005 else "as fast as that"
        if change is changes[0]:
            speed = "the fastest of these" if len(changes) > 1 else "the only one found"
        freed, total = format_gigabytes(change.saved_bytes), format_gigabytes(change.total_bytes)
        pinned = ""
        if change.pinned_bytes:
            node = f"{format_gigabytes(change.pinned_bytes * ranks_per_node)} GB of host memory per node"
            share = f"{format_gigabytes(change.pinned_bytes)} GB for each of {count_with_noun(ranks_per_node, 'rank')}"
            pinned = f", pins {node} ({share})"
        remark = f"; {change.remark}" if change.remark else ""
        lines.append(f"{change.flags}: frees {freed} GB, needs {total} GB{pinned}, {speed}{remark}")
    return lines


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
    """If the requested bytes are free but fragmented, suggests expandable segments."""
    if stats.fragmented_bytes < max(requested, RESERVE_BYTES // 2):
        return []
    return [
        "the environment variable PYTORCH_ALLOC_CONF=expandable_segments:True: makes use of the "
        f"{format_gigabytes(stats.fragmented_bytes)} GB between tensors, no slower"
    ]
