"""Forecasts the peak memory of a rank: pure arithmetic, so it is known before any rank starts.

    weights, optimizer      `estimate/state_bytes.py`
    gradients               those that exist at the peak (`peak_moments.py`)
    activations             saved by the micro-batches in flight, and the largest recomputed group
    logits                  saved by the micro-batches in flight outside their layers, most of it for the loss
    workspace               of the moment: logits of a chunk of the loss, or the gradients inside of a branch

Not counted: communication buffers, and the device's own share. The log has the prediction with the measured peak.

Offload takes page-locked host memory, a budget like that of the device: every rank pins memory for the activations of offloaded layers, for
all micro-batches in flight, and for its offloaded optimizer state. The ranks of a node share its memory, of which a fifth is left for
processes, data and the page cache. A disk (`--optimizer-nvme-offload`) takes none.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Literal

from petatron.base.errors import Problem
from petatron.config import RunConfig
from petatron.config.pipeline_stages import pipeline_stages
from petatron.estimate.memory.peak_moments import PeakMoment, offload_plan, peak_moments
from petatron.estimate.recompute_plan import BudgetError, RecomputePlan, plan_recompute
from petatron.estimate.state_bytes import StateBytes, state_bytes
from petatron.layers.spec.activation_shape import ActivationShape
from petatron.models.frozen_params import frozen_params
from petatron.models.registry import model_spec
from petatron.schedule.pipeline_plan import num_micro_batches, pipeline_plan

DeviceKind = Literal["cpu", "cuda"]


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryForecast:
    """Predicted bytes of one pipeline rank at its peak."""

    pipeline_rank: int
    state: StateBytes
    activations: int
    logits: int
    workspace: int

    @classmethod
    def at_peak(cls, pipeline_rank: int, state: StateBytes, moments: Sequence[PeakMoment]) -> MemoryForecast:
        """Returns the forecast of the moment that needs most; `state` has all gradients."""
        peak = max(moments, key=lambda moment: moment.bytes_with(state.gradients))
        return cls(
            pipeline_rank=pipeline_rank,
            state=replace(state, gradients=int(peak.grad_share * state.gradients)),
            activations=peak.activations,
            logits=peak.logits,
            workspace=peak.workspace,
        )

    @property
    def total(self) -> int:
        return self.state.total + self.activations + self.logits + self.workspace

    def bytes_by_kind(self) -> dict[str, int]:
        """Bytes by kind, for people."""
        return {
            "weights": self.state.weights,
            "gradients": self.state.gradients,
            "optimizer": self.state.optimizer,
            "activations": self.activations,
            "logits": self.logits,
            "workspace": self.workspace,
        }

    def describe(self) -> str:
        kinds = ", ".join(f"{name} {format_gigabytes(size)}" for name, size in self.bytes_by_kind().items())
        return f"{format_gigabytes(self.total)} GB ({kinds})"


def format_gigabytes(size: float) -> str:
    """Formats bytes as GB with three digits or so.

    >>> format_gigabytes(134_217_728_000), format_gigabytes(1_500_000), format_gigabytes(0)
    ('134.2', '0.0015', '0')
    """
    gigabytes = size / 1e9
    return f"{gigabytes:.1f}" if gigabytes >= 10 else f"{gigabytes:.2f}" if gigabytes >= 1 else f"{gigabytes:.2g}"


def recompute_plans(run: RunConfig, *, device: DeviceKind) -> list[RecomputePlan]:
    """Returns the plan of every stage in model order; raises the `BudgetError` of the stage that needs most if a budget is too small."""
    spec, shape, frozen = model_spec(run), ActivationShape.from_config(run, device=device), frozen_params(run)
    pipeline = pipeline_plan(run)
    in_flight = pipeline.in_flight(num_micro_batches(run))
    plan = partial(plan_recompute, run.memory, spec, shape, num_local_stages=pipeline.virtual, frozen=frozen)
    plans: list[RecomputePlan] = []
    errors: list[BudgetError] = []
    for stage, count in zip(pipeline_stages(run), in_flight, strict=True):
        try:
            plans.append(plan(stage, in_flight=count))
        except BudgetError as error:
            errors.append(error)
    if errors:
        raise max(errors, key=lambda error: error.needed_bytes)
    return plans


def forecast_memory(
    run: RunConfig, *, device: DeviceKind, plans: Sequence[RecomputePlan] | None = None
) -> list[MemoryForecast]:
    """Forecasts every pipeline rank's peak; ranks that differ in other axes need the same. `plans` are those of the run, if known."""
    plans = recompute_plans(run, device=device) if plans is None else plans
    moments = moments_per_rank(run, plans, device=device)
    return [
        MemoryForecast.at_peak(rank, state, rank_moments)
        for rank, (state, rank_moments) in enumerate(zip(state_bytes_per_rank(run), moments, strict=True))
    ]


