"""GEMMs of generation: x W^T for the few rows of a decode step, with a weight in its own precision or in FP8. The reference.

An FP8 weight is e4m3 with a scale per output row, a power of two. Such a product is exact in bfloat16, so a GEMM with it *is* the GEMM
with the rounded weight, whichever way it is computed: activations are not quantized.

R rows, D input width, O output width.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from petatron.kernels.cpu_matmul import matmul
from petatron.kernels.fp8.cast_and_gemm import E4M3, Fp8Operand, dequantize

PERMUTED_ORDER = (2, 0, 3, 1)
"""Which of four neighbors each byte of a permuted weight is."""
MAX_FP8_ROWS = 0
"""A GEMM of more rows dequantizes the whole FP8 weight first: here, every one."""
_NATURAL_ORDER = [PERMUTED_ORDER.index(number) for number in range(4)]


@dataclass(frozen=True, slots=True)
class Fp8Weight:
    """A weight [O, D] with a scale per output row, its values in the order in which the kernels read them."""

    values: Tensor
    scale: Tensor
    permuted: bool = False


class FewRowsGemmKernels(Protocol):
    """The interface of this module and its faster implementation."""

    MAX_FP8_ROWS: int

    def pack_fp8(self, operand: Fp8Operand, dtype: torch.dtype) -> Fp8Weight: ...

    def few_rows_gemm(self, x_RD: Tensor, weight: Tensor | Fp8Weight, counters: Tensor) -> Tensor: ...

    def dequantize_weight(self, weight: Fp8Weight, dtype: torch.dtype) -> Tensor: ...


def pack_fp8(operand: Fp8Operand, dtype: torch.dtype) -> Fp8Weight:
    """Returns a quantized weight as the kernels read it, for activations of a dtype."""
    assert operand.scaling == "rowwise"
    return Fp8Weight(operand.values, operand.scale)


def few_rows_gemm(x_RD: Tensor, weight: Tensor | Fp8Weight, counters: Tensor) -> Tensor:
    """x W^T in the precision of x. `counters` is a zeroed int32 workspace, zero again afterwards, which only the fast one needs."""
    return many_rows_gemm(x_RD, dequantize_weight(weight, x_RD.dtype) if isinstance(weight, Fp8Weight) else weight)


def many_rows_gemm(x_RD: Tensor, weight: Tensor) -> Tensor:
    """x W^T, for any number of rows."""
    return matmul(x_RD, weight.t())


def dequantize_weight(weight: Fp8Weight, dtype: torch.dtype) -> Tensor:
    """Returns the whole weight."""
    values = weight.values
    if weight.permuted:
        rows = values.view(torch.uint8).unflatten(1, (-1, 4))
        values = rows[:, :, _NATURAL_ORDER].flatten(1).view(E4M3)
    return dequantize(Fp8Operand(values, weight.scale, "rowwise")).to(dtype)
