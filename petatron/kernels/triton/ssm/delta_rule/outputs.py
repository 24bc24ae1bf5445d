"""Outputs of the delta rule from the states S before its chunks and the values v_new that these write; and the gradient of v_new by the
outputs of the same chunk.

    o_i = from_start_i S^T q_i + sum over j <= i of A_ij v_new_j        inter-chunk and intra-chunk,  A_ij = exp(s_i - s_j) (q_i . k_j)
    d_v_new_j = sum over i >= j of A_ij do_i

All chunks at once: a program has one chunk and head, with the attention matrix A in registers, and goes through the columns of the state.
Where channels have decays, A is read (`channel_intra_chunk.py`).

S sequence, B batch, H value heads, P value head dim, G key heads, N key head dim; c chunks of Q tokens.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from petatron.kernels.triton.ssm.delta_rule.tiles import (
    DecayedQK,
    DeltaChunks,
    gate_offsets,
    load_chunk_matrix,
    load_state,
    row_tile,
    token_decays,
)
from petatron.kernels.triton.ssm.scan_tiles import decay_matrix, document_of, load_rows


def chunk_outputs(
    q_SBGN: Tensor,
    k_SBGN: Tensor,
    v_new_SBHP: Tensor,
    states: Tensor,
    chunks: DeltaChunks,
    decayed: DecayedQK | None = None,
    A: Tensor | None = None,
) -> Tensor:
    """Returns the outputs of all tokens [S, B, H, P].

    decayed, A: where channels have decays, the queries with them and the attention matrices [B, H, c, Q, Q]; None: decays of heads.
    """
    o_SBHP = torch.empty_like(v_new_SBHP)
    rows = (q_SBGN if decayed is None else decayed.q_from_start, k_SBGN, v_new_SBHP)
    _chunk_outputs[(chunks.num_chunks, chunks.heads, chunks.batch)](
        (*rows, A),
        tuple(tensor.stride()[:3] for tensor in rows),
        chunks.gates,
        states,
        o_SBHP,
        chunks.sizes if decayed is None else decayed.sizes(chunks),
        **chunks.constants(v_new_SBHP),
        num_warps=4,
        num_stages=2,
    )
    return o_SBHP


def intra_chunk_v_new_grads(
    q_SBGN: Tensor, k_SBGN: Tensor, grad_o_SBHP: Tensor, chunks: DeltaChunks, A: Tensor | None = None
) -> Tensor:
    """Returns A^T do [S, B, H, P], the gradient of v_new by the outputs of the same chunk alone. A: see `chunk_outputs`."""
    grad_v_new_SBHP = torch.empty(grad_o_SBHP.shape, dtype=grad_o_SBHP.dtype, device=grad_o_SBHP.device)
    _intra_chunk_v_new_grads[(chunks.num_chunks, chunks.heads, chunks.batch)](
        (q_SBGN, k_SBGN, grad_o_SBHP, A),
        tuple(tensor.stride()[:3] for tensor in (q_SBGN, k_SBGN, grad_o_SBHP, grad_v_new_SBHP)),
        chunks.gates,
        grad_v_new_SBHP,
        chunks.sizes,
        **chunks.constants(grad_o_SBHP),
        num_warps=4,
        num_stages=2,
    )
    return grad_v_new_SBHP


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
    q, k, v_new, A = tensors
    q_strides, k_strides, v_new_strides = strides
    length, num_chunks, heads, heads_per_group, key_dim, value_dim = sizes
    _, _, q_inverse_norms, _, _ = gates
    token, group = chunk * CHUNK + tl.arange(0, CHUNK), head // heads_per_group
    query = load_rows(q, q_strides, token, b, group, key_dim, length, KEY_DIM)
    if A is None:
        key = load_rows(k, k_strides, token, b, group, key_dim, length, KEY_DIM)
        qk = tl.dot(query, tl.trans(key), input_precision=PRECISION)
        attention = _decayed_attention(qk, gates, head, group, chunk, b, sizes, CHUNK, TRANSPOSED=False)
        attention = attention.to(query.dtype)
        group_offsets = gate_offsets(group, chunk, b, heads // heads_per_group, num_chunks, CHUNK)
        from_start = token_decays(gates, head, chunk, b, sizes, CHUNK)[0] * tl.load(q_inverse_norms + group_offsets)
    else:
        attention = load_chunk_matrix(A, head, chunk, b, sizes, CHUNK)
        from_start = tl.full((CHUNK,), 1.0, tl.float32)
    for begin in range(0, value_dim, COLUMNS):
        state = load_state(states, head, chunk, b, begin, sizes, KEY_DIM, COLUMNS)
        offsets, mask = row_tile(v_new_strides, token, b, head, begin, value_dim, length, COLUMNS)
        new_value = tl.load(v_new + offsets, mask=mask, other=0.0)
        output = tl.dot(query, state, input_precision=PRECISION) * from_start[:, None]
        output += tl.dot(attention, new_value, input_precision=PRECISION)
        tl.store(o + offsets, output.to(new_value.dtype), mask=mask)


@triton.jit
def _intra_chunk_v_new_grads(
    tensors,
    strides,
    gates,
    grad_v_new,
    sizes,
    CHUNK: tl.constexpr,
    KEY_DIM: tl.constexpr,
    COLUMNS: tl.constexpr,
    PRECISION: tl.constexpr,
):
    chunk, head, b = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    q, k, grad_o, A = tensors
    q_strides, k_strides, grad_o_strides, grad_v_new_strides = strides
    length, _, _, heads_per_group, key_dim, value_dim = sizes
    token, group = chunk * CHUNK + tl.arange(0, CHUNK), head // heads_per_group
    if A is None:
        query = load_rows(q, q_strides, token, b, group, key_dim, length, KEY_DIM)
        key = load_rows(k, k_strides, token, b, group, key_dim, length, KEY_DIM)
        kq = tl.dot(key, tl.trans(query), input_precision=PRECISION)  # [j, i]
        attention = _decayed_attention(kq, gates, head, group, chunk, b, sizes, CHUNK, TRANSPOSED=True)
        attention = attention.to(query.dtype)
    else:
        attention = tl.trans(load_chunk_matrix(A, head, chunk, b, sizes, CHUNK))
    for begin in range(0, value_dim, COLUMNS):
        offsets, mask = row_tile(grad_o_strides, token, b, head, begin, value_dim, length, COLUMNS)
        output_grad = tl.load(grad_o + offsets, mask=mask, other=0.0)
        offsets, mask = row_tile(grad_v_new_strides, token, b, head, begin, value_dim, length, COLUMNS)
        tl.store(
            grad_v_new + offsets,
            tl.dot(attention, output_grad, input_precision=PRECISION).to(output_grad.dtype),
            mask=mask,
        )


@triton.jit
def _decayed_attention(qk, gates, head, group, chunk, b, sizes, CHUNK: tl.constexpr, TRANSPOSED: tl.constexpr):
    """Returns A [i, j], or transposed [j, i], from the products of queries and keys as they are: with decays and inverse norms."""
    length, num_chunks, heads, heads_per_group = sizes[0], sizes[1], sizes[2], sizes[3]
    g_cumsum, _, q_inverse_norms, k_inverse_norms, documents = gates
    group_offsets = gate_offsets(group, chunk, b, heads // heads_per_group, num_chunks, CHUNK)
    q_inverse_norm, k_inverse_norm = tl.load(q_inverse_norms + group_offsets), tl.load(k_inverse_norms + group_offsets)
    if TRANSPOSED:
        inverse_norms = k_inverse_norm[:, None] * q_inverse_norm[None, :]
    else:
        inverse_norms = q_inverse_norm[:, None] * k_inverse_norm[None, :]
    token = chunk * CHUNK + tl.arange(0, CHUNK)
    document = token if documents is None else document_of(documents, token, b, length)
    s = tl.load(g_cumsum + gate_offsets(head, chunk, b, heads, num_chunks, CHUNK))
    return qk * inverse_norms * decay_matrix(s, document, CHUNK, documents is not None, TRANSPOSED=TRANSPOSED)
