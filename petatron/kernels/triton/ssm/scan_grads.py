"""Gradients of B, C, D and of the step sizes, from the states before the chunks and the gradients of the states after them.

Programs have one chunk of one sequence and loop over heads of a group, so that the sums over heads, which the gradients of B and C
are, stay in registers. With h the state before, dh the gradient of the state after, s the running sum of dt A:

    _score_grads     with dS_ij = sum over heads of exp(s_i - s_j) dt_j (dy_i . x_j):  dC = dS B, dB = dS^T C;  dD
    _state_grads     dC_i += sum over heads of exp(s_i) h^T dy_i;  dB_j += sum over heads of dt_j exp(s_Q - s_j) dh^T x_j;  <dh, h>
    _step_grads      dt and A, from sums over the rows of all these products

Every product holds exp(s_i - s_j), exp(s_i) or exp(s_Q - s_j), so its gradient times itself is added to e_i and subtracted from e_j,
with e the gradient of s; e_Q also has exp(s_Q) <dh, h>. The gradient of dt A at a token is the sum of e over it and all after it in the
chunk. The sums at j are also <g_j, x_j>, with g the gradient of dt x: what dt gets besides. No atomic adds: sums over parts of heads or of
states, and those of A and D over chunks, are taken afterwards in a fixed order.
"""

# pyright: reportAttributeAccessIssue=false, reportCallIssue=false, reportIndexIssue=false, reportArgumentType=false
# pyright: reportPossiblyUnboundVariable=false, reportReturnType=false, reportGeneralTypeIssues=false
from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from petatron.kernels.triton.ssm.scan_scores import block_size, document_masks, row_tiles, sees, state_tiles
from petatron.kernels.triton.ssm.scan_tiles import (
    ChunkDecays,
    document_before,
    document_of,
    dot_precision,
    head_parts,
    load_rows,
)

_PROGRAMS = 512
"""So many programs, if there are enough heads: some for every multiprocessor."""
_COLUMNS = 64
"""Columns of a state that a program of `_state_grads` has: its sums are 64 registers of each of 128 threads."""
_HEADS = 16
FACTOR = True
SCORE = {"num_warps": 4, "num_stages": 3}
GROUP = {"num_warps": 4, "num_stages": 3}


class _TokenSums(NamedTuple):
    """Sums over the products of a head at query i and at key j, the latter without dt [2, B, H, padded length], and <dh, h> by chunk.

    of_scores: inside a chunk. of_states: with the states, for each part of their columns.
    """

    of_scores: Tensor
    of_states: Tensor
    state_products: Tensor


