"""GEMMs of generation: x W^T for the few rows of a decode step, with a weight in its own precision or in FP8. The reference.

An FP8 weight is e4m3 with a scale per output row, a power of two. Such a product is exact in bfloat16, so a GEMM with it *is* the GEMM
with the rounded weight, whichever way it is computed: activations are not quantised.

R rows, D input width, O output width.
"""

from __future__ import annotations

from typing import Protocol

from torch import Tensor

from petatron.kernels.fp8.cast_and_gemm import Fp8Operand, dequantise
from petatron.kernels.matmul import matmul


class FewRowsGemmKernels(Protocol):
    """The interface of this module and its faster implementation."""

    def few_rows_gemm(self, x_RD: Tensor, weight: Tensor | Fp8Operand, counters: Tensor) -> Tensor: ...


def few_rows_gemm(x_RD: Tensor, weight: Tensor | Fp8Operand, counters: Tensor) -> Tensor:
    """x W^T in the precision of x. `counters` is a zeroed int32 workspace, zero again afterwards, which only the fast one needs."""
    return many_rows_gemm(x_RD, weight)


def many_rows_gemm(x_RD: Tensor, weight: Tensor | Fp8Operand) -> Tensor:
    """x W^T, for any number of rows."""
    whole = dequantise(weight).to(x_RD.dtype) if isinstance(weight, Fp8Operand) else weight
    return matmul(x_RD, whole.t())
