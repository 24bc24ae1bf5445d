"""Gradients of attention of key intervals (`key_interval_attention.py`), without atomic adds: the same bits every time.

With P the softmax, dO the output's gradient and delta its row sums with the output,

    dV = P^T dO        dS = P (dO V^T - delta)        dQ = dS K / sqrt(E)        dK = dS^T Q / sqrt(E)

A program has a tile of keys and goes through the queries that see them (dK and dV), another a tile of queries (dQ). The gradient of
biases is dS summed over the batch and over all pairs of a distance. Square tiles whose queries and keys are equally far apart need the
same sums: a program adds dS of all such tiles of a head in registers, and sums the diagonals of that tile once. So it computes scores a
third time, two of eleven GEMMs, and nothing of the size of scores is in memory: a few sums for each block of distances, from which the
columns of the table are collected in a fixed order.

S sequence of the queries, T of the keys, B batch, H query heads, K kv heads, E head dim, D distances.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from petatron.kernels.attention.key_interval_attention import KeyIntervals
from petatron.kernels.strides import contiguous_rows
from petatron.kernels.triton.attention.key_interval_tiles import (
    LOG2_E,
    biases,
    bounds_of_queries,
    empty_like_heads,
    float_table,
    head_strides,
    load_tile,
    near_range,
    store_tile,
    tile_constants,
)

_TILE = 64
"""Queries and keys of a tile of the biases' gradient."""
_PROGRAMS = 1024
"""The wanted number of programs for it."""


@triton.jit
def _deltas(tensors, strides, sizes, QUERIES: tl.constexpr, WIDTH: tl.constexpr):
    grad, out, delta = tensors
    length, heads = sizes
    b, head = tl.program_id(1) // heads, tl.program_id(1) % heads
    query = tl.program_id(0) * QUERIES + tl.arange(0, QUERIES)
    grad_tile = load_tile(grad, strides[0], query, b, head, length, WIDTH).to(tl.float32)
    out_tile = load_tile(out, strides[1], query, b, head, length, WIDTH).to(tl.float32)
    sums = tl.sum(grad_tile * out_tile, axis=1)
    tl.store(delta + tl.program_id(1).to(tl.int64) * length + query, sums, mask=query < length)


@triton.jit
def _bounds_of_keys(intervals, key, b, length, key_length, CAUSAL: tl.constexpr):
    """Returns the first and one after the last query that sees each key; none beyond the length."""
    here = key < key_length
    if intervals is not None:
        first = tl.load(intervals[2] + b * key_length + key, mask=here, other=length)
        stop = tl.load(intervals[3] + b * key_length + key, mask=here, other=0)
    else:
        first = tl.where(here, key if CAUSAL else 0, length)
        stop = tl.where(here, length, 0)
    return first, stop


@triton.jit
def _from_queries(
    grads, k_tile, v_tile, tensors, strides, place, lo, hi, NEAR: tl.constexpr, HALF: tl.constexpr, CONST: tl.constexpr
):
    """Adds what the queries lo ... hi - 1 give the keys of a tile."""
    dk, dv = grads
    q, grad, bias, lse, delta = tensors
    key, first, stop, b, head, length, far = place
    QUERIES: tl.constexpr = CONST[0]
    WIDTH: tl.constexpr = CONST[1]
    scale = CONST[2] * LOG2_E
    for start in range(lo, hi, QUERIES):
        query = start + tl.arange(0, QUERIES)
        q_tile = load_tile(q, strides[0], query, b, head, length, WIDTH)
        scores = tl.dot(k_tile, tl.trans(q_tile)) * scale
        if bias is not None:
            if NEAR:
                scores += biases(bias, key[:, None] - query[None, :], head, HALF)
            else:
                scores += far
        log_sum_exp = tl.load(lse + query, mask=query < length, other=0.0) * LOG2_E
        visible = (query[None, :] >= first[:, None]) & (query[None, :] < stop[:, None])
        weights = tl.where(visible, tl.exp2(scores - log_sum_exp[None, :]), 0.0)
        grad_tile = load_tile(grad, strides[3], query, b, head, length, WIDTH)
        dv = tl.dot(weights.to(grad_tile.dtype), grad_tile, dv)
        of_weights = tl.dot(v_tile, tl.trans(grad_tile))
        of_scores = weights * (of_weights - tl.load(delta + query, mask=query < length, other=0.0)[None, :])
        dk = tl.dot(of_scores.to(q_tile.dtype), q_tile, dk)
    return dk, dv


