"""Gradients of B, C, D, dt and A after a sequential scan: from the states before the chunks and the gradients of those after them.

Programs have one chunk of one sequence and loop over heads of a group, so that the sums over heads, which the gradients of B and C
are, stay in registers. With h the state before, dh the gradient of the state after, s the running sum of dt A:

    _score_sums      with dS_ij = sum over heads of exp(s_i - s_j) dt_j (dy_i . x_j):  dC = dS B, dB = dS^T C;  dD
    _state_sums      dC_i += sum over heads of exp(s_i) h^T dy_i;  dB_j += sum over heads of dt_j exp(s_Q - s_j) dh^T x_j;  <dh, h>
    _step_grads      dt and A, from sums over the rows of all these products

Every product holds exp(s_i - s_j), exp(s_i) or exp(s_Q - s_j), so its gradient times itself is added to e_i and subtracted from e_j,
with e the gradient of s; e_Q also has exp(s_Q) <dh, h>. The gradient of dt A at a token is the sum of e over it and all after it in the
chunk. The sums at j, without dt_j, are also <g_j, x_j>, with g the gradient of dt x: what dt gets besides. No atomic adds: sums over parts
of heads or states, and those of A and D over chunks, are taken afterwards in a fixed order.
"""

# pyright: reportAttributeAccessIssue=false, reportCallIssue=false, reportIndexIssue=false, reportArgumentType=false
# pyright: reportPossiblyUnboundVariable=false, reportReturnType=false, reportGeneralTypeIssues=false
from __future__ import annotations

from typing import NamedTuple

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
    num_head_parts,
)
from petatron.kernels.triton.ssm.sequential_scan import documents_of_chunk, row_tiles, state_tiles

_PROGRAMS = 512
"""So many programs, if there are enough heads: some for every multiprocessor."""
_COLUMNS = 64
"""Columns of a state that a program of `_state_sums` has: its sums over heads take 64 registers of each of 128 threads."""
_HEADS = 16


class TokenSums(NamedTuple):
    """Sums over the products of a head at queries and, without dt, at keys [2, B, H, padded length], and <dh, h> [c, B, H].

    of_scores: inside chunks. of_states, state_products: with states, for each part of their columns.
    """

    of_scores: Tensor
    of_states: Tensor
    state_products: Tensor


