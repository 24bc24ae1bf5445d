"""Gradients of attention of key intervals (`key_interval_attention.py`), without atomic adds: the same bits every time.

With P the softmax, dO the output's gradient and delta its row sums with the output,

    dV = P^T dO        dS = P (dO V^T - delta)        dQ = dS K / sqrt(E)        dK = dS^T Q / sqrt(E)

A program has a tile of keys and goes through the queries that see them (dK and dV), another a tile of queries (dQ). The gradient of
biases is in `distance_bias_grad.py`.

S sequence of the queries, T of the keys, B batch, H query heads, K kv heads, E head dim, D distances.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from petatron.kernels.attention.key_interval_attention import KeyIntervals
from petatron.kernels.strides import contiguous_rows
from petatron.kernels.triton.attention.distance_bias_grad import distance_bias_grad
from petatron.kernels.triton.attention.key_interval_tiles import (
    LOG2_E,
    BiasCopies,
    bounds_of_queries,
    empty_like_heads,
    far_bias,
    head_strides,
    load_tile,
    near_range,
    store_tile,
    tile_biases,
    tile_constants,
)
from petatron.kernels.triton.kernel_launch import kernel_launcher


@triton.jit
def _deltas(
    grad,
    out,
    delta,
    grad_s,
    grad_b,
    grad_h,
    out_s,
    out_b,
    out_h,
    length,
    heads,
    QUERIES: tl.constexpr,
    WIDTH: tl.constexpr,
):
    b, head = tl.program_id(1) // heads, tl.program_id(1) % heads
    query = tl.program_id(0) * QUERIES + tl.arange(0, QUERIES)
    grad_tile = load_tile(grad, (grad_s, grad_b, grad_h), query, b, head, length, WIDTH).to(tl.float32)
    out_tile = load_tile(out, (out_s, out_b, out_h), query, b, head, length, WIDTH).to(tl.float32)
    sums = tl.sum(grad_tile * out_tile, axis=1)
    tl.store(delta + tl.program_id(1).to(tl.int64) * length + query, sums, mask=query < length)


@triton.jit
def _bounds_of_keys(first, stop, key, b, length, key_length, CAUSAL: tl.constexpr, HAS_INTERVALS: tl.constexpr):
    """Returns the first and one after the last query that sees each key; none beyond the length."""
    here = key < key_length
    if HAS_INTERVALS:
        first = tl.load(first + b * key_length + key, mask=here, other=length)
        stop = tl.load(stop + b * key_length + key, mask=here, other=0)
    else:
        first = tl.where(here, key if CAUSAL else 0, length)
        stop = tl.where(here, length, 0)
    return first, stop


@triton.jit
def _from_queries(
    grads,
    k_tile,
    v_tile,
    tensors,
    strides,
    place,
    lo,
    hi,
    SCALE: tl.constexpr,
    QUERIES: tl.constexpr,
    WIDTH: tl.constexpr,
    CENTER: tl.constexpr,
    LENGTH: tl.constexpr,
    NEAR: tl.constexpr,
):
    """Adds what the queries lo ... hi - 1 give the keys of a tile."""
    dk, dv = grads
    q, grad, copies, lse, delta = tensors
    q_strides, grad_strides = strides
    key, first, stop, b, head, length, far = place
    for start in range(lo, hi, QUERIES):
        query = start + tl.arange(0, QUERIES)
        q_tile = load_tile(q, q_strides, query, b, head, length, WIDTH)
        scores = tl.dot(k_tile, tl.trans(q_tile)) * (SCALE * LOG2_E)
        if NEAR:
            scores += tile_biases(copies, head, key, start, QUERIES, CENTER, LENGTH)
        else:
            scores += far
        log_sum_exp = tl.load(lse + query, mask=query < length, other=0.0) * LOG2_E
        visible = (query[None, :] >= first[:, None]) & (query[None, :] < stop[:, None])
        weights = tl.where(visible, tl.exp2(scores - log_sum_exp[None, :]), 0.0)
        grad_tile = load_tile(grad, grad_strides, query, b, head, length, WIDTH)
        dv = tl.dot(weights.to(grad_tile.dtype), grad_tile, dv)
        of_weights = tl.dot(v_tile, tl.trans(grad_tile))
        of_scores = weights * (of_weights - tl.load(delta + query, mask=query < length, other=0.0)[None, :])
        dk = tl.dot(of_scores.to(q_tile.dtype), q_tile, dk)
    return dk, dv


@triton.jit
def _key_value_grads(
    q,
    k,
    v,
    grad,
    lse,
    delta,
    copies,
    first,
    stop,
    dk,
    dv,
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
    dk_s,
    dk_b,
    dk_h,
    dv_s,
    dv_b,
    dv_h,
    length,
    key_length,
    heads,
    group,
    SCALE: tl.constexpr,
    QUERIES: tl.constexpr,
    KEYS: tl.constexpr,
    WIDTH: tl.constexpr,
    HALF: tl.constexpr,
    CENTER: tl.constexpr,
    LENGTH: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    HAS_INTERVALS: tl.constexpr,
    CAUSAL: tl.constexpr,
):
    k0 = tl.program_id(0) * KEYS
    b, head = tl.program_id(1) // heads, tl.program_id(1) % heads
    key = k0 + tl.arange(0, KEYS)
    first, stop = _bounds_of_keys(first, stop, key, b, length, key_length, CAUSAL, HAS_INTERVALS)
    lo, hi = tl.min(first, axis=0) // QUERIES * QUERIES, tl.max(stop, axis=0)
    k_tile = load_tile(k, (k_s, k_b, k_h), key, b, head // group, key_length, WIDTH)
    v_tile = load_tile(v, (v_s, v_b, v_h), key, b, head // group, key_length, WIDTH)
    row = tl.program_id(1).to(tl.int64) * length
    dk_tile, dv_tile = tl.zeros((KEYS, WIDTH), tl.float32), tl.zeros((KEYS, WIDTH), tl.float32)
    sums = dk_tile, dv_tile
    strides = (q_s, q_b, q_h), (grad_s, grad_b, grad_h)
    if HAS_BIAS:
        copies += heads * 8 * LENGTH  # those in reverse
        read = q, grad, copies, lse + row, delta + row
        near, after = near_range(lo, hi, k0, k0 + KEYS - 1, HALF, QUERIES)
        place = key, first, stop, b, head, length, far_bias(copies, head, False, LENGTH)
        sums = _from_queries(
            sums, k_tile, v_tile, read, strides, place, lo, near, SCALE, QUERIES, WIDTH, CENTER, LENGTH, False
        )
        sums = _from_queries(
            sums, k_tile, v_tile, read, strides, place, near, after, SCALE, QUERIES, WIDTH, CENTER, LENGTH, True
        )
        place = key, first, stop, b, head, length, far_bias(copies, head, True, LENGTH)
        sums = _from_queries(
            sums, k_tile, v_tile, read, strides, place, after, hi, SCALE, QUERIES, WIDTH, CENTER, LENGTH, False
        )
    else:
        read = q, grad, copies, lse + row, delta + row
        place = key, first, stop, b, head, length, 0.0
        sums = _from_queries(
            sums, k_tile, v_tile, read, strides, place, lo, hi, SCALE, QUERIES, WIDTH, CENTER, LENGTH, False
        )
    store_tile(dk, (dk_s, dk_b, dk_h), key, b, head, key_length, sums[0] * SCALE, WIDTH)
    store_tile(dv, (dv_s, dv_b, dv_h), key, b, head, key_length, sums[1], WIDTH)


@triton.jit
def _from_keys(
    dq,
    q_tile,
    grad_tile,
    tensors,
    strides,
    place,
    lo,
    hi,
    SCALE: tl.constexpr,
    KEYS: tl.constexpr,
    WIDTH: tl.constexpr,
    CENTER: tl.constexpr,
    LENGTH: tl.constexpr,
    NEAR: tl.constexpr,
):
    """Adds what the keys lo ... hi - 1 give the queries of a tile."""
    k, v, copies = tensors
    k_strides, v_strides = strides
    query, first, stop, log_sum_exp, delta, b, head, kv_head, key_length, far = place
    for start in range(lo, hi, KEYS):
        key = start + tl.arange(0, KEYS)
        k_tile = load_tile(k, k_strides, key, b, kv_head, key_length, WIDTH)
        scores = tl.dot(q_tile, tl.trans(k_tile)) * (SCALE * LOG2_E)
        if NEAR:
            scores += tile_biases(copies, head, query, start, KEYS, CENTER, LENGTH)
        else:
            scores += far
        visible = (key[None, :] >= first[:, None]) & (key[None, :] < stop[:, None])
        weights = tl.where(visible, tl.exp2(scores - log_sum_exp[:, None]), 0.0)
        v_tile = load_tile(v, v_strides, key, b, kv_head, key_length, WIDTH)
        of_scores = weights * (tl.dot(grad_tile, tl.trans(v_tile)) - delta[:, None])
        dq = tl.dot(of_scores.to(k_tile.dtype), k_tile, dq)
    return dq


@triton.jit
def _query_grads(
    q,
    k,
    v,
    grad,
    lse,
    delta,
    copies,
    first,
    stop,
    dq_out,
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
    dq_s,
    dq_b,
    dq_h,
    length,
    key_length,
    heads,
    group,
    SCALE: tl.constexpr,
    QUERIES: tl.constexpr,
    KEYS: tl.constexpr,
    WIDTH: tl.constexpr,
    HALF: tl.constexpr,
    CENTER: tl.constexpr,
    LENGTH: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    HAS_INTERVALS: tl.constexpr,
    CAUSAL: tl.constexpr,
):
    q0 = tl.program_id(0) * QUERIES
    b, head = tl.program_id(1) // heads, tl.program_id(1) % heads
    query = q0 + tl.arange(0, QUERIES)
    first, stop = bounds_of_queries(first, stop, query, b, length, key_length, CAUSAL, HAS_INTERVALS)
    lo, hi = tl.min(first, axis=0) // KEYS * KEYS, tl.max(stop, axis=0)
    q_tile = load_tile(q, (q_s, q_b, q_h), query, b, head, length, WIDTH)
    grad_tile = load_tile(grad, (grad_s, grad_b, grad_h), query, b, head, length, WIDTH)
    row = tl.program_id(1).to(tl.int64) * length
    log_sum_exp = tl.load(lse + row + query, mask=query < length, other=0.0) * LOG2_E
    deltas = tl.load(delta + row + query, mask=query < length, other=0.0)
    dq = tl.zeros((QUERIES, WIDTH), tl.float32)
    read, strides = (k, v, copies), ((k_s, k_b, k_h), (v_s, v_b, v_h))
    kv_head = head // group
    if HAS_BIAS:
        near, after = near_range(lo, hi, q0, q0 + QUERIES - 1, HALF, KEYS)
        far = far_bias(copies, head, False, LENGTH)
        place = query, first, stop, log_sum_exp, deltas, b, head, kv_head, key_length, far
        dq = _from_keys(
            dq, q_tile, grad_tile, read, strides, place, lo, near, SCALE, KEYS, WIDTH, CENTER, LENGTH, False
        )
        dq = _from_keys(
            dq, q_tile, grad_tile, read, strides, place, near, after, SCALE, KEYS, WIDTH, CENTER, LENGTH, True
        )
        far = far_bias(copies, head, True, LENGTH)
        place = query, first, stop, log_sum_exp, deltas, b, head, kv_head, key_length, far
        dq = _from_keys(
            dq, q_tile, grad_tile, read, strides, place, after, hi, SCALE, KEYS, WIDTH, CENTER, LENGTH, False
        )
    else:
        place = query, first, stop, log_sum_exp, deltas, b, head, kv_head, key_length, 0.0
        dq = _from_keys(dq, q_tile, grad_tile, read, strides, place, lo, hi, SCALE, KEYS, WIDTH, CENTER, LENGTH, False)
    store_tile(dq_out, (dq_s, dq_b, dq_h), query, b, head, length, dq * SCALE, WIDTH)


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
    (length, batch, heads, width), (key_length, groups) = q.shape, (k.shape[0], k.shape[2])
    biases, constants = BiasCopies.of(bias_HD, q), tile_constants(q, intervals, causal=causal)
    constants |= biases.constants
    first, stop, first_query, stop_query = (lse_BHS,) * 4 if intervals is None else intervals
    delta, programs = torch.empty_like(lse_BHS), batch * heads
    of_deltas = head_strides(grad, out_SBHE)
    launch = kernel_launcher(_deltas, QUERIES=128, WIDTH=width, num_warps=4)
    launch(-(-length // 128), (grad, out_SBHE, delta), (*of_deltas, length, heads), programs)
    dq, dk, dv = empty_like_heads(q), *(_empty_key_grads(x, heads) for x in (k, v))
    read, sizes = (q, k, v, grad, lse_BHS, delta, biases.copies), (length, key_length, heads, heads // groups)
    launch = kernel_launcher(_key_value_grads, QUERIES=64, KEYS=64, **constants, num_warps=4, num_stages=3)
    strides = head_strides(q, k, v, grad, dk, dv)
    launch(-(-key_length // 64), (*read, first_query, stop_query, dk, dv), (*strides, *sizes), programs)
    queries = 128 if length > 64 else 64
    tile = {"QUERIES": queries, "KEYS": 64, "num_warps": queries // 16, "num_stages": 3}
    launch = kernel_launcher(_query_grads, **tile, **constants)
    strides = head_strides(q, k, v, grad, dq)
    launch(-(-length // queries), (*read, first, stop, dq), (*strides, *sizes), programs)
    if groups < heads:
        dk, dv = (x.unflatten(2, (groups, -1)).sum(3) for x in (dk, dv))
    if bias_HD is None:
        return dq, dk, dv, None
    strides = head_strides(q, k, v, grad)
    bias_grad = distance_bias_grad((*read, first, stop), strides, q.shape, heads // groups, constants, causal=causal)
    return dq, dk, dv, bias_grad.to(bias_HD.dtype)


def _empty_key_grads(x_TBKE: Tensor, heads: int) -> Tensor:
    """Returns room for a gradient of each query head's keys or values."""
    return empty_like_heads(x_TBKE if x_TBKE.shape[2] == heads else x_TBKE[:, :, :1].expand(-1, -1, heads, -1))
