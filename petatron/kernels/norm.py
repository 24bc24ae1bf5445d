"""Normalisation of rows, with the residual sum in front of it: the reference, which also runs on the CPU.

    total = x + branch,   normal = total / rms(total) * weight                  (RMSNorm)
                          normal = (total - mean) / deviation * weight + bias   (LayerNorm)

A backward pass gets the gradient of `normal` and, since the residual stream goes on beside the norm, that of `total`. With y
the normalised row before the weight and h = gradient x weight, the row's gradient is

    RMSNorm     rstd (h - y mean(h y))
    LayerNorm   rstd (h - mean(h) - y mean(h y))

plus the gradient of `total`. On request it makes `normal` again, since everything needed for it is at hand: whoever multiplied
with it does not have to keep it. Statistics are in at least float32. R rows, D width.
"""

from __future__ import annotations

import torch
from torch import Tensor

from petatron.kernels.compute_dtype import widened


def rms_norm(
    x_RD: Tensor, weight_D: Tensor, *, eps: float, from_one: bool, branch: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """Total, normalised total and reciprocal root mean square; `from_one`: weights are kept as an offset from one."""
    total = x_RD if branch is None else x_RD + branch
    wide = widened(total)
    rstd_R = torch.rsqrt(wide.square().mean(dim=-1) + eps)
    return total, _scaled(wide * rstd_R[:, None], weight_D, total.dtype, from_one=from_one), rstd_R


def rms_norm_backward(
    grad_RD: Tensor,
    total_RD: Tensor,
    rstd_R: Tensor,
    weight_D: Tensor,
    *,
    from_one: bool,
    grad_total: Tensor | None = None,
    again: bool = True,
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Gradients of the total and of the weight (in at least float32), and the normalised total if it is wanted again."""
    normal, grad = widened(total_RD) * rstd_R[:, None], widened(grad_RD)
    inner = grad * _whole_weight(weight_D, grad.dtype, from_one=from_one)
    out = (inner - normal * (inner * normal).mean(dim=-1, keepdim=True)) * rstd_R[:, None]
    if grad_total is not None:
        out = out + grad_total
    made = _scaled(normal, weight_D, total_RD.dtype, from_one=from_one) if again else None
    return out.to(total_RD.dtype), (grad * normal).sum(dim=0), made


def layer_norm(
    x_RD: Tensor, weight_D: Tensor, bias_D: Tensor, *, eps: float, from_one: bool, branch: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """Total, normalised total, and mean and reciprocal deviation [2, R]."""
    total = x_RD if branch is None else x_RD + branch
    wide = widened(total)
    mean_R = wide.mean(dim=-1)
    rstd_R = torch.rsqrt((wide - mean_R[:, None]).square().mean(dim=-1) + eps)
    normal = (wide - mean_R[:, None]) * rstd_R[:, None]
    return total, _shifted(normal, weight_D, bias_D, total.dtype, from_one=from_one), torch.stack((mean_R, rstd_R))


def layer_norm_backward(
    grad_RD: Tensor,
    total_RD: Tensor,
    statistics: Tensor,
    weight_D: Tensor,
    bias_D: Tensor,
    *,
    from_one: bool,
    grad_total: Tensor | None = None,
    again: bool = True,
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """Gradients of the total, the weight and the bias, and the normalised total if it is wanted again."""
    mean_R1, rstd_R1 = statistics.unsqueeze(-1)
    normal, grad = (widened(total_RD) - mean_R1) * rstd_R1, widened(grad_RD)
    inner = grad * _whole_weight(weight_D, grad.dtype, from_one=from_one)
    along = (inner * normal).mean(dim=-1, keepdim=True)
    out = (inner - inner.mean(dim=-1, keepdim=True) - normal * along) * rstd_R1
    if grad_total is not None:
        out = out + grad_total
    made = _shifted(normal, weight_D, bias_D, total_RD.dtype, from_one=from_one) if again else None
    return out.to(total_RD.dtype), (grad * normal).sum(dim=0), grad.sum(dim=0), made


def _whole_weight(weight_D: Tensor, dtype: torch.dtype, *, from_one: bool) -> Tensor:
    return 1.0 + weight_D.to(dtype) if from_one else weight_D.to(dtype)


def _scaled(normal: Tensor, weight_D: Tensor, dtype: torch.dtype, *, from_one: bool) -> Tensor:
    if from_one:  # in float32 up to here, since one and a small offset need the digits
        return (normal * _whole_weight(weight_D, normal.dtype, from_one=True)).to(dtype)
    return normal.to(dtype) * weight_D


def _shifted(normal: Tensor, weight_D: Tensor, bias_D: Tensor, dtype: torch.dtype, *, from_one: bool) -> Tensor:
    weight = _whole_weight(weight_D, normal.dtype, from_one=from_one)
    return (normal * weight + bias_D.to(normal.dtype)).to(dtype)
