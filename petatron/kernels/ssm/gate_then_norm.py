"""RMSNorm of a gated activation, by groups of channels, in steps between which tensor-parallel ranks may add. The reference.

    v = y silu(z),   out = v / rms(v) * weight          with the mean over the channels of a group

Without a gate, v = y: the norm of a scan's output that is gated after it.

A group may be spread over ranks: the sum of squares, and in backward one more sum per row and group, are then added over them. With
n the normalized v and h = gradient x weight, the gradient of v is (h - n mean(h n)) / rms(v). Backward saves y, z and 1 / rms.

R rows, D channels of this rank, K groups of this rank.
"""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor

from petatron.kernels.compute_dtype import to_compute_dtype


def gated_square_sums(y_RD: Tensor, z_RD: Tensor | None, *, num_groups: int) -> Tensor:
    """Returns the sum of squares of every row and group [R, K]."""
    return _gated(y_RD, z_RD).unflatten(-1, (num_groups, -1)).square().sum(dim=-1)


def gate_then_norm(y_RD: Tensor, z_RD: Tensor | None, rstd_RK: Tensor, weight_D: Tensor) -> Tensor:
    """Returns the norm, given 1 / rms of every row and group."""
    normed = _normalized(y_RD, z_RD, rstd_RK)
    return normed.to(y_RD.dtype) * weight_D


def gate_then_norm_backward_sums(
    grad_RD: Tensor, y_RD: Tensor, z_RD: Tensor | None, rstd_RK: Tensor, weight_D: Tensor
) -> tuple[Tensor, Tensor]:
    """Returns the sum of h n of every row and group [R, K], and the gradient of the weight; both in at least float32."""
    normed, grad = _normalized(y_RD, z_RD, rstd_RK), to_compute_dtype(grad_RD)
    by_weight = grad * normed
    products = (by_weight * to_compute_dtype(weight_D)).unflatten(-1, (rstd_RK.shape[-1], -1))
    return products.sum(dim=-1), by_weight.sum(dim=0)


def gate_then_norm_backward(
    grad_RD: Tensor, y_RD: Tensor, z_RD: Tensor | None, rstd_RK: Tensor, weight_D: Tensor, means_RK: Tensor
) -> tuple[Tensor, Tensor | None]:
    """Returns the gradients of y and z, given the mean of h n of every row and group."""
    groups = (rstd_RK.shape[-1], -1)
    normed = _normalized(y_RD, z_RD, rstd_RK).unflatten(-1, groups)
    h = (to_compute_dtype(grad_RD) * to_compute_dtype(weight_D)).unflatten(-1, groups)
    grad = ((h - normed * means_RK[..., None]) * rstd_RK[..., None]).flatten(-2)
    if z_RD is None:
        return grad.to(y_RD.dtype), None
    z = to_compute_dtype(z_RD)
    sigmoid = z.sigmoid()
    grad_z = grad * to_compute_dtype(y_RD) * sigmoid * (1.0 + z * (1.0 - sigmoid))
    return (grad * z * sigmoid).to(y_RD.dtype), grad_z.to(z_RD.dtype)


def _gated(y_RD: Tensor, z_RD: Tensor | None) -> Tensor:
    y = to_compute_dtype(y_RD)
    return y if z_RD is None else y * F.silu(to_compute_dtype(z_RD))


def _normalized(y_RD: Tensor, z_RD: Tensor | None, rstd_RK: Tensor) -> Tensor:
    return (_gated(y_RD, z_RD).unflatten(-1, (rstd_RK.shape[-1], -1)) * rstd_RK[..., None]).flatten(-2)
