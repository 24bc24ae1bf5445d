"""Draws an id from each row of logits, in two kernels: many programs a row sum its chunks, then one finds the chunk, and the id in it.

Logits are read once, and one chunk of each row a second time; the reference writes and reads them several times in float64. Exponentials
are in float32, and what is summed of them in float64: a draw differs from the reference's where the number is as close to a boundary as
float32 distinguishes.

R rows, V vocabulary.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from petatron.kernels import random_ids as reference

_CHUNK = 4096


@triton.jit
def _scaled_chunk(logits, temperatures, row, chunk, size, stride, CHUNK: tl.constexpr):
    column = chunk * CHUNK + tl.arange(0, CHUNK)
    x = tl.load(logits + row.to(tl.int64) * stride + column, mask=column < size, other=float("-inf"))
    return x.to(tl.float32) / tl.load(temperatures + row)


@triton.jit
def _sum_chunks(logits, temperatures, highest, sums, size, stride, CHUNK: tl.constexpr):
    row, chunk = tl.program_id(0), tl.program_id(1)
    x = _scaled_chunk(logits, temperatures, row, chunk, size, stride, CHUNK)
    top = tl.max(x, 0)
    below = tl.where(x == float("-inf"), 0.0, tl.exp(x - top))  # ids that filters left out, perhaps all of a chunk
    place = row * tl.num_programs(1) + chunk
    tl.store(highest + place, top)
    tl.store(sums + place, tl.sum(below.to(tl.float64), 0))


@triton.jit
def _find_ids(
    logits, temperatures, uniform, highest, sums, out, chunks, size, stride, CHUNK: tl.constexpr, ROW: tl.constexpr
):
    row, place = tl.program_id(0), tl.arange(0, ROW)
    inside = place < chunks
    top = tl.load(highest + row * chunks + place, mask=inside, other=float("-inf"))
    total = tl.load(sums + row * chunks + place, mask=inside, other=0.0)
    highest_of_row = tl.max(top, 0)
    weights = total * tl.exp(top - highest_of_row).to(tl.float64)
    cumulative = tl.cumsum(weights, 0)
    threshold = tl.load(uniform + row) * tl.max(cumulative, 0)
    last_chunk = tl.max(tl.where(weights > 0.0, place, 0), 0)
    chunk = tl.minimum(tl.sum((inside & (cumulative <= threshold)).to(tl.int32), 0), last_chunk)
    before = tl.sum(tl.where(place == chunk, cumulative - weights, 0.0), 0)
    x = _scaled_chunk(logits, temperatures, row, chunk, size, stride, CHUNK)
    shares = tl.exp(x - highest_of_row).to(tl.float64)
    reached = before + tl.cumsum(shares, 0) > threshold
    at = tl.arange(0, CHUNK)
    # Sums of other orders may differ in their last bits: then it is the last id that has a probability.
    last = tl.max(tl.where(shares > 0.0, at, 0), 0)
    tl.store(out + row, chunk * CHUNK + tl.min(tl.where(reached, at, last), 0))


def draw_ids(logits_RV: Tensor, temperatures_R: Tensor, uniform_R: Tensor) -> Tensor:
    """See the reference, which draws in float64."""
    if logits_RV.dtype == torch.float64:
        return reference.draw_ids(logits_RV, temperatures_R, uniform_R)
    rows, size = logits_RV.shape
    logits = logits_RV if logits_RV.stride(1) == 1 else logits_RV.contiguous()
    chunks = triton.cdiv(size, _CHUNK)
    highest = torch.empty((rows, chunks), dtype=torch.float32, device=logits.device)
    sums = torch.empty((rows, chunks), dtype=torch.float64, device=logits.device)
    out = torch.empty(rows, dtype=torch.int64, device=logits.device)
    temperatures = temperatures_R.to(torch.float32)
    _sum_chunks[(rows, chunks)](logits, temperatures, highest, sums, size, logits.stride(0), CHUNK=_CHUNK, num_warps=4)
    _find_ids[(rows,)](
        logits,
        temperatures,
        uniform_R,
        highest,
        sums,
        out,
        chunks,
        size,
        logits.stride(0),
        CHUNK=_CHUNK,
        ROW=triton.next_power_of_2(chunks),
        num_warps=8,
    )
    return out
