"""Statistics of rows of logits, each in one order of sums: see `kernels/batch_invariant/cross_entropy.py`.

A program has a row and goes through it twice, for the maximum and for the exponentials. Every lane of its tile adds up the columns that
fall on it, one after the other, which is the same whatever the layout of threads; the lanes are added by `fixed_order_sum`. A reduction
of Triton's would depend on how many numbers a thread loads, and so on the dtype and the alignment of the row.
"""

from __future__ import annotations

from dataclasses import replace

import torch
import triton
import triton.language as tl
from torch import Tensor

from petatron.kernels.batch_invariant.cross_entropy import with_one_loss
from petatron.kernels.batch_invariant.row_functions import fixed_order_sum
from petatron.kernels.triton import fused_linear_cross_entropy as plain
from petatron.kernels.triton.kernel_launch import kernel_launcher

_LOG2_E: tl.constexpr = tl.constexpr(1.4426950408889634)
_LANES = 2048


@triton.jit
def _statistics(
    logits,
    targets,
    peaks,
    picks,
    totals_CL,
    row_stride,
    NUM_COLUMNS: tl.constexpr,
    LANES: tl.constexpr,
):
    index = tl.program_id(0).to(tl.int64)
    row, lane = logits + index * row_stride, tl.arange(0, LANES)
    highest = tl.full((LANES,), -float("inf"), tl.float32)
    for start in range(0, NUM_COLUMNS, LANES):
        tile = tl.load(row + start + lane, mask=start + lane < NUM_COLUMNS, other=-float("inf"))
        highest = tl.maximum(highest, tile.to(tl.float32))
    peak = tl.max(highest, axis=0)
    totals = tl.zeros((LANES,), tl.float32)
    for start in range(0, NUM_COLUMNS, LANES):
        tile = tl.load(row + start + lane, mask=start + lane < NUM_COLUMNS, other=-float("inf"))
        totals += tl.exp2((tile.to(tl.float32) - peak) * _LOG2_E)
    target = tl.load(targets + index).to(tl.int32)
    is_here = (target >= 0) & (target < NUM_COLUMNS)
    picked = tl.load(row + tl.where(is_here, target, 0)).to(tl.float32)
    tl.store(peaks + index, peak)
    tl.store(picks + index, tl.where(is_here, picked - peak, 0.0))
    tl.store(totals_CL + index * LANES + lane, totals)


def statistics(logits_CV: Tensor, targets_C: Tensor, num_columns: int) -> Tensor:
    """See the reference."""
    if not num_columns:
        return plain.statistics(logits_CV, targets_C, num_columns)
    assert logits_CV.stride(1) == 1 and logits_CV.dtype != torch.float64
    lanes = min(triton.next_power_of_2(num_columns), _LANES)
    out = torch.empty(3, logits_CV.shape[0], dtype=torch.float32, device=logits_CV.device)
    totals_CL = out.new_empty((logits_CV.shape[0], lanes))
    launch = kernel_launcher(_statistics, NUM_COLUMNS=num_columns, LANES=lanes, num_warps=4)
    launch(logits_CV.shape[0], (logits_CV, targets_C, out[0], out[2], totals_CL), (logits_CV.stride(0),))
    out[1] = fixed_order_sum(totals_CL)
    return out


TRITON = with_one_loss(replace(plain.TRITON, statistics=statistics))
