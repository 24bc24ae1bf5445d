"""Attention of chunks of prompts over keys and values in pages, by bounds that only the device knows: what a CUDA graph of a prompt has.

A program has a block of a chunk's tokens with all query heads of a kv head, and loops over the tiles that they see. Which chunk it
belongs to follows from the chunks' first rows, read on the device. Chunks begin in any row, so a chunk may have a block more than
its rows fill: there are as many programs as blocks of all rows, and one for each chunk; those without rows end at once.

T rows, M chunks, H query heads, K kv heads, E head dim.
"""

from __future__ import annotations

from typing import NamedTuple

import triton
import triton.language as tl
from torch import Tensor

from petatron.kernels.attention.paged_attention import KeyValue, PagedBatch
from petatron.kernels.triton.attention.split_kv import online_softmax_update, rows_in_pages


class _Blocking(NamedTuple):
    """How a program is cut: its rows (tokens times query heads of a kv head), the tokens that it reads at once, its warps and stages."""

    rows: int
    tile: int
    warps: int
    stages: int


_NARROW_HEADS = _Blocking(64, 128, 4, 2)
"""Up to a width of 64: 512 tokens of 32 heads take 18 us, with the blocks of wide heads 24."""
_WIDE_HEADS = _Blocking(128, 64, 8, 3)
"""512 tokens after 4,096 of 32 heads of 128 take 167 us, with the blocks of narrow heads 192."""
_FLOAT32 = _Blocking(32, 64, 4, 2)
_NARROW = 64


@triton.jit
def _chunk_block(
    tensors,
    scale,
    strides,
    num_chunks,
    WINDOW: tl.constexpr,
    GROUP: tl.constexpr,
    MEMBERS: tl.constexpr,
    TOKENS: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr,
    WIDTH: tl.constexpr,
    COLUMNS: tl.constexpr,
    PAGE: tl.constexpr,
    CHUNKS: tl.constexpr,
    TILE: tl.constexpr,
):
    q, k_pages, v_pages, table, starts, contexts, output = tensors
    q_stride_t, q_stride_h, out_stride_t, out_stride_h, table_stride = strides
    block, head = tl.program_id(0), tl.program_id(1)
    number = tl.arange(0, CHUNKS)
    first_blocks = tl.load(starts + number, mask=number < num_chunks, other=0) // TOKENS + number
    chunk = tl.sum(((first_blocks <= block) & (number < num_chunks)).to(tl.int32), 0) - 1
    start, stop = tl.load(starts + chunk), tl.load(starts + chunk + 1)
    first = start + (block - start // TOKENS - chunk) * TOKENS
    if first < stop:
        row = tl.arange(0, TOKENS * MEMBERS)
        token, member = first + row // MEMBERS, row % MEMBERS
        context = tl.load(contexts + chunk)
        position = context + token - start
        column = tl.arange(0, COLUMNS)
        valid = ((token < stop) & (member < GROUP))[:, None] & (column[None, :] < WIDTH)
        at_row, heads = token.to(tl.int64), head * GROUP + member
        x = tl.load(q + (at_row * q_stride_t + heads * q_stride_h)[:, None] + column[None, :], mask=valid, other=0.0)
        begin = 0
        if WINDOW > 0:
            begin = tl.maximum(context + first - start - WINDOW + 1, 0) // TILE * TILE
        end = context + tl.minimum(first + TOKENS, stop) - start
        top = tl.full((TOKENS * MEMBERS,), float("-inf"), tl.float32)
        total = tl.zeros((TOKENS * MEMBERS,), tl.float32)
        out = tl.zeros((TOKENS * MEMBERS, COLUMNS), tl.float32)
        for tile in range(begin, end, TILE):
            key = tile + tl.arange(0, TILE)
            inside = key < end
            at = (rows_in_pages(table + chunk * table_stride, key, inside, PAGE) * NUM_KV_HEADS + head) * WIDTH
            readable = inside[:, None] & (column[None, :] < WIDTH)
            k = tl.load(k_pages + at[:, None] + column[None, :], mask=readable, other=0.0)
            scores = tl.dot(x, tl.trans(k), input_precision="ieee") * scale
            seen = inside[None, :] & (key[None, :] <= position[:, None])
            if WINDOW > 0:
                seen = seen & (key[None, :] > position[:, None] - WINDOW)
            scores = tl.where(seen, scores, float("-inf"))
            weights, rescale, top, total = online_softmax_update(scores, top, total)
            v = tl.load(v_pages + at[:, None] + column[None, :], mask=readable, other=0.0)
            out = tl.dot(weights.to(v.dtype), v, out * rescale[:, None], input_precision="ieee")
        out = out / tl.where(total == 0.0, 1.0, total)[:, None]
        target = output + (at_row * out_stride_t + heads * out_stride_h)[:, None] + column[None, :]
        tl.store(target, out.to(output.dtype.element_ty), mask=valid)


def chunk_attention(q_THE: Tensor, pages: KeyValue, batch: PagedBatch, out_THE: Tensor, *, window: int | None) -> None:
    """Writes the attention of the rows of chunks, all stored before; rows of padding stay as they are."""
    assert batch.chunk_bounds is not None
    rows, heads, width = q_THE.shape
    starts, contexts = batch.chunk_bounds
    page, kv_heads = pages.key.shape[1:3]
    group, chunks = heads // kv_heads, len(contexts)
    members = triton.next_power_of_2(group)
    columns = max(16, triton.next_power_of_2(width))
    blocking = _FLOAT32 if q_THE.itemsize > 2 else _NARROW_HEADS if columns <= _NARROW else _WIDE_HEADS
    tokens = max(1, blocking.rows // members)
    q = q_THE if q_THE.stride(-1) == 1 else q_THE.contiguous()
    table = batch.page_table_NP[batch.num_decodes :]
    _chunk_block[(rows // tokens + chunks, kv_heads)](
        (q, *pages, table, starts, contexts, out_THE),
        width**-0.5,
        (*q.stride()[:2], *out_THE.stride()[:2], table.stride(0)),
        chunks,
        WINDOW=window or 0,
        GROUP=group,
        MEMBERS=members,
        TOKENS=tokens,
        NUM_KV_HEADS=kv_heads,
        WIDTH=width,
        COLUMNS=columns,
        PAGE=page,
        CHUNKS=triton.next_power_of_2(chunks),
        TILE=blocking.tile,
        num_warps=blocking.warps,
        num_stages=blocking.stages,
    )
