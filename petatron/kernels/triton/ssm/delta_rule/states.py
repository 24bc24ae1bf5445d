"""States at the chunk boundaries of the delta rule, the values that chunks write to them, and the gradients of both: the sequential,
inter-chunk recurrence.

With T the UT transform of a chunk, S the state before it, S' the one after it, and d for gradients (decays as in `tiles.py`):

    forward     v_new = T beta (v - from_start (k S))              S' = chunk_decay S + k^T (to_end v_new)
    backward    d_rhs = T^T (d_v_new + to_end (k dS'))             dS = chunk_decay dS' + q^T (from_start do) - k^T (from_start beta d_rhs)

d_v_new is the gradient of v_new through the outputs of the same chunk, and d_rhs that of rhs = beta (v - from_start (k S)), the right-hand
side of the chunk's triangular system (I + L) v_new = rhs. A program has some columns of one head's state in registers, in float32, for all
chunks: columns do not mix.

With decays of channels these are inside the products. Queries and keys then have them as factors (`channel_decays.py`), keys once from the
start and once to the end, and `chunk_decay` is a vector over the rows of the state.

S sequence, B batch, H value heads, P value head dim, G key heads, N key head dim; c chunks of Q tokens.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from petatron.kernels.triton.ssm.delta_rule.tiles import (
    DecayedQK,
    DeltaChunks,
    decay_factors,
    gate_offsets,
    load_chunk_matrix,
    row_tile,
    state_base,
    state_tile,
)
from petatron.kernels.triton.ssm.scan_tiles import load_rows

_COLUMNS = 64
_PROGRAMS = 128
"""The wanted number of programs, if columns can be divided: about one for every multiprocessor."""


def chunk_states(
    k_SBGN: Tensor,
    v_SBHP: Tensor,
    T: Tensor,
    chunks: DeltaChunks,
    initial_state: Tensor | None,
    decayed: DecayedQK | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Returns the states S before the chunks [B, c, H, N, P] and v_new [S, B, H, P], both in the dtype of the values, and the final
    state, in float32.

    T: of the UT transform [B, H, c, Q, Q]. initial_state: None: zero. decayed: what is read instead of the keys, where channels have
    decays.
    """
    states, final_state = _new_states(v_SBHP, chunks)
    v_new = torch.empty(v_SBHP.shape, dtype=v_SBHP.dtype, device=v_SBHP.device)
    constants = chunks.constants(v_SBHP, columns=_columns(v_SBHP, chunks))
    grid = (chunks.batch * chunks.heads, triton.cdiv(chunks.value_dim, constants["COLUMNS"]))
    keys = k_SBGN if decayed is None else decayed.k_from_start
    _chunk_states[grid](
        (keys, v_SBHP, T, *_channel_operands(decayed)),
        (keys.stride()[:3], v_SBHP.stride()[:3], v_new.stride()[:3]),
        chunks.gates,
        None if initial_state is None else initial_state.contiguous(),
        states,
        v_new,
        final_state,
        chunks.sizes if decayed is None else decayed.sizes(chunks),
        **constants,
        num_warps=4,
        num_stages=2,
    )
    return states, v_new, final_state