def state_bytes_per_rank(run: RunConfig) -> list[StateBytes]:
    """Returns the state of every pipeline rank, with all gradients."""
    stages = pipeline_stages(run)
    return [state_bytes(run, [stages[stage] for stage in local]) for local in stages_per_rank(run)]


def moments_per_rank(run: RunConfig, plans: Sequence[RecomputePlan], *, device: DeviceKind) -> list[list[PeakMoment]]:
    """Returns the moments of every pipeline rank at which it may need most."""
    shape = ActivationShape.from_config(run, device=device)
    return [peak_moments(run, plans, local, shape) for local in stages_per_rank(run)]


def stages_per_rank(run: RunConfig) -> list[list[int]]:
    """Returns the indices of the stages of every pipeline rank."""
    pipeline, count = pipeline_plan(run), len(pipeline_stages(run))
    return [[stage for stage in range(count) if pipeline.rank_of(stage) == rank] for rank in range(pipeline.ranks)]


def largest_forecast(run: RunConfig, *, device: DeviceKind) -> MemoryForecast:
    """Returns the forecast of the pipeline rank that needs most."""
    return max(forecast_memory(run, device=device), key=lambda forecast: forecast.total)


def shared_device_problem(run: RunConfig, *, memory_bytes: int) -> Problem | None:
    """Returns why a device cannot hold the ranks that share it (`--ranks-per-device`); None if it can, as predicted."""
    ranks, rank_bytes = run.launch.ranks_per_device, largest_forecast(run, device="cuda").total
    if ranks == 1 or ranks * rank_bytes <= memory_bytes:
        return None
    rule = f"ranks of up to {format_gigabytes(rank_bytes)} GB each do not fit into the {format_gigabytes(memory_bytes)} GB of one device"
    most = memory_bytes // rank_bytes
    fix = f"Use {most} or fewer" if most > 1 else "Use a smaller model or micro-batch"
    return Problem("--ranks-per-device", str(ranks), rule, f"{fix}.")


def memory_log_line(run: RunConfig, *, device: DeviceKind, pipeline_rank: int, measured_bytes: int) -> str:
    """Returns prediction and measurement, for the log."""
    predicted = forecast_memory(run, device=device)[pipeline_rank].describe()
    what = "measured peak" if device == "cuda" else "resident peak of the process"
    return f"memory: predicted {predicted}, {what} {format_gigabytes(measured_bytes)} GB"


DEVICES_PER_NODE = 8
_USABLE_SHARE = 0.8


@dataclass(frozen=True, slots=True, kw_only=True)
class HostMemory:
    """The memory of a node, and the ranks that share it."""

    total_bytes: int
    ranks_per_node: int

    @property
    def bytes_per_rank(self) -> int:
        """What a rank may pin."""
        return int(_USABLE_SHARE * self.total_bytes) // self.ranks_per_node


def ranks_per_node(run: RunConfig) -> int:
    """Returns the ranks of a node: as many as are started on each of several, else no more than 8 devices."""
    launch, world = run.launch, run.parallel.world_size
    if launch.nnodes > 1:
        return max(1, world // launch.nnodes)
    return min(world, DEVICES_PER_NODE)


def pinned_activation_bytes(run: RunConfig, plans: Sequence[RecomputePlan], *, device: DeviceKind) -> int:
    """Returns what the rank that pins most has of activations; `plans` are those of all stages."""
    if not run.memory.offloads_activations:
        return 0
    shape = ActivationShape.from_config(run, device=device)
    return max(
        sum(plans[index].in_flight * offload_plan(run, plans, index, shape).total_bytes for index in local)
        for local in stages_per_rank(run)
    )


def pinned_optimizer_bytes(run: RunConfig) -> int:
    """Returns what the rank that pins most has of optimizer state."""
    if not run.memory.optimizer_cpu_offload:
        return 0
    on_device = replace(run, memory=replace(run.memory, optimizer_cpu_offload=False, optimizer_nvme_offload=None))
    stages = pipeline_stages(run)
    ranks = [[stages[index] for index in local] for local in stages_per_rank(run)]
    return max(state_bytes(on_device, rank).optimizer - state_bytes(run, rank).optimizer for rank in ranks)
