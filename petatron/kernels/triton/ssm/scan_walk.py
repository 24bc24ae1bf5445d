"""The selective scan as one walk: a program has one head of one sequence, keeps its state in registers, and goes from chunk to chunk.

Forward and backward are the same walk. "Rows" are x or the gradient of y, "keys" B or C, "queries" C or B:

    forward     y_i = exp(s_i) h C_i + sum over j <= i of exp(s_i - s_j) (C_i . B_j) dt_j x_j + D x_i
                h   = exp(s_Q) h + sum over j of exp(s_Q - s_j) dt_j x_j B_j^T
    reverse     g_j = exp(s_Q - s_j) dh B_j + sum over i >= j of exp(s_i - s_j) (B_j . C_i) dy_i,      dx_j = dt_j g_j + D dy_j
                dh  = exp(s_Q) dh + sum over i of exp(s_i) dy_i C_i^T

with g the gradient of dt x. States are [N, P] here, as the GEMMs want them. A walk may write the states it enters chunks with, or nothing
else: then `scan_outputs.py` has the rows of all chunks at once.

S sequence, B batch, H heads, P head dim, G groups, N state dim; c chunks.
"""

# pyright: reportAttributeAccessIssue=false, reportCallIssue=false, reportIndexIssue=false, reportArgumentType=false
# pyright: reportPossiblyUnboundVariable=false, reportReturnType=false, reportGeneralTypeIssues=false
from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from petatron.kernels.triton.ssm.scan_scores import (
    block_size,
    chunk_rows,
    document_masks,
    row_tiles,
    score_tiles,
    state_tiles,
)
from petatron.kernels.triton.ssm.scan_tiles import ChunkDecays, ScanRows, dot_precision

POINTERS = 0
OPTIONS = {"num_warps": 4, "num_stages": 2}
_HEAD_DIM = 64
STATE_DIM = 128
"""A program has at most so much of a state: 64 registers of each of 128 threads."""


def walk(
    rows: ScanRows, decays: ChunkDecays, first: Tensor | None, *, write_states: bool, write_rows: bool
) -> tuple[Tensor | None, Tensor | None, Tensor]:
    """Returns y or the gradient of x, the states that enter the chunks [B, c, H, N, P] in its dtype, and that after the last, in float32.

    first: the state [B, H, P, N] before the first chunk of the walk; None: zero. The one after the last is [B, H, P, N] as well.
    """
    (length, batch, heads, head_dim), (groups, state_dim) = rows.rows_SBHP.shape, rows.keys_SBGN.shape[2:]
    dtype, device, chunk = rows.rows_SBHP.dtype, rows.rows_SBHP.device, decays.chunk
    out = torch.empty(rows.rows_SBHP.shape, dtype=dtype, device=device) if write_rows else None
    shape = (heads, state_dim, head_dim)
    states = torch.empty((batch, decays.num_chunks, *shape), dtype=dtype, device=device) if write_states else None
    last = torch.empty((batch, *shape), dtype=torch.float32, device=device)
    width, columns = block_size(head_dim, most=_HEAD_DIM), block_size(state_dim, most=STATE_DIM)
    scores = score_tiles(rows.queries_SBGN, rows.keys_SBGN, decays, reverse=rows.reverse) if write_rows else None
    arguments = (
        row_tiles(rows.rows_SBHP, chunk, width),
        row_tiles(rows.keys_SBGN, chunk, columns),
        row_tiles(rows.queries_SBGN, chunk, columns),
        scores,
        None if out is None else row_tiles(out, chunk, width),
        None if states is None else state_tiles(states, columns, width),
        decays.steps,
        decays.sums,
        decays.documents,
        rows.D_H,
        None if first is None else state_tiles(first.float().mT.contiguous(), columns, width),
        state_tiles(last, columns, width),
        length,
        decays.num_chunks,
        heads,
        heads // groups,
    )
    grid = (batch * heads, triton.cdiv(head_dim, width), triton.cdiv(state_dim, columns))
    constants = {
        "CHUNK": chunk,
        "HEAD_DIM": width,
        "STATE_DIM": columns,
        "REVERSE": rows.reverse,
        "PRECISION": dot_precision(rows.rows_SBHP),
    }
    if write_rows:
        fast = list(arguments)
        if POINTERS & 1:
            fast[5] = states
        if POINTERS & 2:
            fast[4] = out
        _factored_walk[grid](*fast, batch * heads * head_dim, **constants, POINTERS=POINTERS, **OPTIONS)
    _walk[grid](*arguments, **constants, num_warps=4, num_stages=2)
    return out, states, last.mT


