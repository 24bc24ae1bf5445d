"""Sums of rows, in two passes: some programs have some rows each, and their sums are added up in a fixed order.

The sum of one program's rows of 256 columns is in registers; the second pass reads a few hundred rows of float32.

R rows, P programs, D width.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from petatron.kernels.strides import rows_and_stride
from petatron.kernels.triton.kernel_launch import kernel_launcher
from petatron.kernels.triton.program_sums import add_up_programs

_COLUMNS, _ROWS = 256, 32
_PROGRAMS = 512
"""The wanted number of programs: some for every multiprocessor."""


@triton.jit
def _partial_sums(
    x_RD, sums_PD, rows, stride, rows_per_program, WIDTH: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr
):
    column = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    first = tl.program_id(1) * rows_per_program
    last = tl.minimum(first + rows_per_program, rows)
    total = tl.zeros((ROWS, BLOCK), dtype=tl.float32)
    for start in range(first, last, ROWS):
        row = start + tl.arange(0, ROWS)
        mask = (row < last)[:, None] & (column < WIDTH)[None, :]
        total += tl.load(x_RD + row.to(tl.int64)[:, None] * stride + column[None, :], mask=mask, other=0.0).to(
            tl.float32
        )
    tl.store(sums_PD + tl.program_id(1) * WIDTH + column, tl.sum(total, axis=0), mask=column < WIDTH)


def sum_rows(x_RD: Tensor, out_D: Tensor, accumulate: bool) -> None:
    """See the reference."""
    x, stride = rows_and_stride(x_RD)
    rows, width = x.shape
    blocks = -(-width // _COLUMNS)
    rows_per_program = max(1, -(-rows * blocks // (_PROGRAMS * _ROWS))) * _ROWS
    programs = max(1, -(-rows // rows_per_program))
    sums_PD = torch.empty((programs, width), dtype=torch.float32, device=x.device)
    launch = kernel_launcher(_partial_sums, WIDTH=width, ROWS=_ROWS, BLOCK=_COLUMNS, num_warps=4)
    launch(blocks, (x, sums_PD), (rows, stride, rows_per_program), programs)
    add_up_programs(sums_PD, out_D, accumulate)
