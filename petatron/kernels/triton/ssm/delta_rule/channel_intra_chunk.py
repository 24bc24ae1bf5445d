"""The intra-chunk matrices of the delta rule with channel-wise decays: the attention matrix A and the UT transform T, all
chunks at once.

    A_ij = sum over n of q_i[n] exp(s_i[n] - s_j[n]) k_j[n]          j <= i
    L_ij = beta_i sum over n of k_i[n] exp(s_i[n] - s_j[n]) k_j[n]   j < i            T = (I + L)^{-1}

The tree of `kernels/ssm/chunk_channel_delta_rule.py`: j < i are in different halves of one node, and with m the last token of its first
half, exp(s_i - s_j) = exp(s_i - s_m) exp(s_m - s_j), two factors that are exp(-|s - s_m|). So one level of the tree, whose nodes have
2^level tokens in either half, is one GEMM of rows that are multiplied by that, of which the pairs of two halves of one node are taken.
Every level is computed as a GEMM of the whole chunk: a tensor core is faster at it than at many small ones, and exponentials, one for
each token, channel and level, take as long.

S sequence, B batch, H value heads, G key heads, N key head dim; c chunks of Q tokens.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from petatron.kernels.triton.ssm.delta_rule.tiles import DeltaChunks, gate_offsets, row_tile, store_chunk_matrix
from petatron.kernels.triton.ssm.delta_rule.ut_transform import unit_lower_inverse
from petatron.kernels.triton.ssm.scan_tiles import document_of

_CHANNELS = 32
_WARPS = 4


def channel_intra_chunk(q_SBGN: Tensor, k_SBGN: Tensor, chunks: DeltaChunks) -> tuple[Tensor, Tensor]:
    """Returns A and T [B, H, c, Q, Q], in the dtype of the keys."""
    shape = (chunks.batch, chunks.heads, chunks.num_chunks, chunks.chunk, chunks.chunk)
    A, T = (torch.empty(shape, dtype=k_SBGN.dtype, device=k_SBGN.device) for _ in range(2))
    constants = chunks.constants(k_SBGN)
    _channel_intra_chunk[(chunks.num_chunks, chunks.heads, chunks.batch)](
        (q_SBGN, k_SBGN),
        (q_SBGN.stride()[:3], k_SBGN.stride()[:3]),
        chunks.gates,
        A,
        T,
        chunks.sizes,
        CHUNK=chunks.chunk,
        LEVELS=tree_levels(chunks),
        CHANNELS=min(_CHANNELS, constants["KEY_DIM"]),
        PRECISION=constants["PRECISION"],
        num_warps=_WARPS,
        num_stages=1,
    )
    return A, T


def tree_levels(chunks: DeltaChunks) -> int:
    """Returns the levels of the tree of a chunk's tokens, log2 Q."""
    return chunks.chunk.bit_length() - 1


