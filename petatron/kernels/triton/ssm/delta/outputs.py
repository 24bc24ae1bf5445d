"""Outputs of the delta rule from the states before its chunks and what these write; and the gradient of what they write, by their outputs.

    o_i = to_token_i S^T q_i + sum over j <= i of A_ij w_j,    A_ij = exp(s_i - s_j) (q_i . k_j)         dw_j = sum over i >= j of A_ij do_i

All chunks at once: a program has one chunk and head, with A in registers, and goes through the columns of the state. Where channels have
decays, A is read (`channel_scores.py`).

S sequence, B batch, H value heads, P value head dim, G key heads, N key head dim.
"""

# pyright: reportAttributeAccessIssue=false, reportCallIssue=false, reportIndexIssue=false, reportArgumentType=false
# pyright: reportPossiblyUnboundVariable=false, reportReturnType=false, reportGeneralTypeIssues=false
from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from petatron.kernels.triton.ssm.delta.tiles import (
    DecayedRows,
    DeltaChunks,
    chunk_row,
    load_square,
    load_state,
    row_tile,
    token_decays,
)
from petatron.kernels.triton.ssm.scan_tiles import decay_matrix, document_of, load_rows


def chunk_outputs(
    q_SBGN: Tensor,
    k_SBGN: Tensor,
    written_SBHP: Tensor,
    states: Tensor,
    chunks: DeltaChunks,
    decayed: DecayedRows | None = None,
    scores: Tensor | None = None,
) -> Tensor:
    """Returns the outputs of all tokens [S, B, H, P]. decayed, scores: rows and A [B, H, c, Q, Q], where channels have decays."""
    o_SBHP = torch.empty_like(written_SBHP)
    rows = (q_SBGN if decayed is None else decayed.q, k_SBGN, written_SBHP)
    _chunk_outputs[(chunks.num_chunks, chunks.heads, chunks.batch)](
        (*rows, scores),
        tuple(tensor.stride()[:3] for tensor in rows),
        chunks.gates,
        states,
        o_SBHP,
        chunks.sizes if decayed is None else decayed.sizes(chunks),
        **chunks.constants(written_SBHP),
        num_warps=4,
        num_stages=2,
    )
    return o_SBHP


def chunk_written_grads(
    q_SBGN: Tensor, k_SBGN: Tensor, grad_o_SBHP: Tensor, chunks: DeltaChunks, scores: Tensor | None = None
) -> Tensor:
    """Returns the gradient of what the chunks write [S, B, H, P], by the outputs of the same chunk alone. scores: see `chunk_outputs`."""
    grad_SBHP = torch.empty(grad_o_SBHP.shape, dtype=grad_o_SBHP.dtype, device=grad_o_SBHP.device)
    _written_grads[(chunks.num_chunks, chunks.heads, chunks.batch)](
        (q_SBGN, k_SBGN, grad_o_SBHP, scores),
        tuple(tensor.stride()[:3] for tensor in (q_SBGN, k_SBGN, grad_o_SBHP, grad_SBHP)),
        chunks.gates,
        grad_SBHP,
        chunks.sizes,
        **chunks.constants(grad_o_SBHP),
        num_warps=4,
        num_stages=2,
    )
    return grad_SBHP


@triton.jit
def _chunk_outputs(
    tensors,
    strides,
    gates,
    states,
    o,
    sizes,
    CHUNK: tl.constexpr,
    KEY_DIM: tl.constexpr,
    COLUMNS: tl.constexpr,
    PRECISION: tl.constexpr,
):
    chunk, head, b = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    q, k, written, made = tensors
    length, num_chunks, heads, heads_per_group, key_dim, value_dim = sizes
    token, group = chunk * CHUNK + tl.arange(0, CHUNK), head // heads_per_group
    query = load_rows(q, strides[0], token, b, group, key_dim, length, KEY_DIM)
    if made is None:
        key = load_rows(k, strides[1], token, b, group, key_dim, length, KEY_DIM)
        scores = tl.dot(query, tl.trans(key), input_precision=PRECISION)
        scores = _decayed(scores, gates, head, group, chunk, b, sizes, CHUNK, TRANSPOSED=False).to(query.dtype)
        of_group = chunk_row(group, chunk, b, heads // heads_per_group, num_chunks, CHUNK)
        start = token_decays(gates, head, chunk, b, sizes, CHUNK)[0] * tl.load(gates[2] + of_group)
    else:
        scores = load_square(made, head, chunk, b, sizes, CHUNK)
        start = tl.full((CHUNK,), 1.0, tl.float32)
    for begin in range(0, value_dim, COLUMNS):
        state = load_state(states, head, chunk, b, begin, sizes, KEY_DIM, COLUMNS)
        rows, inside = row_tile(strides[2], token, b, head, begin, value_dim, length, COLUMNS)
        new = tl.load(written + rows, mask=inside, other=0.0)
        out = tl.dot(query, state, input_precision=PRECISION) * start[:, None]
        out += tl.dot(scores, new, input_precision=PRECISION)
        tl.store(o + rows, out.to(new.dtype), mask=inside)


@triton.jit
def _written_grads(
    tensors,
    strides,
    gates,
    grads,
    sizes,
    CHUNK: tl.constexpr,
    KEY_DIM: tl.constexpr,
    COLUMNS: tl.constexpr,
    PRECISION: tl.constexpr,
):
    chunk, head, b = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    q, k, grad_o, made = tensors
    length, _, _, heads_per_group, key_dim, value_dim = sizes
    token, group = chunk * CHUNK + tl.arange(0, CHUNK), head // heads_per_group
    if made is None:
        query = load_rows(q, strides[0], token, b, group, key_dim, length, KEY_DIM)
        key = load_rows(k, strides[1], token, b, group, key_dim, length, KEY_DIM)
        scores = tl.dot(key, tl.trans(query), input_precision=PRECISION)  # [j, i]
        scores = _decayed(scores, gates, head, group, chunk, b, sizes, CHUNK, TRANSPOSED=True).to(query.dtype)
    else:
        scores = tl.trans(load_square(made, head, chunk, b, sizes, CHUNK))
    for begin in range(0, value_dim, COLUMNS):
        rows, inside = row_tile(strides[2], token, b, head, begin, value_dim, length, COLUMNS)
        out = tl.load(grad_o + rows, mask=inside, other=0.0)
        rows, inside = row_tile(strides[3], token, b, head, begin, value_dim, length, COLUMNS)
        tl.store(grads + rows, tl.dot(scores, out, input_precision=PRECISION).to(out.dtype), mask=inside)


@triton.jit
def _decayed(products, gates, head, group, chunk, b, sizes, CHUNK: tl.constexpr, TRANSPOSED: tl.constexpr):
    """Returns A [i, j], or [j, i], of the products of queries and keys, with the factors that normalise them."""
    length, num_chunks, heads, heads_per_group = sizes[0], sizes[1], sizes[2], sizes[3]
    of_group = chunk_row(group, chunk, b, heads // heads_per_group, num_chunks, CHUNK)
    q_factor, k_factor = tl.load(gates[2] + of_group), tl.load(gates[3] + of_group)
    factors = k_factor[:, None] * q_factor[None, :] if TRANSPOSED else q_factor[:, None] * k_factor[None, :]
    token = chunk * CHUNK + tl.arange(0, CHUNK)
    own = token if gates[4] is None else document_of(gates[4], token, b, length)
    total = tl.load(gates[0] + chunk_row(head, chunk, b, heads, num_chunks, CHUNK))
    return products * factors * decay_matrix(total, own, CHUNK, gates[4] is not None, TRANSPOSED=TRANSPOSED)
