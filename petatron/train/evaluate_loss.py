"""Evaluates the loss of a split: the mean over its first batches, unless a stop comes first."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import torch

from petatron.config.schema.run import RunConfig
from petatron.config.schema.training import TrainConfig
from petatron.data.batch_loader import StepLoader
from petatron.models.objective import names_losses
from petatron.parallel.pipeline.objective_losses import add_totals
from petatron.train.build_run import evaluation_batch_size
from petatron.train.report.log_records import validation_record
from petatron.train.state.train_state import TrainState
from petatron.train.stop_monitor import EvaluationStopCheck


@dataclass(frozen=True, slots=True)
class InterruptedEvaluation:
    """An evaluation that was stopped, and the number of batches it completed."""

    reason: str
    completed_batches: int


@dataclass(frozen=True, slots=True)
class EvaluatedLosses:
    """The means of an evaluation: what training minimizes, each loss and each metric of the objective by name, and the first with other
    weights of the run, by their title.
    """

    loss: float
    named_losses: dict[str, float]
    metrics: dict[str, float]
    loss_by_weights: dict[str, float] = field(default_factory=dict)


def evaluation_is_due(train: TrainConfig, iteration: int) -> bool:
    """Whether a run evaluates after an iteration that is not its last."""
    begins = train.start_eval_at_iter or 0
    return train.eval_interval is not None and iteration % train.eval_interval == 0 and iteration >= begins


def evaluated_batches(run: RunConfig, num_samples: int | None, *, all_samples: bool = False) -> list[tuple[int, int]]:
    """Returns the first sample and the size of each batch that an evaluation of a set reads: the first `eval_iters`, or all.

    The last one of all is as large as micro-batches of all ranks allow.
    """
    size = evaluation_batch_size(run)
    if not all_samples:
        return [(index * size, size) for index in range(run.train.eval_iters)]
    assert num_samples is not None, "an external loader is refused with --full-validation"
    step = (run.train.eval_micro_batch_size or run.train.micro_batch_size) * run.parallel.data_parallel_size
    end = num_samples // step * step
    return [(first, min(size, end - first)) for first in range(0, end, size)]


def evaluate(
    state: TrainState,
    loader: StepLoader,
    stop_check: EvaluationStopCheck | None = None,
    *,
    batches: Sequence[tuple[int, int]] | None = None,
) -> EvaluatedLosses | InterruptedEvaluation:
    """Returns the mean losses per token over the first `eval_iters` batches of a split, or over others; the same every time.

    Other weights that the run has (an average) are evaluated after the trained ones.
    """
    batches = evaluated_batches(state.run, loader.num_samples) if batches is None else batches
    results: dict[str, EvaluatedLosses] = {}
    contexts: dict[str, AbstractContextManager[None]] = {"": nullcontext()}
    contexts |= {component.title: component.in_model() for component in state.alternative_weights()}
    for number, (title, weights) in enumerate(contexts.items()):
        with weights:
            losses = _evaluate_weights(state, loader, stop_check, batches, first_batch=number * len(batches))
        if isinstance(losses, InterruptedEvaluation):
            return losses
        results[title] = losses
    trained = results.pop("")
    return replace(trained, loss_by_weights={title: losses.loss for title, losses in results.items()})


def _evaluate_weights(
    state: TrainState,
    loader: StepLoader,
    stop_check: EvaluationStopCheck | None,
    batches: Sequence[tuple[int, int]],
    *,
    first_batch: int,
) -> EvaluatedLosses | InterruptedEvaluation:
    """Evaluates the weights that the model has now; `first_batch` counts the batches of other weights before."""
    model, objective = state.model, state.model.objective
    names = [spec.name for spec in (*objective.losses, *objective.metric_specs)]
    total = torch.zeros(len(names), dtype=torch.float64, device=state.mesh.device)
    counts = torch.zeros_like(total)
    for index, (first_sample, size) in enumerate(batches):
        why = stop_check.stop_reason(first_batch + index) if stop_check is not None else None
        if why is not None:
            return InterruptedEvaluation(why, first_batch + index)
        micro_batches = loader.next_step(size, first_sample)
        sums, valid = model.evaluate_objective([batch.to(state.mesh.device) for batch in micro_batches])
        total = sums if index == 0 else add_totals(total, sums, objective)
        counts = add_totals(counts, valid, objective)
    means, split = total / counts, len(objective.losses)
    loss = model.total_loss(means[:split])
    minimized, *by_name = torch.cat([loss.reshape(1), means]).tolist()
    named = list(zip(names, by_name, strict=True))
    return EvaluatedLosses(minimized, dict(named[:split]), dict(named[split:]))


def evaluation_record(
    state: TrainState, result: EvaluatedLosses, *, split: Literal["valid", "test"], dataset: str | None = None
) -> dict[str, Any]:
    """Returns the record of an evaluation; each loss is named where training names it."""
    return validation_record(
        iteration=state.progress.iteration,
        lm_loss=result.loss,
        named_losses=result.named_losses if names_losses(state.model.objective) else None,
        objective_metrics=result.metrics,
        loss_by_weights=result.loss_by_weights,
        consumed_samples=state.progress.consumed_samples,
        split=split,
        dataset=dataset,
    )
