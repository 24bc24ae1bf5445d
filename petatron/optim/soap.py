"""SOAP (Vyas et al. 2024): Adam in the basis of the eigenvectors of Shampoo's covariances, matrix by matrix.

With G the gradient of a matrix W times the factor that unscales and clips, t the number of updates,

    M = beta1 M + (1 - beta1) G
    G' = P^T G Q                         M' = P^T M Q
    V = beta2 V + (1 - beta2) G'^2
    N = P [ (M' / (1 - beta1^t)) / (sqrt(V / (1 - beta2^t)) + eps) ] Q^T
    W = W - lr decay W - lr N
    L = s L + (1 - s) G G^T              R = s R + (1 - s) G^T G         s = shampoo beta

and, after the first step and once in `--soap-precondition-frequency` steps, one power iteration with a QR decomposition brings P and Q
nearer to the eigenvectors of L and R: P = QR((L + d I) P). Both begin as the identity, so that the first update is Adam's. This is the
paper's algorithm 3 with the authors' bias correction; they instead find the first basis by an eigendecomposition and skip the first
update. d is 1e-6 of the mean eigenvalue: it moves no eigenvector, and where the covariance has no rank yet, as after few small batches,
a basis vector stays as it is instead of following rounding errors, which differ between layouts.

The step at which a basis is due is known to the host, so that no step synchronizes with it: steps that are skipped count, and leave P and Q
as they are, as everything else, bit for bit. A side longer than `--soap-max-precondition-dim` keeps the identity.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from petatron.config.schema.optimizers.soap import SoapSpec
from petatron.optim.update_rules import CountedRule, MatrixBatch, RuleContext, StepScalars

_DAMPING = 1e-6


class SoapRule(CountedRule):
    """Moments of elements before, everything in the basis of eigenvectors on whole matrices, and the update of elements after."""

    num_inputs = 2

    def __init__(self, spec: SoapSpec, context: RuleContext) -> None:
        super().__init__(context)
        self._settings, self._num_steps = spec.settings, 0

    def start_step(self, step: StepScalars) -> None:
        self.count_update(step)
        self._num_steps += 1

    def exchange_dtype(self, master_dtype: torch.dtype) -> torch.dtype:
        return master_dtype

    def directions(self, grad: Tensor, moments: Sequence[Tensor], step: StepScalars) -> Sequence[Tensor]:
        """Returns gradient and first moment, in the basis of the elements."""
        (average,) = moments
        grad = step.scaled_grad(grad, average.dtype)
        average.lerp_(grad, (1.0 - self._settings.soap_beta1) * step.kept(average.dtype))
        return [grad, average]

    def transform(self, matrices: MatrixBatch) -> Tensor:
        grad, average = matrices.inputs
        state, kept, settings = matrices.state, matrices.kept, self._settings
        left, right = state.get("soap_left_basis"), state.get("soap_right_basis")
        squares = state["soap_exp_avg_sq"]
        squares.lerp_(_project(grad, left, right).square_(), (1.0 - settings.soap_beta2) * kept)
        updates = self._num_updates.clamp(min=1.0).to(torch.float64)
        corrections = [(1.0 - beta**updates).to(squares.dtype) for beta in (settings.soap_beta1, settings.soap_beta2)]
        denominator = (squares / corrections[1]).sqrt_().add_(settings.soap_eps)
        direction = _project(average, left, right).div_(corrections[0]).div_(denominator)
        update = _project_back(direction, left, right)
        for side, matrix in (("soap_left", grad), ("soap_right", grad.mT)):
            if side in state:
                self._update_side(state[side], state[f"{side}_basis"], matrix, kept)
        return update

    def _update_side(self, covariance: Tensor, basis: Tensor, grad: Tensor, kept: Tensor) -> None:
        covariance.lerp_(grad @ grad.mT, (1.0 - self._settings.soap_shampoo_beta) * kept)
        if (self._num_steps - 1) % self._settings.soap_precondition_frequency == 0:  # the basis is due
            damping = covariance.diagonal(dim1=-2, dim2=-1).mean(-1).mul(_DAMPING)[:, None, None]
            rotated, _ = torch.linalg.qr(covariance @ basis + damping * basis)
            basis.copy_(torch.where(kept.bool(), rotated, basis))

    def apply(self, master: Tensor, update: Tensor, step: StepScalars, *, shape: tuple[int, int]) -> None:
        kept = step.kept(master.dtype)
        master.mul_(1.0 - step.lr * step.weight_decay * kept)
        master.sub_(update * (step.lr * kept))

    def scalar_state(self) -> dict[str, float]:
        return {**super().scalar_state(), "soap_steps": float(self._num_steps)}

    def load_scalar_state(self, state: Mapping[str, float]) -> None:
        super().load_scalar_state(state)
        self._num_steps = int(state["soap_steps"])


def _project(x: Tensor, left: Tensor | None, right: Tensor | None) -> Tensor:
    """Returns P^T X Q; None is the identity."""
    x = x.clone() if left is None else left.mT @ x
    return x if right is None else x @ right


def _project_back(x: Tensor, left: Tensor | None, right: Tensor | None) -> Tensor:
    """Returns P X Q^T."""
    x = x if left is None else left @ x
    return x if right is None else x @ right.mT
