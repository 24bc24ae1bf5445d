"""What the walk over chunks and the kernels for all chunks at once read in tiles: rows, states, scores; and the rows of a chunk.

Tiles are described once on the host: a Hopper GPU copies them to shared memory by itself, and no thread holds their addresses. Scores,
C B^T of each chunk, are the same for all heads of a group, so they are computed once and read from the L2 cache.

S sequence, B batch, H heads, P head dim, G groups, N state dim; Q tokens of a chunk.
"""

# pyright: reportAttributeAccessIssue=false, reportCallIssue=false, reportIndexIssue=false, reportArgumentType=false
# pyright: reportPossiblyUnboundVariable=false, reportReturnType=false, reportGeneralTypeIssues=false
from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from petatron.kernels.triton.ssm.scan_tiles import (
    ChunkDecays,
    document_before,
    document_of,
    dot_precision,
    load_rows,
)


def block_size(width: int, *, most: int | None = None) -> int:
    """Returns the columns of a tile: a power of two, of at least the 16 of a GEMM."""
    size = triton.next_power_of_2(max(width, 16))
    return size if most is None else min(size, most)


def row_tiles(tensor: Tensor, tokens: int, width: int) -> TensorDescriptor:
    """Describes tiles of some tokens of one head [1, 1, tokens, width] of a tensor [S, B, H, P]; beyond its ends are zeros."""
    by_head = tensor.permute(1, 2, 0, 3)
    return TensorDescriptor(tensor, list(by_head.shape), list(by_head.stride()), [1, 1, tokens, width])


def state_tiles(states: Tensor, rows: int, width: int) -> TensorDescriptor:
    """Describes parts [1, 1, rows, width] of the states of a tensor [..., H, N, P]."""
    flat = states.view(-1, *states.shape[-3:])
    return TensorDescriptor(flat, list(flat.shape), list(flat.stride()), [1, 1, rows, width])


def score_tiles(queries_SBGN: Tensor, keys_SBGN: Tensor, decays: ChunkDecays, *, reverse: bool) -> TensorDescriptor:
    """Computes and describes the tiles [Q, Q] of queries keys^T, of each sequence, chunk and group in this order.

    Zero where a query does not see a key: one of a later token (in reverse, of an earlier one) or of another document.
    """
    length, batch, groups, state_dim = keys_SBGN.shape
    chunk, chunks = decays.chunk, decays.num_chunks
    scores = torch.empty((batch * chunks * groups * chunk, chunk), dtype=keys_SBGN.dtype, device=keys_SBGN.device)
    _scores[(chunks, groups, batch)](
        queries_SBGN,
        keys_SBGN,
        scores,
        decays.documents,
        length,
        state_dim,
        queries_SBGN.stride()[:3],
        keys_SBGN.stride()[:3],
        CHUNK=chunk,
        STATE_DIM=block_size(state_dim),
        REVERSE=reverse,
        PRECISION=dot_precision(keys_SBGN),
    )
    return TensorDescriptor.from_tensor(scores, [chunk, chunk])


@triton.jit
def _scores(
    queries,
    keys,
    scores,
    documents,
    length,
    state_dim,
    query_strides,
    key_strides,
    CHUNK: tl.constexpr,
    STATE_DIM: tl.constexpr,
    REVERSE: tl.constexpr,
    PRECISION: tl.constexpr,
):
    chunk, group, b = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    token = chunk * CHUNK + tl.arange(0, CHUNK)
    query = load_rows(queries, query_strides, token, b, group, state_dim, length, STATE_DIM)
    key = load_rows(keys, key_strides, token, b, group, state_dim, length, STATE_DIM)
    tile = tl.dot(query, tl.trans(key), input_precision=PRECISION)
    row, column = tl.arange(0, CHUNK)[:, None], tl.arange(0, CHUNK)[None, :]
    tile = tl.where(sees(documents, token, b, length, CHUNK, REVERSE), tile, 0.0)
    at = (b * tl.num_programs(0) + chunk) * tl.num_programs(1) + group
    tl.store(scores + (at.to(tl.int64) * CHUNK + row) * CHUNK + column, tile.to(scores.dtype.element_ty))


@triton.jit
def sees(documents, token, b, length, CHUNK: tl.constexpr, REVERSE: tl.constexpr):
    """Returns which tokens [query, key] of a chunk see which: none later, or in reverse none earlier, nor of another document."""
    row, column = tl.arange(0, CHUNK)[:, None], tl.arange(0, CHUNK)[None, :]
    allowed = row <= column if REVERSE else column <= row
    if documents is not None:
        own = document_of(documents, token, b, length)
        allowed = allowed & (own[:, None] == own[None, :])
    return allowed


@triton.jit
def document_masks(documents, token, chunk, b, length, CHUNK: tl.constexpr):
    """Returns which tokens the state before the chunk reaches, which reach the state after it, and whether the first reaches that."""
    enters, leaves, passes = token >= 0, token >= 0, True
    if documents is not None:
        own = document_of(documents, token, b, length)
        before = document_before(documents, chunk, b, length, CHUNK)
        after = document_of(documents, chunk * CHUNK + CHUNK - 1, b, length)
        enters, leaves, passes = own == before, own == after, before == after
    return enters, leaves, passes


@triton.jit
def chunk_rows(
    from_state, rows, scores, score_row, total, step, to_token, to_end, skip, REVERSE: tl.constexpr, PRECISION: tl.constexpr
):  # fmt: skip
    """Returns the rows of a chunk: y, or in reverse the gradient of x. from_state: queries times the state.

    Where a token is not seen the score is 0 and the exponent above 0: it is cut off, for 0 times infinity is not 0.
    """
    out = from_state * (to_end * step if REVERSE else to_token)[:, None] + skip * rows.to(tl.float32)
    exponent = total[None, :] - total[:, None] if REVERSE else total[:, None] - total[None, :]
    decayed = scores.load([score_row, 0]).to(tl.float32) * tl.exp2(tl.minimum(exponent, 0.0))
    decayed *= step[:, None] if REVERSE else step[None, :]
    return tl.dot(decayed.to(rows.dtype), rows, acc=out, input_precision=PRECISION)
