"""A gate on the output of a scan, y silu(z), without a norm. The reference.

Backward saves y and z and nothing else. R rows, D channels.
"""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor

from petatron.kernels.compute_dtype import to_compute_dtype


def silu_gate(y_RD: Tensor, z_RD: Tensor) -> Tensor:
    """Returns y silu(z) in the dtype of y."""
    return (to_compute_dtype(y_RD) * F.silu(to_compute_dtype(z_RD))).to(y_RD.dtype)


def silu_gate_backward(grad_RD: Tensor, y_RD: Tensor, z_RD: Tensor) -> tuple[Tensor, Tensor]:
    """Returns the gradients of y and z."""
    grad, z = to_compute_dtype(grad_RD), to_compute_dtype(z_RD)
    sigmoid = z.sigmoid()
    grad_z = grad * to_compute_dtype(y_RD) * sigmoid * (1.0 + z * (1.0 - sigmoid))
    return (grad * z * sigmoid).to(y_RD.dtype), grad_z.to(z_RD.dtype)
