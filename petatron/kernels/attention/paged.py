"""Attention over keys and values in pages, for the packed tokens of many sequences: the reference.

The key/value cache of a layer is a tensor of pages; a sequence has a list of them, in any order. One step has two kinds of
sequences: those that *decode* one token each, and *chunks* of prompts. Its tokens are packed without padding:

    rows      decode 0 | decode 1 | ... | fresh chunk | fresh chunk | ... | continued chunk | ...

A fresh chunk begins its sequence, so its keys are all in the step, and it is attended to as training attends to packed documents. A
continued chunk also sees what its sequence has in pages.

T tokens, N sequences, H query heads, K kv heads, E head dim, P pages of a sequence.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from petatron.kernels.attention import block_attention, causal_attention
from petatron.kernels.attention.documents import Documents
from petatron.kernels.attention.flash import widens
from petatron.kernels.attention.mask import AttentionBounds, BlockMask
from petatron.kernels.compute_dtype import to_compute_dtype


@dataclass(frozen=True, slots=True)
class PromptChunk:
    """Rows `start` to `stop` are tokens of the sequence with row `sequence` of the page table, after `context` tokens in pages."""

    start: int
    stop: int
    sequence: int
    context: int


@dataclass(frozen=True, slots=True, eq=False)
class PagedBatch:
    """The tokens of one step.

    slots_T: where each token's rows are stored: page x page size + offset. Padding is stored in page 0, which no sequence has.
    page_table_NP: the pages of each sequence, those that decode first; page 0 after its last. int32.
    lengths_N: its tokens, this step's included; int32. max_length: the longest that decodes.
    num_decodes: so many first rows are one token of a sequence each.
    chunks: of prompts, fresh ones first. documents: the boundaries of the fresh ones, where there are several.
    """

    slots_T: Tensor
    page_table_NP: Tensor
    lengths_N: Tensor
    max_length: int
    num_decodes: int
    chunks: tuple[PromptChunk, ...] = ()
    documents: Documents | None = None


class PagedAttentionKernels(Protocol):
    """The interface of this module and its faster implementations."""

    def store_key_value(
        self, k_pages: Tensor, v_pages: Tensor, k_TKE: Tensor, v_TKE: Tensor, slots_T: Tensor
    ) -> None: ...
    def decode_attention(
        self, q_NHE: Tensor, k_pages: Tensor, v_pages: Tensor, batch: PagedBatch, *, window: int | None
    ) -> Tensor: ...


def paged_attention(
    q_THE: Tensor,
    k_TKE: Tensor,
    v_TKE: Tensor,
    k_pages: Tensor,
    v_pages: Tensor,
    batch: PagedBatch,
    *,
    window: int | None,
    kernels: PagedAttentionKernels,
) -> Tensor:
    """Stores keys and values of all tokens, and returns the attention of each to those of its sequence up to itself."""
    kernels.store_key_value(k_pages, v_pages, k_TKE, v_TKE, batch.slots_T)
    if not batch.chunks and batch.num_decodes == q_THE.shape[0]:
        return kernels.decode_attention(q_THE, k_pages, v_pages, batch, window=window)
    out = torch.zeros((*q_THE.shape[:2], v_TKE.shape[-1]), dtype=q_THE.dtype, device=q_THE.device)
    if batch.num_decodes:
        out[: batch.num_decodes] = kernels.decode_attention(
            q_THE[: batch.num_decodes], k_pages, v_pages, batch, window=window
        )
    fresh = [chunk for chunk in batch.chunks if chunk.context == 0]
    if fresh:
        rows = slice(fresh[0].start, fresh[-1].stop)
        q, k, v = (x[rows].unsqueeze(1) for x in (q_THE, k_TKE, v_TKE))
        out[rows] = causal_attention(q, k, v, window=window, documents=batch.documents).squeeze(1)
    for chunk in batch.chunks[len(fresh) :]:
        rows = slice(chunk.start, chunk.stop)
        out[rows] = _continued_chunk(q_THE[rows], k_pages, v_pages, batch.page_table_NP[chunk.sequence], chunk, window)
    return out


def _continued_chunk(
    q_THE: Tensor, k_pages: Tensor, v_pages: Tensor, page_table_P: Tensor, chunk: PromptChunk, window: int | None
) -> Tensor:
    length = chunk.context + chunk.stop - chunk.start
    k, v = (_gather(pages, page_table_P, length).unsqueeze(1) for pages in (k_pages, v_pages))
    bounds = AttentionBounds.build(length, window=window, document_starts_BS=None, device=q_THE.device)
    mask = BlockMask((range(chunk.context, length),), (range(length),), bounds)
    return block_attention(q_THE.unsqueeze(1), k, v, mask).squeeze(1)


def _gather(pages: Tensor, page_table: Tensor, length: int) -> Tensor:
    """Returns the first `length` rows of one sequence, [L, K, E]."""
    count = -(-length // pages.shape[1])
    return pages.index_select(0, page_table[:count]).flatten(0, 1)[:length]


def store_key_value(k_pages: Tensor, v_pages: Tensor, k_TKE: Tensor, v_TKE: Tensor, slots_T: Tensor) -> None:
    """Writes the rows of every token to its slot."""
    k_pages.flatten(0, 1).index_copy_(0, slots_T.long(), k_TKE)
    v_pages.flatten(0, 1).index_copy_(0, slots_T.long(), v_TKE)


def decode_attention(
    q_NHE: Tensor, k_pages: Tensor, v_pages: Tensor, batch: PagedBatch, *, window: int | None
) -> Tensor:
    """Returns the attention of one token of each sequence to all its rows in pages, its own included; at most `window`."""
    count, size = batch.num_decodes, k_pages.shape[1]
    table = batch.page_table_NP[:count, : -(-batch.max_length // size)]
    k, v = (
        pages.index_select(0, table.flatten()).view(count, -1, *pages.shape[2:]).transpose(1, 2)
        for pages in (k_pages, v_pages)
    )  # [N, K, L, E]
    position = torch.arange(k.shape[2], device=q_NHE.device)
    lengths = batch.lengths_N[:count, None]
    visible = position < lengths
    if window is not None:
        visible &= position >= lengths - window
    q = q_NHE.unflatten(
        1, (k.shape[1], -1)
    )  # the query heads of one kv head are rows of one sequence: nothing is repeated
    if widens(q):
        q, k, v = map(to_compute_dtype, (q, k, v))
    out = F.scaled_dot_product_attention(q, k, v, attn_mask=visible[:, None, None])
    return out.flatten(1, 2).to(q_NHE.dtype)
