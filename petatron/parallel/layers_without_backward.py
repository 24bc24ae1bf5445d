"""Layers below the first trainable parameter run without gradients: they save nothing, and have no autograd nodes."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from petatron.layers.forward_context import ForwardContext
from petatron.models.stage_module import StageModule


def run_without_backward(stage: StageModule, num_layers: int) -> None:
    """Makes the first `num_layers` layers of a stage run without gradients, as long as nothing they take requires one.

    Called last, around recompute and offload.
    """
    first, run_layers = set(list(stage.layers.values())[:num_layers]), stage.run_layers

    def run(layers: Sequence[nn.Module], x_SBD: Tensor, context: ForwardContext) -> Tensor:
        if torch.is_grad_enabled() and not any(x.requires_grad for x in (x_SBD, *context.tensors.values())):
            count = sum(layer in first for layer in layers)
            with torch.no_grad():
                x_SBD = run_layers(layers[:count], x_SBD, context) if count else x_SBD
            layers = layers[count:]
        return run_layers(layers, x_SBD, context) if layers else x_SBD

    if num_layers:
        stage.run_layers = run
