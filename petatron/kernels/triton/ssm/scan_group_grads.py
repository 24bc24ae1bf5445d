"""new gradients"""

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
    head_parts,
    load_rows,
)
from petatron.kernels.triton.ssm.scan_walk import documents_of_chunk, tile_descriptor

_PROGRAMS = 512
SCORE = {"num_warps": 4, "num_stages": 3, "maxnreg": None}
GROUP = {"num_warps": 4, "num_stages": 2, "maxnreg": None}
COLUMNS = 64
_HEADS = 16


def group_grads(
    grad_y_SBHP: Tensor,
    x_SBHP: Tensor,
    B_SBGN: Tensor,
    C_SBGN: Tensor,
    decays: ChunkDecays,
    states: Tensor,
    grad_states: Tensor,
) -> tuple[Tensor, ...]:
    """Returns gradients of B and C in their dtype, and by head that of s, and <dh, h>."""
    length, batch, heads, head_dim = x_SBHP.shape
    groups, state_dim = B_SBGN.shape[2:]
    chunks, chunk = decays.num_chunks, decays.chunk
    padded = triton.next_power_of_2(max(state_dim, 16))
    columns = min(COLUMNS, padded)
    splits = triton.cdiv(state_dim, columns)
    parts = head_parts(heads // groups, programs=chunks * batch * groups, wanted=_PROGRAMS)

    def new(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
        return torch.empty(shape, dtype=dtype, device=x_SBHP.device)

    score_sums, query_sums = new(2, *decays.sums.shape), new(2 * splits, *decays.sums.shape)
    state_products, grad_D = new(splits, chunks, batch, heads), new(chunks, batch, heads)
    grad_B, grad_C = (new(parts, length, batch, groups, state_dim) for _ in range(2))
    dtype = B_SBGN.dtype if parts == 1 else torch.float32
    out_B, out_C = (new(parts, length, batch, groups, state_dim, dtype=dtype) for _ in range(2))
    tiles = (tile_descriptor(grad_y_SBHP, chunk), tile_descriptor(x_SBHP, chunk))
    constants = {
        "PARTS": parts,
        "CHUNK": chunk,
        "HEAD_DIM": triton.next_power_of_2(max(head_dim, 16)),
        "PRECISION": dot_precision(x_SBHP),
    }
    sizes = (length, chunks, batch, groups, heads, heads // groups // parts, state_dim)
    by_head = (decays.steps, decays.sums, decays.documents)
    _score_grads[(chunks * parts, groups, batch)](
        *tiles,
        B_SBGN,
        C_SBGN,
        B_SBGN.stride()[:3],
        C_SBGN.stride()[:3],
        by_head,
        score_sums,
        grad_D,
        grad_B,
        grad_C,
        sizes,
        STATE_DIM=padded,
        **constants,
        **options(SCORE),
    )
    flat = states.view(-1, *states.shape[2:])
    block = [1, 1, columns, constants["HEAD_DIM"]]
    _group_grads[(splits * chunks * parts, groups, batch)](
        *tiles,
        TensorDescriptor(flat, list(flat.shape), list(flat.stride()), block),
        TensorDescriptor(grad_states.view_as(flat), list(flat.shape), list(flat.stride()), block),
        B_SBGN,
        C_SBGN,
        B_SBGN.stride()[:3],
        C_SBGN.stride()[:3],
        by_head,
        query_sums,
        state_products,
        grad_B,
        grad_C,
        out_B,
        out_C,
        sizes,
        COLUMNS=columns,
        SPLITS=splits,
        **constants,
        **options(GROUP),
    )
    if parts > 1:
        out_B, out_C = (tensor.sum(dim=0, keepdim=True).to(B_SBGN.dtype) for tensor in (out_B, out_C))
    return out_B[0], out_C[0], grad_D.sum(dim=(0, 1)), score_sums, query_sums, state_products


def options(all: dict) -> dict:
    return {key: value for key, value in all.items() if value is not None}


@triton.jit
def _score_grads(
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
    size = batch * heads.to(tl.int64) * num_chunks * CHUNK
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
def _group_grads(
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
    size = batch * heads.to(tl.int64) * num_chunks * CHUNK
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


def step_grads(
    A_H: Tensor, decays: ChunkDecays, score_sums: Tensor, query_sums: Tensor, state_products: Tensor, length: int
) -> tuple[Tensor, Tensor]:
    """Returns the gradients of dt [S, B, H] and of A [H] in float32."""
    batch, heads = decays.sums.shape[:2]
    chunks = decays.num_chunks
    grad_dt = torch.empty((length, batch, heads), dtype=torch.float32, device=A_H.device)
    grad_A = torch.empty((chunks, batch, heads), dtype=torch.float32, device=A_H.device)
    _step_grads[(chunks, batch, triton.cdiv(heads, _HEADS))](
        A_H,
        decays.steps,
        decays.sums,
        decays.documents,
        score_sums,
        query_sums,
        state_products,
        grad_dt,
        grad_A,
        length,
        heads,
        SPLITS=len(state_products),
        CHUNK=decays.chunk,
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
    size = batch * heads.to(tl.int64) * chunks * CHUNK
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