@triton.jit
def _channel_intra_chunk(
    tensors,
    strides,
    gates,
    A,
    T,
    sizes,
    CHUNK: tl.constexpr,
    LEVELS: tl.constexpr,
    CHANNELS: tl.constexpr,
    PRECISION: tl.constexpr,
):
    chunk, head, b = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    q, k = tensors
    q_strides, k_strides = strides
    length, num_chunks, heads, heads_per_group, key_dim, _ = sizes
    g_cumsum, betas, q_inverse_norms, k_inverse_norms, documents = gates
    token, group = chunk * CHUNK + tl.arange(0, CHUNK), head // heads_per_group
    row, column = tl.arange(0, CHUNK)[:, None], tl.arange(0, CHUNK)[None, :]
    qk, kk = tl.zeros((CHUNK, CHUNK), dtype=tl.float32), tl.zeros((CHUNK, CHUNK), dtype=tl.float32)
    qk_diagonal = tl.zeros((CHUNK,), dtype=tl.float32)
    identity = (row == column).to(k.dtype.element_ty)
    for begin in range(0, key_dim, CHANNELS):
        # GEMMs with the identity have the rows in registers as operands of the next GEMMs, and exponentials are computed there only.
        offsets, mask = row_tile(q_strides, token, b, group, begin, key_dim, length, CHANNELS)
        query = tl.dot(identity, tl.load(q + offsets, mask=mask, other=0.0), input_precision=PRECISION)
        offsets, mask = row_tile(k_strides, token, b, group, begin, key_dim, length, CHANNELS)
        key = tl.dot(identity, tl.load(k + offsets, mask=mask, other=0.0), input_precision=PRECISION)
        s = load_g_cumsum(g_cumsum, tl.arange(0, CHUNK), begin, head, chunk, b, sizes, CHUNK, CHANNELS)
        qk_diagonal += tl.sum(query * key, axis=1)
        for level in range(LEVELS):
            decay = node_decays(s, level, g_cumsum, begin, head, chunk, b, sizes, CHUNK, CHANNELS)
            decayed_query, decayed_key = (query * decay).to(identity.dtype), (key * decay).to(identity.dtype)
            pairs = node_pairs(level, CHUNK)
            qk += tl.where(pairs, tl.dot(decayed_query, tl.trans(decayed_key), input_precision=PRECISION), 0.0)
            kk += tl.where(pairs, tl.dot(decayed_key, tl.trans(decayed_key), input_precision=PRECISION), 0.0)
    if documents is not None:
        document = document_of(documents, token, b, length)
        same_document = document[:, None] == document[None, :]
        qk, kk = tl.where(same_document, qk, 0.0), tl.where(same_document, kk, 0.0)
    group_offsets = gate_offsets(group, chunk, b, heads // heads_per_group, num_chunks, CHUNK)
    q_inverse_norm = tl.load(q_inverse_norms + group_offsets)[:, None]
    k_inverse_norm = tl.load(k_inverse_norms + group_offsets)
    attention = tl.where(row == column, qk_diagonal[:, None], tl.where(column < row, qk, 0.0))
    attention = attention * q_inverse_norm * k_inverse_norm[None, :]
    store_chunk_matrix(A, attention, head, chunk, b, sizes, CHUNK)
    beta = tl.load(betas + gate_offsets(head, chunk, b, heads, num_chunks, CHUNK))
    L = tl.where(column < row, kk, 0.0) * (beta * k_inverse_norm)[:, None] * k_inverse_norm[None, :]
    store_chunk_matrix(T, unit_lower_inverse(L, CHUNK, PRECISION), head, chunk, b, sizes, CHUNK)


@triton.jit
def node_decays(s, level, g_cumsum, begin, head, chunk, b, sizes, CHUNK: tl.constexpr, CHANNELS: tl.constexpr):
    """Returns exp(-|s - s_m|) [CHUNK, CHANNELS], m being the last token of the first half of a token's node; halves have 2^level tokens."""
    middle = (((tl.arange(0, CHUNK) >> level) | 1) << level) - 1
    s_middle = load_g_cumsum(g_cumsum, middle, begin, head, chunk, b, sizes, CHUNK, CHANNELS)
    return tl.exp2(-tl.abs(s - s_middle))


@triton.jit
def node_pairs(level, CHUNK: tl.constexpr):
    """Returns which pairs of tokens [CHUNK, CHUNK] are in different halves of one node; halves have 2^level tokens."""
    return ((tl.arange(0, CHUNK)[:, None] >> level) ^ (tl.arange(0, CHUNK)[None, :] >> level)) == 1


@triton.jit
def load_g_cumsum(g_cumsum, row, begin, head, chunk, b, sizes, CHUNK: tl.constexpr, CHANNELS: tl.constexpr):
    """Loads s, times log2 e, of some channels at rows of a chunk [rows, CHANNELS]."""
    num_chunks, heads, key_dim = sizes[1], sizes[2], sizes[4]
    channel = begin + tl.arange(0, CHANNELS)[None, :]
    offsets = (((b * heads + head).to(tl.int64) * num_chunks + chunk) * CHUNK + row)[:, None] * key_dim + channel
    return tl.load(g_cumsum + offsets, mask=channel < key_dim, other=0.0)
