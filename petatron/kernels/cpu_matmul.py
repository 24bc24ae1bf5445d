"""Half-precision GEMMs on the CPU: widened to float32 where the CPU has no instructions for the operands' dtype.

Without such instructions PyTorch emulates the dtype element by element or in a kernel with conversions inside its loops: a GEMM is 5 to
100 times slower than in float32, and on some CPUs the library reports its fallback on stderr with a C++ stack. Widening both operands,
one float32 GEMM and one rounding is the same arithmetic, since a half-precision GEMM accumulates in float32 and rounds once too.

Every GEMM of operands that may be in half precision on a CPU calls `matmul` or asks `is_widened`, so the decision is made here only.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from petatron.base.autograd_op import AutogradOp, first_derivative
from petatron.base.device import cpu_instructions
from petatron.kernels.compute_dtype import to_compute_dtype
from petatron.kernels.strides import is_aligned

# Instruction sets, by dtype, for which PyTorch has a GEMM. Not those that only convert or only work on vectors.
_GEMM_INSTRUCTIONS: dict[torch.dtype, tuple[str, ...]] = {
    torch.bfloat16: ("avx512_bf16", "amx_bf16", "avx_ne_convert", "bf16"),
    torch.float16: ("avx512_fp16", "amx_fp16"),
}


def unsupported_reason(device: str, dtype: torch.dtype) -> str | None:
    """Returns why GEMMs of this dtype are widened to float32 on a kind of device; None: they are not."""
    return missing_instructions(dtype, cpu_instructions()) if device == "cpu" else None


@cache
def missing_instructions(dtype: torch.dtype, instructions: frozenset[str]) -> str | None:
    """Returns which instructions for GEMMs of a dtype a CPU with these lacks; None: none are needed, or it has some."""
    needed = _GEMM_INSTRUCTIONS.get(dtype, ())
    if not needed or instructions.intersection(needed):
        return None
    return f"this CPU has no {str(dtype).removeprefix('torch.')} instructions ({', '.join(needed)})"


def is_widened(a: Tensor, b: Tensor) -> bool:
    """Whether the GEMM of two tensors is widened; operands of two dtypes are PyTorch's to refuse."""
    dtype = a.dtype
    if dtype not in _GEMM_INSTRUCTIONS or a.device.type != "cpu" or b.dtype != dtype:
        return False
    return unsupported_reason("cpu", dtype) is not None


def matmul(a: Tensor, b: Tensor) -> Tensor:
    """a b in the dtype of both, also for batches of matrices."""
    if a.is_cuda or not is_widened(a, b):
        return torch.mm(a, b) if a.dim() == b.dim() == 2 else a @ b
    if torch.is_grad_enabled() and (a.requires_grad or b.requires_grad):
        return _WidenedMatmul.apply(a, b)  # pyright: ignore[reportReturnType]
    return _widened(a, b)


def linear(x_RD: Tensor, weight_OD: Tensor, bias_O: Tensor | None = None) -> Tensor:
    """x W^T + b, rounded once, without autograd; PyTorch transposes at less cost to the host than a view of Python's."""
    if x_RD.is_cuda:
        # In a flat buffer a bias may begin anywhere, and one that is not aligned keeps cuBLAS from its fast kernels: a copy costs less.
        return F.linear(x_RD, weight_OD, bias_O if bias_O is None or is_aligned(bias_O) else bias_O.clone())
    if not is_widened(x_RD, weight_OD):
        return F.linear(x_RD, weight_OD, bias_O)
    if bias_O is None:
        return _widened(x_RD, weight_OD.t())
    wide = torch.addmm(to_compute_dtype(bias_O), to_compute_dtype(x_RD), to_compute_dtype(weight_OD).t())
    return wide.to(x_RD.dtype)


def _widened(a: Tensor, b: Tensor) -> Tensor:
    return (to_compute_dtype(a) @ to_compute_dtype(b)).to(a.dtype)


class _WidenedMatmul(AutogradOp):
    """Saves operands as they are: autograd by itself would save the widened ones, twice the bytes. Both are batches of one shape."""

    @staticmethod
    def forward(ctx: Any, a: Tensor, b: Tensor) -> Tensor:
        assert a.shape[:-2] == b.shape[:-2]
        ctx.save_for_backward(a, b)
        return _widened(a, b)

    @staticmethod
    @first_derivative
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, Tensor | None]:
        a, b = ctx.saved_tensors
        a_wanted, b_wanted = ctx.needs_input_grad
        return _widened(grads[0], b.mT) if a_wanted else None, _widened(a.mT, grads[0]) if b_wanted else None
