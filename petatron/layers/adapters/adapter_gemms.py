"""The GEMMs of a linear with an adapter, as one `Gemm`: whatever surrounds a linear's GEMM surrounds its adapter's too.

A `Gemm` gets the whole input of a rank, after it is gathered, and its output is what is summed over ranks, if anything is. An adapter
inside of it needs no communication of activations, whichever way the weight is sharded:

    column    y_t = x W_t^T + (s x A^T) B_t^T           A on every rank, B_t the rows of W_t; x is gathered once, for both
              dx  = sum over t of (g_t W_t + s g_t B_t A)   one reduction, of the sum
    row       y   = sum over t of (x_t W_t^T + (s x_t A_t^T) B^T)   A_t the columns of W_t, B on every rank

What is on every rank, A or B, gets from each a summand of its gradient, which is summed with the others at the end of a step
(`Shard.partial_grad`). The same holds for FP8, whose GEMM is the inner one, for chunks that overlap communication, and for experts,
whose inner GEMMs are grouped.

LoRA (Hu et al. 2021; rsLoRA, Kalajdzievski 2023, has another s) saves the [R, rank] activations h = s x A^T besides what the inner GEMM
saves, and needs the input for the gradient of A alone. DoRA (Liu et al. 2024) has a magnitude m for every output o,

    y_o = m_o / n_o (W_o + s B_o A) x,     n_o = |W_o + s B_o A|, a constant to backward,

and saves the output before the magnitude, u. With V = A A^T, n_o^2 = |W_o|^2 + 2 s (W A^T)_o . B_o + s^2 B_o V B_o^T, without a tensor of
the size of W. IA3 (Liu et al. 2022) scales outputs, or the input of a linear that is sharded along its input.

R rows, D input width, O output width.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from petatron.kernels.block_quantization import DequantizingGemm
from petatron.kernels.compute_dtype import compute_dtype
from petatron.kernels.linear_gemms import AdaptedWeightGrad, ChunkedGemm, Gemm, Tensors, WeightGrad
from petatron.kernels.row_sums import fastest_sum_rows


class AdapterPart(NamedTuple):
    """An A and a B: the rows of A in those of all parts, the rows of B likewise, and the outputs that they are added to."""

    a_rows: slice
    b_rows: slice
    outputs: slice


@dataclass(slots=True)
class LoraGemm:
    """x W^T + b + s (x A^T) B^T; `mask`, if there is one, returns what the adapter's input is multiplied by."""

    base: Gemm
    low_rank: Gemm
    a: Tensor
    b: Tensor
    parts: tuple[AdapterPart, ...]
    scale: float
    mask: Callable[[Tensor], Tensor] | None = None

    def forward(self, x_RD: Tensor, weight: Tensor, bias: Tensor | None = None) -> tuple[Tensor, Tensors]:
        y_RO, saved = self.base.forward(x_RD, weight, bias)
        mask = () if self.mask is None else (self.mask(x_RD),)
        h = self._down(x_RD, mask)
        self._add_up(h, y_RO)
        return y_RO, (h, *mask, *saved)

    def forward_into(self, x_NRD: Tensor, weight: Tensor, out_NRO: Tensor) -> None:
        """See `ChunkedGemm`; saves nothing, so backward computes h once more."""
        assert isinstance(self.base, ChunkedGemm) and self.mask is None
        self.base.forward_into(x_NRD, weight, out_NRO)
        for x_RD, out_RO in zip(x_NRD, out_NRO):
            self._add_up(self._down(x_RD, ()), out_RO)

    def _down(self, x_RD: Tensor, mask: Tensors) -> Tensor:
        for factor in mask:
            x_RD = x_RD * factor
        return self.low_rank.forward(x_RD, self.a)[0] * self.scale

    def _add_up(self, h: Tensor, y_RO: Tensor) -> None:
        for part in self.parts:
            y_RO[:, part.outputs] += self.low_rank.forward(h[:, part.a_rows], self.b[..., part.b_rows, :])[0]

    def backward(self, grad_RO: Tensor, weight: Tensor, saved: Tensors) -> tuple[Tensor, WeightGrad]:
        masked = self.mask is not None
        h, mask, saved = (saved[0] if saved else None), saved[1 : 1 + masked], saved[1 + masked :]
        x_grad, of_weight = self.base.backward(grad_RO, weight, saved)
        of_parts, h_grads = list[WeightGrad](), list[Tensor]()
        for part in self.parts:
            h_grad, of_part = self.low_rank.backward(grad_RO[:, part.outputs], self.b[..., part.b_rows, :], ())
            h_grads.append(h_grad)
            of_parts.append(of_part)
        h_grad = (h_grads[0] if len(h_grads) == 1 else torch.cat(h_grads, dim=1)) * self.scale
        adapter_x_grad, of_a = self.low_rank.backward(h_grad, self.a, ())
        for factor in mask:
            adapter_x_grad = adapter_x_grad * factor
        jobs = ((self.a, _MaskedInput(of_a, mask)), (self.b, _PartGrads(self, tuple(of_parts), h)))
        return x_grad.add_(adapter_x_grad), AdaptedWeightGrad(of_weight, jobs)


