"""The inverses T = (I + L)^{-1} of the delta rule's triangular systems, one of each chunk and head: all chunks at once.

L_ij = beta_i exp(s_i - s_j) (k_i . k_j) for j < i. Powers of L can be of any size (they are sums over all paths between two tokens)
where T is not, so L is never squared as a whole. Blocks of 16 on the diagonal are inverted row by row in float32, all of a chunk
together. With D the block diagonal of I + L, O the blocks below it and M = D^{-1} O, of which a chunk has few,

    I + L = D (I + M),      X_0 = D^{-1},      X_{n+1} = D^{-1} - M X_n,      T = X_{b-1}     for b blocks on the diagonal, since M^b = 0

S sequence, B batch, H value heads, G key heads, N key head dim; c chunks of Q tokens.
"""

# pyright: reportAttributeAccessIssue=false, reportCallIssue=false, reportIndexIssue=false, reportArgumentType=false
# pyright: reportPossiblyUnboundVariable=false, reportReturnType=false, reportGeneralTypeIssues=false
from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from petatron.kernels.triton.ssm.delta.tiles import DeltaChunks, chunk_row, store_square
from petatron.kernels.triton.ssm.scan_tiles import decay_matrix, document_of, load_rows

_MOST_TOKENS = 64


def chunk_inverses(k_SBGN: Tensor, chunks: DeltaChunks) -> Tensor:
    """Returns T [B, H, c, Q, Q] in the dtype of the keys."""
    assert chunks.chunk <= _MOST_TOKENS
    shape = (chunks.batch, chunks.heads, chunks.num_chunks, chunks.chunk, chunks.chunk)
    inverses = torch.empty(shape, dtype=k_SBGN.dtype, device=k_SBGN.device)
    constants = chunks.constants(k_SBGN)
    del constants["COLUMNS"]
    _chunk_inverses[(chunks.num_chunks, chunks.heads, chunks.batch)](
        k_SBGN, chunks.gates, inverses, k_SBGN.stride()[:3], chunks.sizes, **constants, num_warps=4, num_stages=1
    )
    return inverses


@triton.jit
def _chunk_inverses(
    k,
    gates,
    inverses,
    k_strides,
    sizes,
    CHUNK: tl.constexpr,
    KEY_DIM: tl.constexpr,
    PRECISION: tl.constexpr,
):
    chunk, head, b = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    length, num_chunks, heads, heads_per_group, key_dim, _ = sizes
    sums, betas, _, k_factors, documents = gates
    token, group = chunk * CHUNK + tl.arange(0, CHUNK), head // heads_per_group
    at = chunk_row(head, chunk, b, heads, num_chunks, CHUNK)
    factor = tl.load(k_factors + chunk_row(group, chunk, b, heads // heads_per_group, num_chunks, CHUNK))
    key = load_rows(k, k_strides, token, b, group, key_dim, length, KEY_DIM)
    own = token if documents is None else document_of(documents, token, b, length)
    lower = tl.dot(key, tl.trans(key), input_precision=PRECISION)
    lower *= (factor * tl.load(betas + at))[:, None] * factor[None, :]
    lower *= decay_matrix(tl.load(sums + at), own, CHUNK, documents is not None)
    row, column = tl.arange(0, CHUNK)[:, None], tl.arange(0, CHUNK)[None, :]
    inverse = unit_lower_inverse(tl.where(column < row, lower, 0.0), CHUNK, PRECISION)
    store_square(inverses, inverse, head, chunk, b, sizes, CHUNK)


@triton.jit
def unit_lower_inverse(lower, SIZE: tl.constexpr, PRECISION: tl.constexpr):
    """Returns (I + L)^{-1} [SIZE, SIZE] of a strictly lower triangular matrix L of 16, 32 or 64 rows."""
    BLOCKS: tl.constexpr = SIZE // 16
    row, column = tl.arange(0, SIZE)[:, None], tl.arange(0, SIZE)[None, :]
    near = row // 16 == column // 16
    blocks = tl.sum(tl.reshape(tl.where(near, lower, 0.0), (BLOCKS, 16, BLOCKS, 16)), axis=2)
    blocks = _small_inverses(blocks, BLOCKS)
    own, other = tl.arange(0, BLOCKS)[:, None, None, None], tl.arange(0, BLOCKS)[None, None, :, None]
    inverse = tl.reshape(tl.where(own == other, blocks[:, :, None, :], 0.0), (SIZE, SIZE))
    result = inverse
    if BLOCKS > 1:
        below = tl.dot(inverse, tl.where(near, 0.0, lower), input_precision=PRECISION)
        for _ in tl.static_range(BLOCKS - 1):
            result = inverse - tl.dot(below, result, input_precision=PRECISION)
    return result


@triton.jit
def _small_inverses(lower, BLOCKS: tl.constexpr):
    """Returns the inverses of I + L [BLOCKS, 16, 16], row by row: each is minus L's row times the rows above it."""
    index = tl.arange(0, 16)
    row, column = index[None, :, None], index[None, None, :]
    inverse = tl.where(row == column, 1.0, tl.zeros((BLOCKS, 16, 16), dtype=tl.float32))
    transposed = tl.permute(lower, (0, 2, 1))
    for step in range(1, 16):
        weights = tl.sum(tl.where(column == step, transposed, 0.0), axis=2)
        change = tl.sum(weights[:, :, None] * inverse, axis=1)
        inverse = tl.where(row == step, inverse - change[:, None, :], inverse)
    return inverse
