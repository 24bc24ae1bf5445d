"""Normalization of rows, fused with the residual addition before it: the reference, which also runs on the CPU.

    residual = x + branch,   normed = residual / rms(residual) * weight               (RMSNorm)
                             normed = (residual - mean) / deviation * weight + bias   (LayerNorm; the bias may be missing)

Backward gets the gradient of `normed` and, since the residual stream continues past the norm, that of `residual`. With y the
normalized row before the weight and h = gradient x weight, the row's gradient is

    RMSNorm     rstd (h - y mean(h y))
    LayerNorm   rstd (h - mean(h) - y mean(h y))

plus the gradient of `residual`. On request it recomputes `normed` from what it has read: the next GEMM need not save it. Statistics
are in at least float32. R rows, D width.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from petatron.kernels.compute_dtype import to_compute_dtype
from petatron.kernels.fp8.cast_and_gemm import update_amax

SubmitWeightGrad = Callable[[Callable[[Tensor, bool], object]], None]
"""Receives `write(out, accumulate)`, which writes a weight's gradient to `out` or adds it, and calls it before returning."""


def rms_norm(
    x_RD: Tensor,
    weight_D: Tensor,
    *,
    eps: float,
    zero_centered_gamma: bool,
    branch: Tensor | None = None,
    amax: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Returns residual, normalized residual and reciprocal RMS; `zero_centered_gamma`: weights are stored as an offset from one.

    `amax` [1] float32 is updated with the normalized residual.
    """
    residual = x_RD if branch is None else x_RD + branch
    wide = to_compute_dtype(residual)
    # The bits of a square, which is a power with an exponent to look at: that takes longer than a few rows' multiplication.
    rstd_R1 = (wide * wide).mean(dim=-1, keepdim=True).add_(eps).rsqrt_()
    normed = scaled(wide * rstd_R1, weight_D, residual.dtype, zero_centered_gamma=zero_centered_gamma)
    if amax is not None:
        update_amax(normed, amax)
    return residual, normed, rstd_R1.squeeze(-1)


def rms_norm_backward(
    grad_RD: Tensor,
    residual_RD: Tensor,
    rstd_R: Tensor,
    weight_D: Tensor,
    *,
    zero_centered_gamma: bool,
    grad_residual: Tensor | None = None,
    recompute_output: bool = True,
    submit_weight_grad: SubmitWeightGrad | None = None,
    amax: Tensor | None = None,
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """Returns the gradients of the residual and of the weight (in at least float32), and the normalized residual if `recompute_output`.

    `submit_weight_grad` gets the weight's gradient instead of the caller. `amax` is updated with the residual's gradient.
    """
    normed, grad = to_compute_dtype(residual_RD) * rstd_R[:, None], to_compute_dtype(grad_RD)
    inner = grad * _effective_weight(weight_D, grad.dtype, zero_centered_gamma=zero_centered_gamma)
    out = (inner - normed * (inner * normed).mean(dim=-1, keepdim=True)) * rstd_R[:, None]
    if grad_residual is not None:
        out = out + grad_residual
    output = (
        scaled(normed, weight_D, residual_RD.dtype, zero_centered_gamma=zero_centered_gamma)
        if recompute_output
        else None
    )
    x_grad, weight_grad = out.to(residual_RD.dtype), (grad * normed).sum(dim=0)
    if amax is not None:
        update_amax(x_grad, amax)
    if submit_weight_grad is None:
        return x_grad, weight_grad, output
    submit_weight_grad(lambda buffer, accumulate: buffer.add_(weight_grad) if accumulate else buffer.copy_(weight_grad))
    return x_grad, None, output


def layer_norm(
    x_RD: Tensor,
    weight_D: Tensor,
    bias_D: Tensor | None = None,
    *,
    eps: float,
    zero_centered_gamma: bool,
    branch: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Returns residual, normalized residual, and mean and reciprocal deviation [2, R]."""
    residual = x_RD if branch is None else x_RD + branch
    wide = to_compute_dtype(residual)
    mean_R1 = wide.mean(dim=-1, keepdim=True)
    centered = wide - mean_R1
    rstd_R1 = centered.square().mean(dim=-1, keepdim=True).add_(eps).rsqrt_()
    normed = shifted(centered * rstd_R1, weight_D, bias_D, residual.dtype, zero_centered_gamma=zero_centered_gamma)
    return residual, normed, torch.cat((mean_R1.t(), rstd_R1.t()))


def layer_norm_backward(
    grad_RD: Tensor,
    residual_RD: Tensor,
    statistics: Tensor,
    weight_D: Tensor,
    bias_D: Tensor | None = None,
    *,
    zero_centered_gamma: bool,
    grad_residual: Tensor | None = None,
    recompute_output: bool = True,
) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None]:
    """Returns the gradients of residual, weight and bias (None without one), and the normalized residual if `recompute_output`."""
    mean_R1, rstd_R1 = statistics.unsqueeze(-1)
    normed, grad = (to_compute_dtype(residual_RD) - mean_R1) * rstd_R1, to_compute_dtype(grad_RD)
    inner = grad * _effective_weight(weight_D, grad.dtype, zero_centered_gamma=zero_centered_gamma)
    projection = (inner * normed).mean(dim=-1, keepdim=True)
    out = (inner - inner.mean(dim=-1, keepdim=True) - normed * projection) * rstd_R1
    if grad_residual is not None:
        out = out + grad_residual
    output = (
        shifted(normed, weight_D, bias_D, residual_RD.dtype, zero_centered_gamma=zero_centered_gamma)
        if recompute_output
        else None
    )
    return out.to(residual_RD.dtype), (grad * normed).sum(dim=0), None if bias_D is None else grad.sum(dim=0), output


def _effective_weight(weight_D: Tensor, dtype: torch.dtype, *, zero_centered_gamma: bool) -> Tensor:
    weight = weight_D if weight_D.dtype == dtype else weight_D.to(dtype)
    return 1.0 + weight if zero_centered_gamma else weight


def scaled(normed: Tensor, weight_D: Tensor, dtype: torch.dtype, *, zero_centered_gamma: bool) -> Tensor:
    if zero_centered_gamma:  # float32 up to here, since one plus a small offset needs the digits
        return (normed * _effective_weight(weight_D, normed.dtype, zero_centered_gamma=True)).to(dtype)
    return (normed if normed.dtype == dtype else normed.to(dtype)) * weight_D


def shifted(
    normed: Tensor, weight_D: Tensor, bias_D: Tensor | None, dtype: torch.dtype, *, zero_centered_gamma: bool
) -> Tensor:
    shifted = normed * _effective_weight(weight_D, normed.dtype, zero_centered_gamma=zero_centered_gamma)
    if bias_D is not None:
        shifted = shifted + (bias_D if bias_D.dtype == normed.dtype else bias_D.to(normed.dtype))
    return shifted if shifted.dtype == dtype else shifted.to(dtype)
