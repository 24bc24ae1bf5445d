"""Causal attention over tiles of keys from the beginning of each document: see `kernels/batch_invariant/attention.py`.

A program has a block of a document's tokens, with the query heads of one kv head as more rows of its tile, and goes through the keys that
they see, tile by tile, through the table of rows. Training, chunks of prompts and decode steps run the same kernel with the same
constants: a token that decodes is a block with one query, whose other rows see nothing. Rows of a tile are computed alike, so the bits of
a token do not depend on the block that it is in.

T tokens, B blocks, H query heads, K kv heads, E head dim, V width of a value, L rows of keys.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from petatron.kernels.batch_invariant.attention import KEY_TILE, AttentionPlan
from petatron.kernels.triton.kernel_launch import kernel_launcher

_LOG2_E: tl.constexpr = tl.constexpr(1.4426950408889634)
_TILE_ROWS, _FLOAT32_TILE_ROWS = 64, 32
"""Rows of a program, queries x heads: those of one tensor-core instruction of a warp group, in half precision."""


@triton.jit
def _attend(
    q,
    k,
    v,
    key_rows,
    blocks,
    out,
    q_t,
    q_h,
    k_l,
    k_h,
    v_l,
    v_h,
    heads,
    SCALE: tl.constexpr,
    WINDOW: tl.constexpr,
    WIDTH: tl.constexpr,
    LANES: tl.constexpr,
    VALUE_WIDTH: tl.constexpr,
    VALUE_LANES: tl.constexpr,
    PER_GROUP: tl.constexpr,
    GROUP: tl.constexpr,
    ROWS: tl.constexpr,
    KEYS: tl.constexpr,
):
    block, kv_head = blocks + tl.program_id(0) * 4, tl.program_id(1)
    first_row, count = tl.load(block), tl.load(block + 1)
    first_position, first_key = tl.load(block + 2), tl.load(block + 3)
    row = tl.arange(0, ROWS)
    query, member = row // GROUP, row % GROUP
    is_query = (query < count) & (member < PER_GROUP)
    position = tl.where(is_query, first_position + query, -1)
    head, token = kv_head * PER_GROUP + member, (first_row + query).to(tl.int64)
    lane, value_lane, at = tl.arange(0, LANES), tl.arange(0, VALUE_LANES), tl.arange(0, KEYS)
    q_at = q + token[:, None] * q_t + head[:, None] * q_h + lane[None, :]
    q_tile = tl.load(q_at, mask=is_query[:, None] & (lane < WIDTH)[None, :], other=0.0)
    total = tl.zeros((ROWS, VALUE_LANES), tl.float32)
    denominator = tl.zeros((ROWS,), tl.float32)
    highest = tl.full((ROWS,), -float("inf"), tl.float32)
    last = first_position + count - 1
    begin = tl.maximum(first_position - WINDOW + 1, 0) // KEYS * KEYS if WINDOW else 0
    for start in range(begin, last + 1, KEYS):
        key = start + at
        stored = tl.load(key_rows + first_key + key, mask=key <= last, other=0).to(tl.int64)
        k_at = k + stored[:, None] * k_l + kv_head * k_h + lane[None, :]
        k_tile = tl.load(k_at, mask=(key <= last)[:, None] & (lane < WIDTH)[None, :], other=0.0)
        scores = tl.dot(q_tile, tl.trans(k_tile), input_precision="ieee") * (SCALE * _LOG2_E)
        visible = key[None, :] <= position[:, None]
        if WINDOW:
            visible = visible & (key[None, :] > position[:, None] - WINDOW)
        scores = tl.where(visible, scores, -float("inf"))
        top = tl.maximum(highest, tl.max(scores, axis=1))
        finite = tl.where(top == -float("inf"), 0.0, top)
        weights = tl.exp2(scores - finite[:, None])
        faded = tl.exp2(highest - finite)
        v_at = v + stored[:, None] * v_l + kv_head * v_h + value_lane[None, :]
        v_tile = tl.load(v_at, mask=(key <= last)[:, None] & (value_lane < VALUE_WIDTH)[None, :], other=0.0)
        denominator = denominator * faded + tl.sum(weights, axis=1)
        total = tl.dot(weights.to(v_tile.dtype), v_tile, total * faded[:, None], input_precision="ieee")
        highest = top
    result = total / tl.where(denominator > 0.0, denominator, 1.0)[:, None]
    out_at = out + (token * heads + head)[:, None] * VALUE_WIDTH + value_lane[None, :]
    tl.store(out_at, result.to(out.dtype.element_ty), mask=is_query[:, None] & (value_lane < VALUE_WIDTH)[None, :])


def attend(
    q_THE: Tensor, k_LKE: Tensor, v_LKV: Tensor, plan: AttentionPlan, *, window: int | None, key_tile: int = KEY_TILE
) -> Tensor:
    """See the reference."""
    q, k, v = (x if x.stride(2) == 1 else x.contiguous() for x in (q_THE, k_LKE, v_LKV))
    groups, heads, value_width = k.shape[1], q.shape[1], v.shape[2]
    per_group = heads // groups
    group = triton.next_power_of_2(per_group)
    is_wide = q.dtype == torch.float32
    rows = max(_FLOAT32_TILE_ROWS if is_wide else _TILE_ROWS, group)
    blocks = plan.blocks(rows // group)
    out = q.new_zeros((*q.shape[:2], value_width))
    if blocks.shape[0]:
        launch = kernel_launcher(
            _attend,
            SCALE=q.shape[2] ** -0.5,
            WINDOW=window or 0,
            WIDTH=q.shape[2],
            LANES=max(triton.next_power_of_2(q.shape[2]), 16),
            VALUE_WIDTH=value_width,
            VALUE_LANES=max(triton.next_power_of_2(value_width), 16),
            PER_GROUP=per_group,
            GROUP=group,
            ROWS=rows,
            KEYS=key_tile,
            num_warps=4,
            num_stages=2,
        )
        strides = (*q.stride()[:2], *k.stride()[:2], *v.stride()[:2])
        launch(blocks.shape[0], (q, k, v, plan.key_rows, blocks, out), (*strides, heads), groups)
    return out
