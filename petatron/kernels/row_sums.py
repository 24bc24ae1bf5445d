"""Sums of rows: the gradient of a bias, from that of the output it was added to.

R rows, D width.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

import torch
from torch import Tensor

from petatron.kernels.compute_dtype import compute_dtype
from petatron.kernels.registry import KernelContext, choose_kernel

SumRows = Callable[[Tensor, Tensor, bool], None]


@cache
def fastest_sum_rows(device: torch.device, dtype: torch.dtype) -> SumRows:
    """Returns the fastest `sum_rows` for rows of a dtype on a device."""
    return choose_kernel("sums of rows", KernelContext.of(device, dtype, allow_compile=False)).functions.sum_rows


def sum_rows(x_RD: Tensor, out_D: Tensor, accumulate: bool) -> None:
    """Writes the sum of the rows to `out`, or adds it; the sum is in at least float32, rounded once."""
    dtype = out_D.dtype
    if dtype.itemsize < 4:
        dtype = compute_dtype(dtype)
        out_D.copy_(torch.sum(x_RD, dim=0, dtype=dtype).add_(out_D if accumulate else 0.0))
    elif accumulate:
        out_D.add_(torch.sum(x_RD, dim=0, dtype=dtype))
    else:
        torch.sum(x_RD, dim=0, dtype=dtype, out=out_D)