def group_grads(
    grad_y_SBHP: Tensor,
    x_SBHP: Tensor,
    B_SBGN: Tensor,
    C_SBGN: Tensor,
    decays: ChunkDecays,
    states: Tensor,
    grad_states: Tensor,
) -> tuple[Tensor, Tensor, Tensor, TokenSums]:
    """Returns the gradients of B and C, in their dtype or float32, that of D, and what `step_grads` takes.

    states: those before the chunks; grad_states: of those after them [B, c, H, N, P].
    """
    (length, batch, heads, head_dim), (groups, state_dim) = x_SBHP.shape, B_SBGN.shape[2:]
    chunks, chunk, columns = decays.num_chunks, decays.chunk_size, min(_COLUMNS, B_SBGN.shape[3])
    splits = triton.cdiv(state_dim, columns)
    parts = num_head_parts(heads // groups, programs=chunks * batch * groups, wanted=_PROGRAMS)

    def new(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
        return torch.empty(shape, dtype=dtype, device=x_SBHP.device)

    by_head, by_group = decays.dA_cumsum.shape, (parts, length, batch, groups, state_dim)
    sums = TokenSums(new(2, *by_head), new(2 * splits, *by_head), new(splits, chunks, batch, heads))
    grad_D, score_B, score_C = new(chunks, batch, heads), new(*by_group), new(*by_group)
    dtype = B_SBGN.dtype if parts == 1 else torch.float32
    grad_B, grad_C = (new(*by_group, dtype=dtype) for _ in range(2))
    tiles = (row_tiles(grad_y_SBHP, chunk), row_tiles(x_SBHP, chunk))
    both = (B_SBGN, C_SBGN, B_SBGN.stride()[:3], C_SBGN.stride()[:3])
    constants = {"PARTS": parts, "CHUNK": chunk, "HEAD_DIM": head_dim, "PRECISION": dot_precision(x_SBHP)}
    sizes = (length, chunks, batch, groups, heads, heads // groups // parts, state_dim)
    _score_sums[(chunks * parts, groups, batch)](
        *tiles,
        *both,
        (decays.dt, decays.dA_cumsum, decays.documents),
        sums.of_scores,
        grad_D,
        score_B,
        score_C,
        sizes,
        STATE_DIM=state_dim,
        **constants,
        num_warps=4,
        num_stages=3,
    )
    _state_sums[(splits * chunks * parts, groups, batch)](
        *tiles,
        state_tiles(states, columns),
        state_tiles(grad_states, columns),
        *both,
        (decays.dt, decays.dA_cumsum, decays.documents),
        sums.of_states,
        sums.state_products,
        score_B,
        score_C,
        grad_B,
        grad_C,
        sizes,
        COLUMNS=columns,
        SPLITS=splits,
        **constants,
        num_warps=4,
        num_stages=3,
    )
    grad_B, grad_C = (grad[0] if parts == 1 else grad.sum(dim=0) for grad in (grad_B, grad_C))
    return grad_B, grad_C, grad_D.sum(dim=(0, 1)), sums


@triton.jit
def _score_sums(
    grad_tiles,
    x_tiles,
    B,
    C,
    B_strides,
    C_strides,
    by_head,
    score_sums,
    grad_D,
    grad_B,
    grad_C,
    sizes,
    PARTS: tl.constexpr,
    CHUNK: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    STATE_DIM: tl.constexpr,
    PRECISION: tl.constexpr,
):
    chunk, part, group, b = tl.program_id(0) // PARTS, tl.program_id(0) % PARTS, tl.program_id(1), tl.program_id(2)
    steps, sums, documents = by_head
    length, num_chunks, batch, groups, heads, heads_here, state_dim = sizes
    begin = chunk * CHUNK
    token = begin + tl.arange(0, CHUNK)
    query = load_rows(C, C_strides, token, b, group, state_dim, length, STATE_DIM)
    key = load_rows(B, B_strides, token, b, group, state_dim, length, STATE_DIM)
    row, column = tl.arange(0, CHUNK)[:, None], tl.arange(0, CHUNK)[None, :]
    allowed = column <= row
    if documents is not None:
        own = document_of(documents, token, b, length)
        allowed = allowed & (own[:, None] == own[None, :])
    scores = tl.where(allowed, tl.dot(query, tl.trans(key), input_precision=PRECISION), 0.0)
    scores_grad = tl.zeros((CHUNK, CHUNK), dtype=tl.float32)
    first = (group * PARTS + part) * heads_here
    size = tl.cast(batch, tl.int64) * heads * num_chunks * CHUNK
    for head in range(first, first + heads_here):
        at = (b * heads + head).to(tl.int64) * num_chunks * CHUNK + token
        rows = x_tiles.load([b, head, begin, 0]).reshape(CHUNK, HEAD_DIM)
        grad = grad_tiles.load([b, head, begin, 0]).reshape(CHUNK, HEAD_DIM)
        total, step = tl.load(sums + at), tl.load(steps + at)
        products = tl.dot(grad, tl.trans(rows), input_precision=PRECISION)
        tl.store(grad_D + (chunk * batch + b) * heads + head, tl.sum(tl.where(row == column, products, 0.0)))
        products *= tl.exp(tl.minimum(total[:, None] - total[None, :], 0.0))
        tl.store(score_sums + size + at, tl.sum(products * scores, axis=0))
        products *= step[None, :]
        scores_grad += products
        tl.store(score_sums + at, tl.sum(products * scores, axis=1))
    again = tl.arange(0, CHUNK)[None, :] <= tl.arange(0, CHUNK)[:, None]
    if documents is not None:
        own = document_of(documents, token, b, length)
        again = again & (own[:, None] == own[None, :])
    narrow = tl.where(again, scores_grad, 0.0).to(query.dtype)
    n = tl.arange(0, STATE_DIM)[None, :]
    to = (((part * length + token.to(tl.int64)) * batch + b) * groups + group)[:, None] * state_dim + n
    there = (token < length)[:, None] & (n < state_dim)
    tl.store(grad_C + to, tl.dot(narrow, key, input_precision=PRECISION), mask=there)
    tl.store(grad_B + to, tl.dot(tl.trans(narrow), query, input_precision=PRECISION), mask=there)


@triton.jit
def _state_sums(
    grad_tiles,
    x_tiles,
    state_tiles,
    grad_state_tiles,
    B,
    C,
    B_strides,
    C_strides,
    by_head,
    query_sums,
    state_products,
    grad_B,
    grad_C,
    out_B,
    out_C,
    sizes,
    PARTS: tl.constexpr,
    CHUNK: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    COLUMNS: tl.constexpr,
    SPLITS: tl.constexpr,
    PRECISION: tl.constexpr,
):
    split, rest = tl.program_id(0) % SPLITS, tl.program_id(0) // SPLITS
    chunk, part, group, b = rest // PARTS, rest % PARTS, tl.program_id(1), tl.program_id(2)
    steps, sums, documents = by_head
    length, num_chunks, batch, groups, heads, heads_here, state_dim = sizes
    begin = chunk * CHUNK
    token = begin + tl.arange(0, CHUNK)
    enters, leaves, _ = documents_of_chunk(documents, token, chunk, b, length, CHUNK)
    n = split * COLUMNS + tl.arange(0, COLUMNS)[None, :]
    query = load_rows(C + split * COLUMNS, C_strides, token, b, group, state_dim - split * COLUMNS, length, COLUMNS)
    key = load_rows(B + split * COLUMNS, B_strides, token, b, group, state_dim - split * COLUMNS, length, COLUMNS)
    query_grad = tl.zeros((CHUNK, COLUMNS), dtype=tl.float32)
    key_grad = tl.zeros((CHUNK, COLUMNS), dtype=tl.float32)
    first = (group * PARTS + part) * heads_here
    size = tl.cast(batch, tl.int64) * heads * num_chunks * CHUNK
    query_sums += split * 2 * size
    for head in range(first, first + heads_here):
        at = (b * heads + head).to(tl.int64) * num_chunks * CHUNK + token
        state_at = b * num_chunks + chunk
        total, step = tl.load(sums + at), tl.load(steps + at)
        end = tl.load(sums + (b * heads + head).to(tl.int64) * num_chunks * CHUNK + begin + CHUNK - 1)
        grad = grad_tiles.load([b, head, begin, 0]).reshape(CHUNK, HEAD_DIM)
        state = state_tiles.load([state_at, head, split * COLUMNS, 0]).reshape(COLUMNS, HEAD_DIM)
        queried = tl.dot(grad, tl.trans(state), input_precision=PRECISION)
        queried *= tl.where(enters, tl.exp(total), 0.0)[:, None]
        query_grad += queried
        tl.store(query_sums + at, tl.sum(queried * query.to(tl.float32), axis=1))
        state_grad = grad_state_tiles.load([state_at, head, split * COLUMNS, 0]).reshape(COLUMNS, HEAD_DIM)
        inner = tl.sum(state.to(tl.float32) * state_grad.to(tl.float32))
        tl.store(state_products + ((split * num_chunks + chunk) * batch + b) * heads + head, inner)
        rows = x_tiles.load([b, head, begin, 0]).reshape(CHUNK, HEAD_DIM)
        to_end = tl.where(leaves, tl.exp(end - total), 0.0)
        taken = tl.dot(rows, tl.trans(state_grad), input_precision=PRECISION)
        taken *= to_end[:, None]
        tl.store(query_sums + size + at, tl.sum(taken * key.to(tl.float32), axis=1))
        key_grad += taken * step[:, None]
    to = (((part * length + token.to(tl.int64)) * batch + b) * groups + group)[:, None] * state_dim + n
    there = (token < length)[:, None] & (n < state_dim)
    query_grad += tl.load(grad_C + to, mask=there, other=0.0)
    key_grad += tl.load(grad_B + to, mask=there, other=0.0)
    tl.store(out_C + to, query_grad.to(out_C.dtype.element_ty), mask=there)
    tl.store(out_B + to, key_grad.to(out_B.dtype.element_ty), mask=there)


def step_grads(A_H: Tensor, decays: ChunkDecays, sums: TokenSums, *, length: int) -> tuple[Tensor, Tensor]:
    """Returns the gradients of dt [S, B, H] and of A [H] in float32."""
    batch, heads = decays.dA_cumsum.shape[:2]
    chunks = decays.num_chunks
    grad_dt = torch.empty((length, batch, heads), dtype=torch.float32, device=A_H.device)
    grad_A = torch.empty((chunks, batch, heads), dtype=torch.float32, device=A_H.device)
    _step_grads[(chunks, batch, triton.cdiv(heads, _HEADS))](
        A_H,
        decays.dt,
        decays.dA_cumsum,
        decays.documents,
        *sums,
        grad_dt,
        grad_A,
        length,
        heads,
        SPLITS=len(sums.state_products),
        CHUNK=decays.chunk_size,
        HEADS=_HEADS,
    )
    return grad_dt, grad_A.sum(dim=(0, 1))


@triton.jit
def _step_grads(
    A,
    steps,
    sums,
    documents,
    score_sums,
    query_sums,
    state_products,
    grad_dt,
    grad_A,
    length,
    heads,
    SPLITS: tl.constexpr,
    CHUNK: tl.constexpr,
    HEADS: tl.constexpr,
):
    chunk, b, chunks, batch = tl.program_id(0), tl.program_id(1), tl.num_programs(0), tl.num_programs(1)
    head = tl.program_id(2) * HEADS + tl.arange(0, HEADS)
    token = chunk * CHUNK + tl.arange(0, CHUNK)
    there = (head < heads)[:, None]
    row = (b * heads + head).to(tl.int64) * chunks * CHUNK
    size = tl.cast(batch, tl.int64) * heads * chunks * CHUNK
    at = row[:, None] + token[None, :]
    passes = True
    if documents is not None:
        after = document_of(documents, chunk * CHUNK + CHUNK - 1, b, length)
        passes = document_before(documents, chunk, b, length, CHUNK) == after
    chunk_at = (chunk * batch + b) * heads + head
    inner = tl.zeros((HEADS,), dtype=tl.float32)
    added = tl.zeros((HEADS, CHUNK), dtype=tl.float32)
    sums_grad = tl.load(score_sums + at, mask=there, other=0.0)
    for split in tl.static_range(SPLITS):
        sums_grad += tl.load(query_sums + split * 2 * size + at, mask=there, other=0.0)
        added += tl.load(query_sums + (split * 2 + 1) * size + at, mask=there, other=0.0)
        inner += tl.load(state_products + split * chunks * batch * heads + chunk_at, mask=head < heads, other=0.0)
    step = tl.load(steps + at, mask=there, other=0.0)
    products = tl.load(score_sums + size + at, mask=there, other=0.0) + added
    sums_grad -= products * step
    end = tl.load(sums + row + chunk * CHUNK + CHUNK - 1, mask=head < heads, other=0.0)
    end_grad = tl.sum(added * step, axis=1) + tl.where(passes, tl.exp(end), 0.0) * inner
    decay_grad = (tl.sum(sums_grad, axis=1) + end_grad)[:, None] - tl.cumsum(sums_grad, axis=1) + sums_grad
    decay_rate = tl.load(A + head, mask=head < heads, other=0.0).to(tl.float32)
    to = (token.to(tl.int64)[None, :] * batch + b) * heads + head[:, None]
    tl.store(grad_dt + to, decay_grad * decay_rate[:, None] + products, mask=there & (token < length)[None, :])
    tl.store(grad_A + chunk_at, tl.sum(decay_grad * step, axis=1), mask=head < heads)