@dataclass(slots=True)
class _MaskedInput:
    """The gradient of a weight whose GEMM takes the input times a mask, if there is one."""

    job: WeightGrad
    mask: Tensors
    needs_input: bool = True

    def write(self, x_RD: Tensor | None, out: Tensor, accumulate: bool) -> None:
        assert x_RD is not None
        for factor in self.mask:
            x_RD = x_RD * factor
        self.job.write(x_RD, out, accumulate)


@dataclass(slots=True)
class _PartGrads:
    """The gradient of all B, from the h that forward saved or from the input."""

    gemm: LoraGemm
    of_parts: tuple[WeightGrad, ...]
    h: Tensor | None

    @property
    def needs_input(self) -> bool:
        return self.h is None

    def write(self, x_RD: Tensor | None, out: Tensor, accumulate: bool) -> None:
        h = self.h
        if h is None:
            assert x_RD is not None
            h = self.gemm._down(x_RD, ())
        for part, job in zip(self.gemm.parts, self.of_parts, strict=True):
            job.write(h[:, part.a_rows], out[..., part.b_rows, :], accumulate)


@dataclass(slots=True)
class DoraGemm:
    """m / n (x W^T + s (x A^T) B^T) + b, with n the norms of the rows of W + s B A, which are no function of A and B to backward.

    `sum_over_ranks` adds, in place, what ranks have that share the inputs of the weight; None: there are none.
    """

    lora: LoraGemm
    magnitude: Tensor
    sum_over_ranks: Callable[[Tensor], object] | None = None

    def forward(self, x_RD: Tensor, weight: Tensor, bias: Tensor | None = None) -> tuple[Tensor, Tensors]:
        u_RO, saved = self.lora.forward(x_RD, weight)
        factors_O, inverse_norms = self.factors(weight)
        y_RO = u_RO * factors_O
        y_RO = y_RO if bias is None else y_RO.add_(bias)
        return y_RO, (u_RO, factors_O, inverse_norms, *saved)

    def factors(self, weight_OD: Tensor) -> tuple[Tensor, Tensor]:
        """Returns m / n of every output, 1 where it has no magnitude, and 1 / n of those that have one."""
        if isinstance(self.lora.base, DequantizingGemm):
            weight_OD = self.lora.base.weight.dequantize()
        inverse_norms = adapted_row_norms(self.lora, weight_OD, self.sum_over_ranks).reciprocal_()
        factors_O = torch.ones_like(weight_OD[:, 0])
        scaled = (self.magnitude.to(inverse_norms.dtype) * inverse_norms).to(factors_O.dtype)
        for part in self.lora.parts:
            factors_O[part.outputs] = scaled[part.b_rows]
        return factors_O, inverse_norms

    def backward(self, grad_RO: Tensor, weight: Tensor, saved: Tensors) -> tuple[Tensor, WeightGrad]:
        u_RO, factors_O, inverse_norms, *rest = saved
        x_grad, job = self.lora.backward(grad_RO * factors_O, weight, tuple(rest))
        assert isinstance(job, AdaptedWeightGrad)
        of_magnitude = _ScaleGrad((u_RO, grad_RO), tuple((p.b_rows, p.outputs) for p in self.lora.parts), inverse_norms)
        return x_grad, AdaptedWeightGrad(job.of_weight, (*job.of_params, (self.magnitude, of_magnitude)))


