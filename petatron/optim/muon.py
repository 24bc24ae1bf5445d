"""Muon (Jordan et al. 2024): momentum, orthogonalised matrix by matrix.

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
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from petatron.config.schema.training import OptimizerConfig
from petatron.kernels.optimizer.newton_schulz import newton_schulz, step_coefficients
from petatron.optim.update_rules import StepScalars


class MuonRule:
    """The parts of a Muon step: on elements before and after, and on whole matrices between."""

    moments: Mapping[str, torch.dtype | None] = {"momentum_buffer": None}

    def __init__(self, config: OptimizerConfig) -> None:
        self._momentum = config.muon_momentum
        self._nesterov = config.muon_nesterov
        self._scale_mode = config.muon_scale_mode
        self._extra_scale_factor = config.muon_extra_scale_factor
        self._coefficients = step_coefficients(config.muon_coefficient_type, config.muon_num_ns_steps)
        self._narrow = config.muon_fp32_matmul_prec == "medium"

    def iteration_dtype(self, master_dtype: torch.dtype) -> torch.dtype:
        """Returns the dtype in which matrices are exchanged and orthogonalised."""
        return torch.bfloat16 if self._narrow and master_dtype == torch.float32 else master_dtype

    def accumulate(self, grad: Tensor, momentum: Tensor, step: StepScalars) -> Tensor:
        """Accumulates a gradient into the momentum in place, and returns the update direction of these elements."""
        dtype = momentum.dtype
        skipped = step.skipped.bool()
        grad = torch.where(skipped, 0.0, grad.to(dtype) * step.grad_factor.to(dtype))
        momentum.lerp_(grad, (1.0 - self._momentum) * (1.0 - step.skipped.to(dtype)))
        return grad.lerp_(momentum, self._momentum) if self._nesterov else momentum

    def orthogonalize(self, matrices: Sequence[Tensor]) -> list[Tensor]:
        """Orthogonalises matrices, those of one shape in one batch."""
        found: dict[int, Tensor] = {}
        by_shape: dict[torch.Size, list[int]] = {}
        for index, matrix in enumerate(matrices):
            by_shape.setdefault(matrix.shape, []).append(index)
        for indices in by_shape.values():
            results = newton_schulz(torch.stack([matrices[index] for index in indices]), self._coefficients)
            found |= dict(zip(indices, results))
        return [found[index] for index in range(len(matrices))]

    def scale(self, shape: tuple[int, int]) -> float:
        """Returns the factor of an orthogonal update of this shape, without the learning rate."""
        rows, columns = shape
        factors = {
            "spectral": max(rows, columns),
            "unit_rms_norm": rows / columns,
            "shape_scaling": max(1.0, rows / columns),
        }
        return self._extra_scale_factor * math.sqrt(factors[self._scale_mode])

    def apply(self, master: Tensor, orthogonal: Tensor, step: StepScalars, *, scale: float) -> None:
        """Applies weight decay and the update to master weights, in place."""
        kept = 1.0 - step.skipped.to(master.dtype)
        master.mul_(1.0 - step.lr * step.weight_decay * kept)
        master.sub_(orthogonal.to(master.dtype) * (step.lr * scale * kept))

    def scalar_state(self) -> dict[str, float]:
        return {}

    def load_scalar_state(self, state: Mapping[str, float]) -> None:
        """Nothing is counted."""
