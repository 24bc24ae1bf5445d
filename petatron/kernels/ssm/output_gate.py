"""Norms and gates of a recurrence's output: gate then norm, norm then gate, and a gate alone. The reference.

**Gate, then norm**, by groups of channels, in steps between which tensor-parallel ranks may add:

    v = y silu(z),   out = v / rms(v) * weight          with the mean over the channels of a group

Without a gate, v = y: the norm of a scan's output that is gated after it. A group may be spread over ranks: the sum of squares, and in
backward one more sum per row and group, are then added over them. With n the normalized v and h = gradient x weight, the gradient of v is
(h - n mean(h n)) / rms(v). Backward saves y, z and 1 / rms.

**Norm, then gate**, of every head: what a gated delta net does with the output of its states.

    out = y / rms(y) * weight * silu(z)          with the mean over the channels of a head; Kimi delta attention has sigmoid(z)

With n the normalized y, h = gradient x silu(z) and t = h x weight, the gradient of y is (t - n mean(t n)) / rms(y). Backward saves y and z
and nothing else; so does that of a gate alone, y silu(z).

R rows (of heads: any number of dimensions), D channels of this rank, K groups of this rank, P head dim.
"""

from __future__ import annotations

from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from petatron.kernels.compute_dtype import to_compute_dtype

NormGate = Literal["silu", "sigmoid"]


def gated_square_sums(y_RD: Tensor, z_RD: Tensor | None, *, num_groups: int) -> Tensor:
    """Returns the sum of squares of every row and group [R, K]."""
    return _gated(y_RD, z_RD).unflatten(-1, (num_groups, -1)).square().sum(dim=-1)


def gate_then_norm(y_RD: Tensor, z_RD: Tensor | None, rstd_RK: Tensor, weight_D: Tensor) -> Tensor:
    """Returns the norm, given 1 / rms of every row and group."""
    return _normalized(y_RD, z_RD, rstd_RK).to(y_RD.dtype) * weight_D


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
    return (grad.to(y_RD.dtype), None) if z_RD is None else silu_gate_backward(grad, y_RD, z_RD)


def _gated(y_RD: Tensor, z_RD: Tensor | None) -> Tensor:
    y = to_compute_dtype(y_RD)
    return y if z_RD is None else y * F.silu(to_compute_dtype(z_RD))


def _normalized(y_RD: Tensor, z_RD: Tensor | None, rstd_RK: Tensor) -> Tensor:
    return (_gated(y_RD, z_RD).unflatten(-1, (rstd_RK.shape[-1], -1)) * rstd_RK[..., None]).flatten(-2)


def silu_gate(y_RD: Tensor, z_RD: Tensor) -> Tensor:
    """Returns y silu(z) in the dtype of y."""
    return _gated(y_RD, z_RD).to(y_RD.dtype)


def silu_gate_backward(grad_RD: Tensor, y_RD: Tensor, z_RD: Tensor) -> tuple[Tensor, Tensor]:
    """Returns the gradients of y and z."""
    grad, z = to_compute_dtype(grad_RD), to_compute_dtype(z_RD)
    sigmoid = z.sigmoid()
    grad_z = grad * to_compute_dtype(y_RD) * sigmoid * (1.0 + z * (1.0 - sigmoid))
    return (grad * z * sigmoid).to(y_RD.dtype), grad_z.to(z_RD.dtype)


def norm_then_gate(y_RP: Tensor, z_RP: Tensor, weight_P: Tensor, *, eps: float, gate: NormGate = "silu") -> Tensor:
    """Returns the norm of y, times silu(z) or sigmoid(z), in the dtype of y."""
    normed, z = to_compute_dtype(y_RP) * _rstd(y_RP, eps), to_compute_dtype(z_RP)
    return (normed * to_compute_dtype(weight_P) * (F.silu(z) if gate == "silu" else z.sigmoid())).to(y_RP.dtype)


def norm_then_gate_backward(
    grad_RP: Tensor, y_RP: Tensor, z_RP: Tensor, weight_P: Tensor, *, eps: float, gate: NormGate = "silu"
) -> tuple[Tensor, Tensor, Tensor]:
    """Returns the gradients of y, z and, in at least float32, weight."""
    rstd, z, weight = _rstd(y_RP, eps), to_compute_dtype(z_RP), to_compute_dtype(weight_P)
    normed, grad, sigmoid = to_compute_dtype(y_RP) * rstd, to_compute_dtype(grad_RP), z.sigmoid()
    value, slope = sigmoid, sigmoid * (1.0 - sigmoid)
    if gate == "silu":
        value, slope = z * sigmoid, sigmoid * (1.0 + z * (1.0 - sigmoid))
    h = grad * value
    t = h * weight
    grad_y = (t - normed * (t * normed).mean(dim=-1, keepdim=True)) * rstd
    grad_z = grad * normed * weight * slope
    return grad_y.to(y_RP.dtype), grad_z.to(z_RP.dtype), (h * normed).flatten(0, -2).sum(dim=0)


def _rstd(y_RP: Tensor, eps: float) -> Tensor:
    return torch.rsqrt(to_compute_dtype(y_RP).square().mean(dim=-1, keepdim=True) + eps)
