"""One optimizer step."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

from petatron.models.batch import Batch
from petatron.models.objective import names_losses
from petatron.optim.loss_scaler import DynamicLossScaler
from petatron.schedule.actions import TimedAction
from petatron.train.report.metrics import StepMetrics
from petatron.train.report.timeline import write_timeline
from petatron.train.state.train_state import TrainState


def train_step(state: TrainState, batches: Sequence[Batch]) -> StepMetrics:
    """Runs forward, backward, reduction, clipping and update; advances the state's progress.

    Nothing here waits for the device, except for one number per step under dynamic loss scaling.
    """
    run, progress, settings = state.run, state.progress, state.update_settings()
    loss = state.model.train_step(batches, loss_scale=settings["loss_scale"], timeline=_timeline_writer(state))
    zeros = state.optimizer.count_zero_grads() if run.log.log_num_zeros_in_grad else None
    result = state.optimizer.step(**settings)
    size = state.advance(batches, result)
    dynamic = isinstance(state.scaler, DynamicLossScaler)
    return StepMetrics(
        iteration=progress.iteration,
        consumed_samples=progress.consumed_samples,
        tokens=size * batches[0].rows_per_sample * run.model.seq_length,
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


def _timeline_writer(state: TrainState) -> Callable[[list[TimedAction]], None] | None:
    """Returns the writer of this step's measured timeline, if this step is measured."""
    log, next_iteration = state.run.log, state.progress.iteration + 1
    if log.pipeline_timeline is None or next_iteration != log.pipeline_timeline_step:
        return None
    return partial(write_timeline, Path(log.pipeline_timeline), state.model)
