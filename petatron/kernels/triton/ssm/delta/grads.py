"""Gradients of the delta rule's inputs, from states, what chunks write, and the gradients of both: all chunks at once.

With S the state before a chunk, dS' the gradient of the state after it, w what it writes and dy the gradient of its system's right-hand
side beta (v - to_token (k S)) (`states.py`):

    `score_grads.py`, the parts of scores and systems, and dv; then
    _query_grads    dq_i += to_token_i S do_i
    _key_grads      dk_i += to_end_i dS' w_i - to_token_i beta_i S dy_i;  what is left of dg and dbeta

A program has one chunk of one key head and loops over the value heads that share it, so the sums over heads, which the gradients of q
and k are, stay in registers; several kernels, since one has too few registers for all sums. The last kernel that adds to the gradient
of a normalised row turns it into that of the row itself.

The gradient of g at a token is that of every decay over it, times the decay: exp(s_i - s_j) of tokens on its two sides, to_token of
those after, to_end of those before, and whole. These are added up as they are; differences of sums would lose the small among them.

S sequence, B batch, H value heads, P value head dim, G key heads, N key head dim; c chunks.
"""

# pyright: reportAttributeAccessIssue=false, reportCallIssue=false, reportIndexIssue=false, reportArgumentType=false
# pyright: reportPossiblyUnboundVariable=false, reportReturnType=false, reportGeneralTypeIssues=false
from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from petatron.kernels.ssm.delta_recurrence import query_factor
from petatron.kernels.triton.ssm.delta.score_grads import chunk_score_grads
from petatron.kernels.triton.ssm.delta.tiles import (
    DeltaChunks,
    chunk_row,
    load_columns,
    load_state,
    row_tile,
    token_decays,
)
from petatron.kernels.triton.ssm.scan_tiles import load_rows

_COLUMNS = 32
"""Columns of a state in a tile; of more, the sums of a program spill."""


class DeltaIntermediates(NamedTuple):
    """What the sequential kernels made: states before the chunks and gradients of those after them [B, c, H, N, P]; what chunks write,
    and the gradients of their systems' right-hand sides [S, B, H, P], both contiguous."""

    states: Tensor
    grad_states: Tensor
    written: Tensor
    grad_sides: Tensor


