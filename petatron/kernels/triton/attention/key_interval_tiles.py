"""Tiles of heads, the bounds of what a query sees and biases by distance, for attention of key intervals and its gradients.

**Biases of a tile** are a matrix that is constant along its diagonals. Row i of it is a slice of the table, one element to the left of
row i - 1's. Such slices begin anywhere, and would be read an element at a time. So the table is stored eight times, each copy one element
further to the right than the one before: a row reads the copy in which its slice is aligned, 16 bytes at a time. Eight more are in
reverse, for tiles whose rows are keys. On both sides the first and last bias go on, further than a tile that the table reaches into.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl
from torch import Tensor

from petatron.kernels.attention.key_interval_attention import KeyIntervals
from petatron.kernels.strides import empty_heads
from petatron.kernels.triton.kernel_launch import kernel_launcher

LOG2_E = tl.constexpr(1.4426950408889634)
_COPIES = tl.constexpr(8)
_MARGIN = 320
"""Further than any two tokens of a tile are apart, twice, and a multiple of the copies."""


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
def tile_biases(copies, head, row, start, COLUMNS: tl.constexpr, CENTER: tl.constexpr, LENGTH: tl.constexpr):
    """Returns the biases of columns start ... minus those of rows, in units of log 2; `start` is a multiple of the copies."""
    copy = row % _COPIES
    first = (head * _COPIES + copy) * LENGTH + start - (row - copy) + CENTER
    place = first[:, None] + tl.arange(0, COLUMNS)[None, :]
    place = tl.max_contiguous(tl.multiple_of(place, [1, 8]), [1, COLUMNS])
    return tl.load(copies + place).to(tl.float32) * LOG2_E


@triton.jit
def far_bias(copies, head, LAST: tl.constexpr, LENGTH: tl.constexpr):
    """Returns the bias of columns far before the rows, or with `LAST` far after them."""
    return tl.load(copies + head * _COPIES * LENGTH + (LENGTH - 1 if LAST else 0)).to(tl.float32) * LOG2_E


@triton.jit
def bounds_of_queries(first, stop, query, b, length, key_length, CAUSAL: tl.constexpr, HAS_INTERVALS: tl.constexpr):
    """Returns first and stop of each query's keys; none beyond the length."""
    here = query < length
    if HAS_INTERVALS:
        first = tl.load(first + b * length + query, mask=here, other=key_length)
        stop = tl.load(stop + b * length + query, mask=here, other=0)
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


@triton.jit
def _copy_table(
    bias,
    copies,
    SIZE: tl.constexpr,
    HALF: tl.constexpr,
    CENTER: tl.constexpr,
    LENGTH: tl.constexpr,
    BLOCK: tl.constexpr,
):
    head, copy, heads = (
        tl.program_id(0) // (2 * _COPIES),
        tl.program_id(0) % (2 * _COPIES),
        tl.num_programs(0) // (2 * _COPIES),
    )
    in_reverse, shift = copy // _COPIES, copy % _COPIES
    target = copies + ((in_reverse * heads + head) * _COPIES + shift) * LENGTH
    for start in range(0, LENGTH, BLOCK):
        place = start + tl.arange(0, BLOCK)
        distance = tl.minimum(tl.maximum(place - shift - CENTER, -HALF), HALF)
        distance = tl.where(in_reverse == 1, -distance, distance)
        value = tl.load(bias + head * SIZE + distance + HALF)
        tl.store(target + place, value.to(copies.dtype.element_ty), mask=place < LENGTH)


class BiasCopies(NamedTuple):
    """The shifted copies [2, H, 8, LENGTH] of a table, in the precision of the queries, and the constants of kernels that read them."""

    copies: Tensor
    constants: dict[str, Any]

    @classmethod
    def of(cls, bias_HD: Tensor | None, q_SBHE: Tensor) -> BiasCopies:
        """Without a table, something that is not read."""
        if bias_HD is None:
            return cls(q_SBHE, {"HALF": 0, "CENTER": 0, "LENGTH": 0, "HAS_BIAS": False})
        heads, size = bias_HD.shape
        half = size // 2
        center = -(-(half + _MARGIN) // 8) * 8
        length = 2 * center + 8
        copies = q_SBHE.new_empty((2, heads, 8, length))
        sizes = {"HALF": half, "CENTER": center, "LENGTH": length}
        launch = kernel_launcher(_copy_table, SIZE=size, **sizes, BLOCK=512, num_warps=4)
        launch(heads * 16, (bias_HD.contiguous(), copies))
        return cls(copies, {**sizes, "HAS_BIAS": True})


def empty_like_heads(x_SBHE: Tensor) -> Tensor:
    """Returns a dense tensor of the same shape, sequences or tokens first in memory as they are in the other."""
    return empty_heads(x_SBHE, *x_SBHE.shape, batch_first=x_SBHE.stride(1) > x_SBHE.stride(0))


def head_strides(*tensors: Tensor) -> tuple[int, ...]:
    return tuple(stride for x in tensors for stride in x.stride()[:3])


def tile_constants(q_SBHE: Tensor, intervals: KeyIntervals | None, *, causal: bool) -> dict[str, Any]:
    """Returns the constants of all kernels besides those of biases."""
    width = q_SBHE.shape[-1]
    has_intervals = intervals is not None
    return {
        "SCALE": width**-0.5,
        "WIDTH": width,
        "CAUSAL": causal and not has_intervals,
        "HAS_INTERVALS": has_intervals,
    }
