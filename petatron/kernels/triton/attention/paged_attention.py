"""Attention of one token per sequence over keys and values in pages, and the storing of new ones.

A decode step reads every key and value once and computes little, so it must keep many reads in flight, also for one sequence of one kv
head: the tokens of a sequence are cut into splits, each a program (flash decoding, Dao et al. 2023), and a second kernel merges the
splits' partial outputs by their log-sum-exp. (A merge by the program that ends last took 13 us instead of 6: it runs on one
multiprocessor, and a second kernel on all of them.) All query heads of a kv head share its reads. How many splits there are follows
from the number of sequences and kv heads, and how many tokens each has from the length on the device: a CUDA graph replays for any
lengths. The new token's key and value need no kernel of their own: the program of the last split stores them.

N sequences, H query heads, K kv heads, E head dim, P pages of a sequence.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from petatron.kernels.attention.paged_attention import KeyValue, PagedBatch
from petatron.kernels.triton.attention.paged_prompt_chunks import chunk_attention
from petatron.kernels.triton.attention.split_kv import (
    launch_merge,
    log_sum_exp,
    num_splits,
    online_softmax_update,
    rows_in_pages,
    split_range,
    visible_scores,
)
from petatron.kernels.triton.pdl import pdl_options_for, pdl_wait_and_trigger

__all__ = ["chunk_attention", "decode_attention", "store_and_decode", "store_key_value"]

_TILE = 64
"""Tokens that a program reads at once."""
_NARROW = 64
"""Heads up to this width: two warps of a program read 20 % faster than four (64 sequences of 600 tokens: 25 instead of 31 us)."""


@triton.jit
def _store(k_from, v_from, k_pages, v_pages, slots, k_stride, v_stride, ROW: tl.constexpr, TILE: tl.constexpr):
    token = tl.program_id(0)
    slot = tl.load(slots + token).to(tl.int64)
    at = tl.program_id(1) * TILE + tl.arange(0, TILE)
    inside = at < ROW
    tl.store(k_pages + slot * ROW + at, tl.load(k_from + token.to(tl.int64) * k_stride + at, mask=inside), mask=inside)
    tl.store(v_pages + slot * ROW + at, tl.load(v_from + token.to(tl.int64) * v_stride + at, mask=inside), mask=inside)


def store_key_value(pages: KeyValue, new: KeyValue, page_rows_T: Tensor) -> None:
    """Writes the rows of every token to its slot, keys and values in one launch."""
    row = new.key.shape[1] * new.key.shape[2]
    k, v = (x if x[0].is_contiguous() else x.contiguous() for x in new)
    tile = min(1024, triton.next_power_of_2(row))
    _store[(k.shape[0], triton.cdiv(row, tile))](
        k, v, *pages, page_rows_T, k.stride(0), v.stride(0), ROW=row, TILE=tile
    )


@triton.jit
def _decode_split(
    tensors,
    scale,
    strides,
    WINDOW: tl.constexpr,
    GROUP: tl.constexpr,
    ROWS: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr,
    WIDTH: tl.constexpr,
    COLUMNS: tl.constexpr,
    PAGE: tl.constexpr,
    SPLITS: tl.constexpr,
    TILE: tl.constexpr,
    STORE: tl.constexpr,
    USE_PDL: tl.constexpr,
):
    q, k_new, v_new, k_pages, v_pages, table, lengths, partial, lse, output = tensors
    q_stride_n, q_stride_h, k_stride_n, v_stride_n, table_stride = strides
    pdl_wait_and_trigger(USE_PDL)
    sequence, head, split = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    length = tl.load(lengths + sequence)
    begin, end = split_range(length, split, WINDOW, SPLITS, TILE, TILE)
    row, column = tl.arange(0, ROWS), tl.arange(0, COLUMNS)
    valid = (row[:, None] < GROUP) & (column[None, :] < WIDTH)
    heads = head * GROUP + row
    x = tl.load(
        q + sequence.to(tl.int64) * q_stride_n + heads[:, None] * q_stride_h + column[None, :], mask=valid, other=0.0
    )
    pages_of_sequence = table + sequence * table_stride
    new_key, new_value = x, x  # without STORE, neither is used
    if STORE:
        new_key = _new_row(k_new, sequence, k_stride_n, head, column, WIDTH)
        new_value = _new_row(v_new, sequence, v_stride_n, head, column, WIDTH)
        if begin < length and end == length:
            last = rows_in_pages(pages_of_sequence, length - 1, True, PAGE)
            at = (last * NUM_KV_HEADS + head) * WIDTH + column
            tl.store(k_pages + at, new_key, mask=column < WIDTH)
            tl.store(v_pages + at, new_value, mask=column < WIDTH)
    top = tl.full((ROWS,), float("-inf"), tl.float32)
    total = tl.zeros((ROWS,), tl.float32)
    out = tl.zeros((ROWS, COLUMNS), tl.float32)
    for start in range(begin, end, TILE):
        position = start + tl.arange(0, TILE)
        inside = position < end
        stored, is_new = inside, inside
        if STORE:  # the new row is being written: it is taken from where it comes from
            stored, is_new = inside & (position < length - 1), position == length - 1
        at = (rows_in_pages(pages_of_sequence, position, inside, PAGE) * NUM_KV_HEADS + head) * WIDTH
        k = _rows_of_tile(k_pages, at, stored, new_key, is_new, column, WIDTH, STORE)
        scores = tl.dot(x, tl.trans(k), input_precision="ieee") * scale
        scores = visible_scores(scores, position, inside, length, WINDOW)
        weights, rescale, top, total = online_softmax_update(scores, top, total)
        v = _rows_of_tile(v_pages, at, stored, new_value, is_new, column, WIDTH, STORE)
        out = out * rescale[:, None] + tl.dot(weights.to(v.dtype), v, input_precision="ieee")
    out = out / tl.where(total == 0.0, 1.0, total)[:, None]
    pair = sequence * NUM_KV_HEADS + head
    if SPLITS == 1:
        target = output + (pair.to(tl.int64) * GROUP + row[:, None]) * WIDTH + column[None, :]
        tl.store(target, out.to(output.dtype.element_ty), mask=valid)
    else:
        place = (pair * SPLITS + split).to(tl.int64) * GROUP
        tl.store(partial + (place + row[:, None]) * WIDTH + column[None, :], out, mask=valid)
        tl.store(lse + place + row, log_sum_exp(top, total), mask=row < GROUP)


@triton.jit
def _new_row(rows, sequence, stride, head, column, WIDTH: tl.constexpr):
    """Returns the key or value of the sequence's new token."""
    return tl.load(rows + sequence.to(tl.int64) * stride + head * WIDTH + column, mask=column < WIDTH, other=0.0)


