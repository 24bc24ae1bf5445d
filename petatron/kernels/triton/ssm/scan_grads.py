"""Gradients of the selective scan from the states before its chunks and the gradients of the states after them.

Programs have one chunk of one sequence and loop over heads of a group, so that the sums over heads, which the gradients of B and C
are, stay in registers; three kernels, since one has too few registers for all of them. With g the gradient of dt_j x_j, h the state
before, dh the gradient of the state after, and e the gradient of s (every product holds exp(s_i - s_j), exp(s_i) or exp(s_Q - s_j), so
its gradient times itself is added at i and subtracted at j):

    _score_grads    the gradient of C B^T, hence its parts of dB and dC; its part of e
    _query_grads    dC_i += sum over heads of exp(s_i) h^T dy_i;  e_i += exp(s_i) dy_i^T h C_i;  <dh, h>
    _row_grads      g_j = sum over i >= j of exp(s_i - s_j) (C_i . B_j) dy_i + exp(s_Q - s_j) dh B_j;  dx, dt, A, D
                    dB_j += sum over heads of dt_j exp(s_Q - s_j) dh^T x_j

The gradient of dt A at a token is the sum of e over it and all after it in the chunk, and e_Q also has exp(s_Q) <dh, h>. No atomic
adds: sums over parts of heads, and those of A and D over chunks, are taken afterwards in a fixed order.
"""

# pyright: reportAttributeAccessIssue=false, reportCallIssue=false, reportIndexIssue=false, reportArgumentType=false
# pyright: reportPossiblyUnboundVariable=false, reportReturnType=false, reportGeneralTypeIssues=false
from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from petatron.kernels.triton.ssm.scan_tiles import (
    ChunkDecays,
    decay_matrix,
    document_before,
    document_of,
    dot_precision,
    head_parts,
    load_rows,
    state_offsets,
)

_PROGRAMS = 512
"""So many programs, if there are enough heads: some for every multiprocessor."""


