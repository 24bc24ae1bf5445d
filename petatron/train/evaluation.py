"""The loss of a split: the mean over its first batches, unless a stop comes first."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace

import torch

from petatron.data.batch_loader import BatchLoader
from petatron.train.signals import EvaluationStopCheck
from petatron.train.state.train_state import TrainState


@dataclass(frozen=True, slots=True)
class InterruptedEvaluation:
    """An evaluation that was stopped after so many batches."""

    reason: str
    completed_batches: int


@dataclass(frozen=True, slots=True)
class EvaluatedLosses:
    """The means of an evaluation: the objective, each loss by name, and the objective with other weights of the run, by their title."""

    loss: float
    named_losses: dict[str, float]
    loss_by_weights: dict[str, float] = field(default_factory=dict)


def evaluate(
    state: TrainState, loader: BatchLoader, stop_check: EvaluationStopCheck | None = None
) -> EvaluatedLosses | InterruptedEvaluation:
    """Returns the mean losses per token over the first `eval_iters` batches of a split; the same batches every time.

    Other weights that the run has (an average) are evaluated after the trained ones.
    """
    result: EvaluatedLosses | None = None
    contexts: dict[str, AbstractContextManager[None]] = {"": nullcontext()}
    contexts |= {component.title: component.in_model() for component in state.alternative_weights()}
    for number, (title, weights) in enumerate(contexts.items()):
        with weights:
            losses = _evaluate_weights(state, loader, stop_check, first_batch=number * state.run.train.eval_iters)
        if isinstance(losses, InterruptedEvaluation):
            return losses
        if result is None:
            result = losses
        else:
            result = replace(result, loss_by_weights={**result.loss_by_weights, title: losses.loss})
    assert result is not None
    return result


def _evaluate_weights(
    state: TrainState, loader: BatchLoader, stop_check: EvaluationStopCheck | None, *, first_batch: int
) -> EvaluatedLosses | InterruptedEvaluation:
    """Evaluates the weights that the model has now; `first_batch` counts the batches of other weights before."""
    size = state.run.train.global_batch_size
    model = state.model
    total = torch.zeros(len(model.io.losses), dtype=torch.float64, device=state.mesh.device)
    tokens = torch.zeros_like(total)
    for index in range(state.run.train.eval_iters):
        why = stop_check.stop_reason(first_batch + index) if stop_check is not None else None
        if why is not None:
            return InterruptedEvaluation(why, first_batch + index)
        batches = loader.next_step(size, index * size)
        losses, counts = model.evaluate_losses([batch.to(state.mesh.device) for batch in batches])
        total, tokens = total + losses, tokens + counts
    means = total / tokens
    objective, *by_name = torch.cat([model.objective(means).reshape(1), means]).tolist()
    return EvaluatedLosses(objective, {loss.name: mean for loss, mean in zip(model.io.losses, by_name, strict=True)})