@triton.jit
def _rows_of_tile(pages, at, stored, new_row, is_new, column, WIDTH: tl.constexpr, STORE: tl.constexpr):
    """Returns the keys or values of a tile of tokens, those stored from pages, the new one as it is given."""
    rows = tl.load(pages + at[:, None] + column[None, :], mask=stored[:, None] & (column[None, :] < WIDTH), other=0.0)
    if STORE:
        rows = tl.where(is_new[:, None], new_row[None, :], rows)
    return rows


def decode_attention(q_NHE: Tensor, pages: KeyValue, batch: PagedBatch, *, window: int | None) -> Tensor:
    """Returns the attention of one token of each sequence to all its rows in pages, its own included; at most `window`."""
    return _decode(q_NHE, None, pages, batch, window)


def store_and_decode(q_NHE: Tensor, new: KeyValue, pages: KeyValue, batch: PagedBatch, *, window: int | None) -> Tensor:
    """Stores the rows of one token of each sequence, and returns its attention."""
    k, v = (x if x[0].is_contiguous() else x.contiguous() for x in new)
    return _decode(q_NHE, (k, v), pages, batch, window)


def _decode(
    q_NHE: Tensor, new: tuple[Tensor, Tensor] | None, pages: KeyValue, batch: PagedBatch, window: int | None
) -> Tensor:
    k_pages, v_pages = pages
    count, heads, width = q_NHE.shape
    kv_heads, page = k_pages.shape[2], k_pages.shape[1]
    group, splits = heads // kv_heads, num_splits(count * kv_heads)
    q = q_NHE if q_NHE.stride(-1) == 1 else q_NHE.contiguous()
    out = q.new_empty((count, heads, width))
    partial, lse = out, out
    if splits > 1:
        partial = q.new_empty((count, kv_heads, splits, group, width), dtype=torch.float32)
        lse = q.new_empty((count, kv_heads, splits, group), dtype=torch.float32)
    k, v = (q, q) if new is None else new
    columns = max(16, triton.next_power_of_2(width))
    _decode_split[(count, kv_heads, splits)](
        (q, k, v, k_pages, v_pages, batch.page_table_NP, batch.lengths_N, partial, lse, out),
        width**-0.5,
        (*q.stride()[:2], k.stride(0), v.stride(0), batch.page_table_NP.stride(0)),
        WINDOW=window or 0,
        GROUP=group,
        ROWS=max(16, triton.next_power_of_2(group)),
        NUM_KV_HEADS=kv_heads,
        WIDTH=width,
        COLUMNS=columns,
        PAGE=page,
        SPLITS=splits,
        TILE=_TILE,
        STORE=new is not None,
        num_warps=2 if columns <= _NARROW else 4,
        num_stages=3,
        **pdl_options_for(count, q),
    )
    if splits > 1:
        launch_merge(partial, lse, out, pairs=count * kv_heads, columns=columns, launch=pdl_options_for(count, q))
    return out
