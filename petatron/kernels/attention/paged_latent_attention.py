"""Latent attention over pages that hold one latent and one rotary key per token, for the packed tokens of many sequences.

Keys and values of a head are linear in the latent c of a token, k = [W_uk c | r] with the rotary key r, and v = W_uv c. So neither is
stored, and where a query meets tokens of earlier steps neither is computed either: both up-projections are *absorbed* into what one
token computes for itself (DeepSeek-V2, section 2.1.2).

    q . k             =  (W_uk^T q_nope) . c  +  q_rope . r
    sum_j p_j v_j     =  W_uv (sum_j p_j c_j)

Absorbed, all heads share one key of latent and rotary width, and its first part is the value: multi-query attention with wide heads. A
fresh chunk of a prompt has all its keys in the step; there heads of ordinary width cost less, and it is attended to as in training.

Decode steps have a kernel on GPUs (`kernels/triton/attention/paged_latent_attention.py`). Here the pages that they read are gathered; on a
GPU also this neither waits for the device nor depends on lengths, so it can be captured in a CUDA graph.

T tokens, N sequences, H heads of this rank, E width of a query head without position and rotary, C of the latent, R of the rotary key,
V of a value head.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from petatron.kernels.attention import block_attention, paged_attention
from petatron.kernels.attention.flash import widens
from petatron.kernels.attention.visibility import Visibility, VisibilitySupport
from petatron.kernels.attention.visible_key_intervals import BlockMask, VisibleKeys
from petatron.kernels.compute_dtype import to_compute_dtype
from petatron.kernels.cpu_matmul import matmul

VISIBILITY = VisibilitySupport.of("causal", window=True)
"""What it computes of sequences in pages."""


@dataclass(frozen=True, slots=True, eq=False)
class LatentUpProjection:
    """The weights from a latent to keys without position [H, E - R, C] and to values [H, V, C]."""

    key_HNC: Tensor
    value_HVC: Tensor

    @classmethod
    def of(cls, weight: Tensor, *, nope_dim: int, v_dim: int) -> LatentUpProjection:
        """Splits the weight of the one GEMM, whose rows are [key, value] of each head."""
        key, value = weight.unflatten(0, (-1, nope_dim + v_dim)).split((nope_dim, v_dim), dim=1)
        return cls(key, value)

    def absorb(self, q_THE: Tensor) -> tuple[Tensor, Tensor]:
        """Returns the queries of absorbed keys: those of latents [T, H, C], and those of rotary keys [T, H, R]."""
        nope, rotary = q_THE.split((self.key_HNC.shape[1], q_THE.shape[-1] - self.key_HNC.shape[1]), dim=-1)
        return matmul(nope.transpose(0, 1), self.key_HNC).transpose(0, 1), rotary

    def values(self, mixed_THC: Tensor) -> Tensor:
        """Returns the output of every head from its weighted sum of latents, [T, H, V]."""
        return matmul(mixed_THC.transpose(0, 1), self.value_HVC.mT).transpose(0, 1)

    def keys_and_values(self, latent_TC: Tensor, rope_key_TR: Tensor) -> tuple[Tensor, Tensor]:
        """Returns keys [T, H, E] and values [T, H, V] of some tokens, as heads of ordinary width."""
        heads, nope_dim, _ = self.key_HNC.shape
        nope = matmul(latent_TC, self.key_HNC.flatten(0, 1).mT).unflatten(-1, (heads, nope_dim))
        values = matmul(latent_TC, self.value_HVC.flatten(0, 1).mT).unflatten(-1, (heads, -1))
        return torch.cat((nope, rope_key_TR.unsqueeze(1).expand(-1, heads, -1)), dim=-1), values


class LatentPages(NamedTuple):
    """The pages of one layer: latents [pages, page size, C] and rotary keys [pages, page size, R]."""

    latent: Tensor
    rope_key: Tensor

    def keys_of_chunk(self, page_table_P: Tensor, length: int) -> Tensor:
        """Returns the absorbed keys of one sequence's first tokens, [L, C + R]."""
        return torch.cat([paged_attention.first_rows(pages, page_table_P, length) for pages in self], dim=-1)

    def keys_of_decodes(self, batch: paged_attention.PagedBatch, window: int | None) -> Tensor:
        """Returns the absorbed keys of all sequences that decode, [N, L, C + R], padded to the longest."""
        if batch.first_page is not None:
            return torch.cat([paged_attention.rows_of_only_sequence(x, batch, window) for x in self], dim=-1).unsqueeze(
                0
            )
        read, name = paged_attention.pages_to_read(batch, self.latent.shape[1]), f"latent {self.latent.shape[2]}"
        if name not in batch.computed:  # all layers share its memory
            width = self.latent.shape[2] + self.rope_key.shape[2]
            batch.computed[name] = self.latent.new_empty((read.shape[0], self.latent.shape[1], width))
        keys, latent_width = batch.computed[name], self.latent.shape[2]
        keys[..., :latent_width].copy_(self.latent.index_select(0, read))
        keys[..., latent_width:].copy_(self.rope_key.index_select(0, read))
        return keys.view(batch.num_decodes, -1, keys.shape[-1])


