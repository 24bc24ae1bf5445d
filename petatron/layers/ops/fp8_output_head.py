"""The output head's two GEMMs of backward in FP8; its logits stay in the precision of the weights.

    logits = x W^T        as without FP8
    dx = g8 W8            g8 = cast(gradient of the logits), W8 = cast(W): columns of W, once for all chunks of a micro-batch; caching
                          them for a step would take V x D bytes beside all activations, to save 0.1 % of a micro-batch of 16,384 tokens
    dW += g8^T x8         x8 = cast(x)

The gradient of a logit is w (p - onehot), with w the token's weight in the loss and p its probability. Most are far smaller than w, so
they are e5m2, which has 32 powers of two, whatever the recipe of the layers; and none is larger than w, so the largest weight
is the amax, and no pass over the logits is needed for it. One scale holds for the whole tensor. It comes from the weights of all tokens,
which tensor-parallel ranks share: a shard of the vocabulary has the quantized gradients that one rank would have. Scales of W and x come
from the shard and from the chunk; they are powers of two, so only numbers in the subnormal range may differ for it.

cuBLAS's FP8 GEMM does not accumulate. So a chunk's weight gradient is computed for some rows of the vocabulary at a time and added,
which needs memory for those alone.

R rows (tokens of a chunk), D hidden, V vocabulary rows on this device.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from torch import Tensor

from petatron.kernels.fp8.amax import amax_of
from petatron.kernels.fp8.cast_and_gemm import E4M3, E5M2, Fp8Kernels, Fp8Operand
from petatron.kernels.linear_gemms import PLAIN_GEMM, Gemm, Tensors, WeightGrad
from petatron.kernels.size_limits import FP8_SIZE_MULTIPLE
from petatron.layers.ops.fp8_gemm import LogOnce, fallback_message, sizes_fit

_ACCUMULATE_CHUNK_ROWS = 8192
"""Vocabulary rows whose gradient is computed at a time where it is added to another."""


class Fp8OutputHeadGemm:
    """The output head's GEMMs for one micro-batch."""

    def __init__(self, kernels: Fp8Kernels, loss_weights_T: Tensor, report: Callable[[str], None]) -> None:
        self._kernels, self._report = kernels, report
        self._amax = amax_of(loss_weights_T)
        self._weight_columns: Fp8Operand | None = None

    def forward(self, x_RD: Tensor, weight_VD: Tensor, bias: Tensor | None = None) -> tuple[Tensor, Tensors]:
        return PLAIN_GEMM.forward(x_RD, weight_VD, bias)

    def backward(self, grad_RV: Tensor, weight_VD: Tensor, saved: Tensors) -> tuple[Tensor, WeightGrad]:
        if not sizes_fit((grad_RV.shape[0], *weight_VD.shape), FP8_SIZE_MULTIPLE):
            self._report(fallback_message(grad_RV.shape[0], weight_VD.shape, FP8_SIZE_MULTIPLE))
            return PLAIN_GEMM.backward(grad_RV, weight_VD, saved)
        if self._weight_columns is None:
            self._weight_columns = self._kernels.cast_tensor(weight_VD.detach(), E4M3, orientation="columns").columns
        grad = self._kernels.cast_tensor(grad_RV, E5M2, amax=self._amax)
        x_grad = self._kernels.gemm(grad.rows, self._weight_columns, dtype=grad_RV.dtype, fast=False)
        return x_grad, _OutputWeightGrad(grad.columns, self._kernels)


@dataclass(frozen=True, slots=True)
class _OutputWeightGrad:
    """dW = g8^T x8."""

    grad: Fp8Operand
    kernels: Fp8Kernels
    needs_input: bool = True

    def write(self, x_RD: Tensor | None, out: Tensor, accumulate: bool) -> None:
        assert x_RD is not None
        x = self.kernels.cast_tensor(x_RD, E4M3, orientation="columns").columns
        if not accumulate:
            self.kernels.gemm(self.grad, x, dtype=out.dtype, fast=False, out=out)
            return
        for start in range(0, out.shape[0], _ACCUMULATE_CHUNK_ROWS):
            part = slice(start, start + _ACCUMULATE_CHUNK_ROWS)
            rows = replace(self.grad, values=self.grad.values[part])
            out[part].add_(self.kernels.gemm(rows, x, dtype=out.dtype, fast=False))


def fp8_output_head_factory(kernels: Fp8Kernels) -> Callable[[Tensor], Gemm]:
    """Returns a function that makes the GEMMs of a micro-batch from its tokens' weights in the loss."""
    report = LogOnce()
    return lambda loss_weights_T: Fp8OutputHeadGemm(kernels, loss_weights_T, report)