def chunk_state_grads(
    q_SBGN: Tensor,
    k_SBGN: Tensor,
    grad_o_SBHP: Tensor,
    grad_v_new_SBHP: Tensor,
    T: Tensor,
    chunks: DeltaChunks,
    grad_final_state: Tensor | None,
    decayed: DecayedQK | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Returns the gradients dS' of the states after the chunks [B, c, H, N, P] and d_rhs [S, B, H, P], and that of the initial state,
    in float32.

    grad_v_new_SBHP: contiguous, the gradient through the outputs of the same chunk alone; d_rhs overwrites it.
    grad_final_state: None: zero.
    decayed: see `chunk_states`.
    """
    grad_states, grad_initial_state = _new_states(grad_o_SBHP, chunks)
    constants = chunks.constants(grad_o_SBHP, columns=_columns(grad_o_SBHP, chunks))
    grid = (chunks.batch * chunks.heads, triton.cdiv(chunks.value_dim, constants["COLUMNS"]))
    q, k = (q_SBGN, k_SBGN) if decayed is None else (decayed.q_from_start, decayed.k_from_start)
    rows = (q, k, grad_o_SBHP, grad_v_new_SBHP)
    _chunk_state_grads[grid](
        (*rows, T, *_channel_operands(decayed)),
        tuple(tensor.stride()[:3] for tensor in rows),
        chunks.gates,
        None if grad_final_state is None else grad_final_state.contiguous(),
        grad_states,
        grad_initial_state,
        chunks.sizes if decayed is None else decayed.sizes(chunks),
        **constants,
        num_warps=4,
        num_stages=2 if constants["COLUMNS"] < _COLUMNS else 1,  # two of 64 columns leave room for one program
    )
    return grad_states, grad_v_new_SBHP, grad_initial_state


def _channel_operands(decayed: DecayedQK | None) -> tuple[Tensor | None, Tensor | None]:
    """Returns what the kernels take besides where channels have decays: keys decayed to the end, and decays over chunks."""
    return (None, None) if decayed is None else (decayed.k_to_end, decayed.chunk_decays)


def _new_states(rows_SBHP: Tensor, chunks: DeltaChunks) -> tuple[Tensor, Tensor]:
    """Returns memory for the states of all chunks [B, c, H, N, P] in the dtype of the rows, and for one [B, H, N, P] in float32."""
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
    initial_state,
    states,
    v_new,
    final_state,
    sizes,
    CHUNK: tl.constexpr,
    KEY_DIM: tl.constexpr,
    COLUMNS: tl.constexpr,
    PRECISION: tl.constexpr,
):
    k, v, T, k_to_end, chunk_decays = tensors
    k_strides, v_strides, v_new_strides = strides
    length, num_chunks, heads, heads_per_group, key_dim, value_dim = sizes
    betas = gates[1]
    b, head = tl.program_id(0) // heads, tl.program_id(0) % heads
    begin, group = tl.program_id(1) * COLUMNS, head // heads_per_group
    offsets, state_mask = state_tile(begin, key_dim, value_dim, KEY_DIM, COLUMNS)
    head_state_offsets = tl.program_id(0).to(tl.int64) * key_dim * value_dim + offsets
    state = tl.zeros((KEY_DIM, COLUMNS), dtype=tl.float32)
    if initial_state is not None:
        state += tl.load(initial_state + head_state_offsets, mask=state_mask, other=0.0).to(tl.float32)
    for chunk in range(num_chunks):
        rounded_state = state.to(states.dtype.element_ty)
        tl.store(states + state_base(b, chunk, head, sizes) + offsets, rounded_state, mask=state_mask)
        token = chunk * CHUNK + tl.arange(0, CHUNK)
        key = load_rows(k, k_strides, token, b, group, key_dim, length, KEY_DIM)
        value_offsets, mask = row_tile(v_strides, token, b, head, begin, value_dim, length, COLUMNS)
        value = tl.load(v + value_offsets, mask=mask, other=0.0)
        _, k_from_start_factor, k_to_end_factor, chunk_decay = decay_factors(
            gates, chunk_decays, head, group, chunk, b, sizes, CHUNK, KEY_DIM
        )
        beta = tl.load(betas + gate_offsets(head, chunk, b, heads, num_chunks, CHUNK))

        old_value = tl.dot(key, rounded_state, input_precision=PRECISION) * k_from_start_factor[:, None]
        rhs = (value.to(tl.float32) - old_value) * beta[:, None]
        T_tile = load_chunk_matrix(T, head, chunk, b, sizes, CHUNK)
        new_value = tl.dot(T_tile, rhs.to(value.dtype), input_precision=PRECISION)
        value_offsets, mask = row_tile(v_new_strides, token, b, head, begin, value_dim, length, COLUMNS)
        tl.store(v_new + value_offsets, new_value.to(value.dtype), mask=mask)
        new_value_to_end = (new_value * k_to_end_factor[:, None]).to(value.dtype)
        if k_to_end is not None:
            key = load_rows(k_to_end, k_strides, token, b, group, key_dim, length, KEY_DIM)
        state = state * chunk_decay + tl.dot(tl.trans(key), new_value_to_end, input_precision=PRECISION)
    tl.store(final_state + head_state_offsets, state, mask=state_mask)


@triton.jit
def _chunk_state_grads(
    tensors,
    strides,
    gates,
    grad_final_state,
    grad_states,
    grad_initial_state,
    sizes,
    CHUNK: tl.constexpr,
    KEY_DIM: tl.constexpr,
    COLUMNS: tl.constexpr,
    PRECISION: tl.constexpr,
):
    q, k, grad_o, grad_v_new, T, k_to_end, chunk_decays = tensors
    q_strides, k_strides, grad_o_strides, grad_v_new_strides = strides
    length, num_chunks, heads, heads_per_group, key_dim, value_dim = sizes
    betas = gates[1]
    b, head = tl.program_id(0) // heads, tl.program_id(0) % heads
    begin, group = tl.program_id(1) * COLUMNS, head // heads_per_group
    offsets, state_mask = state_tile(begin, key_dim, value_dim, KEY_DIM, COLUMNS)
    head_state_offsets = tl.program_id(0).to(tl.int64) * key_dim * value_dim + offsets
    state_grad = tl.zeros((KEY_DIM, COLUMNS), dtype=tl.float32)
    if grad_final_state is not None:
        state_grad += tl.load(grad_final_state + head_state_offsets, mask=state_mask, other=0.0).to(tl.float32)
    steps = num_chunks
    if chunk_decays is not None:
        # The same number. Triton makes a constant of 1, and where the loop is gone ptxas 12.8 reads a register that it never wrote.
        steps = tl.cdiv(length, CHUNK)
    for step in range(steps):
        chunk = num_chunks - 1 - step
        rounded_grad = state_grad.to(grad_states.dtype.element_ty)
        tl.store(grad_states + state_base(b, chunk, head, sizes) + offsets, rounded_grad, mask=state_mask)
        token = chunk * CHUNK + tl.arange(0, CHUNK)
        q_from_start_factor, k_from_start_factor, k_to_end_factor, chunk_decay = decay_factors(
            gates, chunk_decays, head, group, chunk, b, sizes, CHUNK, KEY_DIM
        )
        beta = tl.load(betas + gate_offsets(head, chunk, b, heads, num_chunks, CHUNK))

        key = load_rows(k, k_strides, token, b, group, key_dim, length, KEY_DIM)
        value_offsets, mask = row_tile(grad_v_new_strides, token, b, head, begin, value_dim, length, COLUMNS)
        new_value_grad = tl.load(grad_v_new + value_offsets, mask=mask, other=0.0).to(tl.float32)
        key_to_end = key
        if k_to_end is not None:
            key_to_end = load_rows(k_to_end, k_strides, token, b, group, key_dim, length, KEY_DIM)
        new_value_grad += tl.dot(key_to_end, rounded_grad, input_precision=PRECISION) * k_to_end_factor[:, None]
        T_tile = load_chunk_matrix(T, head, chunk, b, sizes, CHUNK)
        rhs_grad = tl.dot(tl.trans(T_tile), new_value_grad.to(key.dtype), input_precision=PRECISION)
        tl.store(grad_v_new + value_offsets, rhs_grad.to(key.dtype), mask=mask)

        query = load_rows(q, q_strides, token, b, group, key_dim, length, KEY_DIM)
        value_offsets, mask = row_tile(grad_o_strides, token, b, head, begin, value_dim, length, COLUMNS)
        output_grad = tl.load(grad_o + value_offsets, mask=mask, other=0.0).to(tl.float32)
        output_grad *= q_from_start_factor[:, None]
        state_grad *= chunk_decay
        state_grad += tl.dot(tl.trans(query), output_grad.to(key.dtype), input_precision=PRECISION)
        old_value_grad = rhs_grad * (-beta * k_from_start_factor)[:, None]
        state_grad += tl.dot(tl.trans(key), old_value_grad.to(key.dtype), input_precision=PRECISION)
    tl.store(grad_initial_state + head_state_offsets, state_grad, mask=state_mask)
