"""Stops a run whose forecast exceeds the memory it would run in, before anything is allocated, with the changes that would fit.

The forecast leaves out what it cannot count (workspaces, buffers of communication, the libraries themselves), so a run above the limit
would end in an allocation error, or be killed by the kernel, which says nothing. On a CPU all ranks of a machine share its memory.
"""

from __future__ import annotations

from petatron.base.device import DeviceInfo, host_memory_bytes
from petatron.base.errors import ConfigError, Problem
from petatron.base.text import count_with_noun
from petatron.config import RunConfig
from petatron.estimate.memory.forecast import HostMemory, format_gigabytes, largest_forecast
from petatron.estimate.memory.layouts import fitting_changes
from petatron.train.report.out_of_memory import describe_changes

OVERRIDE_FLAG = "--no-check-memory"
_NOTHING_FITS = (
    "No setting of this run is predicted to fit: use a shorter --seq-length, a smaller --micro-batch-size or model, "
    "or more devices."
)


def check_memory_capacity(run: RunConfig, device: DeviceInfo, *, local_ranks: int) -> None:
    """Raises `ConfigError` if the largest rank is predicted not to fit; `--no-check-memory` goes on anyway."""
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
