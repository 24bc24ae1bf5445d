"""The selective scan, sequential over chunks: a program has one head of one sequence and keeps its state in registers.

Forward and backward are the same loop. "Rows" are x or the gradient of y, "keys" B or C, "queries" C or B:

    forward     y_i = exp(s_i) h C_i + sum over j <= i of exp(s_i - s_j) (C_i . B_j) dt_j x_j + D x_i
                h   = exp(s_Q) h + sum over j of exp(s_Q - s_j) dt_j x_j B_j^T
    reverse     g_j = exp(s_Q - s_j) dh B_j + sum over i >= j of exp(s_i - s_j) (B_j . C_i) dy_i,      dx_j = dt_j g_j + D dy_j
                dh  = exp(s_Q) dh + sum over i of exp(s_i) dy_i C_i^T

with g the gradient of dt x. Forward writes no state; in reverse the gradients of states are written, for those of B. A third pass, forward
without outputs, recomputes the states for the gradient of C. States are [N, P] here, as the GEMMs want them.

Tiles are described once on the host: a Hopper GPU copies them to shared memory by itself, and no thread holds their addresses. Scores,
queries keys^T of a chunk, are the same for all heads of a group, so they are computed once and read from the L2 cache.

S sequence, B batch, H heads, P head dim, G groups, N state dim; c chunks of Q tokens.
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

MOST_HEAD_DIM, MOST_STATE_DIM = 64, 128
"""A state of 64 x 128 takes 64 registers of each of 128 threads."""


def scan_forward(
    x_SBHP: Tensor, B_SBGN: Tensor, C_SBGN: Tensor, D_H: Tensor, decays: ChunkDecays, first: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Returns the outputs of all tokens [S, B, H, P], and the state after the last, in float32."""
    y = torch.empty(x_SBHP.shape, dtype=x_SBHP.dtype, device=x_SBHP.device)
    rows = (x_SBHP, B_SBGN, C_SBGN)
    return y, _launch(rows, y, D_H, decays, first, None, reverse=False, num_stages=2)


def sequential_states(x_SBHP: Tensor, B_SBGN: Tensor, D_H: Tensor, decays: ChunkDecays, first: Tensor | None) -> Tensor:
    """Returns the states before the chunks [B, c, H, N, P] in the dtype of x."""
    states = _new_states(x_SBHP, B_SBGN, decays)
    _launch((x_SBHP, B_SBGN, B_SBGN), None, D_H, decays, first, states, reverse=False, num_stages=3)
    return states


