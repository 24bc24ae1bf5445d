"""RMSNorm of every head, then a gate: what a gated delta net does with the output of its states. The reference.

    out = y / rms(y) * weight * silu(z)          with the mean over the channels of a head; Kimi delta attention has sigmoid(z)

With n the normalized y, h = gradient x silu(z) and t = h x weight, the gradient of y is (t - n mean(t n)) / rms(y). Backward saves y, z
and nothing else.

R any number of dimensions, P head dim.
"""

from __future__ import annotations

from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from petatron.kernels.compute_dtype import to_compute_dtype

NormGate = Literal["silu", "sigmoid"]


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
