"""Gradients of the delta rule's inputs through the states (inter-chunk), added to those inside chunks: all chunks at once.

With S the state before a chunk, dS' the gradient of the state after it, v_new the values it writes and d_rhs the gradient of the right-hand
side beta (v - from_start (k S)) of its triangular system (`states.py`):

    `intra_chunk_grads.py`: through A and L inside chunks, and dv; then
    _query_grads    dq_i += from_start_i S do_i
    _key_grads      dk_i += to_end_i dS' v_new_i - from_start_i beta_i S d_rhs_i;  what is left of dg and dbeta

A program has one chunk of one key head and loops over the value heads that share it, so the sums over heads, which the gradients of q
and k are, stay in registers; several kernels, since one has too few registers for all sums. The last kernel that adds to the gradient
of a normalized row turns it into that of the row itself.

The gradient of g at a token is that of every decay over it, times the decay: exp(s_i - s_j) of tokens on its two sides, from_start of
those after, to_end of those before, and chunk_decay. These are added up as they are; differences of sums would lose the small among them.

S sequence, B batch, H value heads, P value head dim, G key heads, N key head dim; c chunks.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from petatron.kernels.ssm.delta_recurrence import query_scale
from petatron.kernels.triton.ssm.delta_rule.intra_chunk_grads import intra_chunk_grads
from petatron.kernels.triton.ssm.delta_rule.tiles import (
    DeltaChunks,
    gate_offsets,
    load_state,
    load_value_columns,
    row_tile,
    token_decays,
)
from petatron.kernels.triton.ssm.scan_tiles import load_rows

_COLUMNS = 32
"""Columns of a state in a tile; of more, the sums of a program spill."""


class DeltaIntermediates(NamedTuple):
    """What the inter-chunk recurrence computes (`states.py`), forward and backward.

    states: S before the chunks, grad_states: dS' of those after them, both [B, c, H, N, P].
    v_new: the values that chunks write, grad_rhs: d_rhs of their triangular systems, both [S, B, H, P] and contiguous.
    """

    states: Tensor
    grad_states: Tensor
    v_new: Tensor
    grad_rhs: Tensor


def input_grads(
    grad_o_SBHP: Tensor,
    q_SBGN: Tensor,
    k_SBGN: Tensor,
    v_SBHP: Tensor,
    g_SBH: Tensor,
    beta_SBH: Tensor,
    intermediates: DeltaIntermediates,
    chunks: DeltaChunks,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Returns the gradients of q, k, v, g and beta in their dtypes."""
    states, grad_states, v_new, grad_rhs = intermediates

    def new(like: Tensor) -> Tensor:
        return torch.empty(like.shape, dtype=like.dtype, device=like.device)

    grad_q, grad_k, grad_v, grad_g, grad_beta = (new(x) for x in (q_SBGN, k_SBGN, v_SBHP, g_SBH, beta_SBH))
    partial_q, partial_k, partial_g, partial_beta = intra_chunk_grads(
        grad_o_SBHP, q_SBGN, k_SBGN, v_SBHP, v_new, grad_rhs, grad_v, chunks
    )
    grid = (chunks.num_chunks, chunks.groups, chunks.batch)
    constants = chunks.constants(v_SBHP, columns=_COLUMNS)
    options = {"num_warps": 4, "num_stages": 1}
    _query_grads[grid](
        (q_SBGN, grad_o_SBHP, states),
        tuple(tensor.stride()[:3] for tensor in (q_SBGN, grad_o_SBHP, partial_q)),
        chunks.gates,
        (partial_q, partial_g, grad_q),
        chunks.sizes,
        query_scale(chunks.key_dim),
        **constants,
        **options,
    )
    _key_grads[grid](
        (k_SBGN, grad_rhs, v_new, states, grad_states),
        tuple(tensor.stride()[:3] for tensor in (k_SBGN, grad_rhs, partial_k)),
        chunks.gates,
        (partial_k, partial_g, partial_beta, grad_k, grad_g, grad_beta),
        chunks.sizes,
        **constants,
        **options,
    )
    return grad_q, grad_k, grad_v, grad_g, grad_beta


