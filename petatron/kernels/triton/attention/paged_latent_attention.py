"""Decode steps of multi-head latent attention (MLA) over a paged cache of latents and rotary keys; also stores new rows in the pages.

With the key up-projection absorbed into the queries, all heads share one key per token, so a decode step is multi-query attention with
keys of width C + R; its values of width C are the same latents, and each tile of tokens is read once for both GEMMs. A program computes a
block of heads (at least 16, the minimum of tensor cores) for one split of a sequence, and keeps its output in latent space (16 x 512 in
float32 or more) in registers. The head blocks of one split run side by side and share its tiles in the L2 cache. A block is as large
as registers allow: with 128 heads on a rank, blocks of 16 would read each tile eight times from L2, two blocks of 64 read it twice.

As in `paged_attention.py`, the number of splits depends only on the numbers of sequences and heads, and their lengths are read on the
device, so a CUDA graph replays for any lengths. A split has at least 64 tokens: a partial output of 16 heads is as large as 28 tokens, so
merging shorter splits would cost more than reading them.

Bytes to read for DeepSeek-V3 in bf16: 1,152 per token of a sequence, on every rank.

T tokens, N sequences, H heads of this rank, C width of the latent, R of the rotary key, P pages of a sequence.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from petatron.kernels.attention import paged_latent_attention as reference
from petatron.kernels.attention.paged_attention import PagedBatch
from petatron.kernels.attention.paged_latent_attention import LatentPages
from petatron.kernels.triton.attention.split_kv import (
    launch_merge,
    log_sum_exp,
    num_splits,
    online_softmax_update,
    rows_in_pages,
    split_range,
    visible_scores,
)
from petatron.kernels.triton.pdl import device_capability, pdl_options_for, pdl_wait_and_trigger


class _Blocking(NamedTuple):
    """The block sizes of a program: its heads, the tokens of a tile, its warps and pipeline stages.

    A tile is prefetched while the last one is in use, into a second buffer or by another program on the multiprocessor; there is one
    stage more than usual, since the page table is loaded before the tile.
    """

    heads: int
    tile: int
    warps: int
    stages: int


_HEADS_16 = _Blocking(16, 32, 8, 5)
"""100 registers a thread and 94 KB of shared memory for latents of 512: two programs on a multiprocessor."""
_HEADS_32 = _Blocking(32, 32, 8, 4)
"""128 registers and 76 KB."""
_HEADS_64 = _Blocking(64, 64, 8, 2)
"""255 registers and 221 KB: one program, with the tensor cores' instructions for 64 rows, which Hopper has."""
_FLOAT32 = _Blocking(16, 16, 8, 2)
_HOPPER = 9

_MIN_SPLIT_TOKENS = 64
"""The minimum length of a split."""
_MAX_LATENT_DIM = 512
"""The widest latents: a wider accumulator does not fit into registers."""
_MERGED_COLUMNS = 128


@triton.jit
def _store_rows(
    tensors,
    latent_stride,
    rope_stride,
    LATENT: tl.constexpr,
    COLUMNS: tl.constexpr,
    ROTARY: tl.constexpr,
    ROTARY_COLUMNS: tl.constexpr,
    USE_PDL: tl.constexpr,
):
    latent, rope_key, latent_pages, rope_pages, slots = tensors
    pdl_wait_and_trigger(USE_PDL)
    token = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots + token).to(tl.int64)
    column, rotary = tl.arange(0, COLUMNS), tl.arange(0, ROTARY_COLUMNS)
    row = tl.load(latent + token * latent_stride + column, mask=column < LATENT)
    tl.store(latent_pages + slot * LATENT + column, row, mask=column < LATENT)
    key = tl.load(rope_key + token * rope_stride + rotary, mask=rotary < ROTARY)
    tl.store(rope_pages + slot * ROTARY + rotary, key, mask=rotary < ROTARY)


def store_latents(pages: LatentPages, latent_TC: Tensor, rope_key_TR: Tensor, page_rows_T: Tensor) -> None:
    """Writes every token's latent and rotary key to its row in the pages, in one launch."""
    latent, rope_key = (x if x.stride(-1) == 1 else x.contiguous() for x in (latent_TC, rope_key_TR))
    tokens, width = latent.shape
    rotary = rope_key.shape[1]
    _store_rows[(tokens,)](
        (latent, rope_key, pages.latent, pages.rope_key, page_rows_T),
        latent.stride(0),
        rope_key.stride(0),
        LATENT=width,
        COLUMNS=triton.next_power_of_2(width),
        ROTARY=rotary,
        ROTARY_COLUMNS=triton.next_power_of_2(rotary),
        **pdl_options_for(tokens, latent),
    )


