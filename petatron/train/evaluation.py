"""The loss of a split: the mean over its first batches, unless a stop comes first."""

from __future__ import annotations

from dataclasses import dataclass

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
    """The means of an evaluation: the objective, and each loss by name."""

    loss: float
    named_losses: dict[str, float]


def evaluate(
    state: TrainState, loader: BatchLoader, stop_check: EvaluationStopCheck | None = None
) -> EvaluatedLosses | InterruptedEvaluation:
    """Returns the mean losses per token over the first `eval_iters` batches of a split; the same batches every time."""
    size = state.run.train.global_batch_size
    model = state.model
    total = torch.zeros(len(model.io.losses), dtype=torch.float64, device=state.mesh.device)
    tokens = torch.zeros_like(total)
    for index in range(state.run.train.eval_iters):
        why = stop_check.stop_reason(index) if stop_check is not None else None
        if why is not None:
            return InterruptedEvaluation(why, index)
        batches = loader.next_step(size, index * size)
        losses, counts = model.evaluate_losses([batch.to(state.mesh.device) for batch in batches])
        total, tokens = total + losses, tokens + counts
    means = total / tokens
    objective, *by_name = torch.cat([model.objective(means).reshape(1), means]).tolist()
    return EvaluatedLosses(objective, {loss.name: mean for loss, mean in zip(model.io.losses, by_name, strict=True)})