@torch.no_grad()
def adapted_row_norms(
    lora: LoraGemm, weight_OD: Tensor, sum_over_ranks: Callable[[Tensor], object] | None = None
) -> Tensor:
    """Returns the norms of the rows of W + s B A that have a B, in at least float32."""
    dtype = compute_dtype(weight_OD.dtype)
    squares = []
    for part in lora.parts:
        weight, a, b = weight_OD[part.outputs], lora.a[part.a_rows], lora.b[part.b_rows].to(dtype)
        of_weight = torch.linalg.vector_norm(weight, dim=1, dtype=dtype).square_()
        cross = (lora.low_rank.forward(weight, a)[0].to(dtype) * b).sum(dim=1)
        of_low_rank = ((b @ (a.to(dtype) @ a.to(dtype).t())) * b).sum(dim=1)
        squares.append(of_weight + 2.0 * lora.scale * cross + lora.scale**2 * of_low_rank)
    total = torch.cat(squares)
    if sum_over_ranks is not None:
        sum_over_ranks(total)
    return total.sqrt_()


@dataclass(slots=True)
class _ScaleGrad:
    """The gradient of a scale of outputs: the sum over rows of the gradient times what was scaled, times a factor if there is one."""

    operands: Tensors
    columns: tuple[tuple[slice, slice], ...]
    factor: Tensor | None = None
    needs_input: bool = False

    def write(self, x_RD: Tensor | None, out: Tensor, accumulate: bool) -> None:
        unscaled, grad = self.operands
        for rows, outputs in self.columns:
            terms = unscaled[:, outputs] * grad[:, outputs]
            if self.factor is not None:
                terms = terms * self.factor[rows].to(terms.dtype)
            fastest_sum_rows(terms.device, terms.dtype)(terms, out[rows], accumulate)


@dataclass(slots=True)
class ScaledOutputGemm:
    """(x W^T + b) scale, for the outputs that have one."""

    base: Gemm
    scale: Tensor
    parts: tuple[AdapterPart, ...]

    def forward(self, x_RD: Tensor, weight: Tensor, bias: Tensor | None = None) -> tuple[Tensor, Tensors]:
        unscaled_RO, saved = self.base.forward(x_RD, weight, bias)
        scales_O = self._scales(weight)
        return unscaled_RO * scales_O, (unscaled_RO, scales_O, *saved)

    def _scales(self, weight: Tensor) -> Tensor:
        scales_O = torch.ones_like(weight[:, 0])
        for part in self.parts:
            scales_O[part.outputs] = self.scale[part.b_rows]
        return scales_O

    def backward(self, grad_RO: Tensor, weight: Tensor, saved: Tensors) -> tuple[Tensor, WeightGrad]:
        unscaled_RO, scales_O, *rest = saved
        x_grad, of_weight = self.base.backward(grad_RO * scales_O, weight, tuple(rest))
        of_scale = _ScaleGrad((unscaled_RO, grad_RO), tuple((part.b_rows, part.outputs) for part in self.parts))
        return x_grad, AdaptedWeightGrad(of_weight, ((self.scale, of_scale),))


@dataclass(slots=True)
class ScaledInputGemm:
    """(x scale) W^T + b."""

    base: Gemm
    scale: Tensor

    def forward(self, x_RD: Tensor, weight: Tensor, bias: Tensor | None = None) -> tuple[Tensor, Tensors]:
        return self.base.forward(x_RD * self.scale, weight, bias)

    def forward_into(self, x_NRD: Tensor, weight: Tensor, out_NRO: Tensor) -> None:
        """See `ChunkedGemm`."""
        assert isinstance(self.base, ChunkedGemm)
        self.base.forward_into(x_NRD * self.scale, weight, out_NRO)

    def backward(self, grad_RO: Tensor, weight: Tensor, saved: Tensors) -> tuple[Tensor, WeightGrad]:
        scaled_grad, of_weight = self.base.backward(grad_RO, weight, saved)
        of_params = ((self.scale, _InputScaleGrad(scaled_grad)),)
        return scaled_grad * self.scale, AdaptedWeightGrad(of_weight, of_params)


@dataclass(slots=True)
class _InputScaleGrad:
    scaled_grad_RD: Tensor
    needs_input: bool = True

    def write(self, x_RD: Tensor | None, out: Tensor, accumulate: bool) -> None:
        assert x_RD is not None
        terms = x_RD * self.scaled_grad_RD
        fastest_sum_rows(terms.device, terms.dtype)(terms, out, accumulate)
