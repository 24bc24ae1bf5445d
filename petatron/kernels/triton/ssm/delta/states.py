"""States between chunks of the delta rule and what chunks write to them, and the gradients of both: the sequential part.

With T the inverse of a chunk's system, S the state before it and dS' the gradient of the state after it (decays as in `tiles.py`):

    forward     w = T beta (v - to_token (k S))             S' = whole S + k^T (to_end w)
    backward    dy = T^T (dw + to_end (k dS'))              dS = whole dS' + q^T (to_token do) - k^T (to_token beta dy)

w is what the chunk writes, dw its gradient by the outputs of the same chunk, and dy the gradient of beta (v - ...), the right-hand side
of the system. A program has some columns of one head's state in registers, in float32, for all chunks: columns do not mix.

With decays of channels these are inside the products. Queries and keys then have them as factors (`channel_rows.py`), keys once to each
of the two decays, and `whole` is a vector over the rows of the state.

S sequence, B batch, H value heads, P value head dim, G key heads, N key head dim; c chunks of Q tokens.
"""

# pyright: reportAttributeAccessIssue=false, reportCallIssue=false, reportIndexIssue=false, reportArgumentType=false
# pyright: reportPossiblyUnboundVariable=false, reportReturnType=false, reportGeneralTypeIssues=false
from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from petatron.kernels.triton.ssm.delta.tiles import (
    DecayedRows,
    DeltaChunks,
    chunk_row,
    load_square,
    row_decays,
    row_tile,
    state_base,
    state_tile,
)
from petatron.kernels.triton.ssm.scan_tiles import load_rows

_COLUMNS = 64
_PROGRAMS = 128
"""So many programs, if columns can be shared out: about one for every multiprocessor."""


