"""GEMMs of rows with bits that depend on the row alone: the reference, which calls the library with one shape.

Rows are multiplied in blocks of `BLOCK_ROWS`, of which the last is padded with zeros. A BLAS chooses its kernel, and so the order of its
sums, by the shape of a call, and that is always the same for a weight; within a call it treats all rows of a block alike.

R rows, D input width, O output width, E experts.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from petatron.base.autograd_op import AutogradOp, first_derivative
from petatron.kernels.compute_dtype import to_compute_dtype
from petatron.kernels.cpu_matmul import matmul
from petatron.kernels.linear_gemms import PLAIN_GEMM, Tensors, WeightGrad
from petatron.kernels.moe.grouped_gemm import ExpertCounts, GroupedGemm

BLOCK_ROWS = 32
_BATCH = 32
"""Matrices of one batched GEMM."""
_ALIGNMENT = 64


class RowGemmKernels(Protocol):
    """The interface of this module and its faster implementation."""

    def matmul_rows(self, x_RD: Tensor, weight_OD: Tensor, bias_O: Tensor | None = None) -> Tensor: ...

    def grouped_matmul_rows(self, x_RD: Tensor, weight_EOD: Tensor, counts: ExpertCounts) -> Tensor: ...


def matmul_rows(x_RD: Tensor, weight_OD: Tensor, bias_O: Tensor | None = None) -> Tensor:
    """Returns x W^T + b in the precision of x, rounded once."""
    wide, weight_DO = to_compute_dtype(x_RD).contiguous(), to_compute_dtype(weight_OD).t()
    rows, full_rows = wide.shape[0], wide.shape[0] // BLOCK_ROWS * BLOCK_ROWS
    if (
        wide.data_ptr() % _ALIGNMENT
    ):  # a library may treat the first elements of an array that is not aligned by themselves
        wide = wide.clone()
    out = wide.new_empty((rows, weight_DO.shape[1]))
    for start in range(0, full_rows, BLOCK_ROWS):
        stop = start + BLOCK_ROWS
        torch.mm(wide[start:stop], weight_DO, out=out[start:stop])
    if full_rows < rows:
        last = wide.new_zeros((BLOCK_ROWS, wide.shape[1]))
        last[: rows - full_rows] = wide[full_rows:]
        out[full_rows:] = (last @ weight_DO)[: rows - full_rows]
    if bias_O is not None:
        out += to_compute_dtype(bias_O)
    return out.to(x_RD.dtype)


def grouped_matmul_rows(x_RD: Tensor, weight_EOD: Tensor, counts: ExpertCounts) -> Tensor:
    """Returns the product of every expert's rows with its matrix; zeros in rows beyond those of all experts."""
    sizes = [counts] * weight_EOD.shape[0] if isinstance(counts, int) else counts.tolist()
    *parts, others = x_RD.split([*sizes, x_RD.shape[0] - sum(sizes)])
    outputs = [matmul_rows(part, weight) for part, weight in zip(parts, weight_EOD.unbind(), strict=True)]
    return torch.cat([*outputs, others.new_zeros(others.shape[0], weight_EOD.shape[1])])


def batched_matmul(a_NMK: Tensor, b_NKO: Tensor) -> Tensor:
    """Returns the products of pairs of matrices, always so many in a call; the number of pairs changes no bit."""
    count = a_NMK.shape[0]
    out = a_NMK.new_empty((count, a_NMK.shape[1], b_NKO.shape[2]))
    for start in range(0, count, _BATCH):
        a, b = a_NMK[start : start + _BATCH], b_NKO[start : start + _BATCH]
        if (missing := _BATCH - a.shape[0]) > 0:
            a, b = (torch.cat((x, x.new_zeros((missing, *x.shape[1:])))) for x in (a, b))
        out[start : start + _BATCH] = torch.bmm(a.contiguous(), b.contiguous())[: _BATCH - missing]
    return out


@dataclass(frozen=True, slots=True)
class RowGemm:
    """x W^T + b by such a kernel; its gradients by the library."""

    kernels: RowGemmKernels

    def forward(self, x_RD: Tensor, weight: Tensor, bias: Tensor | None = None) -> tuple[Tensor, Tensors]:
        return self.kernels.matmul_rows(x_RD, weight, bias), ()

    def forward_into(self, x_NRD: Tensor, weight: Tensor, out_NRO: Tensor) -> None:
        """See `ChunkedGemm`."""
        for x, out in zip(x_NRD, out_NRO):
            out.copy_(self.kernels.matmul_rows(x, weight))

    def backward(self, grad_RO: Tensor, weight: Tensor, saved: Tensors) -> tuple[Tensor, WeightGrad]:
        return PLAIN_GEMM.backward(grad_RO, weight, saved)


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupedRowGemm(GroupedGemm):
    """The GEMM of every expert's rows by such a kernel; its gradients as those of `GroupedGemm`."""

    kernels: RowGemmKernels

    def forward(
        self, x_RD: Tensor, weight_EOD: Tensor, bias: Tensor | None = None
    ) -> tuple[Tensor, tuple[Tensor, ...]]:
        assert bias is None, "the biases of experts are added by `GroupedLinear`"
        return self.kernels.grouped_matmul_rows(x_RD, weight_EOD, self.counts), ()


class _MultiplyRows(AutogradOp):
    @staticmethod
    def forward(ctx: Any, x_RD: Tensor, weight_OD: Tensor, kernels: RowGemmKernels) -> Tensor:
        ctx.save_for_backward(x_RD, weight_OD)
        return kernels.matmul_rows(x_RD, weight_OD)

    @staticmethod
    @first_derivative
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (grad_RO,), (x_RD, weight_OD) = grads, ctx.saved_tensors
        return matmul(grad_RO, weight_OD), matmul(grad_RO.t(), x_RD), None


def multiply_rows(x_RD: Tensor, weight_OD: Tensor, *, kernels: RowGemmKernels) -> Tensor:
    """x W^T under autograd."""
    return _MultiplyRows.apply(x_RD, weight_OD, kernels)  # pyright: ignore[reportReturnType]
