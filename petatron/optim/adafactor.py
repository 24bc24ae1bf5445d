"""Adafactor (Shazeer and Stern 2018): the second moment of a matrix is stored as one value for each row and each column.

With g the gradient times the factor that unscales and clips, t the number of updates, and b = 1 - t^-c (c = `--adafactor-decay-rate`),

    R = b R + (1 - b) mean over columns of (g^2 + 1e-30)       C likewise, over rows; of a vector, V for each element
    u = g / sqrt(R C / mean R)                                 g / sqrt(V)
    u = u / max(1, RMS(u) / threshold)
    a = lr; at most 1 / sqrt(t) with a relative step; times max(1e-3, RMS(w)) with a scaled parameter
    m = beta1 m + (1 - beta1) a u                              a u itself without a first moment
    w = w - a decay w - m

Root mean squares are over a logical tensor: each of q, k and v, of gate and up, every expert. Whether the update is skipped is a device
scalar: then g counts as zero, and state and weights stay as they are, bit for bit.
"""

from __future__ import annotations

import torch
from torch import Tensor

from petatron.config.schema.optimizers.adafactor import AdafactorSpec
from petatron.optim.update_rules import CountedRule, RuleContext, StepScalars, TensorElements

_SQUARE_EPS = 1e-30
_WEIGHT_EPS = 1e-3


class AdafactorRule(CountedRule):
    """The parts of an Adafactor step: on elements, and from sums over rows, columns and whole tensors."""

    def __init__(self, spec: AdafactorSpec, context: RuleContext) -> None:
        super().__init__(context, dtype=torch.float64)
        self._settings = spec.settings

    start_step = CountedRule.count_update

    def _new_weight(self, step: StepScalars, dtype: torch.dtype) -> Tensor:
        """Returns the weight of this step in the second moment: t^-c, and 0 where it is skipped."""
        weight = self._num_updates.clamp(min=1.0) ** -self._settings.adafactor_decay_rate
        return weight.to(dtype) * step.kept(dtype)

    def measure(self, grad: Tensor, step: StepScalars) -> Tensor:
        dtype = torch.promote_types(grad.dtype, torch.float32)
        return step.scaled_grad(grad, dtype).square_().add_(_SQUARE_EPS)

    def update_means(self, state: Tensor, means: Tensor, step: StepScalars) -> None:
        state.lerp_(means, self._new_weight(step, state.dtype))

    def update_moments(self, elements: TensorElements, step: StepScalars) -> None:
        squares = elements.moments[-1]
        squares.lerp_(self.measure(elements.grad, step), self._new_weight(step, squares.dtype))

    def direction(self, elements: TensorElements, step: StepScalars) -> Tensor:
        grad = step.scaled_grad(elements.grad, elements.master.dtype)
        if elements.row is None or elements.column is None or elements.mean is None:
            return grad.mul_(elements.moments[-1].rsqrt())
        return grad.mul_((elements.row / elements.mean).rsqrt_()).mul_(elements.column.rsqrt())

    def apply(
        self, elements: TensorElements, direction: Tensor, rms: Tensor, weight_rms: Tensor, step: StepScalars
    ) -> None:
        settings, master, kept = self._settings, elements.master, step.kept(elements.master.dtype)
        lr: Tensor | float = step.lr
        if settings.adafactor_relative_step:
            lr = self._num_updates.clamp(min=1.0).rsqrt().clamp(max=step.lr).to(master.dtype)
        if settings.adafactor_scale_parameter:
            lr = weight_rms.clamp(min=_WEIGHT_EPS) * lr
        clipped = direction.mul_(lr / (rms / settings.adafactor_clip_threshold).clamp(min=1.0))
        # Before the first update, state is zero and the direction undefined.
        update = torch.where(step.skipped.bool(), 0.0, clipped)
        if settings.adafactor_beta1:
            average = elements.moments[0]
            average.lerp_(update, (1.0 - settings.adafactor_beta1) * kept)
            update = average * kept
        master.mul_(1.0 - step.weight_decay * lr * kept)
        master.sub_(update)