def chunk_grads(
    grad_y_SBHP: Tensor,
    x_SBHP: Tensor,
    A_H: Tensor,
    B_SBGN: Tensor,
    C_SBGN: Tensor,
    D_H: Tensor,
    decays: ChunkDecays,
    states: Tensor,
    grad_states: Tensor,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Returns the gradients of x, in its dtype, and of dt, A, B, C and D, in float32."""
    length, batch, heads, head_dim = x_SBHP.shape
    groups, state_dim = B_SBGN.shape[2:]
    chunks = decays.num_chunks
    parts = head_parts(heads // groups, programs=chunks * batch * groups, wanted=_PROGRAMS)

    def new(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
        return torch.empty(shape, dtype=dtype, device=x_SBHP.device)

    grad_x, grad_dt = new(*x_SBHP.shape, dtype=x_SBHP.dtype), new(length, batch, heads)
    grad_sums = torch.empty_like(decays.sums)
    state_products, grad_A, grad_D = (new(chunks, batch, heads) for _ in range(3))
    grad_B, grad_C = (new(parts, length, batch, groups, state_dim) for _ in range(2))
    grid = (chunks * parts, groups, batch)
    sizes = (length, chunks, heads, heads // groups // parts, head_dim, state_dim)
    constants = {
        "PARTS": parts,
        "CHUNK": decays.chunk,
        "HEAD_DIM": triton.next_power_of_2(max(head_dim, 16)),
        "STATE_DIM": triton.next_power_of_2(max(state_dim, 16)),
        "PRECISION": dot_precision(x_SBHP),
    }
    rows = (grad_y_SBHP, x_SBHP, B_SBGN, C_SBGN)
    strides = tuple(tensor.stride()[:3] for tensor in rows)
    by_head = (decays.steps, decays.sums, decays.documents)
    sums_over_heads = (grad_B, grad_C, grad_B.stride()[:4])
    _score_grads[grid](
        rows, strides, by_head, grad_sums, sums_over_heads, sizes, **constants, num_warps=4, num_stages=3
    )
    _query_grads[grid](
        rows,
        strides,
        by_head,
        grad_sums,
        sums_over_heads,
        (states, grad_states),
        state_products,
        sizes,
        **constants,
        num_warps=4,
        num_stages=3,
    )
    _row_grads[grid](
        rows,
        strides,
        by_head,
        grad_sums,
        sums_over_heads,
        grad_states,
        state_products,
        (A_H, D_H),
        (grad_x, grad_dt, grad_A, grad_D),
        grad_x.stride()[:3],
        sizes,
        **constants,
        num_warps=4,
        num_stages=1,
    )
    return grad_x, grad_dt, grad_A.sum(dim=(0, 1)), _sum(grad_B), _sum(grad_C), grad_D.sum(dim=(0, 1))


def _sum(parts: Tensor) -> Tensor:
    return parts[0] if len(parts) == 1 else parts.sum(dim=0)


@triton.jit
def _score_grads(
    tensors,
    strides,
    by_head,
    grad_sums,
    sums_over_heads,
    sizes,
    PARTS: tl.constexpr,
    CHUNK: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    STATE_DIM: tl.constexpr,
    PRECISION: tl.constexpr,
):
    chunk, part, group, b = tl.program_id(0) // PARTS, tl.program_id(0) % PARTS, tl.program_id(1), tl.program_id(2)
    dy, x, B, C = tensors
    steps, sums, documents = by_head
    length, num_chunks, heads, heads_here, head_dim, state_dim = sizes
    token = chunk * CHUNK + tl.arange(0, CHUNK)
    query = load_rows(C, strides[3], token, b, group, state_dim, length, STATE_DIM)
    key = load_rows(B, strides[2], token, b, group, state_dim, length, STATE_DIM)
    scores = tl.dot(query, tl.trans(key), input_precision=PRECISION)
    own = token if documents is None else document_of(documents, token, b, length)
    scores_grad = tl.zeros((CHUNK, CHUNK), dtype=tl.float32)
    first = (group * PARTS + part) * heads_here
    for head in range(first, first + heads_here):
        at = (b * heads + head).to(tl.int64) * num_chunks * CHUNK + token
        rows = load_rows(x, strides[1], token, b, head, head_dim, length, HEAD_DIM)
        grad = load_rows(dy, strides[0], token, b, head, head_dim, length, HEAD_DIM)
        total, step = tl.load(sums + at), tl.load(steps + at)
        products = tl.dot(grad, tl.trans(rows), input_precision=PRECISION) * step[None, :]
        products *= decay_matrix(total, own, CHUNK, documents is not None)
        scores_grad += products
        products *= scores
        tl.store(grad_sums + at, tl.sum(products, axis=1) - tl.sum(products, axis=0))
    narrow = scores_grad.to(query.dtype)
    grad_B, grad_C, part_strides = sums_over_heads
    to, there = _part_offsets(part, token, b, group, part_strides, length, state_dim, STATE_DIM)
    tl.store(grad_C + to, tl.dot(narrow, key, input_precision=PRECISION), mask=there)
    tl.store(grad_B + to, tl.dot(tl.trans(narrow), query, input_precision=PRECISION), mask=there)


@triton.jit
def _query_grads(
    tensors,
    strides,
    by_head,
    grad_sums,
    sums_over_heads,
    both_states,
    state_products,
    sizes,
    PARTS: tl.constexpr,
    CHUNK: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    STATE_DIM: tl.constexpr,
    PRECISION: tl.constexpr,
):
    chunk, part, group, b = tl.program_id(0) // PARTS, tl.program_id(0) % PARTS, tl.program_id(1), tl.program_id(2)
    dy, _, _, C = tensors
    _, sums, documents = by_head
    states, grad_states = both_states
    length, num_chunks, heads, heads_here, head_dim, state_dim = sizes
    token = chunk * CHUNK + tl.arange(0, CHUNK)
    query = load_rows(C, strides[3], token, b, group, state_dim, length, STATE_DIM).to(tl.float32)
    enters = token >= 0
    if documents is not None:
        enters = document_of(documents, token, b, length) == document_before(documents, chunk, b, length, CHUNK)
    offsets, there = state_offsets(head_dim, state_dim, HEAD_DIM, STATE_DIM)
    _, grad_C, part_strides = sums_over_heads
    to, stored = _part_offsets(part, token, b, group, part_strides, length, state_dim, STATE_DIM)
    query_grad = tl.load(grad_C + to, mask=stored, other=0.0)
    first = (group * PARTS + part) * heads_here
    for head in range(first, first + heads_here):
        at = (b * heads + head).to(tl.int64) * num_chunks * CHUNK + token
        state_at = ((b.to(tl.int64) * num_chunks + chunk) * heads + head) * head_dim * state_dim + offsets
        grad = load_rows(dy, strides[0], token, b, head, head_dim, length, HEAD_DIM)
        state = tl.load(states + state_at, mask=there, other=0.0)
        state_grad = tl.load(grad_states + state_at, mask=there, other=0.0)
        to_token = tl.where(enters, tl.exp(tl.load(sums + at)), 0.0)
        decayed = (grad.to(tl.float32) * to_token[:, None]).to(grad.dtype)
        queried = tl.dot(decayed, state, input_precision=PRECISION)
        query_grad += queried
        tl.store(grad_sums + at, tl.load(grad_sums + at) + tl.sum(queried * query, axis=1))
        inner = tl.sum(tl.sum(state.to(tl.float32) * state_grad.to(tl.float32), axis=1), axis=0)
        tl.store(state_products + (chunk * tl.num_programs(2) + b) * heads + head, inner)
    tl.store(grad_C + to, query_grad, mask=stored)


@triton.jit
def _row_grads(
    tensors,
    strides,
    by_head,
    grad_sums,
    sums_over_heads,
    grad_states,
    state_products,
    weights,
    grads,
    grad_x_strides,
    sizes,
    PARTS: tl.constexpr,
    CHUNK: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    STATE_DIM: tl.constexpr,
    PRECISION: tl.constexpr,
):
    chunk, part, group, b = tl.program_id(0) // PARTS, tl.program_id(0) % PARTS, tl.program_id(1), tl.program_id(2)
    dy, x, B, C = tensors
    steps, sums, documents = by_head
    A, D = weights
    grad_x, grad_dt, grad_A, grad_D = grads
    length, num_chunks, heads, heads_here, head_dim, state_dim = sizes
    token = chunk * CHUNK + tl.arange(0, CHUNK)
    query = load_rows(C, strides[3], token, b, group, state_dim, length, STATE_DIM)
    key = load_rows(B, strides[2], token, b, group, state_dim, length, STATE_DIM)
    scores = tl.dot(key, tl.trans(query), input_precision=PRECISION)  # [j, i]
    own, leaves, passes = token, token >= 0, True
    if documents is not None:
        own = document_of(documents, token, b, length)
        after = document_of(documents, chunk * CHUNK + CHUNK - 1, b, length)
        leaves, passes = own == after, document_before(documents, chunk, b, length, CHUNK) == after
    offsets, there = state_offsets(head_dim, state_dim, HEAD_DIM, STATE_DIM)
    column = tl.arange(0, HEAD_DIM)[None, :]
    written = (token < length)[:, None] & (column < head_dim)
    grad_B, _, part_strides = sums_over_heads
    to, stored = _part_offsets(part, token, b, group, part_strides, length, state_dim, STATE_DIM)
    key_grad = tl.load(grad_B + to, mask=stored, other=0.0)
    first = (group * PARTS + part) * heads_here
    for head in range(first, first + heads_here):
        at = (b * heads + head).to(tl.int64) * num_chunks * CHUNK + token
        state_at = ((b.to(tl.int64) * num_chunks + chunk) * heads + head) * head_dim * state_dim + offsets
        chunk_at = (chunk * tl.num_programs(2) + b) * heads + head
        rows = load_rows(x, strides[1], token, b, head, head_dim, length, HEAD_DIM)
        grad = load_rows(dy, strides[0], token, b, head, head_dim, length, HEAD_DIM)
        state_grad = tl.load(grad_states + state_at, mask=there, other=0.0)
        total, step = tl.load(sums + at), tl.load(steps + at)
        end = tl.load(sums + (b * heads + head).to(tl.int64) * num_chunks * CHUNK + chunk * CHUNK + CHUNK - 1)
        wide, wide_grad = rows.to(tl.float32), grad.to(tl.float32)
        to_end = tl.where(leaves, tl.exp(end - total), 0.0)
        scaled_grad = tl.dot(key, tl.trans(state_grad), input_precision=PRECISION) * to_end[:, None]
        added = tl.sum(scaled_grad * wide, axis=1) * step
        decayed = scores * decay_matrix(total, own, CHUNK, documents is not None, TRANSPOSED=True)
        scaled_grad += tl.dot(decayed.to(rows.dtype), grad, input_precision=PRECISION)
        weighted = (wide * (step * to_end)[:, None]).to(rows.dtype)
        key_grad += tl.dot(weighted, state_grad, input_precision=PRECISION)

        sums_grad = tl.load(grad_sums + at) - added
        end_grad = tl.sum(added, axis=0) + tl.where(passes, tl.exp(end), 0.0) * tl.load(state_products + chunk_at)
        log_decay_grad = tl.sum(sums_grad, axis=0) - tl.cumsum(sums_grad, axis=0) + sums_grad + end_grad
        step_grad = log_decay_grad * tl.load(A + head).to(tl.float32) + tl.sum(scaled_grad * wide, axis=1)
        tl.store(grad_dt + (token.to(tl.int64) * tl.num_programs(2) + b) * heads + head, step_grad, mask=token < length)
        row = token.to(tl.int64)[:, None] * grad_x_strides[0] + b * grad_x_strides[1] + head * grad_x_strides[2]
        rows_grad = scaled_grad * step[:, None] + tl.load(D + head).to(tl.float32) * wide_grad
        tl.store(grad_x + row + column, rows_grad.to(rows.dtype), mask=written)
        tl.store(grad_A + chunk_at, tl.sum(log_decay_grad * step, axis=0))
        tl.store(grad_D + chunk_at, tl.sum(tl.sum(wide * wide_grad, axis=1), axis=0))
    tl.store(grad_B + to, key_grad, mask=stored)


@triton.jit
def _part_offsets(part, token, b, group, strides, length, state_dim, STATE_DIM: tl.constexpr):
    """Returns the offsets of a chunk's rows in the sums over a part of the heads, and which there are."""
    column = tl.arange(0, STATE_DIM)[None, :]
    row = (
        part.to(tl.int64) * strides[0] + token.to(tl.int64)[:, None] * strides[1] + b * strides[2] + group * strides[3]
    )
    return row + column, (token < length)[:, None] & (column < state_dim)
