"""One optimizer step."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

from petatron.models.batch import Batch
from petatron.optim.loss_scaler import DynamicLossScaler
from petatron.schedule.actions import TimedAction
from petatron.train.report.metrics import StepMetrics
from petatron.train.report.timeline import write_timeline
from petatron.train.state.train_state import TrainState


def train_step(state: TrainState, batches: Sequence[Batch]) -> StepMetrics:
    """Runs forward, backward, reduction, clipping and update; advances the state's progress.

    Nothing here waits for the device, except for one number per step under dynamic loss scaling.
    """
    run, progress, scale = state.run, state.progress, state.scaler.scale
    size = sum(batch.num_samples for batch in batches) * state.mesh.dp.size
    loss = state.model.train_step(batches, loss_scale=scale, timeline=_timeline_writer(state))
    zeros = state.optimizer.count_zero_grads() if run.log.log_num_zeros_in_grad else None
    now, decoupled = (progress.updates, progress.update_samples), state.decoupled_lr_schedule
    lr, decoupled_lr = state.lr_schedule.at(*now), None if decoupled is None else decoupled.at(*now)
    decay = state.weight_decay_schedule.at(*now)
    result = state.optimizer.step(lr=lr, decoupled_lr=decoupled_lr, weight_decay=decay, loss_scale=scale)

    dynamic = isinstance(state.scaler, DynamicLossScaler)
    overflow = dynamic and bool(result.skipped)
    state.scaler.update(overflow)
    progress.iteration += 1
    progress.consumed_samples += size
    progress.consumed_tokens += size * run.model.seq_length
    if not overflow:
        progress.updates += 1
        progress.update_samples += size
    return StepMetrics(
        iteration=progress.iteration,
        consumed_samples=progress.consumed_samples,
        tokens=size * run.model.seq_length,
        loss=loss,
        named_losses=state.model.named_losses if len(state.model.io.losses) > 1 else None,
        lr=lr,
        decoupled_lr=decoupled_lr,
        global_batch_size=size,
        grad_norm=result.grad_norm,
        loss_scale=scale,
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
