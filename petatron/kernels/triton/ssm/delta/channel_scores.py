"""Scores of queries and keys of one chunk with decays of channels, and the inverses of the chunks' systems: all chunks at once.

    A_ij = sum over n of q_i[n] exp(s_i[n] - s_j[n]) k_j[n]          j <= i
    L_ij = beta_i sum over n of k_i[n] exp(s_i[n] - s_j[n]) k_j[n]   j < i            T = (I + L)^{-1}

The tree of `kernels/ssm/chunk_channel_delta_rule.py`: j < i are in different halves of one node, and with m the last token of its first
half, exp(s_i - s_j) = exp(s_i - s_m) exp(s_m - s_j), two factors that are exp(-|s - s_m|). So one level of the tree, whose nodes have
`half` tokens on either side, is one GEMM of rows that are multiplied by that, of which the pairs of two halves of one node are taken.
Every level is computed as a GEMM of the whole chunk: a tensor core is faster at it than at many small ones, and exponentials, one for
each token, channel and level, take as long.

S sequence, B batch, H value heads, G key heads, N key head dim; c chunks of Q tokens.
"""

# pyright: reportAttributeAccessIssue=false, reportCallIssue=false, reportIndexIssue=false, reportArgumentType=false
# pyright: reportPossiblyUnboundVariable=false, reportReturnType=false, reportGeneralTypeIssues=false
from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from petatron.kernels.triton.ssm.delta.inverses import unit_lower_inverse
from petatron.kernels.triton.ssm.delta.tiles import DeltaChunks, chunk_row, row_tile, store_square
from petatron.kernels.triton.ssm.scan_tiles import document_of

_CHANNELS = 32
_WARPS = 4


def channel_scores(q_SBGN: Tensor, k_SBGN: Tensor, chunks: DeltaChunks) -> tuple[Tensor, Tensor]:
    """Returns A and T [B, H, c, Q, Q], in the dtype of the keys."""
    shape = (chunks.batch, chunks.heads, chunks.num_chunks, chunks.chunk, chunks.chunk)
    scores, inverses = (torch.empty(shape, dtype=k_SBGN.dtype, device=k_SBGN.device) for _ in range(2))
    constants = chunks.constants(k_SBGN)
    _channel_scores[(chunks.num_chunks, chunks.heads, chunks.batch)](
        (q_SBGN, k_SBGN),
        (q_SBGN.stride()[:3], k_SBGN.stride()[:3]),
        chunks.gates,
        scores,
        inverses,
        chunks.sizes,
        CHUNK=chunks.chunk,
        LEVELS=tree_levels(chunks),
        CHANNELS=min(_CHANNELS, constants["KEY_DIM"]),
        PRECISION=constants["PRECISION"],
        num_warps=_WARPS,
        num_stages=1,
    )
    return scores, inverses


def tree_levels(chunks: DeltaChunks) -> int:
    """Returns the levels of the tree of a chunk's tokens."""
    return chunks.chunk.bit_length() - 1


