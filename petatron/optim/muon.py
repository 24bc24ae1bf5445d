"""Muon (Jordan et al. 2024): momentum, orthogonalized matrix by matrix.

With g the gradient times the factor that unscales and clips, of a matrix W of n rows and m columns,

    b = momentum b + (1 - momentum) g       d = b, or with Nesterov's momentum  d = momentum b + (1 - momentum) g
    W = W - lr decay W - lr s O             O = Newton-Schulz of d, s = a factor for its shape

    spectral        s = sqrt(max(n, m))       a step as large as AdamW's with --muon-extra-scale-factor 0.2 (Liu et al. 2025)
    unit_rms_norm   s = sqrt(n / m)           outputs change by the same root mean square
    shape_scaling   s = sqrt(max(1, n / m))   Jordan's

Weight decay is decoupled, as in AdamW. Whether the update is skipped is a device scalar: then g counts as zero, and all factors are such
that momentum and weights stay as they are, bit for bit.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from petatron.config.schema.optimizers.muon import MuonSpec
from petatron.kernels.optimizer.newton_schulz import newton_schulz, step_coefficients
from petatron.optim.update_rules import MatrixBatch, RuleContext, StepScalars, UncountedRule


class MuonRule(UncountedRule):
    """The parts of a Muon step: on elements before and after, and on whole matrices between."""

    num_inputs = 1

    def __init__(self, spec: MuonSpec, context: RuleContext) -> None:
        settings = spec.settings
        self._momentum = settings.muon_momentum
        self._nesterov = settings.muon_nesterov
        self._scale_mode = settings.muon_scale_mode
        self._extra_scale_factor = settings.muon_extra_scale_factor
        self._coefficients = step_coefficients(settings.muon_coefficient_type, settings.muon_num_ns_steps)
        self._narrow = settings.muon_fp32_matmul_prec == "medium"

    def start_step(self, step: StepScalars) -> None:
        """Does nothing: a step depends on no earlier one."""

    def exchange_dtype(self, master_dtype: torch.dtype) -> torch.dtype:
        """Returns the dtype in which matrices are exchanged and orthogonalized."""
        return torch.bfloat16 if self._narrow and master_dtype == torch.float32 else master_dtype

    def directions(self, grad: Tensor, moments: Sequence[Tensor], step: StepScalars) -> Sequence[Tensor]:
        """Accumulates a gradient into the momentum in place, and returns the update direction of these elements."""
        (momentum,) = moments
        dtype = momentum.dtype
        grad = step.scaled_grad(grad, dtype)
        momentum.lerp_(grad, (1.0 - self._momentum) * step.kept(dtype))
        return [grad.lerp_(momentum, self._momentum) if self._nesterov else momentum]

    def transform(self, matrices: MatrixBatch) -> Tensor:
        """Orthogonalizes matrices of one shape in one batch."""
        return newton_schulz(matrices.inputs[0], self._coefficients)

    def _scale(self, shape: tuple[int, int]) -> float:
        """Returns the factor of an orthogonal update of this shape, without the learning rate."""
        rows, columns = shape
        factors = {
            "spectral": max(rows, columns),
            "unit_rms_norm": rows / columns,
            "shape_scaling": max(1.0, rows / columns),
        }
        return self._extra_scale_factor * math.sqrt(factors[self._scale_mode])

    def apply(self, master: Tensor, update: Tensor, step: StepScalars, *, shape: tuple[int, int]) -> None:
        kept = step.kept(master.dtype)
        master.mul_(1.0 - step.lr * step.weight_decay * kept)
        master.sub_(update.to(master.dtype) * (step.lr * self._scale(shape) * kept))