def chunk_states(
    k_SBGN: Tensor,
    v_SBHP: Tensor,
    inverses: Tensor,
    chunks: DeltaChunks,
    first: Tensor | None,
    decayed: DecayedRows | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Returns the states before the chunks [B, c, H, N, P] and what they write [S, B, H, P], both in the dtype of the values,
    and the state after the last chunk, in float32. first: the state before the first chunk; None: zero. decayed: rows that are read
    instead of the keys, where channels have decays.
    """
    states, last = _states(v_SBHP, chunks)
    written = torch.empty(v_SBHP.shape, dtype=v_SBHP.dtype, device=v_SBHP.device)
    constants = chunks.constants(v_SBHP, columns=_columns(v_SBHP, chunks))
    grid = (chunks.batch * chunks.heads, triton.cdiv(chunks.value_dim, constants["COLUMNS"]))
    keys = k_SBGN if decayed is None else decayed.k
    _chunk_states[grid](
        (keys, v_SBHP, inverses, *_to_end(decayed)),
        (keys.stride()[:3], v_SBHP.stride()[:3], written.stride()[:3]),
        chunks.gates,
        None if first is None else first.contiguous(),
        states,
        written,
        last,
        chunks.sizes if decayed is None else decayed.sizes(chunks),
        **constants,
        num_warps=4,
        num_stages=2,
    )
    return states, written, last


def chunk_state_grads(
    q_SBGN: Tensor,
    k_SBGN: Tensor,
    grad_o_SBHP: Tensor,
    grad_written_SBHP: Tensor,
    inverses: Tensor,
    chunks: DeltaChunks,
    first: Tensor | None,
    decayed: DecayedRows | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Returns the gradients of the states after the chunks [B, c, H, N, P] and of the systems' right-hand sides [S, B, H, P], and
    that of the state before the first chunk, in float32.

    grad_written_SBHP: contiguous, of the outputs of the same chunk alone; the right-hand sides' take its place in memory. first: the
    gradient of the final state; None: zero. decayed: see `chunk_states`.
    """
    states, last = _states(grad_o_SBHP, chunks)
    constants = chunks.constants(grad_o_SBHP, columns=_columns(grad_o_SBHP, chunks))
    grid = (chunks.batch * chunks.heads, triton.cdiv(chunks.value_dim, constants["COLUMNS"]))
    rows = (*((q_SBGN, k_SBGN) if decayed is None else (decayed.q, decayed.k)), grad_o_SBHP, grad_written_SBHP)
    _chunk_state_grads[grid](
        (*rows, inverses, *_to_end(decayed)),
        tuple(tensor.stride()[:3] for tensor in rows),
        chunks.gates,
        None if first is None else first.contiguous(),
        states,
        last,
        chunks.sizes if decayed is None else decayed.sizes(chunks),
        **constants,
        num_warps=4,
        num_stages=2 if constants["COLUMNS"] < _COLUMNS else 1,  # two of 64 columns leave room for one program
    )
    return states, grad_written_SBHP, last


def _to_end(decayed: DecayedRows | None) -> tuple[Tensor | None, Tensor | None]:
    return (None, None) if decayed is None else (decayed.k_ends, decayed.wholes)


def _states(rows_SBHP: Tensor, chunks: DeltaChunks) -> tuple[Tensor, Tensor]:
    shape, device = (chunks.heads, chunks.key_dim, chunks.value_dim), rows_SBHP.device
    return (
        torch.empty((chunks.batch, chunks.num_chunks, *shape), dtype=rows_SBHP.dtype, device=device),
        torch.empty((chunks.batch, *shape), dtype=torch.float32, device=device),
    )


def _columns(rows_SBHP: Tensor, chunks: DeltaChunks) -> int:
    """Returns the columns of a program: half as many where registers or programs would be too few."""
    wide = chunks.key_dim > 128 or rows_SBHP.dtype == torch.float32
    few = chunks.batch * chunks.heads * triton.cdiv(chunks.value_dim, _COLUMNS) < _PROGRAMS
    return _COLUMNS // 2 if wide or few else _COLUMNS


@triton.jit
def _chunk_states(
    tensors,
    strides,
    gates,
    first,
    states,
    written,
    last,
    sizes,
    CHUNK: tl.constexpr,
    KEY_DIM: tl.constexpr,
    COLUMNS: tl.constexpr,
    PRECISION: tl.constexpr,
):
    k, v, inverses, k_ends, wholes = tensors
    length, num_chunks, heads, heads_per_group, key_dim, value_dim = sizes
    b, head = tl.program_id(0) // heads, tl.program_id(0) % heads
    begin, group = tl.program_id(1) * COLUMNS, head // heads_per_group
    offsets, there = state_tile(begin, key_dim, value_dim, KEY_DIM, COLUMNS)
    at = tl.program_id(0).to(tl.int64) * key_dim * value_dim + offsets
    state = tl.zeros((KEY_DIM, COLUMNS), dtype=tl.float32)
    if first is not None:
        state += tl.load(first + at, mask=there, other=0.0).to(tl.float32)
    for chunk in range(num_chunks):
        rounded = state.to(states.dtype.element_ty)
        tl.store(states + state_base(b, chunk, head, sizes) + offsets, rounded, mask=there)
        token = chunk * CHUNK + tl.arange(0, CHUNK)
        key = load_rows(k, strides[0], token, b, group, key_dim, length, KEY_DIM)
        rows, inside = row_tile(strides[1], token, b, head, begin, value_dim, length, COLUMNS)
        value = tl.load(v + rows, mask=inside, other=0.0)
        _, k_start, k_end, whole = row_decays(gates, wholes, head, group, chunk, b, sizes, CHUNK, KEY_DIM)
        beta = tl.load(gates[1] + chunk_row(head, chunk, b, heads, num_chunks, CHUNK))

        stored = tl.dot(key, rounded, input_precision=PRECISION) * k_start[:, None]
        side = (value.to(tl.float32) - stored) * beta[:, None]
        inverse = load_square(inverses, head, chunk, b, sizes, CHUNK)
        new = tl.dot(inverse, side.to(value.dtype), input_precision=PRECISION)
        rows, inside = row_tile(strides[2], token, b, head, begin, value_dim, length, COLUMNS)
        tl.store(written + rows, new.to(value.dtype), mask=inside)
        weighted = (new * k_end[:, None]).to(value.dtype)
        if k_ends is not None:
            key = load_rows(k_ends, strides[0], token, b, group, key_dim, length, KEY_DIM)
        state = state * whole + tl.dot(tl.trans(key), weighted, input_precision=PRECISION)
    tl.store(last + at, state, mask=there)


@triton.jit
def _chunk_state_grads(
    tensors,
    strides,
    gates,
    first,
    grad_states,
    last,
    sizes,
    CHUNK: tl.constexpr,
    KEY_DIM: tl.constexpr,
    COLUMNS: tl.constexpr,
    PRECISION: tl.constexpr,
):
    q, k, grad_o, grad_written, inverses, k_ends, wholes = tensors
    length, num_chunks, heads, heads_per_group, key_dim, value_dim = sizes
    b, head = tl.program_id(0) // heads, tl.program_id(0) % heads
    begin, group = tl.program_id(1) * COLUMNS, head // heads_per_group
    offsets, there = state_tile(begin, key_dim, value_dim, KEY_DIM, COLUMNS)
    at = tl.program_id(0).to(tl.int64) * key_dim * value_dim + offsets
    grad = tl.zeros((KEY_DIM, COLUMNS), dtype=tl.float32)
    if first is not None:
        grad += tl.load(first + at, mask=there, other=0.0).to(tl.float32)
    steps = num_chunks
    if wholes is not None:
        # The same number. Triton makes a constant of 1, and where the loop is gone ptxas 12.8 reads a register that it never wrote.
        steps = tl.cdiv(length, CHUNK)
    for step in range(steps):
        chunk = num_chunks - 1 - step
        rounded = grad.to(grad_states.dtype.element_ty)
        tl.store(grad_states + state_base(b, chunk, head, sizes) + offsets, rounded, mask=there)
        token = chunk * CHUNK + tl.arange(0, CHUNK)
        q_start, k_start, k_end, whole = row_decays(gates, wholes, head, group, chunk, b, sizes, CHUNK, KEY_DIM)
        beta = tl.load(gates[1] + chunk_row(head, chunk, b, heads, num_chunks, CHUNK))

        key = load_rows(k, strides[1], token, b, group, key_dim, length, KEY_DIM)
        rows, inside = row_tile(strides[3], token, b, head, begin, value_dim, length, COLUMNS)
        new_grad = tl.load(grad_written + rows, mask=inside, other=0.0).to(tl.float32)
        late = key
        if k_ends is not None:
            late = load_rows(k_ends, strides[1], token, b, group, key_dim, length, KEY_DIM)
        new_grad += tl.dot(late, rounded, input_precision=PRECISION) * k_end[:, None]
        inverse = load_square(inverses, head, chunk, b, sizes, CHUNK)
        side_grad = tl.dot(tl.trans(inverse), new_grad.to(key.dtype), input_precision=PRECISION)
        tl.store(grad_written + rows, side_grad.to(key.dtype), mask=inside)

        query = load_rows(q, strides[0], token, b, group, key_dim, length, KEY_DIM)
        rows, inside = row_tile(strides[2], token, b, head, begin, value_dim, length, COLUMNS)
        out = tl.load(grad_o + rows, mask=inside, other=0.0).to(tl.float32) * q_start[:, None]
        grad = grad * whole + tl.dot(tl.trans(query), out.to(key.dtype), input_precision=PRECISION)
        weighted = side_grad * (-beta * k_start)[:, None]
        grad += tl.dot(tl.trans(key), weighted.to(key.dtype), input_precision=PRECISION)
    tl.store(last + at, grad, mask=there)
