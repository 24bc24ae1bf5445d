"""Matrix products of which every expert has its own: rows that lie together by expert, times each expert's matrix.

One kernel does all experts (bfloat16 on CUDA); elsewhere a loop does, for which the host has to know how many rows each has.
Rows beyond those of all experts are not computed: the kernel leaves whatever was in memory there, the loop zeros.

The three products of a layer's backward and forward pass, with x [R, D], W [E, O, D] and the gradient g [R, O]:

    y = x W^T     dL/dx = g W     dL/dW = g^T x, grouped along the rows that are summed over

R rows, E experts, D width, O output width.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from petatron.kernels.alignment import begins_aligned
from petatron.kernels.weight_grad_gemm import matmul_into

Counts = Tensor | int
"""Rows of each expert: a vector [E] on the device, or one number for all of them."""


def looped_linear(x_RD: Tensor, weight_EOD: Tensor, counts: Counts) -> Tensor:
    """One product after the other: the reference. Zeros in rows beyond those of all experts."""
    if isinstance(counts, int):
        return torch.bmm(x_RD.unflatten(0, (-1, counts)), weight_EOD.transpose(1, 2)).flatten(0, 1)
    *parts, rest = _split(x_RD, counts)
    made = [F.linear(part, weight) for part, weight in zip(parts, weight_EOD.unbind(), strict=True)]
    return torch.cat([*made, rest.new_zeros(rest.shape[0], weight_EOD.shape[1])])


def _split(rows: Tensor, counts: Tensor) -> tuple[Tensor, ...]:
    """The rows of each expert, and what is left. The host has to know the counts."""
    sizes = counts.tolist()
    return rows.split([*sizes, rows.shape[0] - sum(sizes)])


def grouped_weight_grad(x_RD: Tensor, grad_RO: Tensor, counts: Counts) -> Tensor:
    """The gradient of the weights of a grouped product, [E, O, D]."""
    if isinstance(counts, int):
        grads, xs = (rows.unflatten(0, (-1, counts)) for rows in (grad_RO, x_RD))
        return torch.bmm(grads.transpose(1, 2), xs)
    if _has_grouped_kernel(x_RD, grad_RO):
        return _one_kernel(grad_RO.contiguous().t(), x_RD.contiguous(), counts)
    pairs = zip(_split(grad_RO, counts)[:-1], _split(x_RD, counts)[:-1], strict=True)
    return torch.stack([grad.t() @ x for grad, x in pairs])


def _one_kernel(a: Tensor, b: Tensor, counts: Tensor) -> Tensor:
    """Rows times a matrix per group, or, of two matrices, one product per group of what is summed over."""
    return F.grouped_mm(a, b, offs=counts.cumsum(0, dtype=torch.int32))


def lacks(device: str, dtype: torch.dtype) -> str | None:
    """What a kind of device and operands lack for the one kernel, whatever the shapes; None: nothing."""
    if device != "cuda":
        return "the device is no GPU"
    return None if dtype == torch.bfloat16 else "it takes bfloat16"


def _has_grouped_kernel(x_RD: Tensor, other: Tensor) -> bool:
    """The kernel copies 16 bytes at a time: widths are multiples of 8, and a weight in a larger buffer begins at one."""
    right_kind = lacks(x_RD.device.type, x_RD.dtype) is None and x_RD.dtype == other.dtype and x_RD.shape[0] > 0
    widths = (x_RD.shape[1], *other.shape[1:])
    return right_kind and all(width % 8 == 0 for width in widths) and begins_aligned(other)


@dataclass(frozen=True, slots=True)
class GroupedWeightGrad:
    """What is left to do of a grouped product's backward pass: the weights' gradients, written where they belong.

    The kernel writes them in bfloat16, so a float32 gradient takes another pass over them.
    """

    grad_RO: Tensor
    counts: Counts
    looped: bool = False
    needs_input: bool = True

    def write(self, x_RD: Tensor | None, out: Tensor, *, accumulate: bool) -> None:
        assert x_RD is not None
        if isinstance(self.counts, int) or (not self.looped and _has_grouped_kernel(x_RD, self.grad_RO)):
            made = grouped_weight_grad(x_RD, self.grad_RO, self.counts)
            out.add_(made) if accumulate else out.copy_(made)
            return
        *grads, _ = _split(self.grad_RO, self.counts)
        *xs, _ = _split(x_RD, self.counts)
        for grad, x, its in zip(grads, xs, out.unbind(), strict=True):
            matmul_into(its, grad.t(), x, accumulate=accumulate)


@dataclass(frozen=True, slots=True)
class GroupedMultiplication:
    """Every expert's rows times its own matrix, [E, O, D]; knows nothing of autograd. `looped`: one expert after the other."""

    counts: Counts
    looped: bool = False

    def forward(self, x_RD: Tensor, weight_EOD: Tensor) -> tuple[Tensor, tuple[Tensor, ...]]:
        """The product, and what has to be kept for `backward`: nothing."""
        return self._times(x_RD, weight_EOD), ()

    def backward(
        self, grad_RO: Tensor, weight_EOD: Tensor, kept: tuple[Tensor, ...]
    ) -> tuple[Tensor, GroupedWeightGrad]:
        """The input's gradient, and the job that makes the weights'."""
        grad_RO = grad_RO.contiguous()
        return self._times(grad_RO, weight_EOD.transpose(1, 2)), GroupedWeightGrad(grad_RO, self.counts, self.looped)

    def _times(self, rows: Tensor, weight: Tensor) -> Tensor:
        if isinstance(self.counts, int) or self.looped or not _has_grouped_kernel(rows, weight):
            return looped_linear(rows, weight, self.counts)
        return _one_kernel(rows.contiguous(), weight.transpose(1, 2), self.counts)
