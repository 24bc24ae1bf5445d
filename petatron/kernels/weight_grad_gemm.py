"""A GEMM whose output buffer has another precision: accumulates weight gradients."""

from __future__ import annotations

import torch
from torch import Tensor

from petatron.kernels.compute_dtype import to_compute_dtype
from petatron.kernels.cpu_matmul import is_widened


def unsupported_reason(device: str) -> str | None:
    """Returns why a kind of device has no GEMM with half-precision operands and a float32 output; None: it has one."""
    return None if device == "cuda" else "the device is no GPU"


def matmul_into(out: Tensor, a: Tensor, b: Tensor, *, accumulate: bool) -> None:
    """out = a b, or out += a b, with a float32 `out` for half-precision operands: one kernel on CUDA, no temporary."""
    if not a.is_cuda and out.dtype == a.dtype and is_widened(a, b):
        total = to_compute_dtype(out) if accumulate else a.new_zeros((), dtype=torch.float32)
        out.copy_(torch.addmm(total, to_compute_dtype(a), to_compute_dtype(b), beta=1 if accumulate else 0))
    elif a.dtype == out.dtype:
        torch.addmm(out, a, b, beta=1 if accumulate else 0, out=out)
    elif a.is_cuda:
        if accumulate:
            torch.addmm(out, a, b, out_dtype=out.dtype, out=out)  # pyright: ignore[reportCallIssue]
        else:
            torch.mm(a, b, out_dtype=out.dtype, out=out)  # pyright: ignore[reportCallIssue]
    else:
        torch.addmm(out, a.to(out.dtype), b.to(out.dtype), beta=1 if accumulate else 0, out=out)
