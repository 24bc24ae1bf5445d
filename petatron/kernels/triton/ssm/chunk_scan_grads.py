"""Gradients of the selective scan from the states h before its chunks and the gradients dh of the states after them.

Programs have one chunk of one sequence and loop over heads of a group, so that the sums over heads, which the gradients of B and C
are, stay in registers; three kernels, since one has too few registers for all of them. `scan_tiles.py` has the notation; g is the gradient
of dt_j x_j.

    _CB_grads       dCB_ij = sum over heads of L_ij dt_j (dy_i . x_j);  dC = dCB B,  dB = dCB^T C;  the intra-chunk part of ddA_cs
    _C_grads        dC_i += sum over heads of exp(s_i) h^T dy_i;  ddA_cs_i += exp(s_i) dy_i^T h C_i;  <dh, h>
    _x_dt_B_grads   g_j = sum over i >= j of L_ij (C_i . B_j) dy_i + exp(s_Q - s_j) dh B_j;  of x, dt, A, D
                    dB_j += sum over heads of dt_j exp(s_Q - s_j) dh^T x_j

Gradients of the decays: every term of y and of the next state has one factor exp(e), with e = s_i - s_j, s_i or s_Q - s_j. The gradient
of e is the term times the term's gradient; it is added to ddA_cs at i (or Q) and subtracted at j. The factor exp(s_Q) of h adds
exp(s_Q) <dh, h> at Q. Then ddA_j = sum over i >= j of ddA_cs_i, inside the chunk.

No atomic adds: sums over parts of heads, and for A and D over chunks, are taken afterwards in a fixed order.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from petatron.kernels.triton.ssm.scan_tiles import (
    ChunkDecays,
    decay_matrix,
    document_of,
    load_rows,
    num_head_parts,
    scan_constants,
    state_masks,
    state_offsets,
)

_PROGRAMS = 512
"""The wanted number of programs, if there are enough heads: some for every multiprocessor."""


def chunk_grads(
    grad_y_SBHP: Tensor,
    x_SBHP: Tensor,
    A_H: Tensor,
    B_SBGN: Tensor,
    C_SBGN: Tensor,
    D_H: Tensor,
    decays: ChunkDecays,
    states: Tensor,
    grad_states: Tensor,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Returns the gradients of x, in its dtype, and of dt, A, B, C and D, in float32."""
    length, batch, heads, head_dim = x_SBHP.shape
    groups, state_dim = B_SBGN.shape[2:]
    num_chunks = decays.num_chunks
    head_parts = num_head_parts(heads // groups, programs=num_chunks * batch * groups, wanted=_PROGRAMS)

    def new(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
        return torch.empty(shape, dtype=dtype, device=x_SBHP.device)

    grad_x, grad_dt = new(*x_SBHP.shape, dtype=x_SBHP.dtype), new(length, batch, heads)
    grad_dA_cumsum = torch.empty_like(decays.dA_cumsum)
    dh_dot_h, grad_A, grad_D = (new(num_chunks, batch, heads) for _ in range(3))
    grad_B, grad_C = (new(head_parts, length, batch, groups, state_dim) for _ in range(2))
    grid = (num_chunks * head_parts, groups, batch)
    sizes = (length, num_chunks, heads, heads // groups // head_parts, head_dim, state_dim)
    constants = scan_constants(decays, x_SBHP, B_SBGN, head_parts)
    inputs = (grad_y_SBHP, x_SBHP, B_SBGN, C_SBGN)
    strides = tuple(tensor.stride()[:3] for tensor in inputs)
    group_grads = (grad_B, grad_C, grad_B.stride()[:4])
    shared = (inputs, strides, decays.by_token, grad_dA_cumsum, group_grads)
    _CB_grads[grid](*shared, sizes, **constants, num_warps=4, num_stages=3)
    _C_grads[grid](*shared, (states, grad_states), dh_dot_h, sizes, **constants, num_warps=4, num_stages=3)
    grads = (grad_x, grad_dt, grad_A, grad_D)
    _x_dt_B_grads[grid](
        *shared,
        *(grad_states, dh_dot_h, (A_H, D_H), grads, grad_x.stride()[:3], sizes),
        **constants,
        num_warps=4,
        num_stages=1,
    )
    grad_B, grad_C = (grad[0] if head_parts == 1 else grad.sum(dim=0) for grad in (grad_B, grad_C))
    return grad_x, grad_dt, grad_A.sum(dim=(0, 1)), grad_B, grad_C, grad_D.sum(dim=(0, 1))


@triton.jit
def _CB_grads(
    inputs,
    strides,
    by_token,
    grad_dA_cumsum,
    group_grads,
    sizes,
    HEAD_PARTS: tl.constexpr,
    CHUNK: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    STATE_DIM: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """dCB = sum over heads of L * (dy x^T) * dt;  dC = dCB B,  dB = dCB^T C;  ddA_cs = row sums less column sums of dM * M.

    dM * M, the gradient of the exponents in L, is CB times a head's part of dCB.
    """
    chunk, head_part = tl.program_id(0) // HEAD_PARTS, tl.program_id(0) % HEAD_PARTS
    group, b = tl.program_id(1), tl.program_id(2)
    grad_y, x, B, C = inputs
    dt, dA_cumsum, documents = by_token
    length, num_chunks, heads, heads_per_part, head_dim, state_dim = sizes
    token = chunk * CHUNK + tl.arange(0, CHUNK)
    C_tile = load_rows(C, strides[3], token, b, group, state_dim, length, STATE_DIM)
    B_tile = load_rows(B, strides[2], token, b, group, state_dim, length, STATE_DIM)
    CB = tl.dot(C_tile, tl.trans(B_tile), input_precision=PRECISION)
    document = token if documents is None else document_of(documents, token, b, length)
    dCB = tl.zeros((CHUNK, CHUNK), dtype=tl.float32)
    first_head = (group * HEAD_PARTS + head_part) * heads_per_part
    for head in range(first_head, first_head + heads_per_part):
        offsets = (b * heads + head).to(tl.int64) * num_chunks * CHUNK + token
        x_tile = load_rows(x, strides[1], token, b, head, head_dim, length, HEAD_DIM)
        dy = load_rows(grad_y, strides[0], token, b, head, head_dim, length, HEAD_DIM)
        dA_cs, dt_tile = tl.load(dA_cumsum + offsets), tl.load(dt + offsets)
        head_dCB = tl.dot(dy, tl.trans(x_tile), input_precision=PRECISION) * dt_tile[None, :]
        head_dCB *= decay_matrix(dA_cs, document, CHUNK, documents is not None)
        dCB += head_dCB
        dM_M = head_dCB * CB
        tl.store(grad_dA_cumsum + offsets, tl.sum(dM_M, axis=1) - tl.sum(dM_M, axis=0))
    rounded_dCB = dCB.to(C_tile.dtype)
    grad_B, grad_C, group_grad_strides = group_grads
    offsets, mask = _group_grad_offsets(head_part, token, b, group, group_grad_strides, length, state_dim, STATE_DIM)
    tl.store(grad_C + offsets, tl.dot(rounded_dCB, B_tile, input_precision=PRECISION), mask=mask)
    tl.store(grad_B + offsets, tl.dot(tl.trans(rounded_dCB), C_tile, input_precision=PRECISION), mask=mask)


@triton.jit
def _C_grads(
    inputs,
    strides,
    by_token,
    grad_dA_cumsum,
    group_grads,
    both_states,
    dh_dot_h,
    sizes,
    HEAD_PARTS: tl.constexpr,
    CHUNK: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    STATE_DIM: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """dC += sum over heads of (exp(s) dy) h;  ddA_cs += row sums of (exp(s) dy) h * C;  <dh, h>: the inter-chunk output."""
    chunk, head_part = tl.program_id(0) // HEAD_PARTS, tl.program_id(0) % HEAD_PARTS
    group, b = tl.program_id(1), tl.program_id(2)
    grad_y, _, _, C = inputs
    _, dA_cumsum, documents = by_token
    states, grad_states = both_states
    length, num_chunks, heads, heads_per_part, head_dim, state_dim = sizes
    token = chunk * CHUNK + tl.arange(0, CHUNK)
    C_tile = load_rows(C, strides[3], token, b, group, state_dim, length, STATE_DIM).to(tl.float32)
    reads_state, _, _ = state_masks(documents, token, chunk, b, length, CHUNK)
    state_tile_offsets, state_mask = state_offsets(head_dim, state_dim, HEAD_DIM, STATE_DIM)
    _, grad_C, group_grad_strides = group_grads
    dC_offsets, dC_mask = _group_grad_offsets(
        head_part, token, b, group, group_grad_strides, length, state_dim, STATE_DIM
    )
    dC = tl.load(grad_C + dC_offsets, mask=dC_mask, other=0.0)
    first_head = (group * HEAD_PARTS + head_part) * heads_per_part
    for head in range(first_head, first_head + heads_per_part):
        offsets = (b * heads + head).to(tl.int64) * num_chunks * CHUNK + token
        state_base = ((b.to(tl.int64) * num_chunks + chunk) * heads + head) * head_dim * state_dim
        head_state_offsets = state_base + state_tile_offsets
        dy = load_rows(grad_y, strides[0], token, b, head, head_dim, length, HEAD_DIM)
        state = tl.load(states + head_state_offsets, mask=state_mask, other=0.0)
        dstate = tl.load(grad_states + head_state_offsets, mask=state_mask, other=0.0)
        from_start = tl.where(reads_state, tl.exp(tl.load(dA_cumsum + offsets)), 0.0)
        decayed_dy = (dy.to(tl.float32) * from_start[:, None]).to(dy.dtype)
        head_dC = tl.dot(decayed_dy, state, input_precision=PRECISION)
        dC += head_dC
        ddA_cs = tl.load(grad_dA_cumsum + offsets) + tl.sum(head_dC * C_tile, axis=1)
        tl.store(grad_dA_cumsum + offsets, ddA_cs)
        inner_product = tl.sum(tl.sum(state.to(tl.float32) * dstate.to(tl.float32), axis=1), axis=0)
        tl.store(dh_dot_h + (chunk * tl.num_programs(2) + b) * heads + head, inner_product)
    tl.store(grad_C + dC_offsets, dC, mask=dC_mask)


@triton.jit
def _x_dt_B_grads(
    inputs,
    strides,
    by_token,
    grad_dA_cumsum,
    group_grads,
    grad_states,
    dh_dot_h,
    weights,
    grads,
    grad_x_strides,
    sizes,
    HEAD_PARTS: tl.constexpr,
    CHUNK: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    STATE_DIM: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """g = (L * CB)^T dy + to_end B dh^T, the gradient of dt x;  dx = dt g + D dy;  dB += sum over heads of (dt to_end x) dh.

    ddA_cs -= <to_end B dh^T, x> dt, whose sum goes to s_Q, as does chunk_decay <dh, h>;  ddA = reverse cumsum of ddA_cs;
    ddt = A ddA + <g, x>;  the gradient of A = <dt, ddA>, that of D = <dy, x>.
    """
    chunk, head_part = tl.program_id(0) // HEAD_PARTS, tl.program_id(0) % HEAD_PARTS
    group, b = tl.program_id(1), tl.program_id(2)
    grad_y, x, B, C = inputs
    dt, dA_cumsum, documents = by_token
    A, D = weights
    grad_x, grad_dt, grad_A, grad_D = grads
    length, num_chunks, heads, heads_per_part, head_dim, state_dim = sizes
    token = chunk * CHUNK + tl.arange(0, CHUNK)
    C_tile = load_rows(C, strides[3], token, b, group, state_dim, length, STATE_DIM)
    B_tile = load_rows(B, strides[2], token, b, group, state_dim, length, STATE_DIM)
    CB_transposed = tl.dot(B_tile, tl.trans(C_tile), input_precision=PRECISION)  # [j, i]
    document = token if documents is None else document_of(documents, token, b, length)
    _, writes_state, passes_state = state_masks(documents, token, chunk, b, length, CHUNK)
    state_tile_offsets, state_mask = state_offsets(head_dim, state_dim, HEAD_DIM, STATE_DIM)
    column = tl.arange(0, HEAD_DIM)[None, :]
    x_mask = (token < length)[:, None] & (column < head_dim)
    grad_B, _, group_grad_strides = group_grads
    dB_offsets, dB_mask = _group_grad_offsets(
        head_part, token, b, group, group_grad_strides, length, state_dim, STATE_DIM
    )
    dB = tl.load(grad_B + dB_offsets, mask=dB_mask, other=0.0)
    first_head = (group * HEAD_PARTS + head_part) * heads_per_part
    for head in range(first_head, first_head + heads_per_part):
        offsets = (b * heads + head).to(tl.int64) * num_chunks * CHUNK + token
        state_base = ((b.to(tl.int64) * num_chunks + chunk) * heads + head) * head_dim * state_dim
        head_state_offsets = state_base + state_tile_offsets
        chunk_offset = (chunk * tl.num_programs(2) + b) * heads + head
        x_tile = load_rows(x, strides[1], token, b, head, head_dim, length, HEAD_DIM)
        dy = load_rows(grad_y, strides[0], token, b, head, head_dim, length, HEAD_DIM)
        dstate = tl.load(grad_states + head_state_offsets, mask=state_mask, other=0.0)
        dA_cs, dt_tile = tl.load(dA_cumsum + offsets), tl.load(dt + offsets)
        row_base = (b * heads + head).to(tl.int64) * num_chunks * CHUNK
        dA_cs_last = tl.load(dA_cumsum + row_base + chunk * CHUNK + CHUNK - 1)
        x_f32, dy_f32 = x_tile.to(tl.float32), dy.to(tl.float32)
        to_end = tl.where(writes_state, tl.exp(dA_cs_last - dA_cs), 0.0)
        g = tl.dot(B_tile, tl.trans(dstate), input_precision=PRECISION) * to_end[:, None]
        to_end_grad = tl.sum(g * x_f32, axis=1) * dt_tile
        L_transposed = decay_matrix(dA_cs, document, CHUNK, documents is not None, TRANSPOSED=True)
        g += tl.dot((CB_transposed * L_transposed).to(x_tile.dtype), dy, input_precision=PRECISION)
        decayed_x = (x_f32 * (dt_tile * to_end)[:, None]).to(x_tile.dtype)
        dB += tl.dot(decayed_x, dstate, input_precision=PRECISION)

        ddA_cs = tl.load(grad_dA_cumsum + offsets) - to_end_grad
        ddA_cs_last = tl.sum(to_end_grad, axis=0)
        ddA_cs_last += tl.where(passes_state, tl.exp(dA_cs_last), 0.0) * tl.load(dh_dot_h + chunk_offset)
        ddA = tl.sum(ddA_cs, axis=0) - tl.cumsum(ddA_cs, axis=0) + ddA_cs + ddA_cs_last
        ddt = ddA * tl.load(A + head).to(tl.float32) + tl.sum(g * x_f32, axis=1)
        tl.store(grad_dt + (token.to(tl.int64) * tl.num_programs(2) + b) * heads + head, ddt, mask=token < length)
        row = token.to(tl.int64)[:, None] * grad_x_strides[0] + b * grad_x_strides[1] + head * grad_x_strides[2]
        dx = g * dt_tile[:, None] + tl.load(D + head).to(tl.float32) * dy_f32
        tl.store(grad_x + row + column, dx.to(x_tile.dtype), mask=x_mask)
        tl.store(grad_A + chunk_offset, tl.sum(ddA * dt_tile, axis=0))
        tl.store(grad_D + chunk_offset, tl.sum(tl.sum(x_f32 * dy_f32, axis=1), axis=0))
    tl.store(grad_B + dB_offsets, dB, mask=dB_mask)


@triton.jit
def _group_grad_offsets(head_part, token, b, group, strides, length, state_dim, STATE_DIM: tl.constexpr):
    """Returns the offsets of a chunk's rows of dB or dC, summed over a part of a group's heads, and their mask."""
    column = tl.arange(0, STATE_DIM)[None, :]
    part_and_token = head_part.to(tl.int64) * strides[0] + token.to(tl.int64)[:, None] * strides[1]
    row = part_and_token + b * strides[2] + group * strides[3]
    return row + column, (token < length)[:, None] & (column < state_dim)
