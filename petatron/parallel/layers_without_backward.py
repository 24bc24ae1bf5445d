"""Layers below the first trainable parameter run without gradients: they save nothing, and have no autograd nodes."""

from __future__ import annotations

from collections.abc import Collection, Sequence

import torch
from torch import Tensor, nn

from petatron.layers.forward_context import ForwardContext
from petatron.models.stage_module import LayerRunner, StageModule


class _RunnerWithoutBackward:
    """Runs the first layers of a stage without gradients, as long as nothing they take requires one."""

    def __init__(self, run_layers: LayerRunner, without_backward: Collection[nn.Module]) -> None:
        self._run_layers, self._without_backward = run_layers, without_backward

    def __call__(self, layers: Sequence[nn.Module], x_SBD: Tensor, context: ForwardContext) -> Tensor:
        if torch.is_grad_enabled() and not any(x.requires_grad for x in (x_SBD, *context.tensors.values())):
            count = sum(layer in self._without_backward for layer in layers)
            with torch.no_grad():
                x_SBD = self._run_layers(layers[:count], x_SBD, context) if count else x_SBD
            layers = layers[count:]
        return self._run_layers(layers, x_SBD, context) if layers else x_SBD


def run_without_backward(stage: StageModule, num_layers: int) -> None:
    """Makes the first `num_layers` layers of a stage run without gradients. Called last, around recompute and offload."""
    if num_layers:
        first = set(list(stage.layers.values())[:num_layers])
        stage.run_layers = _RunnerWithoutBackward(stage.run_layers, first)
