"""Sparse latent attention over pages, which hold an index key beside the latent and the rotary key of each token.

A step in which no sequence has more than top-k tokens runs dense latent attention (`paged_latent_attention.py`). Otherwise all index keys
of a sequence are read, but only the latents of the selected tokens.

T tokens, N sequences, J heads and E width of the indexer, K selected, P pages of a sequence, L tokens of a sequence; others as in
`paged_latent_attention.py`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from petatron.kernels.attention import paged_attention
from petatron.kernels.attention.indexer_loss import IndexVectors
from petatron.kernels.attention.paged_latent_attention import (
    LatentPages,
    LatentUpProjection,
    PagedLatentKernels,
    paged_latent_attention,
)
from petatron.kernels.attention.sparse_latent_attention import (
    attend_selected_rows,
    index_scores,
    row_blocks,
    topk_positions,
)
from petatron.kernels.attention.visibility import Visibility
from petatron.kernels.compute_dtype import to_compute_dtype


class SparseLatentPages(NamedTuple):
    """The pages of one layer: latents and rotary keys, and index keys [pages, page size, E]."""

    latents: LatentPages
    index_key: Tensor

    def flat_latents(self) -> list[Tensor]:
        """Returns the rows of all pages, [A, C] and [A, R]."""
        return [pages.flatten(0, 1) for pages in self.latents]

    def rows_of(self, page_table_NP: Tensor, positions_NQK: Tensor) -> Tensor:
        """Returns the rows that store the tokens at some positions of their sequences; -1 for position -1."""
        size = self.index_key.shape[1]
        positions = positions_NQK.clamp(min=0)
        pages = page_table_NP.long().gather(1, (positions // size).flatten(1)).view_as(positions)
        return torch.where(positions_NQK < 0, -1, pages * size + positions % size)


@dataclass(frozen=True, slots=True)
class TopkSelection:
    """How many tokens a query selects, its window of visible tokens, and whether the indexer has a relu."""

    topk: int
    window: int | None
    relu: bool

    def positions(self, index: IndexVectors, queries_NQ: Tensor) -> Tensor:
        """Returns the positions selected for queries at some positions of their sequences, [N, Q, K]."""
        tokens = torch.arange(index.key.shape[1], device=queries_NQ.device)
        visible = tokens <= queries_NQ.unsqueeze(-1)
        if self.window is not None:
            visible &= tokens > queries_NQ.unsqueeze(-1) - self.window
        return topk_positions(index_scores(*index, relu=self.relu), visible, self.topk)


def paged_sparse_latent_attention(
    q_THE: Tensor,
    index: IndexVectors,
    latent_TC: Tensor,
    rope_key_TR: Tensor,
    pages: SparseLatentPages,
    batch: paged_attention.PagedBatch,
    *,
    up: LatentUpProjection,
    selection: TopkSelection,
    kernels: PagedLatentKernels,
) -> Tensor:
    """Stores the rows of all tokens, and returns the attention of each to its selected tokens, [T, H, V].

    index: of the tokens, as one sequence [1, T, ...].
    """
    paged_attention.store_rows((pages.index_key,), (index.key[0],), batch.page_rows_T)
    lengths = [batch.max_length] if batch.num_decodes else []
    lengths += [chunk.context + chunk.stop - chunk.start for chunk in batch.chunks]
    if max(lengths, default=0) <= selection.topk:
        visibility = Visibility(window=selection.window)
        args = (q_THE, latent_TC, rope_key_TR, pages.latents, batch)
        return paged_latent_attention(*args, up=up, visibility=visibility, kernels=kernels)
    kernels.store_latents(pages.latents, latent_TC, rope_key_TR, batch.page_rows_T)
    wide = LatentUpProjection(to_compute_dtype(up.key_HNC), to_compute_dtype(up.value_HVC))
    parts = [_rows_of_decodes(index, pages, batch, selection)] if batch.num_decodes else []
    parts += [_rows_of_chunk(index, pages, batch, chunk, selection) for chunk in batch.chunks]
    out, start = q_THE.new_zeros((*q_THE.shape[:2], up.value_HVC.shape[1])), 0
    for selected_TK in parts:
        rows = slice(start, start + selected_TK.shape[0])
        scale = q_THE.shape[-1] ** -0.5
        out[rows] = attend_selected_rows(q_THE[rows], pages.flat_latents(), selected_TK, wide, scale=scale)
        start = rows.stop
    return out


def _rows_of_decodes(
    index: IndexVectors, pages: SparseLatentPages, batch: paged_attention.PagedBatch, selection: TopkSelection
) -> Tensor:
    """Returns the rows in pages that are selected for one token of each sequence that decodes, [N, K]."""
    count, size = batch.num_decodes, pages.index_key.shape[1]
    q, _, weight = (x[0, :count].unsqueeze(1) for x in index)
    read = paged_attention.pages_to_read(batch, size)
    key_NLE = pages.index_key.index_select(0, read).view(count, -1, pages.index_key.shape[2])
    last_N1 = batch.lengths_N[:count].unsqueeze(1) - 1
    selected = selection.positions(IndexVectors(q, key_NLE, weight), last_N1)
    return pages.rows_of(batch.page_table_NP[:count], selected).squeeze(1)


def _rows_of_chunk(
    index: IndexVectors,
    pages: SparseLatentPages,
    batch: paged_attention.PagedBatch,
    chunk: paged_attention.PromptChunk,
    selection: TopkSelection,
) -> Tensor:
    """Returns the rows in pages that are selected for the tokens of a chunk of a prompt, [tokens, K]."""
    rows, table_P = slice(chunk.start, chunk.stop), batch.page_table_NP[chunk.sequence]
    length = chunk.context + chunk.stop - chunk.start
    key_1LE = paged_attention.first_rows(pages.index_key, table_P, length).unsqueeze(0)
    q, weight, parts = index.query[:, rows], index.weight[:, rows], list[Tensor]()
    for block in row_blocks(chunk.stop - chunk.start, 8 * length * q.shape[2]):
        positions = torch.arange(chunk.context + block.start, chunk.context + block.stop, device=q.device)
        selected = selection.positions(IndexVectors(q[:, block], key_1LE, weight[:, block]), positions.unsqueeze(0))
        parts.append(pages.rows_of(table_P.unsqueeze(0), selected).squeeze(0))
    return torch.cat(parts)
