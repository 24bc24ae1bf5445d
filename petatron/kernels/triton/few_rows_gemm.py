"""x W^T for a few rows: a decode step's GEMM, whose time is that of reading the weight once.

A program has some rows of the weight and reads them along its whole width (or a part of it, where there are few rows), many tiles in
flight; the few rows of the input come from the cache. The weight may be in FP8 with one scale per row: half the bytes.

R rows, D input width, O output width.
"""

# pyright: reportAttributeAccessIssue=false, reportCallIssue=false, reportIndexIssue=false, reportArgumentType=false
# pyright: reportPossiblyUnboundVariable=false, reportReturnType=false, reportGeneralTypeIssues=false
from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

MAX_ROWS = 16
"""Above, the library's GEMMs are as fast."""


@triton.jit
def _few_rows_gemm(
    x,
    weight,
    scales,
    out,
    num_rows,
    x_stride,
    weight_stride,
    out_stride,
    D: tl.constexpr,
    O: tl.constexpr,  # noqa: E741
    ROWS: tl.constexpr,
    TILE_O: tl.constexpr,
    TILE_D: tl.constexpr,
    SPLITS: tl.constexpr,
    SCALED: tl.constexpr,
):
    row = tl.arange(0, ROWS)
    column = tl.program_id(0) * TILE_O + tl.arange(0, TILE_O)
    inside = column < O
    each: tl.constexpr = tl.cdiv(tl.cdiv(D, TILE_D), SPLITS) * TILE_D
    begin = tl.program_id(1) * each
    total = tl.zeros((ROWS, TILE_O), tl.float32)
    for start in range(begin, min(begin + each, D), TILE_D):
        at = start + tl.arange(0, TILE_D)
        w = tl.load(
            weight + column[:, None].to(tl.int64) * weight_stride + at[None, :],
            mask=inside[:, None] & (at[None, :] < D),
            other=0.0,
        )
        a = tl.load(
            x + row[:, None] * x_stride + at[None, :], mask=(row[:, None] < num_rows) & (at[None, :] < D), other=0.0
        )
        total += tl.dot(a, tl.trans(w.to(a.dtype)))
    if SCALED:
        total = total * tl.load(scales + column, mask=inside, other=0.0)[None, :]
    target = out + tl.program_id(1) * num_rows * out_stride + row[:, None] * out_stride + column[None, :]
    tl.store(target, total.to(out.dtype.element_ty), mask=(row[:, None] < num_rows) & inside[None, :])


class Tiling(NamedTuple):
    tile_o: int
    tile_d: int
    splits: int
    warps: int
    stages: int


def few_rows_gemm(x_RD: Tensor, weight_OD: Tensor, scales_O: Tensor | None, tiling: Tiling) -> Tensor:
    """Returns x W^T, times the scale of each column if there are any."""
    count, width = x_RD.shape
    columns = weight_OD.shape[0]
    splits = tiling.splits
    out = x_RD.new_empty((splits, count, columns), dtype=torch.float32 if splits > 1 else x_RD.dtype)
    _few_rows_gemm[(triton.cdiv(columns, tiling.tile_o), splits)](
        x_RD,
        weight_OD,
        weight_OD if scales_O is None else scales_O,
        out,
        count,
        x_RD.stride(0),
        weight_OD.stride(0),
        columns,
        D=width,
        O=columns,
        ROWS=16,
        TILE_O=tiling.tile_o,
        TILE_D=tiling.tile_d,
        SPLITS=splits,
        SCALED=scales_O is not None,
        num_warps=tiling.warps,
        num_stages=tiling.stages,
    )
    return out[0] if splits == 1 else out.sum(dim=0).to(x_RD.dtype)
