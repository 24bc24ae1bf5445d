"""The selective scan, sequential over chunks: a program has one head of one sequence and keeps its state in registers.

Forward and reverse are the same loop: the reverse scan is that of dy with B and C exchanged, from the last chunk to the first.

    forward     y_i = exp(s_i) h C_i + sum over j <= i of L_ij (C_i . B_j) dt_j x_j + D x_i
                h   = exp(s_Q) h + sum over j of exp(s_Q - s_j) dt_j x_j B_j^T
    reverse     g_j = exp(s_Q - s_j) dh B_j + sum over i >= j of L_ij (B_j . C_i) dy_i,      dx_j = dt_j g_j + D dy_j
                dh  = exp(s_Q) dh + sum over i of exp(s_i) dy_i C_i^T

with g the gradient of dt x; `scan_tiles.py` has the notation. Names say both: `x_or_dy` is x, in reverse dy; `B_or_C` is what is written
to a state with it, `C_or_B` what reads the state. Forward writes no state; in reverse the gradients of states are written, for those of
B. A third pass, forward without outputs, recomputes the states for the gradient of C. States are [N, P] here, as the GEMMs want them.

Tiles are described once on the host: a Hopper GPU copies them to shared memory by itself, and no thread holds their addresses. CB = C B^T
of a chunk, in reverse its transpose, is the same for all heads of a group, so it is computed once and read from the L2 cache.

S sequence, B batch, H heads, P head dim, G groups, N state dim; c chunks of Q tokens.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from petatron.kernels.triton.ssm.scan_tiles import (
    ChunkDecays,
    document_of,
    dot_precision,
    load_rows,
    state_masks,
)

MAX_HEAD_DIM, MAX_STATE_DIM = 64, 128
"""A state of 64 x 128 takes 64 registers of each of 128 threads."""


def scan_forward(
    x_SBHP: Tensor, B_SBGN: Tensor, C_SBGN: Tensor, D_H: Tensor, decays: ChunkDecays, initial_state: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Returns the outputs of all tokens [S, B, H, P], and the final state, in float32."""
    y = torch.empty(x_SBHP.shape, dtype=x_SBHP.dtype, device=x_SBHP.device)
    inputs = (x_SBHP, B_SBGN, C_SBGN)
    return y, _launch(inputs, y, D_H, decays, initial_state, None, reverse=False, num_stages=2)


def sequential_states(
    x_SBHP: Tensor, B_SBGN: Tensor, D_H: Tensor, decays: ChunkDecays, initial_state: Tensor | None
) -> Tensor:
    """Returns the states before the chunks [B, c, H, N, P] in the dtype of x."""
    states = _new_states(x_SBHP, B_SBGN, decays)
    inputs = (x_SBHP, B_SBGN, B_SBGN)  # without outputs nothing reads the state
    _launch(inputs, None, D_H, decays, initial_state, states, reverse=False, num_stages=3)
    return states


