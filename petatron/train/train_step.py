"""One optimizer step, and the timeline of the one that is measured."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

from petatron.base.errors import DataError
from petatron.base.log import get_logger
from petatron.mesh.json_collectives import gather_json_to_first
from petatron.models.batch import Batch
from petatron.models.objective import names_losses
from petatron.optim.loss_scaler import DynamicLossScaler
from petatron.parallel.parallel_model import ParallelModel
from petatron.schedule.actions import COMPUTE_KINDS, TimedAction
from petatron.schedule.measured_timeline import timed_action_from_json, timed_action_to_json, write_measured
from petatron.train.hooks.build_hooks import StepInstruments, build_instruments
from petatron.train.hooks.step_timers import StepTimers
from petatron.train.report.log_records import StepMetrics
from petatron.train.state.train_state import TrainState

_log = get_logger(__name__)


def train_step(
    state: TrainState,
    batches: Sequence[Batch],
    instruments: StepInstruments | None = None,
    *,
    num_samples: int | None = None,
) -> StepMetrics:
    """Runs forward, backward, reduction, clipping and update; advances the state's progress, by the rows unless the samples are given.

    Nothing here waits for the device, except for one number per step under dynamic loss scaling, and for what instruments read.
    """
    run, progress, settings = state.run, state.progress, state.update_settings()
    instruments, iteration = instruments or build_instruments(state), progress.iteration + 1
    timers, validation = instruments.timers, instruments.validation
    passes = partial(
        state.model.train_step,
        batches,
        loss_scale=settings["loss_scale"],
        timeline=_timeline_writer(state, timers),
    )
    with timers.phase("forward-backward"):
        loss = validation.run(iteration, passes)
    zeros = state.optimizer.count_zero_grads() if run.log.log_num_zeros_in_grad else None
    instruments.hooks.before_update(iteration)
    with timers.phase("optimizer"):
        result = state.optimizer.step(**settings)
    size = state.advance(batches, result, num_samples=num_samples)
    dynamic = isinstance(state.scaler, DynamicLossScaler)
    return StepMetrics(
        iteration=progress.iteration,
        consumed_samples=progress.consumed_samples,
        tokens=state.num_rows(batches) * run.model.seq_length,
        loss=loss,
        named_losses=state.model.named_losses if names_losses(state.model.objective) else None,
        objective_metrics=state.model.named_metrics or None,
        lr=settings["lr"],
        decoupled_lr=settings["decoupled_lr"],
        global_batch_size=size,
        grad_norm=result.grad_norm,
        loss_scale=settings["loss_scale"],
        skipped=result.skipped,
        nan=~loss.isfinite() if dynamic else ~loss.isfinite() | result.skipped.bool(),
        params_norm=state.optimizer.weight_norm() if run.log.log_params_norm else None,
        num_zeros=zeros,
        router_statistics=state.model.router_statistics.totals,
    )


def _timeline_writer(state: TrainState, timers: StepTimers) -> Callable[[list[TimedAction]], None] | None:
    """Returns what receives this step's measured timeline, if this step is measured."""
    log, next_iteration = state.run.log, state.progress.iteration + 1
    if log.pipeline_timeline is None or next_iteration != log.pipeline_timeline_step:
        return timers.add_passes if timers.times_passes else None
    return partial(_write_timeline, Path(log.pipeline_timeline), state.model)


def _write_timeline(path: Path, model: ParallelModel, timed_actions: Sequence[TimedAction]) -> None:
    """Writes the actions of every rank of the pipeline of rank 0, as one file; every rank calls it."""
    computed = [timed_action_to_json(t) for t in timed_actions if t.action.kind in COMPUTE_KINDS]
    gathered = gather_json_to_first(computed, model.mesh.control)
    if gathered is None:
        return
    ranks = [[timed_action_from_json(record) for record in gathered[rank]] for rank in model.mesh.pp.ranks]
    start = min(t.start for rank in ranks for t in rank)
    from_zero = [[TimedAction(t.action, t.start - start, t.end - start) for t in rank] for rank in ranks]
    try:
        write_measured(path, model.plan.name, from_zero)
    except DataError as error:  # a picture is no reason to lose a run
        _log.warning("no timeline: %s", error)
    else:
        _log.info("wrote the measured timeline of one step to %s", path)