@triton.jit
def _query_grads(
    tensors,
    strides,
    gates,
    grads,
    sizes,
    scale,
    CHUNK: tl.constexpr,
    KEY_DIM: tl.constexpr,
    COLUMNS: tl.constexpr,
    PRECISION: tl.constexpr,
):
    chunk, group, b = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    q, grad_o, states = tensors
    q_strides, grad_o_strides, partial_strides = strides
    length, num_chunks, heads, heads_per_group, key_dim, _ = sizes
    _, _, q_inverse_norms, _, _ = gates
    partial_q, partial_g, grad_q = grads
    token = chunk * CHUNK + tl.arange(0, CHUNK)
    inverse_norm = tl.load(q_inverse_norms + gate_offsets(group, chunk, b, heads // heads_per_group, num_chunks, CHUNK))
    query = load_rows(q, q_strides, token, b, group, key_dim, length, KEY_DIM)
    offsets, mask = row_tile(partial_strides, token, b, group, 0, key_dim, length, KEY_DIM)
    query_grad = tl.load(partial_q + offsets, mask=mask, other=0.0)
    first_head = group * heads_per_group
    for head in range(first_head, first_head + heads_per_group):
        from_start = token_decays(gates, head, chunk, b, sizes, CHUNK)[0]
        place, rows = (head, chunk, b), (grad_o, grad_o_strides)
        query_grad, dots = _through_states(
            query_grad, query, rows, from_start, states, place, sizes, CHUNK, KEY_DIM, COLUMNS, PRECISION
        )
        head_offsets = gate_offsets(head, chunk, b, heads, num_chunks, CHUNK)
        g_grad = _reverse_cumsum(dots * inverse_norm * from_start, CHUNK)
        tl.store(partial_g + head_offsets, tl.load(partial_g + head_offsets) + g_grad)
    row_grad = l2_normalize_grads(query_grad, query, inverse_norm, scale)
    tl.store(grad_q + offsets, row_grad.to(grad_q.dtype.element_ty), mask=mask)


@triton.jit
def _key_grads(
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
    chunk, group, b = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    length, num_chunks, heads, heads_per_group, key_dim, _ = sizes
    k, grad_rhs, v_new, states, grad_states = tensors
    k_strides, value_strides, partial_strides = strides
    _, betas, _, k_inverse_norms, _ = gates
    partial_k, partial_g, partial_beta, grad_k, grad_g, grad_beta = grads
    token = chunk * CHUNK + tl.arange(0, CHUNK)
    inverse_norm = tl.load(k_inverse_norms + gate_offsets(group, chunk, b, heads // heads_per_group, num_chunks, CHUNK))
    key = load_rows(k, k_strides, token, b, group, key_dim, length, KEY_DIM)
    offsets, mask = row_tile(partial_strides, token, b, group, 0, key_dim, length, KEY_DIM)
    key_grad = tl.load(partial_k + offsets, mask=mask, other=0.0)
    first_head = group * heads_per_group
    for head in range(first_head, first_head + heads_per_group):
        head_offsets = gate_offsets(head, chunk, b, heads, num_chunks, CHUNK)
        beta = tl.load(betas + head_offsets)
        from_start, to_end, chunk_decay = token_decays(gates, head, chunk, b, sizes, CHUNK)
        place, rows = (head, chunk, b), (grad_rhs, value_strides)
        key_grad, from_start_dots = _through_states(
            key_grad, key, rows, -beta * from_start, states, place, sizes, CHUNK, KEY_DIM, COLUMNS, PRECISION
        )
        rows = (v_new, value_strides)
        key_grad, to_end_dots = _through_states(
            key_grad, key, rows, to_end, grad_states, place, sizes, CHUNK, KEY_DIM, COLUMNS, PRECISION
        )
        chunk_decay_grad = _state_dot_grad(states, grad_states, head, chunk, b, sizes, KEY_DIM, COLUMNS)
        from_start_dots *= inverse_norm * from_start
        g_grad = tl.load(partial_g + head_offsets) - _reverse_cumsum(from_start_dots * beta, CHUNK)
        g_grad += chunk_decay * chunk_decay_grad
        g_grad += _exclusive_cumsum(to_end_dots * inverse_norm * to_end, CHUNK)
        gate_grad_offsets = (token.to(tl.int64) * tl.num_programs(2) + b) * heads + head
        tl.store(grad_g + gate_grad_offsets, g_grad.to(grad_g.dtype.element_ty), mask=token < length)
        beta_grad = tl.load(partial_beta + head_offsets) - from_start_dots
        tl.store(grad_beta + gate_grad_offsets, beta_grad.to(grad_beta.dtype.element_ty), mask=token < length)
    key = load_rows(k, k_strides, token, b, group, key_dim, length, KEY_DIM)
    tl.store(
        grad_k + offsets,
        l2_normalize_grads(key_grad, key, inverse_norm, 1.0).to(grad_k.dtype.element_ty),
        mask=mask,
    )


@triton.jit
def _through_states(
    grad,
    row,
    rows,
    weight,
    states,
    place,
    sizes,
    CHUNK: tl.constexpr,
    KEY_DIM: tl.constexpr,
    COLUMNS: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Returns grad + weight x S^T [CHUNK, KEY_DIM], and the dot products x . (row S) [CHUNK], for the rows x of a head in `rows`, a
    tensor and its strides, and its state S in this chunk. place: head, chunk, sequence."""
    tensor, strides = rows
    head, chunk, b = place
    token = chunk * CHUNK + tl.arange(0, CHUNK)
    dots = tl.zeros((CHUNK,), dtype=tl.float32)
    for begin in range(0, sizes[5], COLUMNS):
        state = load_state(states, head, chunk, b, begin, sizes, KEY_DIM, COLUMNS)
        x = load_value_columns(tensor, strides, token, b, head, begin, sizes, COLUMNS).to(tl.float32)
        dots += tl.sum(x * tl.dot(row, state, input_precision=PRECISION), axis=1)
        grad = tl.dot((x * weight[:, None]).to(state.dtype), tl.trans(state), grad, input_precision=PRECISION)
    return grad, dots


@triton.jit
def _state_dot_grad(
    states, grad_states, head, chunk, b, sizes, KEY_DIM: tl.constexpr, COLUMNS: tl.constexpr
):  # fmt: skip
    """Returns the sum of S dS' over all elements of a state, the gradient of chunk_decay."""
    by_row = tl.zeros((KEY_DIM,), dtype=tl.float32)
    for begin in range(0, sizes[5], COLUMNS):
        state = load_state(states, head, chunk, b, begin, sizes, KEY_DIM, COLUMNS).to(tl.float32)
        state_grad = load_state(grad_states, head, chunk, b, begin, sizes, KEY_DIM, COLUMNS).to(tl.float32)
        by_row += tl.sum(state * state_grad, axis=1)
    return tl.sum(by_row, axis=0)


@triton.jit
def _reverse_cumsum(x, CHUNK: tl.constexpr):
    """Returns for each token the sum over it and all after it."""
    from_token_on = tl.arange(0, CHUNK)[None, :] >= tl.arange(0, CHUNK)[:, None]
    return tl.sum(tl.where(from_token_on, x[None, :], 0.0), axis=1)


@triton.jit
def _exclusive_cumsum(x, CHUNK: tl.constexpr):
    """Returns for each token the sum over all before it."""
    before_token = tl.arange(0, CHUNK)[None, :] < tl.arange(0, CHUNK)[:, None]
    return tl.sum(tl.where(before_token, x[None, :], 0.0), axis=1)


@triton.jit
def l2_normalize_grads(grad, row, inverse_norm, scale):
    """Returns the gradient of rows from that of the normalized ones, row times inverse_norm; inverse_norm: scale / |row|.

    With y = row / |row|, that is (grad - y (y . grad)) scale / |row|.
    """
    unit_row = row.to(tl.float32) * (inverse_norm / scale)[:, None]
    return (grad - unit_row * tl.sum(unit_row * grad, axis=1)[:, None]) * inverse_norm[:, None]
