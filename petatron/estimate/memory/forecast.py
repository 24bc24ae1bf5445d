"""Forecasts the peak memory of a rank: pure arithmetic, so it is known before any rank starts.

    weights, gradients, optimizer   `estimate/state_bytes.py`
    activations                     saved by the micro-batches in flight, and the largest recomputed group
    logits                          saved by the micro-batches in flight outside their layers, most of it for the loss

Not counted: a kernel's workspace, communication buffers, and the device's own share. The log has the prediction with the measured
peak.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from petatron.base.errors import Problem
from petatron.config import RunConfig
from petatron.config.pipeline_stages import PipelineStage, pipeline_stages
from petatron.estimate.offload_plan import freed_bytes
from petatron.estimate.recompute_plan import BudgetError, RecomputePlan, plan_recompute
from petatron.estimate.state_bytes import StateBytes, state_bytes
from petatron.layers.spec.activation_shape import ActivationShape
from petatron.models.registry import model_spec
from petatron.schedule.pipeline_plan import num_micro_batches, pipeline_plan

DeviceKind = Literal["cpu", "cuda"]


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryForecast:
    """Predicted bytes of one pipeline rank."""

    pipeline_rank: int
    state: StateBytes
    activations: int
    logits: int

    @property
    def total(self) -> int:
        return self.state.total + self.activations + self.logits

    def bytes_by_kind(self) -> dict[str, int]:
        """Bytes by kind, for people."""
        return {
            "weights": self.state.weights,
            "gradients": self.state.gradients,
            "optimizer": self.state.optimizer,
            "activations": self.activations,
            "logits": self.logits,
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
    spec, shape = model_spec(run), ActivationShape.from_config(run, device=device)
    pipeline = pipeline_plan(run)
    in_flight = pipeline.in_flight(num_micro_batches(run))
    plans: list[RecomputePlan] = []
    errors: list[BudgetError] = []
    for stage, count in zip(pipeline_stages(run), in_flight, strict=True):
        try:
            plans.append(
                plan_recompute(run.memory, spec, shape, stage, in_flight=count, num_local_stages=pipeline.virtual)
            )
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
    return [
        MemoryForecast(pipeline_rank=rank, state=state, activations=peak - logits, logits=logits)
        for rank, (state, (peak, logits)) in enumerate(
            zip(state_bytes_per_rank(run), activation_peaks(run, plans, device=device), strict=True)
        )
    ]


def state_bytes_per_rank(run: RunConfig) -> list[StateBytes]:
    """Returns the persistent state of every pipeline rank."""
    stages = pipeline_stages(run)
    return [state_bytes(run, [stages[stage] for stage in own]) for own in _stages_per_rank(run)]


def activation_peaks(run: RunConfig, plans: Sequence[RecomputePlan], *, device: DeviceKind) -> list[tuple[int, int]]:
    """Returns every pipeline rank's peak of activations, and how much of it is outside layers."""
    spec, stages = model_spec(run), pipeline_stages(run)
    shape = ActivationShape.from_config(run, device=device)
    return [
        (
            sum(_stage_peak_bytes(run, plans[stage], shape, stages[stage]) for stage in own),
            sum(plans[stage].in_flight * spec.outer_saved_bytes(shape, stages[stage]) for stage in own),
        )
        for own in _stages_per_rank(run)
    ]


def _stages_per_rank(run: RunConfig) -> list[list[int]]:
    pipeline, count = pipeline_plan(run), len(pipeline_stages(run))
    return [[stage for stage in range(count) if pipeline.rank_of(stage) == rank] for rank in range(pipeline.ranks)]


def largest_forecast(run: RunConfig, *, device: DeviceKind) -> MemoryForecast:
    """Returns the forecast of the pipeline rank that needs most."""
    return max(forecast_memory(run, device=device), key=lambda forecast: forecast.total)


def shared_device_problem(run: RunConfig, *, memory_bytes: int) -> Problem | None:
    """Returns why a device cannot hold the ranks that share it (`--ranks-per-device`); None if it can, as predicted."""
    ranks, each = run.launch.ranks_per_device, largest_forecast(run, device="cuda").total
    if ranks == 1 or ranks * each <= memory_bytes:
        return None
    rule = f"ranks of up to {format_gigabytes(each)} GB each do not fit into the {format_gigabytes(memory_bytes)} GB of one device"
    most = memory_bytes // each
    fix = f"Use {most} or fewer" if most > 1 else "Use a smaller model or micro-batch"
    return Problem("--ranks-per-device", str(ranks), rule, f"{fix}.")


def _stage_peak_bytes(run: RunConfig, plan: RecomputePlan, shape: ActivationShape, stage: PipelineStage) -> int:
    layers = model_spec(run).stage_layers(stage)
    return plan.peak_bytes - freed_bytes(plan, shape, layers, run.memory.cpu_offloading_num_layers)


def memory_log_line(run: RunConfig, *, device: DeviceKind, pipeline_rank: int, measured_bytes: int) -> str:
    """Returns prediction and measurement, for the log."""
    predicted = forecast_memory(run, device=device)[pipeline_rank].describe()
    what = "measured peak" if device == "cuda" else "resident peak of the process"
    return f"memory: predicted {predicted}, {what} {format_gigabytes(measured_bytes)} GB"
