"""The UT transform of the delta rule: T = (I + L)^{-1} of every chunk and head, all chunks at once.

    L_ij = beta_i exp(s_i - s_j) (k_i . k_j)     j < i

With it the WY representation is U = T beta v, W = T beta exp(s) k, and v_new = U - W S = T beta (v - exp(s) k S). (The papers' T has the
factor diag(beta) in it.) Powers of L can be of any size (they are sums over all paths between two tokens) where T is not, so L is never
squared as a whole. Blocks of 16 on the diagonal are inverted row by row in float32 (forward substitution), all of a chunk together. With D
the block diagonal of I + L, O the blocks below it and M = D^{-1} O, of which a chunk has few,

    I + L = D (I + M),      X_0 = D^{-1},      X_{n+1} = D^{-1} - M X_n,      T = X_{b-1}     for b blocks on the diagonal, since M^b = 0

S sequence, B batch, H value heads, G key heads, N key head dim; c chunks of Q tokens.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from petatron.kernels.triton.ssm.delta_rule.tiles import DeltaChunks, gate_offsets, store_chunk_matrix
from petatron.kernels.triton.ssm.scan_tiles import decay_matrix, document_of, load_rows

_MOST_TOKENS = 64


def ut_transform(k_SBGN: Tensor, chunks: DeltaChunks) -> Tensor:
    """Returns T [B, H, c, Q, Q] in the dtype of the keys."""
    assert chunks.chunk <= _MOST_TOKENS
    shape = (chunks.batch, chunks.heads, chunks.num_chunks, chunks.chunk, chunks.chunk)
    T = torch.empty(shape, dtype=k_SBGN.dtype, device=k_SBGN.device)
    constants = chunks.constants(k_SBGN)
    del constants["COLUMNS"]
    _ut_transform[(chunks.num_chunks, chunks.heads, chunks.batch)](
        k_SBGN, chunks.gates, T, k_SBGN.stride()[:3], chunks.sizes, **constants, num_warps=4, num_stages=1
    )
    return T


@triton.jit
def _ut_transform(
    k,
    gates,
    T,
    k_strides,
    sizes,
    CHUNK: tl.constexpr,
    KEY_DIM: tl.constexpr,
    PRECISION: tl.constexpr,
):
    chunk, head, b = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    length, num_chunks, heads, heads_per_group, key_dim, _ = sizes
    g_cumsum, betas, _, k_inverse_norms, documents = gates
    token, group = chunk * CHUNK + tl.arange(0, CHUNK), head // heads_per_group
    head_offsets = gate_offsets(head, chunk, b, heads, num_chunks, CHUNK)
    group_offsets = gate_offsets(group, chunk, b, heads // heads_per_group, num_chunks, CHUNK)
    inverse_norm = tl.load(k_inverse_norms + group_offsets)
    key = load_rows(k, k_strides, token, b, group, key_dim, length, KEY_DIM)
    document = token if documents is None else document_of(documents, token, b, length)
    L = tl.dot(key, tl.trans(key), input_precision=PRECISION)
    L *= (inverse_norm * tl.load(betas + head_offsets))[:, None] * inverse_norm[None, :]
    L *= decay_matrix(tl.load(g_cumsum + head_offsets), document, CHUNK, documents is not None)
    row, column = tl.arange(0, CHUNK)[:, None], tl.arange(0, CHUNK)[None, :]
    inverse = unit_lower_inverse(tl.where(column < row, L, 0.0), CHUNK, PRECISION)
    store_chunk_matrix(T, inverse, head, chunk, b, sizes, CHUNK)


@triton.jit
def unit_lower_inverse(L, SIZE: tl.constexpr, PRECISION: tl.constexpr):
    """Returns T = (I + L)^{-1} [SIZE, SIZE] of a strictly lower triangular matrix L of 16, 32 or 64 rows."""
    BLOCKS: tl.constexpr = SIZE // 16
    row, column = tl.arange(0, SIZE)[:, None], tl.arange(0, SIZE)[None, :]
    on_diagonal = row // 16 == column // 16
    diagonal_blocks = tl.sum(tl.reshape(tl.where(on_diagonal, L, 0.0), (BLOCKS, 16, BLOCKS, 16)), axis=2)
    block_inverses = _block_inverses(diagonal_blocks, BLOCKS)
    row_block, column_block = tl.arange(0, BLOCKS)[:, None, None, None], tl.arange(0, BLOCKS)[None, None, :, None]
    D_inverse = tl.reshape(tl.where(row_block == column_block, block_inverses[:, :, None, :], 0.0), (SIZE, SIZE))
    T = D_inverse
    if BLOCKS > 1:
        M = tl.dot(D_inverse, tl.where(on_diagonal, 0.0, L), input_precision=PRECISION)
        for _ in tl.static_range(BLOCKS - 1):
            T = D_inverse - tl.dot(M, T, input_precision=PRECISION)
    return T


@triton.jit
def _block_inverses(L, BLOCKS: tl.constexpr):
    """Returns the inverses of I + L [BLOCKS, 16, 16] by forward substitution: each row is minus L's row times the rows above it."""
    index = tl.arange(0, 16)
    row, column = index[None, :, None], index[None, None, :]
    inverse = tl.where(row == column, 1.0, tl.zeros((BLOCKS, 16, 16), dtype=tl.float32))
    L_transposed = tl.permute(L, (0, 2, 1))
    for step in range(1, 16):
        L_row = tl.sum(tl.where(column == step, L_transposed, 0.0), axis=2)
        change = tl.sum(L_row[:, :, None] * inverse, axis=1)
        inverse = tl.where(row == step, inverse - change[:, None, :], inverse)
    return inverse
