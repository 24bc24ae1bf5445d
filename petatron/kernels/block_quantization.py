"""Weights of 4 or 8 bits an element, with a scale for each block of 64: frozen weights that are dequantized for each GEMM (QLoRA).

A block of 64 consecutive elements is stored as its largest magnitude, in the precision of the weight, and codes of its elements divided by
that. The sixteen codes of NF4 (Dettmers et al., QLoRA, 2023) are quantiles of a normal distribution, asymmetric so that zero is one of
them; two are in a byte, the first one in its upper half. The other form is FP8 (E4M3). An element of the largest magnitude is exact,
so that a dequantized weight that is quantized again gives the same codes.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cache
from statistics import NormalDist
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from petatron.kernels.compute_dtype import compute_dtype
from petatron.kernels.linear_gemms import ChunkedGemm, Gemm, Tensors, WeightGrad

BLOCK = 64
CODE_BYTES = {"nf4": 0.5, "fp8": 1.0}
"""The bytes of an element's code; a block's largest magnitude is besides."""
QuantizedFormat = Literal["nf4", "fp8"]
_OFFSET = 0.9677083
"""The largest probability whose quantile is a code: the mean of 1 - 1/32 and 1 - 1/30."""
_FP8_MAX = 448.0


@cache
def nf4_codes() -> tuple[float, ...]:
    """Returns the codes in ascending order: eight quantiles below zero, zero, and seven above.

    >>> [round(code, 3) for code in nf4_codes()[6:10]]
    [-0.091, 0.0, 0.08, 0.161]
    """
    quantile = NormalDist().inv_cdf
    above = [quantile(_OFFSET + (0.5 - _OFFSET) * step / 8) for step in range(8)]
    below = [-quantile(_OFFSET + (0.5 - _OFFSET) * step / 7) for step in range(7)]
    codes = sorted([*above, 0.0, *below])
    return tuple(code / codes[-1] for code in codes)


@dataclass(frozen=True, slots=True)
class QuantizedWeight:
    """A quantized weight: bytes of codes, and the largest magnitude of each block."""

    form: QuantizedFormat
    codes: Tensor
    absmax: Tensor
    shape: tuple[int, ...]

    @property
    def num_bytes(self) -> int:
        return self.codes.nbytes + self.absmax.nbytes

    def dequantize(self) -> Tensor:
        """Returns the weight in the precision that it had."""
        dtype = self.absmax.dtype
        if self.form == "nf4":
            pairs = F.embedding(self.codes.to(torch.int32), _pairs_of_codes(dtype, self.codes.device))
            values = pairs.view(-1, BLOCK)
        else:
            values = self.codes.view(torch.float8_e4m3fn).to(dtype).view(-1, BLOCK) / _FP8_MAX
        scaled = (values * self.absmax.unsqueeze(1)).flatten()
        return scaled[: math.prod(self.shape)].view(self.shape)


def quantize(weight: Tensor, form: QuantizedFormat) -> QuantizedWeight:
    """Quantizes a weight, block by block of its elements in memory order; the last block may have less than 64."""
    flat = weight.detach().reshape(-1)
    blocks = F.pad(flat, (0, -flat.numel() % BLOCK)).view(-1, BLOCK)
    absmax = blocks.abs().amax(dim=1)
    wide = compute_dtype(weight.dtype)
    normalized = blocks.to(wide) / absmax.to(wide).clamp(min=torch.finfo(wide).tiny).unsqueeze(1)
    if form == "fp8":
        codes = (normalized * _FP8_MAX).to(torch.float8_e4m3fn).flatten().view(torch.uint8)
        return QuantizedWeight(form, codes, absmax, tuple(weight.shape))
    table = torch.tensor(nf4_codes(), dtype=wide, device=weight.device)
    indices = torch.bucketize(normalized, (table[1:] + table[:-1]) / 2, out_int32=True).to(torch.uint8).flatten()
    codes = (indices[::2] << 4) | indices[1::2]
    return QuantizedWeight(form, codes, absmax, tuple(weight.shape))


@cache
def _pairs_of_codes(dtype: torch.dtype, device: torch.device) -> Tensor:
    """Returns both values of each byte, [256, 2]."""
    table = torch.tensor(nf4_codes(), dtype=torch.float64)
    return torch.stack((table.repeat_interleave(16), table.repeat(16)), dim=1).to(dtype=dtype, device=device)


@dataclass(frozen=True, slots=True)
class DequantizingGemm:
    """A GEMM with a quantized weight in place of the one that it is called with, which has the same shape and no values."""

    base: Gemm
    weight: QuantizedWeight

    def forward(self, x_RD: Tensor, weight: Tensor, bias: Tensor | None = None) -> tuple[Tensor, Tensors]:
        return self.base.forward(x_RD, self.weight.dequantize(), bias)

    def forward_into(self, x_NRD: Tensor, weight: Tensor, out_NRO: Tensor) -> None:
        """See `ChunkedGemm`."""
        assert isinstance(self.base, ChunkedGemm)
        self.base.forward_into(x_NRD, self.weight.dequantize(), out_NRO)

    def backward(self, grad_RO: Tensor, weight: Tensor, saved: Tensors) -> tuple[Tensor, WeightGrad]:
        return self.base.backward(grad_RO, self.weight.dequantize(), saved)