class PagedLatentKernels(Protocol):
    """The interface of this module and its faster implementations."""

    def store_latents(
        self, pages: LatentPages, latent_TC: Tensor, rope_key_TR: Tensor, page_rows_T: Tensor
    ) -> None: ...
    def decode_latents(
        self,
        q_NHC: Tensor,
        q_rope_NHR: Tensor,
        pages: LatentPages,
        batch: paged_attention.PagedBatch,
        *,
        scale: float,
        window: int | None,
    ) -> Tensor: ...


def paged_latent_attention(
    q_THE: Tensor,
    latent_TC: Tensor,
    rope_key_TR: Tensor,
    pages: LatentPages,
    batch: paged_attention.PagedBatch,
    *,
    up: LatentUpProjection,
    visibility: Visibility,
    kernels: PagedLatentKernels,
) -> Tensor:
    """Stores the rows of all tokens, and returns the attention of each to what it sees of its sequence up to itself, [T, H, V]."""
    window = visibility.window
    kernels.store_latents(pages, latent_TC, rope_key_TR, batch.page_rows_T)
    scale, num_decodes = q_THE.shape[-1] ** -0.5, batch.num_decodes
    if not batch.chunks and num_decodes == q_THE.shape[0]:
        return up.values(kernels.decode_latents(*up.absorb(q_THE), pages, batch, scale=scale, window=window))
    out = q_THE.new_zeros((*q_THE.shape[:2], up.value_HVC.shape[1]))
    if num_decodes:
        absorbed = up.absorb(q_THE[:num_decodes])
        out[:num_decodes] = up.values(kernels.decode_latents(*absorbed, pages, batch, scale=scale, window=window))
    fresh = [chunk for chunk in batch.chunks if chunk.context == 0]
    if fresh:
        rows = slice(fresh[0].start, fresh[-1].stop)
        k, v = up.keys_and_values(latent_TC[rows], rope_key_TR[rows])
        out[rows] = paged_attention.fresh_chunks_attention(q_THE[rows], k, v, batch, fresh, visibility=visibility)
    for chunk in batch.chunks[len(fresh) :]:
        rows = slice(chunk.start, chunk.stop)
        keys = pages.keys_of_chunk(batch.page_table_NP[chunk.sequence], chunk.context + chunk.stop - chunk.start)
        out[rows] = _continued_chunk(q_THE[rows], keys, chunk, up, visibility)
    return out


def store_latents(pages: LatentPages, latent_TC: Tensor, rope_key_TR: Tensor, page_rows_T: Tensor) -> None:
    """Writes the rows of every token to its slot."""
    paged_attention.store_rows(pages, (latent_TC, rope_key_TR), page_rows_T)


def decode_latents(
    q_NHC: Tensor,
    q_rope_NHR: Tensor,
    pages: LatentPages,
    batch: paged_attention.PagedBatch,
    *,
    scale: float,
    window: int | None,
) -> Tensor:
    """Returns the weighted sum of latents [N, H, C] of one token of each sequence, over all its rows in pages, its own included.

    q_NHC, q_rope_NHR: absorbed queries. scale: the factor on scores. window: the most tokens that one attends to.
    """
    k = pages.keys_of_decodes(batch, window).unsqueeze(1)
    mask = (
        None
        if batch.first_page is not None
        else paged_attention.added_mask(batch, pages.latent, Visibility(window=window))
    )
    q = torch.cat((q_NHC, q_rope_NHR), dim=-1).unsqueeze(1)  # heads are rows of one sequence
    v = k[..., : pages.latent.shape[2]]
    if widens(q):
        q, k, v = map(to_compute_dtype, (q, k, v))
    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=scale).squeeze(1).to(q_NHC.dtype)


def _continued_chunk(
    q_THE: Tensor, keys_LK: Tensor, chunk: paged_attention.PromptChunk, up: LatentUpProjection, visibility: Visibility
) -> Tensor:
    length, latent_width = keys_LK.shape[0], up.key_HNC.shape[2]
    visible = VisibleKeys.of(visibility, length, q_THE.device)
    mask = BlockMask((range(chunk.context, length),), (range(length),), visible)
    # Blocks divide scores by the root of the absorbed width; they are to be divided by that of a head.
    q = torch.cat(up.absorb(q_THE), dim=-1) * (keys_LK.shape[-1] / q_THE.shape[-1]) ** 0.5
    k = keys_LK[:, None, None]
    return up.values(block_attention(q.unsqueeze(1), k, k[..., :latent_width], mask).squeeze(1))
