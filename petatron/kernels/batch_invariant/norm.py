"""RMSNorm and LayerNorm with a fixed order of sums: see `kernels/norm.py`, whose derivatives these have. R rows, D width."""

from __future__ import annotations

import torch
from torch import Tensor

from petatron.kernels.batch_invariant.row_functions import fixed_order_mean
from petatron.kernels.compute_dtype import to_compute_dtype
from petatron.kernels.fp8.cast_and_gemm import update_amax
from petatron.kernels.norm import layer_norm_backward, rms_norm_backward, scaled, shifted

__all__ = ["layer_norm", "layer_norm_backward", "rms_norm", "rms_norm_backward"]


def rms_norm(
    x_RD: Tensor,
    weight_D: Tensor,
    *,
    eps: float,
    zero_centered_gamma: bool,
    branch: Tensor | None = None,
    amax: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Returns residual, normalized residual and reciprocal RMS."""
    residual = x_RD if branch is None else x_RD + branch
    wide = to_compute_dtype(residual)
    rstd_R1 = _reciprocal_root(fixed_order_mean(wide * wide) + eps)
    normed = scaled(wide * rstd_R1, weight_D, residual.dtype, zero_centered_gamma=zero_centered_gamma)
    if amax is not None:
        update_amax(normed, amax)
    return residual, normed, rstd_R1.squeeze(-1)


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
    mean_R1 = fixed_order_mean(wide)
    centered = wide - mean_R1
    rstd_R1 = _reciprocal_root(fixed_order_mean(centered * centered) + eps)
    normed = shifted(centered * rstd_R1, weight_D, bias_D, residual.dtype, zero_centered_gamma=zero_centered_gamma)
    return residual, normed, torch.cat((mean_R1.t(), rstd_R1.t()))


def _reciprocal_root(x: Tensor) -> Tensor:
    """1 / sqrt(x) in two operations that are rounded correctly everywhere."""
    return 1.0 / x.sqrt()