@triton.jit
def _key_value_grads(
    tensors,
    intervals,
    strides,
    sizes,
    SCALE: tl.constexpr,
    QUERIES: tl.constexpr,
    KEYS: tl.constexpr,
    WIDTH: tl.constexpr,
    HALF: tl.constexpr,
    CAUSAL: tl.constexpr,
):
    q, k, v, grad, bias, lse, delta, dk, dv = tensors
    length, key_length, heads, group = sizes
    b, head = tl.program_id(1) // heads, tl.program_id(1) % heads
    k0 = tl.program_id(0) * KEYS
    key = k0 + tl.arange(0, KEYS)
    first, stop = _bounds_of_keys(intervals, key, b, length, key_length, CAUSAL)
    lo, hi = tl.min(first, axis=0) // QUERIES * QUERIES, tl.max(stop, axis=0)
    k_tile = load_tile(k, strides[1], key, b, head // group, key_length, WIDTH)
    v_tile = load_tile(v, strides[2], key, b, head // group, key_length, WIDTH)
    row = tl.program_id(1).to(tl.int64) * length
    grads = tl.zeros((KEYS, WIDTH), tl.float32), tl.zeros((KEYS, WIDTH), tl.float32)
    CONST: tl.constexpr = (QUERIES, WIDTH, SCALE)
    read = (q, grad, bias, lse + row, delta + row)
    place = (key, first, stop, b, head, length, 0.0)
    if bias is None:
        grads = _from_queries(grads, k_tile, v_tile, read, strides, place, lo, hi, 0, HALF, CONST)
    else:
        near, after = near_range(lo, hi, k0, k0 + KEYS - 1, HALF, QUERIES)
        place = (key, first, stop, b, head, length, biases(bias, HALF, head, HALF))
        grads = _from_queries(grads, k_tile, v_tile, read, strides, place, lo, near, 0, HALF, CONST)
        grads = _from_queries(grads, k_tile, v_tile, read, strides, place, near, after, 1, HALF, CONST)
        place = (key, first, stop, b, head, length, biases(bias, -HALF, head, HALF))
        grads = _from_queries(grads, k_tile, v_tile, read, strides, place, after, hi, 0, HALF, CONST)
    store_tile(dk, strides[4], key, b, head, key_length, grads[0] * SCALE, WIDTH)
    store_tile(dv, strides[5], key, b, head, key_length, grads[1], WIDTH)


@triton.jit
def _from_keys(
    dq, q_tile, grad_tile, tensors, strides, place, lo, hi, NEAR: tl.constexpr, HALF: tl.constexpr, CONST: tl.constexpr
):
    """Adds what the keys lo ... hi - 1 give the queries of a tile."""
    k, v, bias = tensors
    query, first, stop, log_sum_exp, delta, b, head, kv_head, key_length, far = place
    KEYS: tl.constexpr = CONST[0]
    WIDTH: tl.constexpr = CONST[1]
    scale = CONST[2] * LOG2_E
    for start in range(lo, hi, KEYS):
        key = start + tl.arange(0, KEYS)
        k_tile = load_tile(k, strides[1], key, b, kv_head, key_length, WIDTH)
        scores = tl.dot(q_tile, tl.trans(k_tile)) * scale
        if bias is not None:
            if NEAR:
                scores += biases(bias, key[None, :] - query[:, None], head, HALF)
            else:
                scores += far
        visible = (key[None, :] >= first[:, None]) & (key[None, :] < stop[:, None])
        weights = tl.where(visible, tl.exp2(scores - log_sum_exp[:, None]), 0.0)
        v_tile = load_tile(v, strides[2], key, b, kv_head, key_length, WIDTH)
        of_scores = weights * (tl.dot(grad_tile, tl.trans(v_tile)) - delta[:, None])
        dq = tl.dot(of_scores.to(k_tile.dtype), k_tile, dq)
    return dq


@triton.jit
def _query_grads(
    tensors,
    intervals,
    strides,
    sizes,
    SCALE: tl.constexpr,
    QUERIES: tl.constexpr,
    KEYS: tl.constexpr,
    WIDTH: tl.constexpr,
    HALF: tl.constexpr,
    CAUSAL: tl.constexpr,
):
    q, k, v, grad, bias, lse, delta, dq_out = tensors
    length, key_length, heads, group = sizes
    b, head = tl.program_id(1) // heads, tl.program_id(1) % heads
    q0 = tl.program_id(0) * QUERIES
    query = q0 + tl.arange(0, QUERIES)
    first, stop = bounds_of_queries(intervals, query, b, length, key_length, CAUSAL)
    lo, hi = tl.min(first, axis=0) // KEYS * KEYS, tl.max(stop, axis=0)
    q_tile = load_tile(q, strides[0], query, b, head, length, WIDTH)
    grad_tile = load_tile(grad, strides[3], query, b, head, length, WIDTH)
    row = tl.program_id(1).to(tl.int64) * length
    log_sum_exp = tl.load(lse + row + query, mask=query < length, other=0.0) * LOG2_E
    delta_tile = tl.load(delta + row + query, mask=query < length, other=0.0)
    dq = tl.zeros((QUERIES, WIDTH), tl.float32)
    CONST: tl.constexpr = (KEYS, WIDTH, SCALE)
    kvb = (k, v, bias)
    kv_head = head // group
    place = (query, first, stop, log_sum_exp, delta_tile, b, head, kv_head, key_length, 0.0)
    if bias is None:
        dq = _from_keys(dq, q_tile, grad_tile, kvb, strides, place, lo, hi, 0, HALF, CONST)
    else:
        near, after = near_range(lo, hi, q0, q0 + QUERIES - 1, HALF, KEYS)
        far = biases(bias, -HALF, head, HALF)
        place = (query, first, stop, log_sum_exp, delta_tile, b, head, kv_head, key_length, far)
        dq = _from_keys(dq, q_tile, grad_tile, kvb, strides, place, lo, near, 0, HALF, CONST)
        dq = _from_keys(dq, q_tile, grad_tile, kvb, strides, place, near, after, 1, HALF, CONST)
        far = biases(bias, HALF, head, HALF)
        place = (query, first, stop, log_sum_exp, delta_tile, b, head, kv_head, key_length, far)
        dq = _from_keys(dq, q_tile, grad_tile, kvb, strides, place, after, hi, 0, HALF, CONST)
    store_tile(dq_out, strides[4], query, b, head, length, dq * SCALE, WIDTH)


@triton.jit
def _diagonal_sums(
    tensors,
    intervals,
    strides,
    sizes,
    SCALE: tl.constexpr,
    TILE: tl.constexpr,
    WIDTH: tl.constexpr,
    HALF: tl.constexpr,
    CAUSAL: tl.constexpr,
):
    """Sums dS over the batch and over tiles that are equally far from the diagonal, then over the diagonals of a tile."""
    q, k, v, grad, bias, lse, delta, sums = tensors
    length, batch, heads, group, tiles, splits = sizes
    apart, head = tl.program_id(0) // splits - (tiles - 1), tl.program_id(1)
    count = tiles - tl.abs(apart)
    row = tl.arange(0, TILE)
    scale = SCALE * LOG2_E
    # The same for all tiles of the program.
    tile_bias = biases(bias, apart * TILE + row[None, :] - row[:, None], head, HALF)
    total = tl.zeros((TILE, TILE), tl.float32)
    for item in range(tl.program_id(0) % splits, count * batch, splits):
        b, number = item // count, item % count
        query = (number + tl.maximum(-apart, 0)) * TILE + row
        key = (number + tl.maximum(apart, 0)) * TILE + row
        first, stop = bounds_of_queries(intervals, query, b, length, length, CAUSAL)
        q_tile = load_tile(q, strides[0], query, b, head, length, WIDTH)
        k_tile = load_tile(k, strides[1], key, b, head // group, length, WIDTH)
        v_tile = load_tile(v, strides[2], key, b, head // group, length, WIDTH)
        grad_tile = load_tile(grad, strides[3], query, b, head, length, WIDTH)
        at = (b * heads + head).to(tl.int64) * length + query
        log_sum_exp = tl.load(lse + at, mask=query < length, other=0.0) * LOG2_E
        scores = tl.dot(q_tile, tl.trans(k_tile)) * scale + tile_bias
        visible = (key[None, :] >= first[:, None]) & (key[None, :] < stop[:, None])
        weights = tl.where(visible, tl.exp2(scores - log_sum_exp[:, None]), 0.0)
        deltas = tl.load(delta + at, mask=query < length, other=0.0)
        total += weights * (tl.dot(grad_tile, tl.trans(v_tile)) - deltas[:, None])
    place = tl.arange(0, 2 * TILE)
    column = place[None, :] - (TILE - 1) + row[:, None]
    inside = (column >= 0) & (column < TILE)
    sheared = tl.gather(total, tl.where(inside, column, 0), axis=1)
    diagonals = tl.sum(tl.where(inside, sheared, 0.0), axis=0)
    tl.store(sums + (head * tl.num_programs(0) + tl.program_id(0)) * 2 * TILE + place, diagonals)


@triton.jit
def _collect_columns(sums, out, sizes, TILE: tl.constexpr, HALF: tl.constexpr, COLUMNS: tl.constexpr):
    """Adds the sums of diagonals up to the columns of the table."""
    tiles, blocks, splits = sizes
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


def input_grads(
    grad_SBHE: Tensor,
    q_SBHE: Tensor,
    k_TBKE: Tensor,
    v_TBKE: Tensor,
    bias_HD: Tensor | None,
    intervals: KeyIntervals | None,
    *,
    out_SBHE: Tensor,
    lse_BHS: Tensor,
    causal: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """Returns the gradients of queries, keys, values and biases."""
    q, k, v, grad = map(contiguous_rows, (q_SBHE, k_TBKE, v_TBKE, grad_SBHE))
    bounds, table = None if intervals is None else tuple(intervals), float_table(bias_HD)
    (length, batch, heads, width), (key_length, groups) = q.shape, (k.shape[0], k.shape[2])
    sizes, constants = (length, key_length, heads, heads // groups), tile_constants(q, table, intervals, causal=causal)
    delta = torch.empty_like(lse_BHS)
    programs = batch * heads
    _deltas[(triton.cdiv(length, 128), programs)](
        (grad, out_SBHE, delta), head_strides(grad, out_SBHE), (length, heads), QUERIES=128, WIDTH=width, num_warps=4
    )
    read = (q, k, v, grad, table, lse_BHS, delta)
    dq, dk, dv = empty_like_heads(q), *(_empty_key_grads(x, heads) for x in (k, v))
    _key_value_grads[(triton.cdiv(key_length, 64), programs)](
        (*read, dk, dv),
        bounds,
        head_strides(q, k, v, grad, dk, dv),
        sizes,
        QUERIES=64,
        KEYS=64,
        **constants,
        num_warps=4,
        num_stages=3,
    )
    queries = 128 if length > 64 else 64
    _query_grads[(triton.cdiv(length, queries), programs)](
        (*read, dq),
        bounds,
        head_strides(q, k, v, grad, dq),
        sizes,
        QUERIES=queries,
        KEYS=64,
        **constants,
        num_warps=queries // 16 if queries > 64 else 4,
        num_stages=3,
    )
    if groups < heads:
        dk, dv = (x.unflatten(2, (groups, -1)).sum(3) for x in (dk, dv))
    if table is None or bias_HD is None:
        return dq, dk, dv, None
    tiles = triton.cdiv(length, _TILE)
    blocks = tiles if causal else 2 * tiles - 1
    splits = max(1, min(tiles * batch, _PROGRAMS // (blocks * heads)))
    sums = lse_BHS.new_empty((heads, blocks, splits, 2 * _TILE))
    _diagonal_sums[(blocks * splits, heads)](
        (*read, sums),
        bounds,
        head_strides(q, k, v, grad),
        (length, batch, heads, heads // groups, tiles, splits),
        TILE=_TILE,
        **constants,
        num_warps=4,
        num_stages=3,
    )
    bias_grad = torch.empty_like(table)
    columns = 64
    _collect_columns[(triton.cdiv(table.shape[1], columns), heads)](
        sums, bias_grad, (tiles, blocks, splits), TILE=_TILE, HALF=constants["HALF"], COLUMNS=columns, num_warps=4
    )
    return dq, dk, dv, bias_grad.to(bias_HD.dtype)


def _empty_key_grads(x_TBKE: Tensor, heads: int) -> Tensor:
    """Returns room for a gradient of each query head's keys or values."""
    return empty_like_heads(x_TBKE if x_TBKE.shape[2] == heads else x_TBKE[:, :, :1].expand(-1, -1, heads, -1))
