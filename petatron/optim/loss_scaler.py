"""The loss scale that keeps float16 gradients inside their range, and the compute dtype of a run.

float16 gradients below 6e-8 vanish, so the loss is multiplied by a scale before the backward pass and the gradients are
divided by it before the update. The dynamic scale looks for the largest one that does not overflow. An overflowing step
spends one unit of patience; without patience left the scale halves, and goes on halving at every further overflow.
`loss_scale_window` clean steps in a row double the scale and give back the patience (`hysteresis` units). So a rare
stray overflow costs one step, not half of the scale.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from petatron.config.schema.precision import PrecisionConfig


def compute_dtype(precision: PrecisionConfig) -> torch.dtype:
    """The dtype of activations and of the weights used in the forward pass."""
    if precision.fp64:
        return torch.float64
    if precision.fp16:
        return torch.float16
    return torch.bfloat16 if precision.bf16 else torch.float32


class LossScaler:
    """A constant loss scale. Its state, plain JSON values, is empty: the value comes from the configuration."""

    def __init__(self, scale: float) -> None:
        self.scale = scale

    def update(self, overflow: bool) -> None:
        """Updates the scale after a step, given whether its gradients overflowed."""

    def state(self) -> dict[str, Any]:
        return {}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Continues from a saved state."""


class DynamicLossScaler(LossScaler):
    """A loss scale that halves after overflows and doubles after clean steps; the rule is at the top of this file.

    >>> scale = DynamicLossScaler(PrecisionConfig(fp16=True, initial_loss_scale=8.0, hysteresis=2, loss_scale_window=1))
    >>> for overflow in (True, True, False):
    ...     scale.update(overflow)
    ...     print(scale.scale)
    8.0
    4.0
    8.0
    """

    def __init__(self, precision: PrecisionConfig) -> None:
        super().__init__(precision.initial_loss_scale)
        self._min_scale = precision.min_loss_scale
        self._window = precision.loss_scale_window
        self._hysteresis = precision.hysteresis
        self._clean_steps = 0
        self._hysteresis_left = self._hysteresis

    def update(self, overflow: bool) -> None:
        if overflow:
            self._clean_steps = 0
            self._hysteresis_left -= 1
            if self._hysteresis_left <= 0:
                self.scale = max(self.scale / 2, self._min_scale)
            return
        self._clean_steps += 1
        if self._clean_steps >= self._window:
            self._clean_steps = 0
            self._hysteresis_left = self._hysteresis
            self.scale *= 2

    def state(self) -> dict[str, Any]:
        return {"value": self.scale, "clean_steps": self._clean_steps, "patience": self._hysteresis_left}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Continues from a saved state; an empty one (saved under a constant scale) leaves the initial scale."""
        if state:
            self.scale = float(state["value"])
            self._clean_steps = int(state["clean_steps"])
            self._hysteresis_left = int(state["patience"])


def build_loss_scaler(precision: PrecisionConfig) -> LossScaler:
    """Returns the loss scale of a run; only float16 has one that is not 1."""
    if not precision.fp16:
        return LossScaler(1.0)
    return DynamicLossScaler(precision) if precision.loss_scale is None else LossScaler(precision.loss_scale)