def chunk_grads(
    grad_o_SBHP: Tensor,
    q_SBGN: Tensor,
    k_SBGN: Tensor,
    v_SBHP: Tensor,
    g_SBH: Tensor,
    beta_SBH: Tensor,
    made: DeltaIntermediates,
    chunks: DeltaChunks,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Returns the gradients of q, k, v, g and beta in their dtypes."""

    def new(like: Tensor) -> Tensor:
        return torch.empty(like.shape, dtype=like.dtype, device=like.device)

    grads = tuple(new(tensor) for tensor in (q_SBGN, k_SBGN, v_SBHP, g_SBH, beta_SBH))
    sides = made.grad_sides
    q_sums, k_sums, partial_g, partial_beta = chunk_score_grads(
        grad_o_SBHP, q_SBGN, k_SBGN, v_SBHP, made.written, sides, grads[2], chunks
    )
    grid = (chunks.num_chunks, chunks.groups, chunks.batch)
    constants = chunks.constants(v_SBHP, columns=_COLUMNS)
    options = {"num_warps": 4, "num_stages": 1}
    _query_grads[grid](
        (q_SBGN, grad_o_SBHP, made.states),
        tuple(tensor.stride()[:3] for tensor in (q_SBGN, grad_o_SBHP, q_sums)),
        chunks.gates,
        (q_sums, partial_g, grads[0]),
        chunks.sizes,
        query_factor(chunks.key_dim),
        **constants,
        **options,
    )
    _key_grads[grid](
        (k_SBGN, sides, made.written, made.states, made.grad_states),
        tuple(tensor.stride()[:3] for tensor in (k_SBGN, sides, k_sums)),
        chunks.gates,
        (k_sums, partial_g, partial_beta, grads[1], *grads[3:]),
        chunks.sizes,
        **constants,
        **options,
    )
    return grads


@triton.jit
def _query_grads(
    tensors,
    strides,
    gates,
    sums,
    sizes,
    scale,
    CHUNK: tl.constexpr,
    KEY_DIM: tl.constexpr,
    COLUMNS: tl.constexpr,
    PRECISION: tl.constexpr,
):
    chunk, group, b = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    q, grad_o, states = tensors
    length, num_chunks, heads, heads_per_group, key_dim, _ = sizes
    q_sums, partial_g, grad_q = sums
    token = chunk * CHUNK + tl.arange(0, CHUNK)
    factor = tl.load(gates[2] + chunk_row(group, chunk, b, heads // heads_per_group, num_chunks, CHUNK))
    query = load_rows(q, strides[0], token, b, group, key_dim, length, KEY_DIM)
    to, there = row_tile(strides[2], token, b, group, 0, key_dim, length, KEY_DIM)
    query_grad = tl.load(q_sums + to, mask=there, other=0.0)
    first = group * heads_per_group
    for head in range(first, first + heads_per_group):
        to_token = token_decays(gates, head, chunk, b, sizes, CHUNK)[0]
        query_grad, products = _through_states(
            query_grad,
            query,
            grad_o,
            strides[1],
            to_token,
            states,
            head,
            chunk,
            b,
            sizes,
            CHUNK,
            KEY_DIM,
            COLUMNS,
            PRECISION,
        )
        at = chunk_row(head, chunk, b, heads, num_chunks, CHUNK)
        from_start = _sums_from(products * factor * to_token, CHUNK)
        tl.store(partial_g + at, tl.load(partial_g + at) + from_start)
    row_grad = row_grads(query_grad, query, factor, scale)
    tl.store(grad_q + to, row_grad.to(grad_q.dtype.element_ty), mask=there)


@triton.jit
def _key_grads(
    tensors,
    strides,
    gates,
    sums,
    sizes,
    CHUNK: tl.constexpr,
    KEY_DIM: tl.constexpr,
    COLUMNS: tl.constexpr,
    PRECISION: tl.constexpr,
):
    chunk, group, b = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    length, num_chunks, heads, heads_per_group, key_dim, _ = sizes
    k, sides, written, states, grad_states = tensors
    k_sums, partial_g, partial_beta, grad_k, grad_g, grad_beta = sums
    token = chunk * CHUNK + tl.arange(0, CHUNK)
    factor = tl.load(gates[3] + chunk_row(group, chunk, b, heads // heads_per_group, num_chunks, CHUNK))
    key = load_rows(k, strides[0], token, b, group, key_dim, length, KEY_DIM)
    to, there = row_tile(strides[2], token, b, group, 0, key_dim, length, KEY_DIM)
    key_grad = tl.load(k_sums + to, mask=there, other=0.0)
    first = group * heads_per_group
    for head in range(first, first + heads_per_group):
        at = chunk_row(head, chunk, b, heads, num_chunks, CHUNK)
        beta = tl.load(gates[1] + at)
        to_token, to_end, whole = token_decays(gates, head, chunk, b, sizes, CHUNK)
        key_grad, found = _through_states(
            key_grad,
            key,
            sides,
            strides[1],
            -beta * to_token,
            states,
            head,
            chunk,
            b,
            sizes,
            CHUNK,
            KEY_DIM,
            COLUMNS,
            PRECISION,
        )
        key_grad, ended = _through_states(
            key_grad,
            key,
            written,
            strides[1],
            to_end,
            grad_states,
            head,
            chunk,
            b,
            sizes,
            CHUNK,
            KEY_DIM,
            COLUMNS,
            PRECISION,
        )
        kept = _state_product(states, grad_states, head, chunk, b, sizes, KEY_DIM, COLUMNS)
        found *= factor * to_token
        log_decay = tl.load(partial_g + at) - _sums_from(found * beta, CHUNK) + whole * kept
        log_decay += _sums_before(ended * factor * to_end, CHUNK)
        of_head = (token.to(tl.int64) * tl.num_programs(2) + b) * heads + head
        tl.store(grad_g + of_head, log_decay.to(grad_g.dtype.element_ty), mask=token < length)
        strength = tl.load(partial_beta + at) - found
        tl.store(grad_beta + of_head, strength.to(grad_beta.dtype.element_ty), mask=token < length)
    key = load_rows(k, strides[0], token, b, group, key_dim, length, KEY_DIM)
    tl.store(grad_k + to, row_grads(key_grad, key, factor, 1.0).to(grad_k.dtype.element_ty), mask=there)


@triton.jit
def _through_states(
    total,
    row,
    tensor,
    strides,
    weight,
    states,
    head,
    chunk,
    b,
    sizes,
    CHUNK: tl.constexpr,
    KEY_DIM: tl.constexpr,
    COLUMNS: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Returns the total with weight x S^T added, and x . (row S) of each token, for the rows x of a head and its state S in this chunk."""
    token = chunk * CHUNK + tl.arange(0, CHUNK)
    products = tl.zeros((CHUNK,), dtype=tl.float32)
    for begin in range(0, sizes[5], COLUMNS):
        state = load_state(states, head, chunk, b, begin, sizes, KEY_DIM, COLUMNS)
        x = load_columns(tensor, strides, token, b, head, begin, sizes, COLUMNS).to(tl.float32)
        products += tl.sum(x * tl.dot(row, state, input_precision=PRECISION), axis=1)
        total = tl.dot((x * weight[:, None]).to(state.dtype), tl.trans(state), total, input_precision=PRECISION)
    return total, products


@triton.jit
def _state_product(
    states, grad_states, head, chunk, b, sizes, KEY_DIM: tl.constexpr, COLUMNS: tl.constexpr
):  # fmt: skip
    """Returns the sum of a state times its gradient, element by element."""
    total = tl.zeros((KEY_DIM,), dtype=tl.float32)
    for begin in range(0, sizes[5], COLUMNS):
        state = load_state(states, head, chunk, b, begin, sizes, KEY_DIM, COLUMNS).to(tl.float32)
        grad = load_state(grad_states, head, chunk, b, begin, sizes, KEY_DIM, COLUMNS).to(tl.float32)
        total += tl.sum(state * grad, axis=1)
    return tl.sum(total, axis=0)


@triton.jit
def _sums_from(x, CHUNK: tl.constexpr):
    """Returns for each token the sum over it and all after it."""
    after = tl.arange(0, CHUNK)[None, :] >= tl.arange(0, CHUNK)[:, None]
    return tl.sum(tl.where(after, x[None, :], 0.0), axis=1)


@triton.jit
def _sums_before(x, CHUNK: tl.constexpr):
    """Returns for each token the sum over all before it."""
    before = tl.arange(0, CHUNK)[None, :] < tl.arange(0, CHUNK)[:, None]
    return tl.sum(tl.where(before, x[None, :], 0.0), axis=1)


@triton.jit
def row_grads(grad, row, factor, scale):
    """Returns the gradient of rows from that of the normalised ones, row times factor; factor: scale / |row|."""
    unit = row.to(tl.float32) * (factor / scale)[:, None]
    return (grad - unit * tl.sum(unit * grad, axis=1)[:, None]) * factor[:, None]
