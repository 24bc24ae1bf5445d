"""Attention of key intervals with biases by distance: in one pass over the keys (FlashAttention).

A program has a tile of queries of one head and goes through the keys that they see. A bias is read from the table of its head, by the
distance of each pair: the addresses of neighbors in a tile are neighbors, so the table's reads are few and come from the nearest cache.
Distances beyond the table's have its first or last bias. So the keys are in three ranges, far before, near, and far after, and only the
near one reads the table: with a table for 128 tokens, and long sequences, nearly none of the work.

Scores are in units of log 2, for which the hardware has an exponential. Products of half-precision operands are summed in float32.

S sequence of the queries, T of the keys, B batch, H query heads, K kv heads, E head dim, D distances.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from petatron.kernels.attention.key_interval_attention import KeyIntervals
from petatron.kernels.strides import contiguous_rows
from petatron.kernels.triton.attention.key_interval_attention_grads import input_grads
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

_LN_2 = tl.constexpr(0.6931471805599453)
_WIDEST = 128
_HALF = (torch.float16, torch.bfloat16)


def unsupported_tensors_reason(q: Tensor, v: Tensor) -> str | None:
    """See the reference."""
    width = q.shape[-1]
    if width != v.shape[-1] or width > _WIDEST or width < 16 or width & (width - 1):
        return f"heads of {width} and {v.shape[-1]} values; equal powers of two from 16 to {_WIDEST} are served"
    return None if q.dtype in _HALF else f"{q.dtype} is not half precision"


@triton.jit
def _attend(state, q, tensors, strides, place, lo, hi, NEAR: tl.constexpr, HALF: tl.constexpr, CONST: tl.constexpr):
    """Goes through the keys lo ... hi - 1; `NEAR` 0: the biases are the same for all, that of the head's column `far`."""
    total, denominator, highest = state
    k, v, bias = tensors
    query, first, stop, b, head, kv_head, key_length, far = place
    KEYS: tl.constexpr = CONST[0]
    WIDTH: tl.constexpr = CONST[1]
    scale = CONST[2] * LOG2_E
    for start in range(lo, hi, KEYS):
        key = start + tl.arange(0, KEYS)
        k_tile = load_tile(k, strides[1], key, b, kv_head, key_length, WIDTH)
        scores = tl.dot(q, tl.trans(k_tile)) * scale
        if bias is not None:
            if NEAR:
                scores += biases(bias, key[None, :] - query[:, None], head, HALF)
            else:
                scores += far
        visible = (key[None, :] >= first[:, None]) & (key[None, :] < stop[:, None])
        scores = tl.where(visible, scores, -float("inf"))
        top = tl.maximum(highest, tl.max(scores, axis=1))
        finite = tl.where(top == -float("inf"), 0.0, top)
        weights = tl.exp2(scores - finite[:, None])
        faded = tl.exp2(highest - finite)
        v_tile = load_tile(v, strides[2], key, b, kv_head, key_length, WIDTH)
        denominator = denominator * faded + tl.sum(weights, axis=1)
        total = tl.dot(weights.to(v_tile.dtype), v_tile, total * faded[:, None])
        highest = top
    return total, denominator, highest


@triton.jit
def _forward(
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
    q, k, v, bias, out, lse = tensors
    length, key_length, heads, group = sizes
    b, head = tl.program_id(1) // heads, tl.program_id(1) % heads
    query = tl.program_id(0) * QUERIES + tl.arange(0, QUERIES)
    first, stop = bounds_of_queries(intervals, query, b, length, key_length, CAUSAL)
    lo, hi = tl.min(first, axis=0) // KEYS * KEYS, tl.max(stop, axis=0)
    q_tile = load_tile(q, strides[0], query, b, head, length, WIDTH)
    state = (
        tl.zeros((QUERIES, WIDTH), tl.float32),
        tl.zeros((QUERIES,), tl.float32),
        tl.full((QUERIES,), -float("inf"), tl.float32),
    )
    CONST: tl.constexpr = (KEYS, WIDTH, SCALE)
    kvb = (k, v, bias)
    place = (query, first, stop, b, head, head // group, key_length, 0.0)
    if bias is None:
        state = _attend(state, q_tile, kvb, strides, place, lo, hi, 0, HALF, CONST)
    else:
        q0 = tl.program_id(0) * QUERIES
        near, after = near_range(lo, hi, q0, q0 + QUERIES - 1, HALF, KEYS)
        far = biases(bias, -HALF, head, HALF)
        place = (query, first, stop, b, head, head // group, key_length, far)
        state = _attend(state, q_tile, kvb, strides, place, lo, near, 0, HALF, CONST)
        state = _attend(state, q_tile, kvb, strides, place, near, after, 1, HALF, CONST)
        far = biases(bias, HALF, head, HALF)
        place = (query, first, stop, b, head, head // group, key_length, far)
        state = _attend(state, q_tile, kvb, strides, place, after, hi, 0, HALF, CONST)
    total, denominator, highest = state
    some = denominator > 0.0
    y = total / tl.where(some, denominator, 1.0)[:, None]
    store_tile(out, strides[3], query, b, head, length, y, WIDTH)
    log_sum_exp = tl.where(some, (highest + tl.log2(denominator)) * _LN_2, -float("inf"))
    tl.store(lse + tl.program_id(1).to(tl.int64) * length + query, log_sum_exp, mask=query < length)


def forward(
    q_SBHE: Tensor,
    k_TBKE: Tensor,
    v_TBKE: Tensor,
    bias_HD: Tensor | None,
    intervals: KeyIntervals | None,
    *,
    causal: bool,
) -> tuple[Tensor, Tensor]:
    """See the reference."""
    q, k, v = map(contiguous_rows, (q_SBHE, k_TBKE, v_TBKE))
    length, batch, heads, _ = q.shape
    out, lse = empty_like_heads(q), q.new_empty((batch, heads, length), dtype=torch.float32)
    queries = 128 if length > 64 else 64
    _forward[(triton.cdiv(length, queries), batch * heads)](
        (q, k, v, float_table(bias_HD), out, lse),
        None if intervals is None else tuple(intervals),
        head_strides(q, k, v, out),
        (length, k.shape[0], heads, heads // k.shape[2]),
        QUERIES=queries,
        KEYS=64,
        **tile_constants(q, bias_HD, intervals, causal=causal),
        num_warps=queries // 16 if queries > 64 else 4,
        num_stages=3,
    )
    return out, lse


def backward(
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
    """See the reference."""
    tensors = q_SBHE, k_TBKE, v_TBKE, bias_HD, intervals
    return input_grads(grad_SBHE, *tensors, out_SBHE=out_SBHE, lse_BHS=lse_BHS, causal=causal)
