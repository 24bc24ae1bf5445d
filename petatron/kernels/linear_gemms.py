"""The three GEMMs of a linear layer (forward, input gradient, weight gradient), in one of several implementations.

A bias is added by the forward GEMM. Its gradient, the sum of the output gradient's rows, is no part of the other two.

A weight's gradient is not returned but written: its GEMM accumulates into the wider buffer that sums a step's micro-batches. So no
gradient exists in the weight's precision, and none is added in a second pass.

R rows, D input width, O output width, N blocks of rows.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor

from petatron.kernels.cpu_matmul import is_widened, linear, matmul
from petatron.kernels.weight_grad_gemm import matmul_into

Tensors = tuple[Tensor, ...]


class WeightGrad(Protocol):
    """A weight's gradient that is still to be computed."""

    @property
    def needs_input(self) -> bool:
        """Whether `write` needs the GEMM's input."""
        ...

    def write(self, x_RD: Tensor | None, out: Tensor, accumulate: bool) -> None:
        """Writes the gradient to a tensor, or adds it."""


class Gemm(Protocol):
    """An implementation of a linear's GEMMs."""

    def forward(self, x_RD: Tensor, weight: Tensor, bias: Tensor | None = None, /) -> tuple[Tensor, Tensors]:
        """Returns the output, and tensors to save for backward; none means that the input itself is saved or recomputed."""
        ...

    def backward(self, grad_RO: Tensor, weight: Tensor, saved: Tensors, /) -> tuple[Tensor, WeightGrad]:
        """Returns the gradient of the input, and that of the weight as work to be done."""
        ...


@runtime_checkable
class ChunkedGemm(Gemm, Protocol):
    """A GEMM whose output rows may be computed chunk by chunk, because none depends on the other rows' input."""

    def forward_into(self, x_NRD: Tensor, weight: Tensor, out_NRO: Tensor, /) -> None:
        """Computes some of the output rows in place; the N blocks of rows may be strided, in `x_NRD` and in `out_NRO`."""


@dataclass(slots=True)  # not frozen: a layer builds four in every backward pass, and that costs three times as much
class PlainWeightGrad:
    grad_RO: Tensor
    needs_input: bool = True

    def write(self, x_RD: Tensor | None, out: Tensor, accumulate: bool) -> None:
        assert x_RD is not None
        matmul_into(out, self.grad_RO.t(), x_RD, accumulate=accumulate)


@dataclass(slots=True)
class AdaptedWeightGrad:
    """The gradient of a weight, and those of the parameters of the adapter beside it: (parameter, gradient) each."""

    of_weight: WeightGrad
    of_params: tuple[tuple[Tensor, WeightGrad], ...]

    @property
    def needs_input(self) -> bool:
        return self.of_weight.needs_input

    def write(self, x_RD: Tensor | None, out: Tensor, accumulate: bool) -> None:
        self.of_weight.write(x_RD, out, accumulate)


def grads_of_adapter(job: WeightGrad) -> tuple[tuple[Tensor, WeightGrad], ...]:
    """Returns the gradients of an adapter's parameters that are computed with a weight's."""
    assert isinstance(job, AdaptedWeightGrad)
    return job.of_params


class PlainGemm:
    """x W^T + b in the precision of both; cuBLAS adds the bias before it rounds, in the same kernel."""

    def forward(self, x_RD: Tensor, weight: Tensor, bias: Tensor | None = None) -> tuple[Tensor, Tensors]:
        return linear(x_RD, weight, bias), ()

    def forward_into(self, x_NRD: Tensor, weight: Tensor, out_NRO: Tensor) -> None:
        if is_widened(x_NRD, weight):
            out_NRO.copy_(matmul(x_NRD, weight.t()))
        elif len(x_NRD) == 1:
            torch.mm(x_NRD[0], weight.t(), out=out_NRO[0])
        else:  # a strided batched GEMM reads and writes strided blocks without a copy
            torch.bmm(x_NRD, weight.t().expand(len(x_NRD), -1, -1), out=out_NRO)

    def backward(self, grad_RO: Tensor, weight: Tensor, saved: Tensors) -> tuple[Tensor, WeightGrad]:
        return matmul(grad_RO, weight), PlainWeightGrad(grad_RO)


PLAIN_GEMM = PlainGemm()
