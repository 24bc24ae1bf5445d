"""Tiles of heads, the bounds of what a query sees and biases by distance, for attention of key intervals and its gradients."""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from petatron.kernels.attention.key_interval_attention import KeyIntervals
from petatron.kernels.strides import empty_heads

LOG2_E = tl.constexpr(1.4426950408889634)


@triton.jit
def load_tile(x, strides, index, b, head, length, WIDTH: tl.constexpr):
    """Loads rows of one head of a tensor [S, B, H, E], zeros beyond its length."""
    rows = x + b.to(tl.int64) * strides[1] + head.to(tl.int64) * strides[2] + index.to(tl.int64)[:, None] * strides[0]
    return tl.load(rows + tl.arange(0, WIDTH)[None, :], mask=(index < length)[:, None], other=0.0)


@triton.jit
def store_tile(x, strides, index, b, head, length, tile, WIDTH: tl.constexpr):
    """Stores rows of one head."""
    rows = x + b.to(tl.int64) * strides[1] + head.to(tl.int64) * strides[2] + index.to(tl.int64)[:, None] * strides[0]
    tl.store(rows + tl.arange(0, WIDTH)[None, :], tile.to(x.dtype.element_ty), mask=(index < length)[:, None])


@triton.jit
def biases(bias, distance, head, HALF: tl.constexpr):
    """Reads the biases of distances, in units of log 2."""
    column = tl.minimum(tl.maximum(distance + HALF, 0), 2 * HALF)
    return tl.load(bias + head * (2 * HALF + 1) + column) * LOG2_E


@triton.jit
def bounds_of_queries(intervals, query, b, length, key_length, CAUSAL: tl.constexpr):
    """Returns first and stop of each query's keys; none beyond the length."""
    here = query < length
    if intervals is not None:
        first = tl.load(intervals[0] + b * length + query, mask=here, other=key_length)
        stop = tl.load(intervals[1] + b * length + query, mask=here, other=0)
    else:
        first = tl.where(here, 0, key_length)
        stop = tl.where(here, tl.minimum(query + 1, key_length) if CAUSAL else key_length, 0)
    return first, stop


@triton.jit
def near_range(lo, hi, first, last, HALF: tl.constexpr, STEP: tl.constexpr):
    """Cuts lo ... hi, which goes on in steps, at the indices from which on all, or none, are further than HALF away from first ... last."""
    near = lo + tl.maximum(first - HALF + 1 - lo, 0) // STEP * STEP
    far = lo + (tl.maximum(last + HALF - lo, 0) + STEP - 1) // STEP * STEP
    near = tl.minimum(near, hi)
    return near, tl.minimum(tl.maximum(far, near), hi)


def empty_like_heads(x_SBHE: Tensor) -> Tensor:
    """Returns a dense tensor of the same shape, sequences or tokens first in memory as they are in the other."""
    return empty_heads(x_SBHE, *x_SBHE.shape, batch_first=x_SBHE.stride(1) > x_SBHE.stride(0))


def float_table(bias_HD: Tensor | None) -> Tensor | None:
    return None if bias_HD is None else bias_HD.to(torch.float32).contiguous()


def head_strides(*tensors: Tensor) -> tuple[tuple[int, ...], ...]:
    return tuple(x.stride()[:3] for x in tensors)


def tile_constants(
    q_SBHE: Tensor, bias_HD: Tensor | None, intervals: KeyIntervals | None, *, causal: bool
) -> dict[str, Any]:
    """Returns the constants of all kernels."""
    width = q_SBHE.shape[-1]
    half = 0 if bias_HD is None else bias_HD.shape[1] // 2
    return {"SCALE": width**-0.5, "WIDTH": width, "HALF": half, "CAUSAL": causal and intervals is None}