def chunk_grads(
    grad_y_SBHP: Tensor,
    x_SBHP: Tensor,
    A_H: Tensor,
    B_SBGN: Tensor,
    C_SBGN: Tensor,
    decays: ChunkDecays,
    states: Tensor,
    grad_states: Tensor,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Returns the gradients of dt, A, B, C and D in float32; those of B and C in their dtype if nothing is to be added to them."""
    (length, batch, heads, head_dim), (groups, state_dim) = x_SBHP.shape, B_SBGN.shape[2:]
    chunks, chunk, width = decays.num_chunks, decays.chunk, block_size(head_dim)
    columns = block_size(state_dim, most=_COLUMNS)
    splits = triton.cdiv(state_dim, columns)
    parts = head_parts(heads // groups, programs=chunks * batch * groups, wanted=_PROGRAMS)

    def new(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
        return torch.empty(shape, dtype=dtype, device=x_SBHP.device)

    by_head = decays.sums.shape
    sums = _TokenSums(new(2, *by_head), new(splits, 2, *by_head), new(splits, chunks, batch, heads))
    grad_D, by_group = new(chunks, batch, heads), (parts, length, batch, groups, state_dim)
    of_scores = (new(*by_group), new(*by_group))
    grads = of_scores if parts > 1 else tuple(new(*by_group, dtype=B_SBGN.dtype) for _ in range(2))
    tiles = (row_tiles(grad_y_SBHP, chunk, width), row_tiles(x_SBHP, chunk, width))
    both = (B_SBGN, C_SBGN, B_SBGN.stride()[:3], C_SBGN.stride()[:3])
    sizes = (length, chunks, batch, groups, heads, heads // groups // parts, state_dim)
    decays_by_head = (decays.steps, decays.sums, decays.documents)
    constants = {"PARTS": parts, "CHUNK": chunk, "HEAD_DIM": width, "PRECISION": dot_precision(x_SBHP)}
    _score_grads[(chunks * parts, groups, batch)](
        *tiles,
        both,
        decays_by_head,
        sums.of_scores,
        grad_D,
        of_scores,
        sizes,
        STATE_DIM=block_size(state_dim),
        FACTOR=FACTOR,
        **constants,
        **SCORE,
    )
    _state_grads[(splits * chunks * parts, groups, batch)](
        *tiles,
        state_tiles(states, columns, width),
        state_tiles(grad_states, columns, width),
        both,
        decays_by_head,
        sums.of_states,
        sums.state_products,
        of_scores,
        grads,
        sizes,
        COLUMNS=columns,
        SPLITS=splits,
        **constants,
        **GROUP,
    )
    grad_B, grad_C = (grad[0] if parts == 1 else grad.sum(dim=0) for grad in grads)
    return *_step_size_grads(A_H, decays, sums, length), grad_B, grad_C, grad_D.sum(dim=(0, 1))


def _step_size_grads(A_H: Tensor, decays: ChunkDecays, sums: _TokenSums, length: int) -> tuple[Tensor, Tensor]:
    """Returns the gradients of dt [S, B, H] and of A [H]."""
    batch, heads, _ = decays.sums.shape
    grad_dt = torch.empty((length, batch, heads), dtype=torch.float32, device=A_H.device)
    grad_A = torch.empty((decays.num_chunks, batch, heads), dtype=torch.float32, device=A_H.device)
    _step_grads[(decays.num_chunks, batch, triton.cdiv(heads, _HEADS))](
        A_H,
        (decays.steps, decays.sums, decays.documents),
        tuple(sums),
        grad_dt,
        grad_A,
        length,
        heads,
        SPLITS=len(sums.state_products),
        CHUNK=decays.chunk,
        HEADS=_HEADS,
    )
    return grad_dt, grad_A.sum(dim=(0, 1))


@triton.jit
def _score_grads(
    grad_tiles,
    x_tiles,
    both,
    by_head,
    token_sums,
    grad_D,
    grads,
    sizes,
    PARTS: tl.constexpr,
    CHUNK: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    STATE_DIM: tl.constexpr,
    FACTOR: tl.constexpr,
    PRECISION: tl.constexpr,
):
    chunk, part, group, b = tl.program_id(0) // PARTS, tl.program_id(0) % PARTS, tl.program_id(1), tl.program_id(2)
    steps, sums, documents = by_head
    length, num_chunks, batch, _, heads, heads_here, state_dim = sizes
    begin = chunk * CHUNK
    token = begin + tl.arange(0, CHUNK)
    key = load_rows(both[0], both[2], token, b, group, state_dim, length, STATE_DIM)
    query = load_rows(both[1], both[3], token, b, group, state_dim, length, STATE_DIM)
    seen = sees(documents, token, b, length, CHUNK, False)
    scores = tl.where(seen, tl.dot(query, tl.trans(key), input_precision=PRECISION), 0.0)
    scores_grad = tl.zeros((CHUNK, CHUNK), dtype=tl.float32)
    diagonal = tl.arange(0, CHUNK)[:, None] == tl.arange(0, CHUNK)[None, :]
    size = batch * heads.to(tl.int64) * num_chunks * CHUNK
    first = (group * PARTS + part) * heads_here
    for head in range(first, first + heads_here):
        at = (b * heads + head).to(tl.int64) * num_chunks * CHUNK + token
        rows = x_tiles.load([b, head, begin, 0]).reshape(CHUNK, HEAD_DIM)
        grad = grad_tiles.load([b, head, begin, 0]).reshape(CHUNK, HEAD_DIM)
        total, step = tl.load(sums + at), tl.load(steps + at)
        products = tl.dot(grad, tl.trans(rows), input_precision=PRECISION)
        tl.store(grad_D + (chunk * batch + b) * heads + head, tl.sum(tl.where(diagonal, products, 0.0)))
        if FACTOR:
            end = tl.load(sums + (b * heads + head).to(tl.int64) * num_chunks * CHUNK + begin + CHUNK - 1)
            if end >= -80.0:
                decay = tl.exp2(total - 0.5 * end)[:, None] * tl.exp2(0.5 * end - total)[None, :]
            else:
                decay = tl.exp2(tl.minimum(total[:, None] - total[None, :], 0.0))
            products *= decay
        else:
            products *= tl.exp2(tl.minimum(total[:, None] - total[None, :], 0.0))
        tl.store(token_sums + size + at, tl.sum(products * scores, axis=0))
        products *= step[None, :]
        scores_grad += products
        tl.store(token_sums + at, tl.sum(products * scores, axis=1))
    narrow = tl.where(sees(documents, token, b, length, CHUNK, False), scores_grad, 0.0).to(query.dtype)
    to, there = _group_offsets(part, token, b, group, 0, sizes, STATE_DIM)
    tl.store(grads[1] + to, tl.dot(narrow, key, input_precision=PRECISION), mask=there)
    tl.store(grads[0] + to, tl.dot(tl.trans(narrow), query, input_precision=PRECISION), mask=there)


@triton.jit
def _state_grads(
    grad_tiles,
    x_tiles,
    states,
    grad_states,
    both,
    by_head,
    token_sums,
    state_products,
    of_scores,
    grads,
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
    length, num_chunks, batch, _, heads, heads_here, state_dim = sizes
    begin, n = chunk * CHUNK, split * COLUMNS
    token = begin + tl.arange(0, CHUNK)
    enters, leaves, _ = document_masks(documents, token, chunk, b, length, CHUNK)
    key = load_rows(both[0] + n, both[2], token, b, group, state_dim - n, length, COLUMNS)
    query = load_rows(both[1] + n, both[3], token, b, group, state_dim - n, length, COLUMNS)
    key_grad = tl.zeros((CHUNK, COLUMNS), dtype=tl.float32)
    query_grad = tl.zeros((CHUNK, COLUMNS), dtype=tl.float32)
    size = batch * heads.to(tl.int64) * num_chunks * CHUNK
    token_sums += split * 2 * size
    first = (group * PARTS + part) * heads_here
    for head in range(first, first + heads_here):
        own_row = (b * heads + head).to(tl.int64) * num_chunks * CHUNK
        total, step = tl.load(sums + own_row + token), tl.load(steps + own_row + token)
        end = tl.load(sums + own_row + begin + CHUNK - 1)
        grad = grad_tiles.load([b, head, begin, 0]).reshape(CHUNK, HEAD_DIM)
        state = states.load([b * num_chunks + chunk, head, n, 0]).reshape(COLUMNS, HEAD_DIM)
        # A factor of a row is applied after the GEMM: its operands stay as they were loaded.
        product = tl.dot(grad, tl.trans(state), input_precision=PRECISION)
        product *= tl.where(enters, tl.exp2(total), 0.0)[:, None]
        tl.store(token_sums + own_row + token, tl.sum(product * query.to(tl.float32), axis=1))
        query_grad += product
        state_grad = grad_states.load([b * num_chunks + chunk, head, n, 0]).reshape(COLUMNS, HEAD_DIM)
        inner = tl.sum(state.to(tl.float32) * state_grad.to(tl.float32))
        tl.store(state_products + ((split * num_chunks + chunk) * batch + b) * heads + head, inner)
        rows = x_tiles.load([b, head, begin, 0]).reshape(CHUNK, HEAD_DIM)
        product = tl.dot(rows, tl.trans(state_grad), input_precision=PRECISION)
        product *= tl.where(leaves, tl.exp2(end - total), 0.0)[:, None]
        tl.store(token_sums + size + own_row + token, tl.sum(product * key.to(tl.float32), axis=1))
        key_grad += product * step[:, None]
    to, there = _group_offsets(part, token, b, group, n, sizes, COLUMNS)
    key_grad += tl.load(of_scores[0] + to, mask=there, other=0.0)
    query_grad += tl.load(of_scores[1] + to, mask=there, other=0.0)
    tl.store(grads[0] + to, key_grad.to(grads[0].dtype.element_ty), mask=there)
    tl.store(grads[1] + to, query_grad.to(grads[1].dtype.element_ty), mask=there)


@triton.jit
def _group_offsets(part, token, b, group, n, sizes, COLUMNS: tl.constexpr):
    """Returns the offsets of a chunk's rows in the sums over a part of the heads, and which there are."""
    length, _, batch, groups, _, _, state_dim = sizes
    column = n + tl.arange(0, COLUMNS)[None, :]
    row = ((part * length + token.to(tl.int64)) * batch + b) * groups + group
    return row[:, None] * state_dim + column, (token < length)[:, None] & (column < state_dim)


@triton.jit
def _step_grads(
    A,
    by_head,
    token_sums,
    grad_dt,
    grad_A,
    length,
    heads,
    SPLITS: tl.constexpr,
    CHUNK: tl.constexpr,
    HEADS: tl.constexpr,
):
    chunk, b, chunks, batch = tl.program_id(0), tl.program_id(1), tl.num_programs(0), tl.num_programs(1)
    steps, sums, documents = by_head
    of_scores, of_states, state_products = token_sums
    head = tl.program_id(2) * HEADS + tl.arange(0, HEADS)
    token = chunk * CHUNK + tl.arange(0, CHUNK)
    is_head, there = head < heads, (head < heads)[:, None]
    own_row = (b * heads + head).to(tl.int64) * chunks * CHUNK
    size = batch * heads.to(tl.int64) * chunks * CHUNK
    at, chunk_at = own_row[:, None] + token[None, :], (chunk * batch + b) * heads + head
    passes = True
    if documents is not None:
        after = document_of(documents, chunk * CHUNK + CHUNK - 1, b, length)
        passes = document_before(documents, chunk, b, length, CHUNK) == after
    step = tl.load(steps + at, mask=there, other=0.0)
    sums_grad = tl.load(of_scores + at, mask=there, other=0.0)
    from_states = tl.zeros((HEADS, CHUNK), dtype=tl.float32)
    inner = tl.zeros((HEADS,), dtype=tl.float32)
    for split in tl.static_range(SPLITS):
        sums_grad += tl.load(of_states + split * 2 * size + at, mask=there, other=0.0)
        from_states += tl.load(of_states + (split * 2 + 1) * size + at, mask=there, other=0.0)
        inner += tl.load(state_products + split * chunks * batch * heads + chunk_at, mask=is_head, other=0.0)
    at_keys = tl.load(of_scores + size + at, mask=there, other=0.0) + from_states
    sums_grad -= at_keys * step
    end = tl.load(sums + own_row + chunk * CHUNK + CHUNK - 1, mask=is_head, other=0.0)
    end_grad = tl.sum(from_states * step, axis=1) + tl.where(passes, tl.exp2(end), 0.0) * inner
    decay_grad = (tl.sum(sums_grad, axis=1) + end_grad)[:, None] - tl.cumsum(sums_grad, axis=1) + sums_grad
    rate = tl.load(A + head, mask=is_head, other=0.0).to(tl.float32)
    to = (token.to(tl.int64)[None, :] * batch + b) * heads + head[:, None]
    tl.store(grad_dt + to, decay_grad * rate[:, None] + at_keys, mask=there & (token < length)[None, :])
    tl.store(grad_A + chunk_at, tl.sum(decay_grad * step, axis=1), mask=is_head)
