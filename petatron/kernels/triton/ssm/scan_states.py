"""Chunk states and state passing, forward and backward: one kernel, which scans the chunks of a head in either direction.

    forward     h before chunk c + 1  = exp(s_Q) h before c  + sum over j of exp(s_Q - s_j) dt_j x_j B_j^T
    backward    dh before chunk c     = exp(s_Q) dh after c  + sum over i of exp(s_i) dy_i C_i^T

The second term is the chunk state of mamba_ssm, the first its state passing; here they are one loop. A program has one head of one sequence
and some columns of its state, in registers for the whole scan: a chunk's GEMM does not wait for the chunk before, so loads and GEMMs of the
next one overlap. The state that enters each chunk in the scan's direction is written. `scan_tiles.py` has the notation.

S sequence, B batch, H heads, P head dim, G groups, N state dim; c chunks.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from petatron.kernels.triton.ssm.scan_tiles import (
    ChunkDecays,
    dot_precision,
    load_rows,
    state_masks,
    state_offsets,
)

_COLUMNS = 128
"""Columns of a state that a program has."""


def chunk_states(
    x_or_dy_SBHP: Tensor, B_or_C_SBGN: Tensor, decays: ChunkDecays, initial_state: Tensor | None, *, reverse: bool
) -> tuple[Tensor, Tensor]:
    """Returns the states that enter the chunks [B, c, H, P, N] in the dtype of x, and the one after the last, in float32.

    reverse: takes dy and C instead of x and B, and returns the gradients of the states after the chunks and of the initial state.
    initial_state: the state before the first chunk, in reverse the gradient of the final state; None: zero.
    """
    length, batch, heads, head_dim = x_or_dy_SBHP.shape
    groups, state_dim = B_or_C_SBGN.shape[2:]
    shape = (batch, decays.num_chunks, heads, head_dim, state_dim)
    states = torch.empty(shape, dtype=x_or_dy_SBHP.dtype, device=x_or_dy_SBHP.device)
    final_state = torch.empty((batch, heads, head_dim, state_dim), dtype=torch.float32, device=x_or_dy_SBHP.device)
    columns = min(_COLUMNS, triton.next_power_of_2(max(state_dim, 16)))
    _chunk_states[(batch * heads, triton.cdiv(state_dim, columns))](
        (x_or_dy_SBHP, B_or_C_SBGN),
        decays.by_token,
        (None if initial_state is None else initial_state.contiguous(), states, final_state),
        (length, decays.num_chunks, heads, heads // groups, head_dim, state_dim),
        (x_or_dy_SBHP.stride()[:3], B_or_C_SBGN.stride()[:3]),
        CHUNK=decays.chunk_size,
        HEAD_DIM=triton.next_power_of_2(max(head_dim, 16)),
        COLUMNS=columns,
        REVERSE=reverse,
        PRECISION=dot_precision(x_or_dy_SBHP),
        num_warps=4 if reverse else 8,
        num_stages=2 if reverse else 3,
    )
    return states, final_state


@triton.jit
def _chunk_states(
    tensors,
    by_token,
    all_states,
    sizes,
    strides,
    CHUNK: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    COLUMNS: tl.constexpr,
    REVERSE: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """h = exp(s_Q) h + (exp(s_Q - s) dt x)^T B over the chunks; REVERSE: dh = exp(s_Q) dh + (exp(s) dy)^T C from the last on."""
    x_or_dy, B_or_C = tensors
    dt, dA_cumsum, documents = by_token
    initial_state, states, final_state = all_states
    length, num_chunks, heads, heads_per_group, head_dim, state_dim = sizes
    b, head = tl.program_id(0) // heads, tl.program_id(0) % heads
    first_column = tl.program_id(1) * COLUMNS
    offsets, mask = state_offsets(head_dim, state_dim, HEAD_DIM, COLUMNS)
    offsets, mask = offsets + first_column, mask & (first_column + tl.arange(0, COLUMNS)[None, :] < state_dim)
    state_size = head_dim * state_dim
    head_offsets = tl.program_id(0).to(tl.int64) * state_size + offsets
    state = tl.zeros((HEAD_DIM, COLUMNS), dtype=tl.float32)
    if initial_state is not None:
        state += tl.load(initial_state + head_offsets, mask=mask, other=0.0).to(tl.float32)
    row_base = tl.program_id(0).to(tl.int64) * num_chunks * CHUNK
    for step in range(num_chunks):
        chunk = num_chunks - 1 - step if REVERSE else step
        chunk_offsets = ((b.to(tl.int64) * num_chunks + chunk) * heads + head) * state_size + offsets
        tl.store(states + chunk_offsets, state.to(states.dtype.element_ty), mask=mask)
        token = chunk * CHUNK + tl.arange(0, CHUNK)
        x_tile = load_rows(x_or_dy, strides[0], token, b, head, head_dim, length, HEAD_DIM)
        B_columns, width, group = B_or_C + first_column, state_dim - first_column, head // heads_per_group
        B_tile = load_rows(B_columns, strides[1], token, b, group, width, length, COLUMNS)
        dA_cs = tl.load(dA_cumsum + row_base + token)
        dA_cs_last = tl.load(dA_cumsum + row_base + chunk * CHUNK + CHUNK - 1)
        decay, chunk_decay = _state_decays(dA_cs, dA_cs_last, documents, token, chunk, b, length, CHUNK, REVERSE)
        if not REVERSE:
            decay *= tl.load(dt + row_base + token)
        decayed_x = (x_tile.to(tl.float32) * decay[:, None]).to(x_tile.dtype)
        state = state * chunk_decay + tl.dot(tl.trans(decayed_x), B_tile, input_precision=PRECISION)
    tl.store(final_state + head_offsets, state, mask=mask)


@triton.jit
def _state_decays(dA_cs, dA_cs_last, documents, token, chunk, b, length, CHUNK: tl.constexpr, REVERSE: tl.constexpr):
    """Returns to_end = exp(s_Q - s_j), REVERSE: from_start = exp(s_i), of each token; and chunk_decay = exp(s_Q)."""
    decay, chunk_decay = tl.exp(dA_cs if REVERSE else dA_cs_last - dA_cs), tl.exp(dA_cs_last)
    if documents is not None:
        reads_state, writes_state, passes_state = state_masks(documents, token, chunk, b, length, CHUNK)
        decay = tl.where(reads_state if REVERSE else writes_state, decay, 0.0)
        chunk_decay = tl.where(passes_state, chunk_decay, 0.0)
    return decay, chunk_decay
