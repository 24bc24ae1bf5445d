"""States at the boundaries of chunks, and their gradients: one kernel, which scans the chunks of a head forward or backward.

    forward     h before chunk c + 1 = exp(s_Q) h before c + sum over j of exp(s_Q - s_j) dt_j x_j B_j^T
    backward    gradient of h before c = exp(s_Q) gradient of h after c + sum over i of exp(s_i) gradient of y_i C_i^T

A program has one head of one sequence and some columns of its state, in registers for the whole scan: a chunk's GEMM does not wait for
the chunk before, so loads and GEMMs of the next one overlap. Written is the state that enters each chunk in the scan's direction.

S sequence, B batch, H heads, P head dim, G groups, N state dim; c chunks.
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
    document_before,
    document_of,
    dot_precision,
    load_rows,
    state_offsets,
)

_COLUMNS = 128
"""Columns of a state that a program has."""


def chunk_states(
    rows_SBHP: Tensor, keys_SBGN: Tensor, decays: ChunkDecays, first: Tensor | None, *, reverse: bool
) -> tuple[Tensor, Tensor]:
    """Returns the states that enter the chunks [B, c, H, P, N] in the dtype of the rows, and the one after the last, in float32.

    rows_SBHP, keys_SBGN: x and B, or in reverse the gradient of y and C. first: the state before the first; None: zero.
    """
    length, batch, heads, head_dim = rows_SBHP.shape
    groups, state_dim = keys_SBGN.shape[2:]
    shape = (batch, decays.num_chunks, heads, head_dim, state_dim)
    states = torch.empty(shape, dtype=rows_SBHP.dtype, device=rows_SBHP.device)
    last = torch.empty((batch, heads, head_dim, state_dim), dtype=torch.float32, device=rows_SBHP.device)
    columns = min(_COLUMNS, triton.next_power_of_2(max(state_dim, 16)))
    grid = (batch * heads, triton.cdiv(state_dim, columns))
    _chunk_states[grid](
        rows_SBHP,
        keys_SBGN,
        decays.steps,
        decays.sums,
        decays.documents,
        None if first is None else first.contiguous(),
        states,
        last,
        length,
        decays.num_chunks,
        heads,
        heads // groups,
        head_dim,
        state_dim,
        rows_SBHP.stride()[:3],
        keys_SBGN.stride()[:3],
        CHUNK=decays.chunk,
        HEAD_DIM=triton.next_power_of_2(max(head_dim, 16)),
        COLUMNS=columns,
        REVERSE=reverse,
        PRECISION=dot_precision(rows_SBHP),
        num_warps=4 if reverse else 8,
        num_stages=2 if reverse else 3,
    )
    return states, last


@triton.jit
def _chunk_states(
    rows,
    keys,
    steps,
    sums,
    documents,
    first,
    states,
    last,
    length,
    num_chunks,
    heads,
    heads_per_group,
    head_dim,
    state_dim,
    row_strides,
    key_strides,
    CHUNK: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    COLUMNS: tl.constexpr,
    REVERSE: tl.constexpr,
    PRECISION: tl.constexpr,
):
    b, head = tl.program_id(0) // heads, tl.program_id(0) % heads
    begin = tl.program_id(1) * COLUMNS
    offsets, there = state_offsets(head_dim, state_dim, HEAD_DIM, COLUMNS)
    offsets, there = offsets + begin, there & (begin + tl.arange(0, COLUMNS)[None, :] < state_dim)
    size = head_dim * state_dim
    at = tl.program_id(0).to(tl.int64) * size + offsets
    state = tl.zeros((HEAD_DIM, COLUMNS), dtype=tl.float32)
    if first is not None:
        state += tl.load(first + at, mask=there, other=0.0).to(tl.float32)
    by_head = tl.program_id(0).to(tl.int64) * num_chunks * CHUNK
    for step in range(num_chunks):
        chunk = num_chunks - 1 - step if REVERSE else step
        to = ((b.to(tl.int64) * num_chunks + chunk) * heads + head) * size + offsets
        tl.store(states + to, state.to(states.dtype.element_ty), mask=there)
        token = chunk * CHUNK + tl.arange(0, CHUNK)
        x = load_rows(rows, row_strides, token, b, head, head_dim, length, HEAD_DIM)
        key = load_rows(
            keys + begin, key_strides, token, b, head // heads_per_group, state_dim - begin, length, COLUMNS
        )
        total = tl.load(sums + by_head + token)
        end = tl.load(sums + by_head + chunk * CHUNK + CHUNK - 1)
        weight, decay = _weights(total, end, documents, token, chunk, b, length, CHUNK, REVERSE)
        if not REVERSE:
            weight *= tl.load(steps + by_head + token)
        weighted = (x.to(tl.float32) * weight[:, None]).to(x.dtype)
        state = state * decay + tl.dot(tl.trans(weighted), key, input_precision=PRECISION)
    tl.store(last + at, state, mask=there)


@triton.jit
def _weights(total, end, documents, token, chunk, b, length, CHUNK: tl.constexpr, REVERSE: tl.constexpr):
    """Returns the decay of each token, to the end of the chunk or from its beginning, and that of the whole chunk."""
    weight, decay = tl.exp(total if REVERSE else end - total), tl.exp(end)
    if documents is not None:
        own = document_of(documents, token, b, length)
        before = document_before(documents, chunk, b, length, CHUNK)
        after = document_of(documents, chunk * CHUNK + CHUNK - 1, b, length)
        weight = tl.where(own == (before if REVERSE else after), weight, 0.0)
        decay = tl.where(before == after, decay, 0.0)
    return weight, decay
