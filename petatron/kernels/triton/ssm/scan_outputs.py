"""Outputs of the selective scan from the states that enter its chunks.

    y_i = exp(s_i) h C_i + sum over j <= i of exp(s_i - s_j) (C_i . B_j) dt_j x_j + D x_i

A program has one chunk of one sequence and loops over heads of a group: C and the scores C B^T are the same for all of them.
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

_PROGRAMS = 1024
"""So many programs, if there are enough heads: some for every multiprocessor."""


def chunk_outputs(
    x_SBHP: Tensor, B_SBGN: Tensor, C_SBGN: Tensor, D_H: Tensor, decays: ChunkDecays, states: Tensor
) -> Tensor:
    """Returns the outputs of all tokens [S, B, H, P]."""
    length, batch, heads, head_dim = x_SBHP.shape
    groups, state_dim = B_SBGN.shape[2:]
    y_SBHP = torch.empty(x_SBHP.shape, dtype=x_SBHP.dtype, device=x_SBHP.device)
    parts = head_parts(heads // groups, programs=decays.num_chunks * batch * groups, wanted=_PROGRAMS)
    _chunk_outputs[(decays.num_chunks * parts, groups, batch)](
        x_SBHP,
        B_SBGN,
        C_SBGN,
        D_H,
        decays.steps,
        decays.sums,
        decays.documents,
        states,
        y_SBHP,
        length,
        decays.num_chunks,
        heads,
        heads // groups // parts,
        head_dim,
        state_dim,
        x_SBHP.stride()[:3],
        B_SBGN.stride()[:3],
        C_SBGN.stride()[:3],
        y_SBHP.stride()[:3],
        PARTS=parts,
        CHUNK=decays.chunk,
        HEAD_DIM=triton.next_power_of_2(max(head_dim, 16)),
        STATE_DIM=triton.next_power_of_2(max(state_dim, 16)),
        PRECISION=dot_precision(x_SBHP),
        num_warps=8 if decays.chunk > 64 else 4,
        num_stages=3,
    )
    return y_SBHP


@triton.jit
def _chunk_outputs(
    x,
    B,
    C,
    D,
    steps,
    sums,
    documents,
    states,
    y,
    length,
    num_chunks,
    heads,
    heads_here,
    head_dim,
    state_dim,
    x_strides,
    B_strides,
    C_strides,
    y_strides,
    PARTS: tl.constexpr,
    CHUNK: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    STATE_DIM: tl.constexpr,
    PRECISION: tl.constexpr,
):
    chunk, part, group, b = tl.program_id(0) // PARTS, tl.program_id(0) % PARTS, tl.program_id(1), tl.program_id(2)
    token = chunk * CHUNK + tl.arange(0, CHUNK)
    query = load_rows(C, C_strides, token, b, group, state_dim, length, STATE_DIM)
    key = load_rows(B, B_strides, token, b, group, state_dim, length, STATE_DIM)
    scores = tl.dot(query, tl.trans(key), input_precision=PRECISION)
    own, enters = token, token >= 0
    if documents is not None:
        own = document_of(documents, token, b, length)
        enters = own == document_before(documents, chunk, b, length, CHUNK)
    offsets, there = state_offsets(head_dim, state_dim, HEAD_DIM, STATE_DIM)
    column = tl.arange(0, HEAD_DIM)[None, :]
    stored = (token < length)[:, None] & (column < head_dim)
    first = (group * PARTS + part) * heads_here
    for head in range(first, first + heads_here):
        by_head = (b * heads + head).to(tl.int64) * num_chunks * CHUNK
        at = ((b.to(tl.int64) * num_chunks + chunk) * heads + head) * head_dim * state_dim
        state = tl.load(states + at + offsets, mask=there, other=0.0)
        rows = load_rows(x, x_strides, token, b, head, head_dim, length, HEAD_DIM)
        total, step = tl.load(sums + by_head + token), tl.load(steps + by_head + token)
        decayed = scores * decay_matrix(total, own, CHUNK, documents is not None) * step[None, :]
        out = tl.dot(query, tl.trans(state), input_precision=PRECISION)
        out *= tl.where(enters, tl.exp(total), 0.0)[:, None]
        out += tl.dot(decayed.to(rows.dtype), rows, input_precision=PRECISION)
        out += tl.load(D + head).to(tl.float32) * rows.to(tl.float32)
        to = y + token.to(tl.int64)[:, None] * y_strides[0] + b.to(tl.int64) * y_strides[1] + head * y_strides[2]
        tl.store(to + column, out.to(rows.dtype), mask=stored)