@triton.jit
def _channel_scores(
    tensors,
    strides,
    gates,
    scores,
    inverses,
    sizes,
    CHUNK: tl.constexpr,
    LEVELS: tl.constexpr,
    CHANNELS: tl.constexpr,
    PRECISION: tl.constexpr,
):
    chunk, head, b = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    q, k = tensors
    length, num_chunks, heads, heads_per_group, key_dim, _ = sizes
    sums, betas, q_factors, k_factors, documents = gates
    token, group = chunk * CHUNK + tl.arange(0, CHUNK), head // heads_per_group
    row, column = tl.arange(0, CHUNK)[:, None], tl.arange(0, CHUNK)[None, :]
    qk, kk = tl.zeros((CHUNK, CHUNK), dtype=tl.float32), tl.zeros((CHUNK, CHUNK), dtype=tl.float32)
    same = tl.zeros((CHUNK,), dtype=tl.float32)
    unit = (row == column).to(k.dtype.element_ty)
    for begin in range(0, key_dim, CHANNELS):
        # GEMMs with the identity have the rows in registers as operands of the next GEMMs, and exponentials are computed there only.
        rows, inside = row_tile(strides[0], token, b, group, begin, key_dim, length, CHANNELS)
        query = tl.dot(unit, tl.load(q + rows, mask=inside, other=0.0), input_precision=PRECISION)
        rows, inside = row_tile(strides[1], token, b, group, begin, key_dim, length, CHANNELS)
        key = tl.dot(unit, tl.load(k + rows, mask=inside, other=0.0), input_precision=PRECISION)
        total = load_sums(sums, tl.arange(0, CHUNK), begin, head, chunk, b, sizes, CHUNK, CHANNELS)
        same += tl.sum(query * key, axis=1)
        for level in range(LEVELS):
            decay = node_decays(total, level, sums, begin, head, chunk, b, sizes, CHUNK, CHANNELS)
            late, early = (query * decay).to(unit.dtype), (key * decay).to(unit.dtype)
            pairs = two_halves(level, CHUNK)
            qk += tl.where(pairs, tl.dot(late, tl.trans(early), input_precision=PRECISION), 0.0)
            kk += tl.where(pairs, tl.dot(early, tl.trans(early), input_precision=PRECISION), 0.0)
    if documents is not None:
        own = document_of(documents, token, b, length)
        together = own[:, None] == own[None, :]
        qk, kk = tl.where(together, qk, 0.0), tl.where(together, kk, 0.0)
    of_group = chunk_row(group, chunk, b, heads // heads_per_group, num_chunks, CHUNK)
    q_factor, k_factor = tl.load(q_factors + of_group)[:, None], tl.load(k_factors + of_group)
    qk = tl.where(row == column, same[:, None], tl.where(column < row, qk, 0.0)) * q_factor * k_factor[None, :]
    store_square(scores, qk, head, chunk, b, sizes, CHUNK)
    beta = tl.load(betas + chunk_row(head, chunk, b, heads, num_chunks, CHUNK))
    kk = tl.where(column < row, kk, 0.0) * (beta * k_factor)[:, None] * k_factor[None, :]
    store_square(inverses, unit_lower_inverse(kk, CHUNK, PRECISION), head, chunk, b, sizes, CHUNK)


@triton.jit
def node_decays(total, level, sums, begin, head, chunk, b, sizes, CHUNK: tl.constexpr, CHANNELS: tl.constexpr):
    """Returns exp(-|s - s_m|) [CHUNK, CHANNELS], m being the last token of the first half of a token's node; halves have 2^level tokens."""
    middle = (((tl.arange(0, CHUNK) >> level) | 1) << level) - 1
    return tl.exp2(-tl.abs(total - load_sums(sums, middle, begin, head, chunk, b, sizes, CHUNK, CHANNELS)))


@triton.jit
def two_halves(level, CHUNK: tl.constexpr):
    """Returns which pairs of tokens [CHUNK, CHUNK] are in different halves of one node; halves have 2^level tokens."""
    return ((tl.arange(0, CHUNK)[:, None] >> level) ^ (tl.arange(0, CHUNK)[None, :] >> level)) == 1


@triton.jit
def load_sums(sums, row, begin, head, chunk, b, sizes, CHUNK: tl.constexpr, CHANNELS: tl.constexpr):
    """Loads some channels of the sums at rows of a chunk [rows, CHANNELS]."""
    num_chunks, heads, key_dim = sizes[1], sizes[2], sizes[4]
    column = begin + tl.arange(0, CHANNELS)[None, :]
    at = (((b * heads + head).to(tl.int64) * num_chunks + chunk) * CHUNK + row)[:, None] * key_dim + column
    return tl.load(sums + at, mask=column < key_dim, other=0.0)