def scan_reverse(
    grad_y_SBHP: Tensor,
    B_SBGN: Tensor,
    C_SBGN: Tensor,
    D_H: Tensor,
    decays: ChunkDecays,
    grad_last: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Returns the gradients of x, of the states after the chunks [B, c, H, N, P], and of the initial state, in float32."""
    grad_x = torch.empty(grad_y_SBHP.shape, dtype=grad_y_SBHP.dtype, device=grad_y_SBHP.device)
    states = _new_states(grad_y_SBHP, B_SBGN, decays)
    rows = (grad_y_SBHP, C_SBGN, B_SBGN)
    return grad_x, states, _launch(rows, grad_x, D_H, decays, grad_last, states, reverse=True, num_stages=2)


def _new_states(x_SBHP: Tensor, B_SBGN: Tensor, decays: ChunkDecays) -> Tensor:
    batch, heads, head_dim = x_SBHP.shape[1:]
    shape = (batch, decays.num_chunks, heads, B_SBGN.shape[3], head_dim)
    return torch.empty(shape, dtype=x_SBHP.dtype, device=x_SBHP.device)


def chunk_scores(queries_SBGN: Tensor, keys_SBGN: Tensor, decays: ChunkDecays, *, reverse: bool) -> Tensor:
    """Returns queries keys^T of each chunk [B, c, G, Q, Q] in their dtype.

    Zero where a query does not see a key: one of a later token (in reverse, of an earlier one) or of another document.
    """
    length, batch, groups, state_dim = keys_SBGN.shape
    chunk, chunks = decays.chunk_size, decays.num_chunks
    scores = torch.empty((batch, chunks, groups, chunk, chunk), dtype=keys_SBGN.dtype, device=keys_SBGN.device)
    _chunk_scores[(chunks, groups, batch)](
        queries_SBGN,
        keys_SBGN,
        scores,
        decays.documents,
        length,
        state_dim,
        queries_SBGN.stride()[:3],
        keys_SBGN.stride()[:3],
        CHUNK=chunk,
        STATE_DIM=state_dim,
        REVERSE=reverse,
        PRECISION=dot_precision(keys_SBGN),
    )
    return scores


@triton.jit
def _chunk_scores(
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
    allowed = row <= column if REVERSE else column <= row
    if documents is not None:
        own = document_of(documents, token, b, length)
        allowed = allowed & (own[:, None] == own[None, :])
    tile = tl.where(allowed, tile, 0.0)
    at = (b * tl.num_programs(0) + chunk) * tl.num_programs(1) + group
    to = tl.arange(0, CHUNK)[:, None] * CHUNK + tl.arange(0, CHUNK)[None, :]
    tl.store(scores + at.to(tl.int64) * CHUNK * CHUNK + to, tile.to(scores.dtype.element_ty))


def row_tiles(tensor: Tensor, tokens: int) -> TensorDescriptor:
    """Describes tiles of some tokens of one head [1, 1, tokens, P] of a tensor [S, B, H, P]; beyond its end are zeros."""
    by_head = tensor.permute(1, 2, 0, 3)
    return TensorDescriptor(tensor, list(by_head.shape), list(by_head.stride()), [1, 1, tokens, tensor.shape[3]])


def state_tiles(states: Tensor, columns: int) -> TensorDescriptor:
    """Describes parts [1, 1, columns, P] of the states of a tensor [..., H, N, P]."""
    flat = states.view(-1, *states.shape[-3:])
    return TensorDescriptor(flat, list(flat.shape), list(flat.stride()), [1, 1, columns, states.shape[-1]])


def _launch(
    rows: tuple[Tensor, Tensor, Tensor],
    out: Tensor | None,
    D_H: Tensor,
    decays: ChunkDecays,
    first: Tensor | None,
    states: Tensor | None,
    *,
    reverse: bool,
    num_stages: int,
) -> Tensor:
    """Returns the state after the last chunk. rows: what a state takes in, with keys and queries. first: the state before the first."""
    rows_SBHP, keys_SBGN, queries_SBGN = rows
    (length, batch, heads, head_dim), (groups, state_dim) = rows_SBHP.shape, keys_SBGN.shape[2:]
    last = torch.empty((batch, heads, state_dim, head_dim), dtype=torch.float32, device=rows_SBHP.device)
    chunk = decays.chunk_size
    scores = None if out is None else chunk_scores(queries_SBGN, keys_SBGN, decays, reverse=reverse)
    _sequential_scan[(batch * heads,)](
        row_tiles(rows_SBHP, chunk),
        row_tiles(keys_SBGN, chunk),
        row_tiles(queries_SBGN, chunk),
        None if scores is None else TensorDescriptor.from_tensor(scores.view(-1, chunk), [chunk, chunk]),
        None if out is None else row_tiles(out, chunk),
        states,
        decays.dt,
        decays.dA_cumsum,
        decays.documents,
        D_H,
        None if first is None else state_tiles(first.float().mT.contiguous(), state_dim),
        state_tiles(last, state_dim),
        length,
        decays.num_chunks,
        heads,
        heads // groups,
        CHUNK=chunk,
        HEAD_DIM=head_dim,
        STATE_DIM=state_dim,
        REVERSE=reverse,
        PRECISION=dot_precision(rows_SBHP),
        num_warps=4,
        num_stages=num_stages,
    )
    return last.mT


@triton.jit
def _sequential_scan(
    rows_tiles,
    key_tiles,
    query_tiles,
    score_tiles,
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
    state = tl.zeros((STATE_DIM, HEAD_DIM), dtype=tl.float32)
    if first is not None:
        state += first.load([b, head, 0, 0]).reshape(STATE_DIM, HEAD_DIM)
    own_row = tl.program_id(0).to(tl.int64) * num_chunks * CHUNK
    steps += own_row
    sums += own_row
    skip = tl.load(D + head).to(tl.float32)
    DTYPE: tl.constexpr = rows_tiles.dtype
    for number in range(num_chunks):
        chunk = num_chunks - 1 - number if REVERSE else number
        begin = chunk * CHUNK
        token = begin + tl.arange(0, CHUNK)
        # What is loaded stays in registers until its last use, so every tile is loaded right before its first.
        if out_tiles is not None:
            query = query_tiles.load([b, group, begin, 0]).reshape(CHUNK, STATE_DIM)
        narrow = state.to(DTYPE)
        if states is not None:
            to = ((b * num_chunks + chunk).to(tl.int64) * heads + head) * (STATE_DIM * HEAD_DIM)
            within = tl.arange(0, STATE_DIM)[:, None] * HEAD_DIM + tl.arange(0, HEAD_DIM)[None, :]
            tl.store(states + to + within, narrow)
        if out_tiles is not None:
            out = tl.dot(query, narrow, input_precision=PRECISION)
        total, step = tl.load(sums + token), tl.load(steps + token)
        end = tl.load(sums + begin + CHUNK - 1)
        enters, leaves, passes = documents_of_chunk(documents, token, chunk, b, length, CHUNK)
        to_token, to_end = tl.where(enters, tl.exp(total), 0.0), tl.where(leaves, tl.exp(end - total), 0.0)
        decay = tl.where(passes, tl.exp(end), 0.0)
        rows = rows_tiles.load([b, head, begin, 0]).reshape(CHUNK, HEAD_DIM)
        wide = rows.to(tl.float32)
        weight = to_token if REVERSE else to_end * step
        weighted = (wide * weight[:, None]).to(DTYPE)
        if out_tiles is not None:
            out = out * (to_end * step if REVERSE else to_token)[:, None] + skip * wide
            at = (b * num_chunks + chunk) * (heads // heads_per_group) + group
            # A score of 0, where a token is not seen, may meet an exponent above 0: it is cut off, for 0 times infinity is not 0.
            difference = total[None, :] - total[:, None] if REVERSE else total[:, None] - total[None, :]
            decayed = score_tiles.load([at * CHUNK, 0]).to(tl.float32) * tl.exp(tl.minimum(difference, 0.0))
            decayed *= step[:, None] if REVERSE else step[None, :]
            out = tl.dot(decayed.to(DTYPE), rows, acc=out, input_precision=PRECISION)
            out_tiles.store([b, head, begin, 0], out.to(DTYPE).reshape(1, 1, CHUNK, HEAD_DIM))
        key = key_tiles.load([b, group, begin, 0]).reshape(CHUNK, STATE_DIM)
        state = tl.dot(tl.trans(key), weighted, acc=state * decay, input_precision=PRECISION)
    last.store([b, head, 0, 0], state.reshape(1, 1, STATE_DIM, HEAD_DIM))


@triton.jit
def documents_of_chunk(documents, token, chunk, b, length, CHUNK: tl.constexpr):
    """Returns which tokens the state before a chunk reaches, which reach the state after it, and whether the first reaches that."""
    enters, leaves, passes = token >= 0, token >= 0, True
    if documents is not None:
        own = document_of(documents, token, b, length)
        before = document_before(documents, chunk, b, length, CHUNK)
        after = document_of(documents, chunk * CHUNK + CHUNK - 1, b, length)
        enters, leaves, passes = own == before, own == after, before == after
    return enters, leaves, passes
