"""The building blocks of split-KV decode attention: splits of a sequence, rows in pages, online softmax, the merge of splits.

A split attends to some tokens of a sequence and leaves a partial output, normalized by its own weights, with the log-sum-exp of its
scores. The merge weighs partial outputs by that.
"""

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl
from torch import Tensor

from petatron.kernels.triton.pdl import pdl_wait_and_trigger

_WANTED_PROGRAMS = 512
"""Two or more rounds on a large GPU, which has room for 132 or 264 at once: the last round is seldom nearly empty."""
_MAX_SPLITS = 64


def launch_merge(
    partial: Tensor, lse: Tensor, out: Tensor, *, pairs: int, columns: int, launch: dict[str, Any]
) -> None:
    """Writes `out` [..., group, width] from partial outputs [..., splits, group, width] of `pairs` pairs; a program has `columns`."""
    splits, group, width = partial.shape[-3:]
    merge_splits[(pairs, group, triton.cdiv(width, columns))](
        partial,
        lse,
        out,
        GROUP=group,
        WIDTH=width,
        COLUMNS=columns,
        SPLITS=splits,
        ROWS=triton.next_power_of_2(splits),
        num_warps=4,
        **launch,
    )


def num_splits(programs: int) -> int:
    """Returns the number of splits of a sequence, for `programs` pairs of a sequence and a kv head or block of heads.

    >>> num_splits(8), num_splits(64), num_splits(512), num_splits(5000)
    (64, 8, 1, 1)
    """
    return max(1, min(_MAX_SPLITS, _WANTED_PROGRAMS // programs))


@triton.jit
def split_range(length, split, WINDOW: tl.constexpr, SPLITS: tl.constexpr, TILE: tl.constexpr, LEAST: tl.constexpr):
    """Returns the first token of a split and the one after its last: whole tiles, `LEAST` tokens or more. Later splits may be empty."""
    first = 0
    if WINDOW > 0:
        first = tl.maximum(length - WINDOW, 0) // TILE * TILE
    tokens = tl.maximum(tl.cdiv(tl.cdiv(length - first, TILE), SPLITS) * TILE, LEAST)
    begin = first + split * tokens
    return begin, tl.minimum(begin + tokens, length)


@triton.jit
def rows_in_pages(pages_of_sequence, position, inside, PAGE: tl.constexpr):
    """Returns the rows of a sequence's tokens in the tensor of pages, as 64-bit integers."""
    page = tl.load(pages_of_sequence + position // PAGE, mask=inside, other=0).to(tl.int64)
    return page * PAGE + position % PAGE


@triton.jit
def visible_scores(scores, position, inside, length, WINDOW: tl.constexpr):
    """Returns scores [queries, tokens], minus infinity for tokens that the last one of the sequence does not see."""
    visible = inside
    if WINDOW > 0:
        visible = visible & (position >= length - WINDOW)
    return tl.where(visible[None, :], scores, float("-inf"))


@triton.jit
def online_softmax_update(scores, row_max, row_sum):
    """Returns the weights of more scores, the factor on what was summed before, and the running maximum and sum with them."""
    new_max = tl.maximum(row_max, tl.max(scores, 1))
    safe = tl.where(new_max == float("-inf"), 0.0, new_max)
    weights = tl.exp(scores - safe[:, None])
    rescale = tl.exp(row_max - safe)
    return weights, rescale, new_max, row_sum * rescale + tl.sum(weights, 1)


@triton.jit
def log_sum_exp(row_max, row_sum):
    """Returns that of all scores summed; minus infinity for none."""
    return tl.where(row_sum == 0.0, float("-inf"), row_max + tl.log(tl.where(row_sum == 0.0, 1.0, row_sum)))


@triton.jit
def merge_splits(
    partial,
    lse,
    output,
    GROUP: tl.constexpr,
    WIDTH: tl.constexpr,
    COLUMNS: tl.constexpr,
    SPLITS: tl.constexpr,
    ROWS: tl.constexpr,
    USE_PDL: tl.constexpr,
):
    """Writes the output [pairs, GROUP, WIDTH] of partial ones [pairs, SPLITS, GROUP, WIDTH]: a program has a query head's columns."""
    pdl_wait_and_trigger(USE_PDL)
    pair, member = tl.program_id(0), tl.program_id(1)  # of (sequence, kv head), and a query head of it
    split, column = tl.arange(0, ROWS), tl.program_id(2) * COLUMNS + tl.arange(0, COLUMNS)
    place = (pair * SPLITS + split).to(tl.int64) * GROUP + member
    sums = tl.load(lse + place, mask=split < SPLITS, other=float("-inf"))
    weights = tl.exp(sums - tl.max(sums, 0))
    weights = weights / tl.sum(weights, 0)
    readable = (weights[:, None] > 0.0) & (column[None, :] < WIDTH)
    values = tl.load(partial + place[:, None] * WIDTH + column[None, :], mask=readable, other=0.0)
    target = output + (pair.to(tl.int64) * GROUP + member) * WIDTH + column
    tl.store(target, tl.sum(values * weights[:, None], 0).to(output.dtype.element_ty), mask=column < WIDTH)
