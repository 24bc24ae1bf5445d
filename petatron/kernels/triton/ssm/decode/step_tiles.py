"""Triton helpers that the decode kernels of all recurrences share: exact softplus, and contiguous rows."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor


@triton.jit
def softplus(x):
    """Returns log(1 + exp(x)) = max(x, 0) + log(1 + u), u = exp(-|x|), with log(1 + u) = 2 artanh(u / (2 + u)) by its series.

    Step sizes begin at 0.001: the hardware's logarithm of 1.001 has an error of 1e-4 of itself. The series ends with an error of 1e-9
    for u = 1, and far less for smaller ones.
    """
    u = tl.exp(-tl.abs(x))
    z = u / (2.0 + u)
    square = z * z
    series = 1.0 / 17.0
    series = series * square + 1.0 / 15.0
    series = series * square + 1.0 / 13.0
    series = series * square + 1.0 / 11.0
    series = series * square + 1.0 / 9.0
    series = series * square + 1.0 / 7.0
    series = series * square + 1.0 / 5.0
    series = series * square + 1.0 / 3.0
    return tl.maximum(x, 0.0) + 2.0 * z * (series * square + 1.0)


def contiguous_tokens(x_B: Tensor) -> Tensor:
    """Returns a tensor whose tokens [B, ...] are each contiguous, at any distance from each other: columns of a GEMM's output are."""
    return x_B if x_B[0].is_contiguous() else x_B.contiguous()
