"""Weights in FP8 between ranks: a weight whose GEMMs are e4m3 is all-gathered as the result of that cast.

With power-of-two scales (`kernels/fp8/cast_and_gemm.py`), casting a weight, dequantizing it and casting the result gives the values
of the first cast, whatever the weight. So ranks may send e4m3 and fill the weight with dequantized values: every GEMM gets the same
operand as if the weight had been gathered whole, and nothing after the all-gather has to know. Let s be the scale of weights w with
the given amax, q = e4m3(w / s) rounded to nearest even, and w' = s q. Then

    s' = s or s / 2     amax / s is in (224, 448], so its q is in [224, 448]; only 224 gives half the scale. (Where s is the
                        least scale there is, amax may be smaller, and s' = s.)
    q' = q or 2 q       if s' = s / 2, no q is above 224, and twice an e4m3 number up to 224 is one. So nothing is rounded,
    s' q' = s q         and the values are the same. In a GEMM, the factor 2 moves from all summands to the scale exactly
    w' fits w's dtype   it is w, or has four digits or fewer, the last no finer than w's. Only 256 x 2^120 is too large for
                        bfloat16 and float32; the largest number replaces it, which is cast to 256 as well

Zeros have the scale 1 both times. Infinity and NaN are NaN after either cast, and give the other values of their set the scale 1.

This holds for each set of values with one scale whose cast is the same in both orientations: a tensor, or a block of 128 x 128,
but not a row, which is cast once more as part of columns.

A matrix is flattened, and a rank has a flat shard of it. `columns` None means one scale for all; otherwise each block of 128 x 128
has its own, row of blocks by row of blocks. Flat shards of blocks begin and end at multiples of 64 elements, so runs of 64 have
one scale. Elements after the end of a matrix are padding and use its last scale.

N elements, T scales, P adjacent shards of a matrix.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from petatron.kernels.fp8.cast_and_gemm import BLOCK, E4M3, quantize

SCALE_RUN_ELEMENTS = 64


@dataclass(frozen=True, slots=True)
class Fp8ParamGatherKernels:
    """One implementation of each operation; the functions below, the reference, say what each does."""

    update_shard_amax: Callable[..., None]
    quantize_shard: Callable[..., None]
    dequantize_shards: Callable[..., None]


def update_shard_amax(x_N: Tensor, amax_T: Tensor, *, begin: int, columns: int | None) -> None:
    """Updates each scale's amax (float32) with the elements from `begin` on."""
    if not x_N.numel():
        return
    # Without the sign, a float's bits order as its value, with NaN above all, which no maximum of floats guarantees.
    runs = x_N.view(1, -1) if columns is None else x_N.view(-1, SCALE_RUN_ELEMENTS)
    bits = runs.abs().amax(dim=1).to(torch.float32).abs().view(torch.int32)
    index = _scale_index_of_each_run(bits, amax_T.numel(), begin=begin, columns=columns)
    amax_T.view(torch.int32).scatter_reduce_(0, index, bits, "amax")


def quantize_shard(x_N: Tensor, scale_T: Tensor, out_N: Tensor, *, begin: int, columns: int | None) -> None:
    """Casts the elements from `begin` on into `out_N`, e4m3, with the scales of the whole matrix."""
    x, out = (x_N, out_N) if columns is None else (x_N.view(-1, SCALE_RUN_ELEMENTS), out_N.view(-1, SCALE_RUN_ELEMENTS))
    out.copy_(quantize(x, _scale_of_each_run(x, scale_T, begin=begin, columns=columns), E4M3))


def dequantize_shards(values_PN: Tensor, scale_T: Tensor, out_PN: Tensor, *, columns: int | None) -> None:
    """Dequantizes all shards of a matrix; a shard is contiguous, the shards may be strided."""
    runs = values_PN.reshape(-1, SCALE_RUN_ELEMENTS) if columns is not None else values_PN
    values = runs.to(torch.float32) * _scale_of_each_run(runs, scale_T, begin=0, columns=columns)
    limit = torch.finfo(out_PN.dtype).max
    out_PN.copy_(values.clamp(-limit, limit).view(out_PN.shape))


def _scale_of_each_run(runs: Tensor, scale_T: Tensor, *, begin: int, columns: int | None) -> Tensor:
    """Returns the scale of each run, one per row; or the one that all share."""
    if columns is None:
        return scale_T
    return scale_T[_scale_index_of_each_run(runs[:, 0], scale_T.numel(), begin=begin, columns=columns)].unsqueeze(1)


def _scale_index_of_each_run(firsts: Tensor, scales: int, *, begin: int, columns: int | None) -> Tensor:
    """Returns the scale index of each run, given one element of each."""
    runs = torch.arange(firsts.numel(), device=firsts.device)
    if columns is None:
        return runs * 0
    assert begin % SCALE_RUN_ELEMENTS == 0 and columns % BLOCK == 0, f"{begin} elements into rows of {columns}"
    element = begin + runs * SCALE_RUN_ELEMENTS
    square = element // columns // BLOCK * (columns // BLOCK) + element % columns // BLOCK
    return square.clamp(max=scales - 1)


REFERENCE = Fp8ParamGatherKernels(
    update_shard_amax=update_shard_amax, quantize_shard=quantize_shard, dequantize_shards=dequantize_shards
)
"""Plain torch on any device."""
