"""Rows times a weight, and the two products of its backward pass, in one of several ways.

A weight's gradient is not returned but written: into the wide buffer in which a step's micro-batches are summed, by the product
that makes it. So no gradient exists in the weight's precision, and none is added in a second pass.

R rows, D input width, O output width, N blocks of rows.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor

from petatron.kernels.weight_grad_gemm import matmul_into

Tensors = tuple[Tensor, ...]


class WeightGrad(Protocol):
    """A weight's gradient that is still to be computed."""

    @property
    def needs_input(self) -> bool:
        """Whether `write` wants the rows that were multiplied."""
        ...

    def write(self, x_RD: Tensor | None, out: Tensor, *, accumulate: bool) -> None:
        """Write the gradient to a tensor, or add it."""
        ...


class Gemm(Protocol):
    """A way to multiply."""

    def forward(self, x_RD: Tensor, weight: Tensor, /) -> tuple[Tensor, Tensors]:
        """The product, and tensors to keep; none means that the rows themselves are wanted again."""
        ...

    def backward(self, grad_RO: Tensor, weight: Tensor, saved: Tensors, /) -> tuple[Tensor, WeightGrad]:
        """The gradient of the rows, and the one of the weight as work to be done."""
        ...


@runtime_checkable
class ChunkedGemm(Gemm, Protocol):
    """A GEMM whose output rows may be computed chunk by chunk, because none depends on the other rows' input."""

    def forward_into(self, x_NRD: Tensor, weight: Tensor, out_NRO: Tensor, /) -> None:
        """Compute some of the output rows in place; N blocks of rows may be spread in memory, in `x_NRD` and in `out_NRO`."""
        ...


@dataclass(frozen=True, slots=True)
class PlainWeightGrad:
    grad_RO: Tensor
    needs_input: bool = True

    def write(self, x_RD: Tensor | None, out: Tensor, *, accumulate: bool) -> None:
        assert x_RD is not None
        matmul_into(out, self.grad_RO.t(), x_RD, accumulate=accumulate)


class PlainGemm:
    """x W^T in the precision of both."""

    def forward(self, x_RD: Tensor, weight: Tensor) -> tuple[Tensor, Tensors]:
        return x_RD @ weight.t(), ()

    def forward_into(self, x_NRD: Tensor, weight: Tensor, out_NRO: Tensor) -> None:
        if len(x_NRD) == 1:
            torch.mm(x_NRD[0], weight.t(), out=out_NRO[0])
        else:  # a strided batched GEMM reads and writes spread blocks without a copy
            torch.bmm(x_NRD, weight.t().expand(len(x_NRD), -1, -1), out=out_NRO)

    def backward(self, grad_RO: Tensor, weight: Tensor, saved: Tensors) -> tuple[Tensor, WeightGrad]:
        return grad_RO @ weight, PlainWeightGrad(grad_RO)


PLAIN_GEMM = PlainGemm()
