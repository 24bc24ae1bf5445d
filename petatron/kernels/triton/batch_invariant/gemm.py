"""GEMMs of rows with a tile that follows from the weight alone: see `kernels/batch_invariant/gemm.py`.

A program computes a tile of `rows` x `columns` and goes through the inner width in steps of `depth`, in one order, without sharing a sum
with another program. Tensor cores compute every row of a tile alike. So a row's bits depend neither on the other rows nor on their
number: a decode step pads its few rows to a tile, which costs no more than reading the weight does.

Rows of experts are sorted; a tile has rows of one expert, which it finds in the cumulated numbers of tiles. Nothing is read by the host:
there are programs for as many tiles as there can be.

On an H200 tiles of 64 to 128 rows, 64 to 256 columns and depths of 64 and 128 give the same bits. In ms, bfloat16, 4,096 x 4,096:

| tile                       | 8,192 rows | 64 rows |
|----------------------------|------------|---------|
| the library                | 0.34       | 0.027   |
| 128 x 256 x 64, 8 warps    | 0.41       | 0.052   |
| 128 x 128 x 64, 8 warps    | 0.45       | 0.032   |
| 64 x 128 x 64, 4 warps     | 0.59       | 0.027   |

R rows, D input width, O output width, E experts.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from petatron.kernels.moe.grouped_gemm import ExpertCounts
from petatron.kernels.triton.kernel_launch import kernel_launcher

_PROGRAMS_TOGETHER: tl.constexpr = tl.constexpr(8)
"""Tiles of rows that share the weight they read in the L2 cache."""


class _GemmTile(NamedTuple):
    rows: int
    columns: int
    depth: int
    warps: int
    stages: int


_HALF_PRECISION_TILE = _GemmTile(rows=128, columns=128, depth=64, warps=8, stages=3)
_FLOAT32_TILE = _GemmTile(rows=32, columns=32, depth=32, warps=4, stages=2)


@triton.jit
def _multiply_tile(
    x,
    weight,
    row,
    column,
    is_row,
    x_stride,
    weight_stride,
    INNER: tl.constexpr,
    OUTPUTS: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    DEPTH: tl.constexpr,
):
    """Returns the sums of a tile in float32."""
    at = tl.arange(0, DEPTH)
    x_at = x + row.to(tl.int64)[:, None] * x_stride + at[None, :]
    weight_at = weight + column.to(tl.int64)[None, :] * weight_stride + at[:, None]
    is_column = (column < OUTPUTS)[None, :]
    total = tl.zeros((ROWS, COLUMNS), tl.float32)
    for start in range(0, INNER, DEPTH):
        if INNER % DEPTH == 0:
            x_tile = tl.load(x_at + start, mask=is_row[:, None], other=0.0)
            weight_tile = tl.load(weight_at + start, mask=is_column, other=0.0)
        else:
            is_inner = start + at < INNER
            x_tile = tl.load(x_at + start, mask=is_row[:, None] & is_inner[None, :], other=0.0)
            weight_tile = tl.load(weight_at + start, mask=is_column & is_inner[:, None], other=0.0)
        total = tl.dot(x_tile, weight_tile, total, input_precision="ieee")
    return total


@triton.jit
def _store_tile(out, total, row, column, is_row, OUTPUTS: tl.constexpr):
    place = out + row.to(tl.int64)[:, None] * OUTPUTS + column[None, :]
    tl.store(place, total.to(out.dtype.element_ty), mask=is_row[:, None] & (column < OUTPUTS)[None, :])


@triton.jit
def _row_gemm(
    x,
    weight,
    bias,
    out,
    rows,
    x_stride,
    weight_stride,
    INNER: tl.constexpr,
    OUTPUTS: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    DEPTH: tl.constexpr,
    HAS_BIAS: tl.constexpr,
):
    strips: tl.constexpr = (OUTPUTS + COLUMNS - 1) // COLUMNS
    together = _PROGRAMS_TOGETHER * strips
    first = tl.program_id(0) // together * _PROGRAMS_TOGETHER
    count = tl.minimum(tl.cdiv(rows, ROWS) - first, _PROGRAMS_TOGETHER)
    number = tl.program_id(0) % together
    row = (first + number % count) * ROWS + tl.arange(0, ROWS)
    column = number // count * COLUMNS + tl.arange(0, COLUMNS)
    is_row = row < rows
    total = _multiply_tile(
        x, weight, row, column, is_row, x_stride, weight_stride, INNER, OUTPUTS, ROWS, COLUMNS, DEPTH
    )
    if HAS_BIAS:
        total += tl.load(bias + column, mask=column < OUTPUTS, other=0.0).to(tl.float32)[None, :]
    _store_tile(out, total, row, column, is_row, OUTPUTS)


@triton.jit
def _grouped_row_gemm(
    x,
    weight,
    tile_ends,
    row_ends,
    out,
    x_stride,
    weight_stride,
    expert_stride,
    INNER: tl.constexpr,
    OUTPUTS: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    DEPTH: tl.constexpr,
    EXPERTS: tl.constexpr,
    LANES: tl.constexpr,
):
    tile, lane = tl.program_id(0), tl.arange(0, LANES)
    ends = tl.load(tile_ends + lane, mask=lane < EXPERTS, other=2147483647)
    expert = tl.sum((ends <= tile).to(tl.int32), axis=0)
    if expert < EXPERTS:
        before = tl.maximum(expert - 1, 0)
        first_tile = tl.where(expert > 0, tl.load(tile_ends + before), 0)
        first_row = tl.where(expert > 0, tl.load(row_ends + before), 0)
        row = first_row + (tile - first_tile) * ROWS + tl.arange(0, ROWS)
        column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
        is_row = row < tl.load(row_ends + expert)
        of_expert = weight + expert.to(tl.int64) * expert_stride
        total = _multiply_tile(
            x, of_expert, row, column, is_row, x_stride, weight_stride, INNER, OUTPUTS, ROWS, COLUMNS, DEPTH
        )
        _store_tile(out, total, row, column, is_row, OUTPUTS)


def _tile(dtype: torch.dtype) -> _GemmTile:
    return _FLOAT32_TILE if dtype == torch.float32 else _HALF_PRECISION_TILE


def _constants(tile: _GemmTile, inner: int, outputs: int) -> dict[str, int]:
    sizes = {"ROWS": tile.rows, "COLUMNS": tile.columns, "DEPTH": tile.depth}
    return {"INNER": inner, "OUTPUTS": outputs, **sizes, "num_warps": tile.warps, "num_stages": tile.stages}


def matmul_rows(x_RD: Tensor, weight_OD: Tensor, bias_O: Tensor | None = None) -> Tensor:
    """See the reference."""
    x = x_RD if x_RD.stride(1) == 1 else x_RD.contiguous()
    weight = weight_OD if weight_OD.stride(1) == 1 else weight_OD.contiguous()
    (rows, inner), outputs, tile = x.shape, weight.shape[0], _tile(x.dtype)
    out = x.new_empty((rows, outputs))
    if rows and outputs:
        launch = kernel_launcher(_row_gemm, HAS_BIAS=bias_O is not None, **_constants(tile, inner, outputs))
        programs = triton.cdiv(rows, tile.rows) * triton.cdiv(outputs, tile.columns)
        tensors = (x, weight, x if bias_O is None else bias_O.contiguous(), out)
        launch(programs, tensors, (rows, x.stride(0), weight.stride(0)))
    return out


def grouped_matmul_rows(x_RD: Tensor, weight_EOD: Tensor, counts: ExpertCounts) -> Tensor:
    """See the reference; rows beyond those of all experts are not written."""
    x = x_RD if x_RD.stride(1) == 1 else x_RD.contiguous()
    weight = weight_EOD if weight_EOD.stride(2) == 1 else weight_EOD.contiguous()
    (rows, inner), (experts, outputs, _), tile = x.shape, weight.shape, _tile(x.dtype)
    out = x.new_empty((rows, outputs))
    if not rows:
        return out
    counts_E = torch.full((experts,), counts, device=x.device) if isinstance(counts, int) else counts
    row_ends = counts_E.cumsum(0, dtype=torch.int32)
    tile_ends = ((counts_E + (tile.rows - 1)) // tile.rows).cumsum(0, dtype=torch.int32)
    most = triton.cdiv(rows, tile.rows) + min(experts, rows) - 1
    lanes = triton.next_power_of_2(experts)
    launch = kernel_launcher(_grouped_row_gemm, EXPERTS=experts, LANES=lanes, **_constants(tile, inner, outputs))
    strides = (x.stride(0), weight.stride(1), weight.stride(0))
    launch(most, (x, weight, tile_ends, row_ends, out), strides, triton.cdiv(outputs, tile.columns))
    return out