def scan_reverse(
    grad_y_SBHP: Tensor,
    B_SBGN: Tensor,
    C_SBGN: Tensor,
    D_H: Tensor,
    decays: ChunkDecays,
    grad_final_state: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Returns the gradients of x, of the states after the chunks [B, c, H, N, P], and of the initial state, in float32."""
    grad_x = torch.empty(grad_y_SBHP.shape, dtype=grad_y_SBHP.dtype, device=grad_y_SBHP.device)
    grad_states = _new_states(grad_y_SBHP, B_SBGN, decays)
    inputs = (grad_y_SBHP, C_SBGN, B_SBGN)
    grad_initial_state = _launch(inputs, grad_x, D_H, decays, grad_final_state, grad_states, reverse=True, num_stages=2)
    return grad_x, grad_states, grad_initial_state


def _new_states(x_SBHP: Tensor, B_SBGN: Tensor, decays: ChunkDecays) -> Tensor:
    batch, heads, head_dim = x_SBHP.shape[1:]
    shape = (batch, decays.num_chunks, heads, B_SBGN.shape[3], head_dim)
    return torch.empty(shape, dtype=x_SBHP.dtype, device=x_SBHP.device)


def chunk_CB(C_or_B_SBGN: Tensor, B_or_C_SBGN: Tensor, decays: ChunkDecays, *, reverse: bool) -> Tensor:
    """Returns C B^T, in reverse B C^T, of each chunk [B, c, G, Q, Q] in their dtype.

    Zero where L is: for a B of a later token than the C's, or of another document.
    """
    length, batch, groups, state_dim = B_or_C_SBGN.shape
    chunk_size, num_chunks = decays.chunk_size, decays.num_chunks
    shape = (batch, num_chunks, groups, chunk_size, chunk_size)
    CB = torch.empty(shape, dtype=B_or_C_SBGN.dtype, device=B_or_C_SBGN.device)
    _chunk_CB[(num_chunks, groups, batch)](
        (C_or_B_SBGN, B_or_C_SBGN, CB, decays.documents),
        (length, state_dim),
        (C_or_B_SBGN.stride()[:3], B_or_C_SBGN.stride()[:3]),
        CHUNK=chunk_size,
        STATE_DIM=state_dim,
        REVERSE=reverse,
        PRECISION=dot_precision(B_or_C_SBGN),
    )
    return CB


@triton.jit
def _chunk_CB(
    tensors,
    sizes,
    strides,
    CHUNK: tl.constexpr,
    STATE_DIM: tl.constexpr,
    REVERSE: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """CB_ij = C_i . B_j for j <= i of one document, else 0; REVERSE: its transpose."""
    chunk, group, b = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    C_or_B, B_or_C, CB, documents = tensors
    length, state_dim = sizes
    token = chunk * CHUNK + tl.arange(0, CHUNK)
    C_tile = load_rows(C_or_B, strides[0], token, b, group, state_dim, length, STATE_DIM)
    B_tile = load_rows(B_or_C, strides[1], token, b, group, state_dim, length, STATE_DIM)
    CB_tile = tl.dot(C_tile, tl.trans(B_tile), input_precision=PRECISION)
    row, column = tl.arange(0, CHUNK)[:, None], tl.arange(0, CHUNK)[None, :]
    causal = row <= column if REVERSE else column <= row
    if documents is not None:
        document = document_of(documents, token, b, length)
        causal = causal & (document[:, None] == document[None, :])
    CB_tile = tl.where(causal, CB_tile, 0.0)
    chunk_index = (b * tl.num_programs(0) + chunk) * tl.num_programs(1) + group
    offsets = tl.arange(0, CHUNK)[:, None] * CHUNK + tl.arange(0, CHUNK)[None, :]
    tl.store(CB + chunk_index.to(tl.int64) * CHUNK * CHUNK + offsets, CB_tile.to(CB.dtype.element_ty))


def row_descriptor(tensor: Tensor, tokens: int) -> TensorDescriptor:
    """Describes tiles of some tokens of one head [1, 1, tokens, P] of a tensor [S, B, H, P]; beyond its end are zeros."""
    by_head = tensor.permute(1, 2, 0, 3)
    return TensorDescriptor(tensor, list(by_head.shape), list(by_head.stride()), [1, 1, tokens, tensor.shape[3]])


def state_descriptor(states: Tensor, state_rows: int) -> TensorDescriptor:
    """Describes tiles [1, 1, state_rows, P] of the states of a tensor [..., H, N, P]."""
    flat = states.view(-1, *states.shape[-3:])
    return TensorDescriptor(flat, list(flat.shape), list(flat.stride()), [1, 1, state_rows, states.shape[-1]])


def _launch(
    inputs: tuple[Tensor, Tensor, Tensor],
    y_or_dx: Tensor | None,
    D_H: Tensor,
    decays: ChunkDecays,
    initial_state: Tensor | None,
    states: Tensor | None,
    *,
    reverse: bool,
    num_stages: int,
) -> Tensor:
    """Returns the state after the last chunk, in reverse its gradient before the first.

    inputs: x, B and C, in reverse dy, C and B. initial_state: in reverse the gradient of the final state; None: zero.
    y_or_dx, states: written where there are any.
    """
    x_or_dy_SBHP, B_or_C_SBGN, C_or_B_SBGN = inputs
    (length, batch, heads, head_dim), (groups, state_dim) = x_or_dy_SBHP.shape, B_or_C_SBGN.shape[2:]
    final_state = torch.empty((batch, heads, state_dim, head_dim), dtype=torch.float32, device=x_or_dy_SBHP.device)
    chunk_size = decays.chunk_size
    CB = None if y_or_dx is None else chunk_CB(C_or_B_SBGN, B_or_C_SBGN, decays, reverse=reverse)
    _sequential_scan[(batch * heads,)](
        row_descriptor(x_or_dy_SBHP, chunk_size),
        row_descriptor(B_or_C_SBGN, chunk_size),
        row_descriptor(C_or_B_SBGN, chunk_size),
        None if CB is None else TensorDescriptor.from_tensor(CB.view(-1, chunk_size), [chunk_size, chunk_size]),
        None if y_or_dx is None else row_descriptor(y_or_dx, chunk_size),
        states,
        decays.by_token,
        D_H,
        None if initial_state is None else state_descriptor(initial_state.float().mT.contiguous(), state_dim),
        state_descriptor(final_state, state_dim),
        (length, decays.num_chunks, heads, heads // groups),
        CHUNK=chunk_size,
        HEAD_DIM=head_dim,
        STATE_DIM=state_dim,
        REVERSE=reverse,
        PRECISION=dot_precision(x_or_dy_SBHP),
        num_warps=4,
        num_stages=num_stages,
    )
    return final_state.mT


@triton.jit
def _sequential_scan(
    x_or_dy,
    B_or_C,
    C_or_B,
    CB,
    y_or_dx,
    states,
    by_token,
    D,
    initial_state,
    final_state,
    sizes,
    CHUNK: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    STATE_DIM: tl.constexpr,
    REVERSE: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """y = exp(s) C h + (L * CB * dt) x + D x,  h = exp(s_Q) h + B^T (exp(s_Q - s) dt x)  over the chunks, with h [N, P].

    REVERSE: dx = exp(s_Q - s) dt B dh + dt (L * CB)^T dy + D dy,  dh = exp(s_Q) dh + C^T (exp(s) dy)  from the last chunk on.
    """
    dt, dA_cumsum, documents = by_token
    length, num_chunks, heads, heads_per_group = sizes
    b, head = tl.program_id(0) // heads, tl.program_id(0) % heads
    group = head // heads_per_group
    state = tl.zeros((STATE_DIM, HEAD_DIM), dtype=tl.float32)
    if initial_state is not None:
        state += initial_state.load([b, head, 0, 0]).reshape(STATE_DIM, HEAD_DIM)
    row_base = tl.program_id(0).to(tl.int64) * num_chunks * CHUNK
    dt += row_base
    dA_cumsum += row_base
    D_head = tl.load(D + head).to(tl.float32)
    DTYPE: tl.constexpr = x_or_dy.dtype
    for step in range(num_chunks):
        chunk = num_chunks - 1 - step if REVERSE else step
        first_token = chunk * CHUNK
        token = first_token + tl.arange(0, CHUNK)
        # What is loaded stays in registers until its last use, so every tile is loaded right before its first.
        if y_or_dx is not None:
            C_tile = C_or_B.load([b, group, first_token, 0]).reshape(CHUNK, STATE_DIM)
        rounded_state = state.to(DTYPE)
        if states is not None:
            state_base = ((b * num_chunks + chunk).to(tl.int64) * heads + head) * (STATE_DIM * HEAD_DIM)
            offsets = tl.arange(0, STATE_DIM)[:, None] * HEAD_DIM + tl.arange(0, HEAD_DIM)[None, :]
            tl.store(states + state_base + offsets, rounded_state)
        if y_or_dx is not None:
            y_tile = tl.dot(C_tile, rounded_state, input_precision=PRECISION)
        dA_cs, dt_tile = tl.load(dA_cumsum + token), tl.load(dt + token)
        dA_cs_last = tl.load(dA_cumsum + first_token + CHUNK - 1)
        reads_state, writes_state, passes_state = state_masks(documents, token, chunk, b, length, CHUNK)
        from_start = tl.where(reads_state, tl.exp(dA_cs), 0.0)
        to_end = tl.where(writes_state, tl.exp(dA_cs_last - dA_cs), 0.0)
        chunk_decay = tl.where(passes_state, tl.exp(dA_cs_last), 0.0)
        x_tile = x_or_dy.load([b, head, first_token, 0]).reshape(CHUNK, HEAD_DIM)
        x_f32 = x_tile.to(tl.float32)
        decay = from_start if REVERSE else to_end * dt_tile
        decayed_x = (x_f32 * decay[:, None]).to(DTYPE)
        if y_or_dx is not None:
            y_tile = y_tile * (to_end * dt_tile if REVERSE else from_start)[:, None] + D_head * x_f32
            chunk_index = (b * num_chunks + chunk) * (heads // heads_per_group) + group
            # Where CB is masked to 0, the exponent of L may be above 0: it is cut off, for 0 times infinity is not 0.
            exponent = dA_cs[None, :] - dA_cs[:, None] if REVERSE else dA_cs[:, None] - dA_cs[None, :]
            M = CB.load([chunk_index * CHUNK, 0]).to(tl.float32) * tl.exp(tl.minimum(exponent, 0.0))
            M *= dt_tile[:, None] if REVERSE else dt_tile[None, :]
            y_tile = tl.dot(M.to(DTYPE), x_tile, acc=y_tile, input_precision=PRECISION)
            y_or_dx.store([b, head, first_token, 0], y_tile.to(DTYPE).reshape(1, 1, CHUNK, HEAD_DIM))
        B_tile = B_or_C.load([b, group, first_token, 0]).reshape(CHUNK, STATE_DIM)
        state = tl.dot(tl.trans(B_tile), decayed_x, acc=state * chunk_decay, input_precision=PRECISION)
    final_state.store([b, head, 0, 0], state.reshape(1, 1, STATE_DIM, HEAD_DIM))
