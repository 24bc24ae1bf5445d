"""The selective scan as one walk: a program has one head of one sequence, keeps its state in registers, and goes from chunk to chunk.

Forward and backward are the same walk. With "rows" x or the gradient of y, "keys" B or C, "queries" C or B,

    forward     y_i = exp(s_i) h C_i + sum over j <= i of exp(s_i - s_j) (C_i . B_j) dt_j x_j + D x_i
                h   = exp(s_Q) h + sum over j of exp(s_Q - s_j) dt_j x_j B_j^T
    reverse     g_j = exp(s_Q - s_j) dh B_j + sum over i >= j of exp(s_i - s_j) (B_j . C_i) dy_i
                dh  = exp(s_Q) dh + sum over i of exp(s_i) dy_i C_i^T

g is the gradient of dt_j x_j, hence dx, and what dt and the decays get of it. No state is read from memory; the forward walk writes none,
the reverse one those that the gradient of B needs.

S sequence, B batch, H heads, P head dim, G groups, N state dim; c chunks.
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

POINTERS = False
FORWARD = {"num_warps": 4, "num_stages": 2, "maxnreg": None}
STATES = {"num_warps": 4, "num_stages": 2, "maxnreg": None}
REVERSE = {"num_warps": 4, "num_stages": 2, "maxnreg": None}


def scan_forward(
    x_SBHP: Tensor, B_SBGN: Tensor, C_SBGN: Tensor, D_H: Tensor, decays: ChunkDecays, first: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Returns the outputs of all tokens [S, B, H, P], and the state after the last, in float32."""
    y = torch.empty(x_SBHP.shape, dtype=x_SBHP.dtype, device=x_SBHP.device)
    rows = (x_SBHP, B_SBGN, C_SBGN)
    return y, _launch(rows, y, D_H, decays, first, None, reverse=False, options=FORWARD)


def scan_states(
    x_SBHP: Tensor, B_SBGN: Tensor, D_H: Tensor, decays: ChunkDecays, first: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Returns the states before the chunks [B, c, H, N, P] in the dtype of x, and that after the last, in float32."""
    states = _new_states(x_SBHP, B_SBGN, decays)
    rows = (x_SBHP, B_SBGN, B_SBGN)
    return states, _launch(rows, None, D_H, decays, first, states, reverse=False, options=STATES)


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
    return grad_x, states, _launch(rows, grad_x, D_H, decays, grad_last, states, reverse=True, options=REVERSE)


def _new_states(x_SBHP: Tensor, B_SBGN: Tensor, decays: ChunkDecays) -> Tensor:
    batch, heads, head_dim = x_SBHP.shape[1:]
    shape = (batch, decays.num_chunks, heads, B_SBGN.shape[3], head_dim)
    return torch.empty(shape, dtype=x_SBHP.dtype, device=x_SBHP.device)


def chunk_scores(queries_SBGN: Tensor, keys_SBGN: Tensor, decays: ChunkDecays, *, reverse: bool) -> Tensor:
    """Returns queries keys^T of each chunk [B, c, G, Q, Q] in their dtype."""
    length, batch, groups, state_dim = keys_SBGN.shape
    chunk, chunks = decays.chunk, decays.num_chunks
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
        STATE_DIM=triton.next_power_of_2(max(state_dim, 16)),
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


def tile_descriptor(tensor: Tensor, rows: int) -> TensorDescriptor:
    """Describes tiles of `rows` tokens of one head [1, 1, rows, width] of a tensor [S, B, H, width]; beyond its end are zeros."""
    by_head = tensor.permute(1, 2, 0, 3)
    width = triton.next_power_of_2(max(tensor.shape[3], 16))
    return TensorDescriptor(tensor, list(by_head.shape), list(by_head.stride()), [1, 1, rows, width])


def state_descriptor(states: Tensor) -> TensorDescriptor:
    """Describes single states [1, 1, N, P] of a tensor [..., H, N, P]."""
    flat = states.view(-1, *states.shape[-3:])
    block = [1, 1, *(triton.next_power_of_2(max(width, 16)) for width in states.shape[-2:])]
    return TensorDescriptor(flat, list(flat.shape), list(flat.stride()), block)


def _launch(
    rows: tuple[Tensor, Tensor, Tensor],
    out: Tensor | None,
    D_H: Tensor,
    decays: ChunkDecays,
    first: Tensor | None,
    states: Tensor | None,
    *,
    reverse: bool,
    options: dict[str, int | None],
) -> Tensor:
    """rows: those that a state takes in, with keys and queries."""
    rows_SBHP, keys_SBGN, queries_SBGN = rows
    length, batch, heads, head_dim = rows_SBHP.shape
    groups, state_dim = keys_SBGN.shape[2:]
    last = torch.empty((batch, heads, state_dim, head_dim), dtype=torch.float32, device=rows_SBHP.device)
    chunk = decays.chunk
    scores = None if out is None else chunk_scores(queries_SBGN, keys_SBGN, decays, reverse=reverse)
    _walk[(batch * heads,)](
        tile_descriptor(rows_SBHP, chunk),
        tile_descriptor(keys_SBGN, chunk),
        tile_descriptor(queries_SBGN, chunk),
        None if scores is None else TensorDescriptor.from_tensor(scores.view(-1, chunk), [chunk, chunk]),
        None if out is None else tile_descriptor(out, chunk),
        states if states is None or POINTERS else state_descriptor(states),
        decays.steps,
        decays.sums,
        decays.documents,
        D_H,
        None if first is None else state_descriptor(first.float().mT.contiguous()),
        state_descriptor(last),
        length,
        decays.num_chunks,
        heads,
        heads // groups,
        CHUNK=chunk,
        HEAD_DIM=triton.next_power_of_2(max(head_dim, 16)),
        STATE_DIM=triton.next_power_of_2(max(state_dim, 16)),
        REVERSE=reverse,
        POINTERS=POINTERS,
        PRECISION=dot_precision(rows_SBHP),
        **{key: value for key, value in options.items() if value is not None},
    )
    return last.mT


@triton.jit
def _walk(
    rows_tiles,
    key_tiles,
    query_tiles,
    score_tiles,
    out_tiles,
    state_tiles,
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
    POINTERS: tl.constexpr,
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
        if out_tiles is not None:
            query = query_tiles.load([b, group, begin, 0]).reshape(CHUNK, STATE_DIM)
        narrow = state.to(DTYPE)
        if state_tiles is not None:
            if POINTERS:
                to = ((b * num_chunks + chunk).to(tl.int64) * heads + head) * (STATE_DIM * HEAD_DIM)
                within = tl.arange(0, STATE_DIM)[:, None] * HEAD_DIM + tl.arange(0, HEAD_DIM)[None, :]
                tl.store(state_tiles + to + within, narrow)
            else:
                state_tiles.store([b * num_chunks + chunk, head, 0, 0], narrow.reshape(1, 1, STATE_DIM, HEAD_DIM))
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
    """Returns which tokens the state before the chunk reaches and which reach its end, and whether that does."""
    enters, leaves, passes = token >= 0, token >= 0, True
    if documents is not None:
        own = document_of(documents, token, b, length)
        before = document_before(documents, chunk, b, length, CHUNK)
        after = document_of(documents, chunk * CHUNK + CHUNK - 1, b, length)
        enters, leaves, passes = own == before, own == after, before == after
    return enters, leaves, passes