@triton.jit
def _decode_split(
    tensors,
    scale,
    strides,
    WINDOW: tl.constexpr,
    NUM_HEADS: tl.constexpr,
    HEADS: tl.constexpr,
    LATENT: tl.constexpr,
    COLUMNS: tl.constexpr,
    ROTARY: tl.constexpr,
    ROTARY_COLUMNS: tl.constexpr,
    PAGE: tl.constexpr,
    SPLITS: tl.constexpr,
    TILE: tl.constexpr,
    LEAST: tl.constexpr,
    USE_PDL: tl.constexpr,
):
    q_latent, q_rope, latent_pages, rope_pages, table, lengths, partial, lse, output = tensors
    latent_stride_n, latent_stride_h, rope_stride_n, rope_stride_h, table_stride = strides
    pdl_wait_and_trigger(USE_PDL)
    block, sequence, split = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    length = tl.load(lengths + sequence)
    begin, end = split_range(length, split, WINDOW, SPLITS, TILE, LEAST)
    head = block * HEADS + tl.arange(0, HEADS)
    column, rotary = tl.arange(0, COLUMNS), tl.arange(0, ROTARY_COLUMNS)
    there, n = head < NUM_HEADS, sequence.to(tl.int64)
    q_c = _rows(q_latent + n * latent_stride_n, head * latent_stride_h, there, column, LATENT)
    q_r = _rows(q_rope + n * rope_stride_n, head * rope_stride_h, there, rotary, ROTARY)
    top = tl.full((HEADS,), float("-inf"), tl.float32)
    total = tl.zeros((HEADS,), tl.float32)
    out = tl.zeros((HEADS, COLUMNS), tl.float32)
    for start in range(begin, end, TILE):
        position = start + tl.arange(0, TILE)
        inside = position < end
        row = rows_in_pages(table + n * table_stride, position, inside, PAGE)
        latent = _rows(latent_pages, row * LATENT, inside, column, LATENT)
        rope_key = _rows(rope_pages, row * ROTARY, inside, rotary, ROTARY)
        scores = tl.dot(q_c, tl.trans(latent), input_precision="ieee")
        scores = tl.dot(q_r, tl.trans(rope_key), scores, input_precision="ieee") * scale
        scores = visible_scores(scores, position, inside, length, WINDOW)
        weights, rescale, top, total = online_softmax_update(scores, top, total)
        out = tl.dot(weights.to(latent.dtype), latent, out * rescale[:, None], input_precision="ieee")
    out = out / tl.where(total == 0.0, 1.0, total)[:, None]
    valid = there[:, None] & (column[None, :] < LATENT)
    if SPLITS == 1:
        target = output + (n * NUM_HEADS + head[:, None]) * LATENT + column[None, :]
        tl.store(target, out.to(output.dtype.element_ty), mask=valid)
    else:
        place = (n * SPLITS + split) * NUM_HEADS + head
        tl.store(lse + place, log_sum_exp(top, total), mask=there)
        if begin < end:  # the merge skips partial outputs of empty splits
            tl.store(partial + place[:, None] * LATENT + column[None, :], out, mask=valid)


@triton.jit
def _rows(tensor, at, there, column, WIDTH: tl.constexpr):
    """Loads the rows that begin at elements `at`; zero for masked rows and beyond `WIDTH`."""
    mask = there[:, None] & (column[None, :] < WIDTH)
    return tl.load(tensor + at[:, None] + column[None, :], mask=mask, other=0.0)


def decode_latents(
    q_NHC: Tensor,
    q_rope_NHR: Tensor,
    pages: LatentPages,
    batch: PagedBatch,
    *,
    scale: float,
    window: int | None,
) -> Tensor:
    """See the reference, which also computes wider latents."""
    count, heads, width = q_NHC.shape
    if width > _MAX_LATENT_DIM:
        return reference.decode_latents(q_NHC, q_rope_NHR, pages, batch, scale=scale, window=window)
    blocking, rotary = _blocking(q_NHC), q_rope_NHR.shape[-1]
    blocks = triton.cdiv(heads, blocking.heads)
    splits = num_splits(count * blocks)
    q_latent, q_rope = (x if x.stride(-1) == 1 else x.contiguous() for x in (q_NHC, q_rope_NHR))
    out = q_latent.new_empty((count, heads, width))
    partial, lse = out, out
    if splits > 1:
        partial = out.new_empty((count, splits, heads, width), dtype=torch.float32)
        lse = out.new_empty((count, splits, heads), dtype=torch.float32)
    table, columns = batch.page_table_NP, max(16, triton.next_power_of_2(width))
    _decode_split[(blocks, count, splits)](
        (q_latent, q_rope, pages.latent, pages.rope_key, table, batch.lengths_N, partial, lse, out),
        scale,
        (*q_latent.stride()[:2], *q_rope.stride()[:2], table.stride(0)),
        WINDOW=window or 0,
        NUM_HEADS=heads,
        HEADS=blocking.heads,
        LATENT=width,
        COLUMNS=columns,
        ROTARY=rotary,
        ROTARY_COLUMNS=max(16, triton.next_power_of_2(rotary)),
        PAGE=pages.latent.shape[1],
        SPLITS=splits,
        TILE=blocking.tile,
        LEAST=_MIN_SPLIT_TOKENS,
        num_warps=blocking.warps,
        num_stages=blocking.stages,
        **pdl_options_for(count, out),
    )
    if splits > 1:
        merged = min(columns, _MERGED_COLUMNS)
        launch_merge(partial, lse, out, pairs=count, columns=merged, launch=pdl_options_for(count, out))
    return out


def _blocking(q_NHC: Tensor) -> _Blocking:
    """Returns the block sizes for these queries."""
    if q_NHC.itemsize > 2:
        return _FLOAT32
    heads, hopper = q_NHC.shape[1], q_NHC.is_cuda and device_capability(q_NHC.get_device())[0] == _HOPPER
    if heads > _HEADS_32.heads and hopper:
        return _HEADS_64
    return _HEADS_16 if heads <= _HEADS_16.heads else _HEADS_32