@triton.jit
def _walk(
    row_tiles,
    key_tiles,
    query_tiles,
    scores,
    out_tiles,
    states,
    steps,
    sums,
    documents,
    D,
    first,
    last,
    length,
    num_chunks,
    heads,
    heads_per_group,
    CHUNK: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    STATE_DIM: tl.constexpr,
    REVERSE: tl.constexpr,
    PRECISION: tl.constexpr,
):
    b, head = tl.program_id(0) // heads, tl.program_id(0) % heads
    group = head // heads_per_group
    p, n = tl.program_id(1) * HEAD_DIM, tl.program_id(2) * STATE_DIM
    own_row = tl.program_id(0).to(tl.int64) * num_chunks * CHUNK
    steps += own_row
    sums += own_row
    if out_tiles is not None and _decays_factor(sums, num_chunks, CHUNK):
        return
    state = tl.zeros((STATE_DIM, HEAD_DIM), dtype=tl.float32)
    if first is not None:
        state += first.load([b, head, n, p]).reshape(STATE_DIM, HEAD_DIM)
    skip = tl.load(D + head).to(tl.float32)
    for number in range(num_chunks):
        chunk = num_chunks - 1 - number if REVERSE else number
        begin = chunk * CHUNK
        token = begin + tl.arange(0, CHUNK)
        # What is loaded stays in registers until its last use, so every tile is loaded right before the first.
        if out_tiles is not None:
            query = query_tiles.load([b, group, begin, 0]).reshape(CHUNK, STATE_DIM)
        narrow = state.to(row_tiles.dtype)
        if states is not None:
            states.store([b * num_chunks + chunk, head, n, p], narrow.reshape(1, 1, STATE_DIM, HEAD_DIM))
        if out_tiles is not None:
            from_state = tl.dot(query, narrow, input_precision=PRECISION)
        total, step = tl.load(sums + token), tl.load(steps + token)
        end = tl.load(sums + begin + CHUNK - 1)
        enters, leaves, passes = document_masks(documents, token, chunk, b, length, CHUNK)
        to_token, to_end = tl.where(enters, tl.exp2(total), 0.0), tl.where(leaves, tl.exp2(end - total), 0.0)
        rows = row_tiles.load([b, head, begin, p]).reshape(CHUNK, HEAD_DIM)
        weight = to_token if REVERSE else to_end * step
        weighted = (rows.to(tl.float32) * weight[:, None]).to(rows.dtype)
        if out_tiles is not None:
            at = ((b * num_chunks + chunk) * (heads // heads_per_group) + group) * CHUNK
            out = chunk_rows(from_state, rows, scores, at, total, step, to_token, to_end, skip, REVERSE, PRECISION)
            out_tiles.store([b, head, begin, p], out.to(rows.dtype).reshape(1, 1, CHUNK, HEAD_DIM))
        key = key_tiles.load([b, group, begin, n]).reshape(CHUNK, STATE_DIM)
        decayed = state * tl.where(passes, tl.exp2(end), 0.0)
        state = tl.dot(tl.trans(key), weighted, acc=decayed, input_precision=PRECISION)
    last.store([b, head, n, p], state.reshape(1, 1, STATE_DIM, HEAD_DIM))


@triton.jit
def _factored_walk(
    row_tiles,
    key_tiles,
    query_tiles,
    scores,
    out_tiles,
    states,
    steps,
    sums,
    documents,
    D,
    first,
    last,
    length,
    num_chunks,
    heads,
    heads_per_group,
    out_row,
    CHUNK: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    STATE_DIM: tl.constexpr,
    REVERSE: tl.constexpr,
    POINTERS: tl.constexpr,
    PRECISION: tl.constexpr,
):
    b, head = tl.program_id(0) // heads, tl.program_id(0) % heads
    group = head // heads_per_group
    p, n = tl.program_id(1) * HEAD_DIM, tl.program_id(2) * STATE_DIM
    own_row = tl.program_id(0).to(tl.int64) * num_chunks * CHUNK
    steps += own_row
    sums += own_row
    if not _decays_factor(sums, num_chunks, CHUNK):
        return
    state = tl.zeros((STATE_DIM, HEAD_DIM), dtype=tl.float32)
    if first is not None:
        state += first.load([b, head, n, p]).reshape(STATE_DIM, HEAD_DIM)
    carried = 1.0
    skip = tl.load(D + head).to(tl.float32)
    for number in range(num_chunks):
        chunk = num_chunks - 1 - number if REVERSE else number
        begin = chunk * CHUNK
        token = begin + tl.arange(0, CHUNK)
        end = tl.load(sums + begin + CHUNK - 1)
        if states is not None:
            entering = (state * carried).to(row_tiles.dtype)
            if POINTERS & 1:
                to = ((b * num_chunks + chunk).to(tl.int64) * heads + head) * (STATE_DIM * HEAD_DIM)
                within = tl.arange(0, STATE_DIM)[:, None] * HEAD_DIM + tl.arange(0, HEAD_DIM)[None, :]
                tl.store(states + to + within, entering)
            else:
                states.store([b * num_chunks + chunk, head, n, p], entering.reshape(1, 1, STATE_DIM, HEAD_DIM))
        half = tl.exp2(0.5 * end)
        state *= carried * half
        carried = half
        query = query_tiles.load([b, group, begin, 0]).reshape(CHUNK, STATE_DIM)
        out = tl.dot(query, state.to(row_tiles.dtype), input_precision=PRECISION)
        total, step = tl.load(sums + token), tl.load(steps + token)
        to_middle, from_middle = tl.exp2(0.5 * end - total) * step, tl.exp2(total - 0.5 * end)
        if REVERSE:
            to_middle, from_middle = from_middle, to_middle
        rows = row_tiles.load([b, head, begin, p]).reshape(CHUNK, HEAD_DIM)
        weighted = (rows.to(tl.float32) * to_middle[:, None]).to(rows.dtype)
        own = weighted
        if documents is not None:
            enters, leaves, passes = document_masks(documents, token, chunk, b, length, CHUNK)
            out = tl.where((leaves if REVERSE else enters)[:, None], out, 0.0)
            own = tl.where((enters if REVERSE else leaves)[:, None], weighted, 0.0)
            state = tl.where(passes, state, 0.0)
        at = ((b * num_chunks + chunk) * (heads // heads_per_group) + group) * CHUNK
        out = tl.dot(scores.load([at, 0]), weighted, acc=out, input_precision=PRECISION)
        out = out * from_middle[:, None] + skip * rows.to(tl.float32)
        if POINTERS & 2:
            place = (
                token.to(tl.int64)[:, None] * out_row + tl.program_id(0) * HEAD_DIM + tl.arange(0, HEAD_DIM)[None, :]
            )
            tl.store(out_tiles + place, out.to(rows.dtype), mask=(token < length)[:, None])
        else:
            out_tiles.store([b, head, begin, p], out.to(rows.dtype).reshape(1, 1, CHUNK, HEAD_DIM))
        key = key_tiles.load([b, group, begin, n]).reshape(CHUNK, STATE_DIM)
        state = tl.dot(tl.trans(key), own, acc=state, input_precision=PRECISION)
    last.store([b, head, n, p], (state * carried).reshape(1, 1, STATE_DIM, HEAD_DIM))


@triton.jit
def _decays_factor(sums, num_chunks, CHUNK: tl.constexpr):
    """Returns whether no chunk of a head decays by more than 2^-80."""
    lowest = 0.0
    for first in range(0, num_chunks, 64):
        chunk = first + tl.arange(0, 64)
        ends = tl.load(sums + chunk * CHUNK + CHUNK - 1, mask=chunk < num_chunks, other=0.0)
        lowest = tl.minimum(lowest, tl.min(ends, axis=0))
    return lowest >= -80.0
