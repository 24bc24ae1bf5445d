"""What `petatron plan memory` predicts, as numbers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from petatron.cli.train import load_planned
from petatron.config import LoadedConfig
from petatron.estimate.memory.forecast import (
    forecast_memory,
    format_gigabytes,
    pinned_activation_bytes,
    pinned_optimizer_bytes,
    recompute_plans,
)
from petatron.plan.pipeline_simulator import theoretical_bubble
from petatron.schedule.pipeline_plan import num_micro_batches, pipeline_plan


class MemoryPlan(NamedTuple):
    """The largest rank's memory and what is pinned on the host, in GB as printed; the bubble in percent as printed."""

    loaded: LoadedConfig
    gigabytes: str
    pinned_gigabytes: str
    bubble: str


def planned(flags: Sequence[str]) -> MemoryPlan:
    """Checks a run as `petatron plan memory` does and predicts it."""
    loaded = load_planned(flags)
    run = loaded.config
    plans = recompute_plans(run, device="cuda")
    most = max(forecast.total for forecast in forecast_memory(run, device="cuda", plans=plans))
    pinned = pinned_activation_bytes(run, plans, device="cuda") + pinned_optimizer_bytes(run)
    pipeline, count = pipeline_plan(run), num_micro_batches(run)
    bubble = theoretical_bubble(pipeline.name, ranks=pipeline.ranks, virtual=pipeline.virtual, micro_batches=count)
    return MemoryPlan(
        loaded,
        format_gigabytes(most),
        format_gigabytes(pinned),
        "-" if bubble is None else f"{100 * bubble:.1f} %",
    )
