"""Grouped GEMMs of experts: rows sorted by expert, times each expert's matrix.

One kernel runs all experts (bfloat16 on CUDA); elsewhere a loop does, for which the host has to know each expert's rows. Rows beyond
those of all experts are not computed: the kernel leaves them uninitialized, the loop zeros them.

The three GEMMs of a layer's forward and backward, with x [R, D], W [E, O, D] and the gradient g [R, O]:

    y = x W^T     dL/dx = g W     dL/dW = g^T x, grouped along the rows that are summed over

R rows, E experts, D width, O output width.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from petatron.kernels.cpu_matmul import matmul
from petatron.kernels.size_limits import grouped_gemm_supports
from petatron.kernels.strides import is_aligned
from petatron.kernels.weight_grad_gemm import matmul_into

ExpertCounts = Tensor | int
"""Rows of each expert: a vector [E] on the device, or one number for all of them."""
WriteGrad = Callable[[Tensor, Tensor, bool], None]
"""Writes a gradient, the second argument, to a buffer, or adds it to what is there."""


def write_grad(out: Tensor, grad: Tensor, accumulate: bool) -> None:
    """The reference of `WriteGrad`."""
    out.add_(grad) if accumulate else out.copy_(grad)


def looped_linear(x_RD: Tensor, weight_EOD: Tensor, counts: ExpertCounts) -> Tensor:
    """Runs one GEMM per expert: the reference. Zeros in rows beyond those of all experts."""
    if isinstance(counts, int):
        return matmul(x_RD.unflatten(0, (-1, counts)), weight_EOD.transpose(1, 2)).flatten(0, 1)
    *parts, unassigned = _split_by_expert(x_RD, counts)
    outputs = [matmul(part, weight.t()) for part, weight in zip(parts, weight_EOD.unbind(), strict=True)]
    return torch.cat([*outputs, unassigned.new_zeros(unassigned.shape[0], weight_EOD.shape[1])])


def _split_by_expert(rows: Tensor, counts: Tensor) -> tuple[Tensor, ...]:
    """Splits rows by expert, with the unassigned rows last. Synchronizes: the host has to know the counts."""
    sizes = counts.tolist()
    return rows.split([*sizes, rows.shape[0] - sum(sizes)])


def grouped_weight_grad(x_RD: Tensor, grad_RO: Tensor, counts: ExpertCounts) -> Tensor:
    """Returns the weight gradient of a grouped GEMM, [E, O, D]."""
    if isinstance(counts, int):
        grads, xs = (rows.unflatten(0, (-1, counts)) for rows in (grad_RO, x_RD))
        return matmul(grads.transpose(1, 2), xs)
    if _supports_grouped_mm(x_RD, grad_RO):
        return _grouped_mm(grad_RO.contiguous().t(), x_RD.contiguous(), counts)
    pairs = zip(_split_by_expert(grad_RO, counts)[:-1], _split_by_expert(x_RD, counts)[:-1], strict=True)
    return torch.stack([matmul(grad.t(), x) for grad, x in pairs])


def _grouped_mm(a: Tensor, b: Tensor, counts: Tensor) -> Tensor:
    """Computes a GEMM of rows with a matrix per group, or, of two matrices, one GEMM per group of the summed dimension."""
    return F.grouped_mm(a, b, offs=counts.cumsum(0, dtype=torch.int32))


def unsupported_reason(device: str, dtype: torch.dtype) -> str | None:
    """Returns what a kind of device and operands lack for the grouped kernel, whatever the shapes; None: nothing."""
    if device != "cuda":
        return "the device is no GPU"
    return None if dtype == torch.bfloat16 else "it takes bfloat16"


def _supports_grouped_mm(x_RD: Tensor, other: Tensor) -> bool:
    """The kernel copies 16 bytes at a time, so that a weight in a larger buffer must be aligned."""
    supported = (
        unsupported_reason(x_RD.device.type, x_RD.dtype) is None and x_RD.dtype == other.dtype and x_RD.shape[0] > 0
    )
    return supported and grouped_gemm_supports(x_RD.shape[1], *other.shape[1:]) and is_aligned(other)


@dataclass(frozen=True, slots=True)
class GroupedWeightGrad:
    """The deferred weight gradients of a grouped GEMM.

    The kernel writes them in bfloat16, so a float32 gradient needs another pass over them.
    """

    grad_RO: Tensor
    counts: ExpertCounts
    write_grad: WriteGrad = write_grad
    looped: bool = False
    needs_input: bool = True

    def write(self, x_RD: Tensor | None, out: Tensor, accumulate: bool) -> None:
        assert x_RD is not None
        if isinstance(self.counts, int) or (not self.looped and _supports_grouped_mm(x_RD, self.grad_RO)):
            self.write_grad(out, grouped_weight_grad(x_RD, self.grad_RO, self.counts), accumulate)
            return
        *grads, _ = _split_by_expert(self.grad_RO, self.counts)
        *xs, _ = _split_by_expert(x_RD, self.counts)
        for grad, x, expert_out in zip(grads, xs, out.unbind(), strict=True):
            matmul_into(expert_out, grad.t(), x, accumulate=accumulate)


@dataclass(frozen=True, slots=True)
class GroupedGemm:
    """Computes a GEMM of every expert's rows with its matrix, [E, O, D]; without autograd. `looped`: one expert after the other."""

    counts: ExpertCounts
    write_grad: WriteGrad = write_grad
    looped: bool = False

    def forward(
        self, x_RD: Tensor, weight_EOD: Tensor, bias: Tensor | None = None
    ) -> tuple[Tensor, tuple[Tensor, ...]]:
        """Returns the output, and the tensors to save for `backward`: none."""
        assert bias is None, "the biases of experts are added by `GroupedLinear`"
        return self._matmul(x_RD, weight_EOD), ()

    def backward(
        self, grad_RO: Tensor, weight_EOD: Tensor, saved: tuple[Tensor, ...]
    ) -> tuple[Tensor, GroupedWeightGrad]:
        """Returns the input's gradient, and the computation of the weights'."""
        grad_RO = grad_RO.contiguous()
        weight_grad = GroupedWeightGrad(grad_RO, self.counts, self.write_grad, self.looped)
        return self._matmul(grad_RO, weight_EOD.transpose(1, 2)), weight_grad

    def _matmul(self, rows: Tensor, weight: Tensor) -> Tensor:
        if isinstance(self.counts, int) or self.looped or not _supports_grouped_mm(rows, weight):
            return looped_linear(rows, weight, self.counts)
        return _grouped_mm(rows.contiguous(), weight.transpose(1, 2), self.counts)
