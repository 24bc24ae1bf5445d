"""Executes a schedule: the only code that calls forward and backward of a model in training."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext

import torch
from torch import Tensor, nn

from petatron.models.base import Batch
from petatron.parallel.gradients import GradientSync
from petatron.parallel.schedule import Action


class Pipeline:
    """A rank's stage of the model and its gradient reduction."""

    def __init__(self, model: nn.Module, gradients: GradientSync | None = None) -> None:
        self._model = model
        self._gradients = gradients

    def run(
        self,
        schedule: Sequence[Action],
        batches: Sequence[Batch],
        *,
        backward_scale: Callable[[Tensor], Tensor] | None = None,
    ) -> Tensor:
        """Perform the actions; returns the sum of the token losses of all micro-batches, detached.

        backward_scale turns a micro-batch's loss sum into what its backward pass starts from (divided by the global token
        count, multiplied by the loss scale).
        """
        backwards = [action.micro_batch for action in schedule if action.kind == "backward"]
        total = torch.zeros((), dtype=torch.float64, device=batches[0].tokens.device)
        pending: dict[int, Tensor] = {}
        for action in schedule:
            batch = batches[action.micro_batch]
            if action.kind == "forward":
                with nullcontext() if backwards else torch.no_grad():
                    losses_SB = self._model(batch)
                    loss = (losses_SB * batch.loss_mask.t()).sum()
                total += loss.detach()
                if backwards:
                    pending[action.micro_batch] = loss
            else:
                assert self._gradients is not None and backward_scale is not None
                last = action.micro_batch == backwards[-1]
                with self._gradients.last_micro_batch() if last else nullcontext():
                    backward_scale(pending.pop(action.micro_batch)).backward()
        return total
