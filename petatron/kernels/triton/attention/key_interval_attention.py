"""Attention of key intervals with biases by distance: in one pass over the keys (FlashAttention).

A program has a tile of queries of one head and goes through the keys that they see. Distances beyond the table's have its first or last
bias. So the keys are in three ranges, far before, near, and far after, and only the near one reads the table (`key_interval_tiles.py` says
how): with a table for 128 tokens, and long sequences, nearly none of the work.

Scores are in units of log 2, for which the hardware has an exponential. Products of half-precision operands are summed in float32; biases
are read in the operands' precision, as those of a model in half precision are.

S sequence of the queries, T of the keys, B batch, H query heads, K kv heads, E head dim, D distances.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from petatron.kernels.attention.key_interval_attention import KeyIntervals
from petatron.kernels.size_limits import interval_kernel_supports_heads
from petatron.kernels.strides import contiguous_rows
from petatron.kernels.triton.attention.key_interval_attention_grads import input_grads
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

_LN_2 = tl.constexpr(0.6931471805599453)
_HALF_PRECISION = (torch.float16, torch.bfloat16)


def unsupported_tensors_reason(q: Tensor, v: Tensor) -> str | None:
    """See the reference."""
    width = q.shape[-1]
    if width != v.shape[-1] or not interval_kernel_supports_heads(width):
        return f"heads of {width} and {v.shape[-1]} values; equal powers of two from 16 to 128 are served"
    return None if q.dtype in _HALF_PRECISION else f"{q.dtype} is not half precision"


@triton.jit
def _attend(
    state,
    q_tile,
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
    """Goes through the keys lo ... hi - 1. Without `NEAR` all have one bias, which is in `place`."""
    total, denominator, highest = state
    k, v, copies = tensors
    k_strides, v_strides = strides
    query, first, stop, b, head, kv_head, key_length, far = place
    for start in range(lo, hi, KEYS):
        key = start + tl.arange(0, KEYS)
        k_tile = load_tile(k, k_strides, key, b, kv_head, key_length, WIDTH)
        scores = tl.dot(q_tile, tl.trans(k_tile)) * (SCALE * LOG2_E)
        if NEAR:
            scores += tile_biases(copies, head, query, start, KEYS, CENTER, LENGTH)
        else:
            scores += far
        visible = (key[None, :] >= first[:, None]) & (key[None, :] < stop[:, None])
        scores = tl.where(visible, scores, -float("inf"))
        top = tl.maximum(highest, tl.max(scores, axis=1))
        finite = tl.where(top == -float("inf"), 0.0, top)
        weights = tl.exp2(scores - finite[:, None])
        faded = tl.exp2(highest - finite)
        v_tile = load_tile(v, v_strides, key, b, kv_head, key_length, WIDTH)
        denominator = denominator * faded + tl.sum(weights, axis=1)
        total = tl.dot(weights.to(v_tile.dtype), v_tile, total * faded[:, None])
        highest = top
    return total, denominator, highest


@triton.jit
def _forward(
    q,
    k,
    v,
    copies,
    first,
    stop,
    out,
    lse,
    q_s,
    q_b,
    q_h,
    k_s,
    k_b,
    k_h,
    v_s,
    v_b,
    v_h,
    out_s,
    out_b,
    out_h,
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
    total = tl.zeros((QUERIES, WIDTH), tl.float32)
    denominator = tl.zeros((QUERIES,), tl.float32)
    highest = tl.full((QUERIES,), -float("inf"), tl.float32)
    state = total, denominator, highest
    tensors, strides = (k, v, copies), ((k_s, k_b, k_h), (v_s, v_b, v_h))
    kv_head = head // group
    if HAS_BIAS:
        near, after = near_range(lo, hi, q0, q0 + QUERIES - 1, HALF, KEYS)
        place = query, first, stop, b, head, kv_head, key_length, far_bias(copies, head, False, LENGTH)
        state = _attend(state, q_tile, tensors, strides, place, lo, near, SCALE, KEYS, WIDTH, CENTER, LENGTH, False)
        state = _attend(state, q_tile, tensors, strides, place, near, after, SCALE, KEYS, WIDTH, CENTER, LENGTH, True)
        place = query, first, stop, b, head, kv_head, key_length, far_bias(copies, head, True, LENGTH)
        state = _attend(state, q_tile, tensors, strides, place, after, hi, SCALE, KEYS, WIDTH, CENTER, LENGTH, False)
    else:
        place = query, first, stop, b, head, kv_head, key_length, 0.0
        state = _attend(state, q_tile, tensors, strides, place, lo, hi, SCALE, KEYS, WIDTH, CENTER, LENGTH, False)
    total, denominator, highest = state
    some = denominator > 0.0
    divisor = tl.where(some, denominator, 1.0)
    store_tile(out, (out_s, out_b, out_h), query, b, head, length, total / divisor[:, None], WIDTH)
    log_sum_exp = tl.where(some, (highest + tl.log2(divisor)) * _LN_2, -float("inf"))
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
    biases = BiasCopies.of(bias_HD, q)
    first, stop = (lse, lse) if intervals is None else intervals[:2]
    queries = 128 if length > 64 else 64
    launch = kernel_launcher(
        _forward,
        QUERIES=queries,
        KEYS=64,
        **tile_constants(q, intervals, causal=causal),
        **biases.constants,
        num_warps=queries // 16,
        num_stages=3,
    )
    launch(
        -(-length // queries),
        (q, k, v, biases.copies, first, stop, out, lse),
        (*head_strides(q, k, v, out), length, k.shape[0], heads, heads // k.shape[2]),
        batch * heads,
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
