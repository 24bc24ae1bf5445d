"""Call a decoder, or a stage of one, as a function of one tensor."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from petatron.models.batch import Batch
from petatron.models.decoder import HIDDEN, LM_LOSS
from petatron.models.stage_inputs_outputs import StageOutput


def run_stage(
    model: nn.Module,
    batch: Batch,
    x_SBD: Tensor | None = None,
    *,
    loss_weights_SB: Tensor | None = None,
    **options: Any,
) -> Tensor:
    """Token losses [S, B] from the last stage, else the next stage's input."""
    inputs = {} if x_SBD is None else {HIDDEN: x_SBD}
    weights = None if loss_weights_SB is None else {LM_LOSS: loss_weights_SB}
    output: StageOutput = model(batch, inputs, loss_weights=weights, **options)
    [result] = (output.tensors | output.losses).values()
    return result
