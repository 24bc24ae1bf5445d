"""The gradient of biases by distance: dS of `key_interval_attention_grads.py`, summed over the batch and over all pairs of a distance.

Square tiles whose queries and keys are equally far apart need the same sums: a program adds dS of all such tiles of a head in
registers, and sums the diagonals of that tile once. So it computes scores a third time, two of eleven GEMMs, and nothing of the size of
scores is in memory: a few sums for each block of distances, from which the columns of the table are collected in a fixed order.

S sequence, B batch, H query heads, E head dim, D distances.
"""

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl
from torch import Tensor

from petatron.kernels.triton.attention.key_interval_tiles import LOG2_E, bounds_of_queries, load_tile, tile_biases
from petatron.kernels.triton.kernel_launch import kernel_launcher

_TILE, _WARPS, _STAGES = 64, 4, 3
_PROGRAMS = 1024
"""The wanted number of programs."""


@triton.jit
def _diagonal_sums(
    q,
    k,
    v,
    grad,
    lse,
    delta,
    copies,
    first,
    stop,
    sums,
    q_s,
    q_b,
    q_h,
    k_s,
    k_b,
    k_h,
    v_s,
    v_b,
    v_h,
    grad_s,
    grad_b,
    grad_h,
    length,
    batch,
    heads,
    group,
    tiles,
    splits,
    SCALE: tl.constexpr,
    TILE: tl.constexpr,
    WIDTH: tl.constexpr,
    HALF: tl.constexpr,
    CENTER: tl.constexpr,
    LENGTH: tl.constexpr,
    HAS_INTERVALS: tl.constexpr,
    CAUSAL: tl.constexpr,
):
    """Sums dS over the batch and over tiles that are equally far from the diagonal, then over the diagonals of a tile."""
    apart, head = tl.program_id(0) // splits - (tiles - 1), tl.program_id(1)
    count = tiles - tl.abs(apart)
    row = tl.arange(0, TILE)
    # Further away all biases are the same, which go on as far as this.
    FURTHEST: tl.constexpr = (HALF + 7) // 8 * 8 + TILE
    nearer = tl.minimum(tl.maximum(apart * TILE, -FURTHEST), FURTHEST)
    total = tl.zeros((TILE, TILE), tl.float32)
    for item in range(tl.program_id(0) % splits, count * batch, splits):
        b, number = item // count, item % count
        query = (number + tl.maximum(-apart, 0)) * TILE + row
        key = (number + tl.maximum(apart, 0)) * TILE + row
        begin, end = bounds_of_queries(first, stop, query, b, length, length, CAUSAL, HAS_INTERVALS)
        q_tile = load_tile(q, (q_s, q_b, q_h), query, b, head, length, WIDTH)
        k_tile = load_tile(k, (k_s, k_b, k_h), key, b, head // group, length, WIDTH)
        v_tile = load_tile(v, (v_s, v_b, v_h), key, b, head // group, length, WIDTH)
        grad_tile = load_tile(grad, (grad_s, grad_b, grad_h), query, b, head, length, WIDTH)
        at = (b * heads + head).to(tl.int64) * length + query
        log_sum_exp = tl.load(lse + at, mask=query < length, other=0.0) * LOG2_E
        deltas = tl.load(delta + at, mask=query < length, other=0.0)
        of_weights = tl.dot(grad_tile, tl.trans(v_tile)) - deltas[:, None]
        scores = tl.dot(q_tile, tl.trans(k_tile)) * (SCALE * LOG2_E) - log_sum_exp[:, None]
        scores += tile_biases(copies, head, row, nearer, TILE, CENTER, LENGTH)
        visible = (key[None, :] >= begin[:, None]) & (key[None, :] < end[:, None])
        total += tl.where(visible, tl.exp2(scores), 0.0) * of_weights
    place = tl.arange(0, 2 * TILE)
    column = place[None, :] - (TILE - 1) + row[:, None]
    inside = (column >= 0) & (column < TILE)
    sheared = tl.gather(total, tl.where(inside, column, 0), axis=1)
    diagonals = tl.sum(tl.where(inside, sheared, 0.0), axis=0)
    tl.store(sums + (head * tl.num_programs(0) + tl.program_id(0)) * 2 * TILE + place, diagonals)


@triton.jit
def _collect_columns(sums, out, tiles, blocks, splits, TILE: tl.constexpr, HALF: tl.constexpr, COLUMNS: tl.constexpr):
    """Adds the sums of diagonals up to the columns of the table."""
    column, head = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS), tl.program_id(1)
    place = tl.arange(0, 2 * TILE)
    total = tl.zeros((COLUMNS,), tl.float32)
    for block in range(blocks):
        of_block = tl.zeros((2 * TILE,), tl.float32)
        for split in range(splits):
            of_block += tl.load(sums + ((head * blocks + block) * splits + split) * 2 * TILE + place)
        distance = (block - (tiles - 1)) * TILE + place - (TILE - 1)
        target = tl.minimum(tl.maximum(distance + HALF, 0), 2 * HALF)
        total += tl.sum(tl.where(target[:, None] == column[None, :], of_block[:, None], 0.0), axis=0)
    tl.store(out + head * (2 * HALF + 1) + column, total, mask=column < 2 * HALF + 1)


def distance_bias_grad(
    tensors: tuple[Tensor, ...],
    strides: tuple[int, ...],
    shape: tuple[int, ...],
    group: int,
    constants: dict[str, Any],
    *,
    causal: bool,
) -> Tensor:
    """Returns the gradient [H, D] in float32.

    tensors: queries, keys, values, the output's gradient, log-sum-exp, delta, copies of the table, bounds of the queries. strides: of
    the first four. shape: of the queries. group: how many of their heads share keys. constants: of `BiasCopies` and `tile_constants`.
    """
    length, batch, heads, _ = shape
    tiles = -(-length // _TILE)
    blocks = tiles if causal else 2 * tiles - 1
    splits = max(1, min(tiles * batch, _PROGRAMS // (blocks * heads)))
    lse = tensors[4]
    sums = lse.new_empty((heads, blocks, splits, 2 * _TILE))
    used = {name: value for name, value in constants.items() if name != "HAS_BIAS"}
    launch = kernel_launcher(_diagonal_sums, TILE=_TILE, **used, num_warps=_WARPS, num_stages=_STAGES)
    launch(blocks * splits, (*tensors, sums), (*strides, length, batch, heads, group, tiles, splits), heads)
    columns, half = 64, constants["HALF"]
    out = lse.new_empty((heads, 2 * half + 1))
    launch = kernel_launcher(_collect_columns, TILE=_TILE, HALF=half, COLUMNS=columns, num_warps=4)
    launch(-(-(2 * half + 1) // columns), (sums, out), (tiles, blocks, splits), heads)
    return out
