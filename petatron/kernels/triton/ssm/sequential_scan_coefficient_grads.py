"""Gradients of B, C, D, dt and A after a sequential scan: from the states h before the chunks and the gradients dh of those after them.

Programs have one chunk of one sequence and loop over heads of a group, so that the sums over heads, which the gradients of B and C
are, stay in registers. `scan_tiles.py` has the notation.

    _intra_chunk_grads      dCB_ij = sum over heads of L_ij dt_j (dy_i . x_j);  dC = dCB B,  dB = dCB^T C;  of D
    _inter_chunk_grads      dC_i += sum over heads of exp(s_i) h^T dy_i;  dB_j += sum over heads of dt_j exp(s_Q - s_j) dh^T x_j;  <dh, h>
    _dt_A_grads             of dt and A, from the row and column sums that the other two store (`CumsumGrads`)

Gradients of the decays: every term of y and of the next state has one factor exp(e), with e = s_i - s_j, s_i or s_Q - s_j. The gradient
of e is the term times the term's gradient; it is added to ddA_cs at i (or Q) and subtracted at j. The factor exp(s_Q) of h adds
exp(s_Q) <dh, h> at Q. Then ddA_j = sum over i >= j of ddA_cs_i, inside the chunk. What is subtracted at j is dt_j <g_j, x_j>, with g the
gradient of dt x. As ddt_j = A ddA_j + <g_j, x_j> needs the same inner products, they are stored without dt_j.

No atomic adds: sums over parts of heads or of state rows, and for A and D over chunks, are taken afterwards in a fixed order.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from petatron.kernels.triton.ssm.scan_tiles import (
    ChunkDecays,
    causal_pairs,
    dot_precision,
    load_rows,
    num_head_parts,
    state_masks,
)
from petatron.kernels.triton.ssm.sequential_scan import row_descriptor, state_descriptor

_PROGRAMS = 512
"""The target number of programs: a few per multiprocessor."""
_STATE_ROWS = 64
"""Rows of a state [N, P] that a program of `_inter_chunk_grads` has: its sums over heads take 64 registers of each of 128 threads."""
_HEADS = 16


class CumsumGrads(NamedTuple):
    """Parts of ddA_cs, in float32: r_i = sum over j of dM_ij M_ij, and the inner product u_j = <g_j, x_j>; `_dt_A_grads` adds them up.

    intra_chunk: r, then u, of the terms inside the chunk [2, B, H, padded length].
    inter_chunk: r of the term that reads the state, then u of the term that writes it, for each part of the state's rows
        [2 N parts, B, H, padded length].
    dh_dot_h: <dh, h> of each part of the state's rows [N parts, c, B, H].
    """

    intra_chunk: Tensor
    inter_chunk: Tensor
    dh_dot_h: Tensor


def B_C_D_grads(
    grad_y_SBHP: Tensor,
    x_SBHP: Tensor,
    B_SBGN: Tensor,
    C_SBGN: Tensor,
    decays: ChunkDecays,
    states: Tensor,
    grad_states: Tensor,
) -> tuple[Tensor, Tensor, Tensor, CumsumGrads]:
    """Returns the gradients of B and C, in their dtype or float32, that of D, and what `dt_A_grads` takes.

    states: those before the chunks; grad_states: of those after them [B, c, H, N, P].
    """
    (length, batch, heads, head_dim), (groups, state_dim) = x_SBHP.shape, B_SBGN.shape[2:]
    num_chunks, chunk_size, state_rows = decays.num_chunks, decays.chunk_size, min(_STATE_ROWS, B_SBGN.shape[3])
    state_parts = triton.cdiv(state_dim, state_rows)
    head_parts = num_head_parts(heads // groups, programs=num_chunks * batch * groups, wanted=_PROGRAMS)

    def new(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
        return torch.empty(shape, dtype=dtype, device=x_SBHP.device)

    by_head, by_group = decays.dA_cumsum.shape, (head_parts, length, batch, groups, state_dim)
    cumsum_grads = CumsumGrads(
        intra_chunk=new(2, *by_head),
        inter_chunk=new(2 * state_parts, *by_head),
        dh_dot_h=new(state_parts, num_chunks, batch, heads),
    )
    grad_D, intra_chunk_B, intra_chunk_C = new(num_chunks, batch, heads), new(*by_group), new(*by_group)
    dtype = B_SBGN.dtype if head_parts == 1 else torch.float32
    grad_B, grad_C = (new(*by_group, dtype=dtype) for _ in range(2))
    descriptors = (row_descriptor(grad_y_SBHP, chunk_size), row_descriptor(x_SBHP, chunk_size))
    B_and_C = (B_SBGN, C_SBGN, B_SBGN.stride()[:3], C_SBGN.stride()[:3])
    constants = {
        "HEAD_PARTS": head_parts,
        "CHUNK": chunk_size,
        "HEAD_DIM": head_dim,
        "PRECISION": dot_precision(x_SBHP),
    }
    sizes = (length, num_chunks, batch, groups, heads, heads // groups // head_parts, state_dim)
    _intra_chunk_grads[(num_chunks * head_parts, groups, batch)](
        *descriptors,
        *B_and_C,
        decays.by_token,
        (cumsum_grads.intra_chunk, grad_D, intra_chunk_B, intra_chunk_C),
        sizes,
        STATE_DIM=state_dim,
        **constants,
        num_warps=4,
        num_stages=3,
    )
    _inter_chunk_grads[(state_parts * num_chunks * head_parts, groups, batch)](
        *descriptors,
        state_descriptor(states, state_rows),
        state_descriptor(grad_states, state_rows),
        *B_and_C,
        decays.by_token,
        (cumsum_grads.inter_chunk, cumsum_grads.dh_dot_h, intra_chunk_B, intra_chunk_C, grad_B, grad_C),
        sizes,
        STATE_ROWS=state_rows,
        STATE_PARTS=state_parts,
        **constants,
        num_warps=4,
        num_stages=3,
    )
    grad_B, grad_C = (grad[0] if head_parts == 1 else grad.sum(dim=0) for grad in (grad_B, grad_C))
    return grad_B, grad_C, grad_D.sum(dim=(0, 1)), cumsum_grads


@triton.jit
def _intra_chunk_grads(
    grad_y,
    x,
    B,
    C,
    B_strides,
    C_strides,
    by_token,
    grads,
    sizes,
    HEAD_PARTS: tl.constexpr,
    CHUNK: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    STATE_DIM: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """dCB = sum over heads of L * (dy x^T) * dt;  dC = dCB B,  dB = dCB^T C;  the gradient of D = trace(dy x^T).

    Of dM * M, the gradient of the exponents in L: its row sums, at i; and its column sums without dt, at j.
    """
    chunk, head_part = tl.program_id(0) // HEAD_PARTS, tl.program_id(0) % HEAD_PARTS
    group, b = tl.program_id(1), tl.program_id(2)
    dt, dA_cumsum, documents = by_token
    grad_dA_cumsum, grad_D, grad_B, grad_C = grads
    length, num_chunks, batch, groups, heads, heads_per_part, state_dim = sizes
    first_token = chunk * CHUNK
    token = first_token + tl.arange(0, CHUNK)
    C_tile = load_rows(C, C_strides, token, b, group, state_dim, length, STATE_DIM)
    B_tile = load_rows(B, B_strides, token, b, group, state_dim, length, STATE_DIM)
    row, column = tl.arange(0, CHUNK)[:, None], tl.arange(0, CHUNK)[None, :]
    causal = causal_pairs(documents, token, b, length, CHUNK)
    CB = tl.where(causal, tl.dot(C_tile, tl.trans(B_tile), input_precision=PRECISION), 0.0)
    dCB = tl.zeros((CHUNK, CHUNK), dtype=tl.float32)
    first_head = (group * HEAD_PARTS + head_part) * heads_per_part
    num_rows = tl.cast(batch, tl.int64) * heads * num_chunks * CHUNK
    for head in range(first_head, first_head + heads_per_part):
        offsets = (b * heads + head).to(tl.int64) * num_chunks * CHUNK + token
        x_tile = x.load([b, head, first_token, 0]).reshape(CHUNK, HEAD_DIM)
        dy = grad_y.load([b, head, first_token, 0]).reshape(CHUNK, HEAD_DIM)
        dA_cs, dt_tile = tl.load(dA_cumsum + offsets), tl.load(dt + offsets)
        dy_x = tl.dot(dy, tl.trans(x_tile), input_precision=PRECISION)
        tl.store(grad_D + (chunk * batch + b) * heads + head, tl.sum(tl.where(row == column, dy_x, 0.0)))
        L_dy_x = dy_x * tl.exp(tl.minimum(dA_cs[:, None] - dA_cs[None, :], 0.0))
        tl.store(grad_dA_cumsum + num_rows + offsets, tl.sum(L_dy_x * CB, axis=0))
        head_dCB = L_dy_x * dt_tile[None, :]
        dCB += head_dCB
        tl.store(grad_dA_cumsum + offsets, tl.sum(head_dCB * CB, axis=1))
    # The decays above have no mask: it was in CB, and the sum over heads is masked here.
    rounded_dCB = tl.where(causal_pairs(documents, token, b, length, CHUNK), dCB, 0.0).to(C_tile.dtype)
    n = tl.arange(0, STATE_DIM)[None, :]
    offsets = (((head_part * length + token.to(tl.int64)) * batch + b) * groups + group)[:, None] * state_dim + n
    mask = (token < length)[:, None] & (n < state_dim)
    tl.store(grad_C + offsets, tl.dot(rounded_dCB, B_tile, input_precision=PRECISION), mask=mask)
    tl.store(grad_B + offsets, tl.dot(tl.trans(rounded_dCB), C_tile, input_precision=PRECISION), mask=mask)


@triton.jit
def _inter_chunk_grads(
    grad_y,
    x,
    states,
    grad_states,
    B,
    C,
    B_strides,
    C_strides,
    by_token,
    grads,
    sizes,
    HEAD_PARTS: tl.constexpr,
    CHUNK: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    STATE_ROWS: tl.constexpr,
    STATE_PARTS: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """dC = intra-chunk part + sum over heads of from_start dy h^T;  dB = intra-chunk part + sum over heads of dt to_end x dh^T.

    For some of the state's rows, states being [N, P]. Also <dh, h>, and of the products' exponents ddA_cs at i, and at j without dt.
    """
    state_part, chunk_and_head_part = tl.program_id(0) % STATE_PARTS, tl.program_id(0) // STATE_PARTS
    chunk, head_part = chunk_and_head_part // HEAD_PARTS, chunk_and_head_part % HEAD_PARTS
    group, b = tl.program_id(1), tl.program_id(2)
    dt, dA_cumsum, documents = by_token
    grad_dA_cumsum, dh_dot_h, intra_chunk_B, intra_chunk_C, grad_B, grad_C = grads
    length, num_chunks, batch, groups, heads, heads_per_part, state_dim = sizes
    first_token = chunk * CHUNK
    token = first_token + tl.arange(0, CHUNK)
    reads_state, writes_state, _ = state_masks(documents, token, chunk, b, length, CHUNK)
    n = state_part * STATE_ROWS + tl.arange(0, STATE_ROWS)[None, :]
    C_tile = load_rows(
        C + state_part * STATE_ROWS, C_strides, token, b, group, state_dim - state_part * STATE_ROWS, length, STATE_ROWS
    )
    B_tile = load_rows(
        B + state_part * STATE_ROWS, B_strides, token, b, group, state_dim - state_part * STATE_ROWS, length, STATE_ROWS
    )
    dC = tl.zeros((CHUNK, STATE_ROWS), dtype=tl.float32)
    dB = tl.zeros((CHUNK, STATE_ROWS), dtype=tl.float32)
    first_head = (group * HEAD_PARTS + head_part) * heads_per_part
    num_rows = tl.cast(batch, tl.int64) * heads * num_chunks * CHUNK
    grad_dA_cumsum += state_part * 2 * num_rows
    for head in range(first_head, first_head + heads_per_part):
        offsets = (b * heads + head).to(tl.int64) * num_chunks * CHUNK + token
        state_index = b * num_chunks + chunk
        dA_cs, dt_tile = tl.load(dA_cumsum + offsets), tl.load(dt + offsets)
        row_base = (b * heads + head).to(tl.int64) * num_chunks * CHUNK
        dA_cs_last = tl.load(dA_cumsum + row_base + first_token + CHUNK - 1)
        dy = grad_y.load([b, head, first_token, 0]).reshape(CHUNK, HEAD_DIM)
        state = states.load([state_index, head, state_part * STATE_ROWS, 0]).reshape(STATE_ROWS, HEAD_DIM)
        head_dC = tl.dot(dy, tl.trans(state), input_precision=PRECISION)
        head_dC *= tl.where(reads_state, tl.exp(dA_cs), 0.0)[:, None]
        dC += head_dC
        tl.store(grad_dA_cumsum + offsets, tl.sum(head_dC * C_tile.to(tl.float32), axis=1))
        dstate = grad_states.load([state_index, head, state_part * STATE_ROWS, 0]).reshape(STATE_ROWS, HEAD_DIM)
        inner_product = tl.sum(state.to(tl.float32) * dstate.to(tl.float32))
        tl.store(dh_dot_h + ((state_part * num_chunks + chunk) * batch + b) * heads + head, inner_product)
        x_tile = x.load([b, head, first_token, 0]).reshape(CHUNK, HEAD_DIM)
        to_end = tl.where(writes_state, tl.exp(dA_cs_last - dA_cs), 0.0)
        x_dstate = tl.dot(x_tile, tl.trans(dstate), input_precision=PRECISION)
        x_dstate *= to_end[:, None]
        tl.store(grad_dA_cumsum + num_rows + offsets, tl.sum(x_dstate * B_tile.to(tl.float32), axis=1))
        dB += x_dstate * dt_tile[:, None]
    offsets = (((head_part * length + token.to(tl.int64)) * batch + b) * groups + group)[:, None] * state_dim + n
    mask = (token < length)[:, None] & (n < state_dim)
    dC += tl.load(intra_chunk_C + offsets, mask=mask, other=0.0)
    dB += tl.load(intra_chunk_B + offsets, mask=mask, other=0.0)
    tl.store(grad_C + offsets, dC.to(grad_C.dtype.element_ty), mask=mask)
    tl.store(grad_B + offsets, dB.to(grad_B.dtype.element_ty), mask=mask)


def dt_A_grads(A_H: Tensor, decays: ChunkDecays, cumsum_grads: CumsumGrads, *, length: int) -> tuple[Tensor, Tensor]:
    """Returns the gradients of dt [S, B, H] and of A [H] in float32."""
    batch, heads = decays.dA_cumsum.shape[:2]
    num_chunks = decays.num_chunks
    grad_dt = torch.empty((length, batch, heads), dtype=torch.float32, device=A_H.device)
    grad_A = torch.empty((num_chunks, batch, heads), dtype=torch.float32, device=A_H.device)
    _dt_A_grads[(num_chunks, batch, triton.cdiv(heads, _HEADS))](
        A_H,
        decays.by_token,
        tuple(cumsum_grads),
        (grad_dt, grad_A),
        (length, heads),
        STATE_PARTS=len(cumsum_grads.dh_dot_h),
        CHUNK=decays.chunk_size,
        HEADS=_HEADS,
    )
    return grad_dt, grad_A.sum(dim=(0, 1))


@triton.jit
def _dt_A_grads(
    A,
    by_token,
    cumsum_grads,
    grads,
    sizes,
    STATE_PARTS: tl.constexpr,
    CHUNK: tl.constexpr,
    HEADS: tl.constexpr,
):
    """Adds up the parts in `CumsumGrads`, r and u, to the gradients of dt and A.

    u_j       = u_intra_j + u_inter_j  =  <g_j, x_j>
    ddA_cs_i  = r_intra_i + r_inter_i - dt_i u_i
    ddA_cs_Q += sum over j of dt_j u_inter_j + chunk_decay <dh, h>
    ddA_j     = sum over i >= j of ddA_cs_i
    ddt_j     = A ddA_j + u_j;    the gradient of A = sum over j of dt_j ddA_j
    """
    chunk, b, num_chunks, batch = tl.program_id(0), tl.program_id(1), tl.num_programs(0), tl.num_programs(1)
    dt, dA_cumsum, documents = by_token
    intra_chunk, inter_chunk, dh_dot_h = cumsum_grads
    grad_dt, grad_A = grads
    length, heads = sizes
    head = tl.program_id(2) * HEADS + tl.arange(0, HEADS)
    token = chunk * CHUNK + tl.arange(0, CHUNK)
    mask = (head < heads)[:, None]
    row_base = (b * heads + head).to(tl.int64) * num_chunks * CHUNK
    num_rows = tl.cast(batch, tl.int64) * heads * num_chunks * CHUNK
    offsets = row_base[:, None] + token[None, :]
    _, _, passes_state = state_masks(documents, token, chunk, b, length, CHUNK)
    chunk_offsets = (chunk * batch + b) * heads + head
    inner_product = tl.zeros((HEADS,), dtype=tl.float32)
    inter_chunk_g_x = tl.zeros((HEADS, CHUNK), dtype=tl.float32)
    ddA_cs = tl.load(intra_chunk + offsets, mask=mask, other=0.0)
    for part in tl.static_range(STATE_PARTS):
        ddA_cs += tl.load(inter_chunk + part * 2 * num_rows + offsets, mask=mask, other=0.0)
        inter_chunk_g_x += tl.load(inter_chunk + (part * 2 + 1) * num_rows + offsets, mask=mask, other=0.0)
        part_offsets = part * num_chunks * batch * heads
        inner_product += tl.load(dh_dot_h + part_offsets + chunk_offsets, mask=head < heads, other=0.0)
    dt_tile = tl.load(dt + offsets, mask=mask, other=0.0)
    g_x = tl.load(intra_chunk + num_rows + offsets, mask=mask, other=0.0) + inter_chunk_g_x
    ddA_cs -= g_x * dt_tile
    dA_cs_last = tl.load(dA_cumsum + row_base + chunk * CHUNK + CHUNK - 1, mask=head < heads, other=0.0)
    ddA_cs_last = tl.sum(inter_chunk_g_x * dt_tile, axis=1)
    ddA_cs_last += tl.where(passes_state, tl.exp(dA_cs_last), 0.0) * inner_product
    ddA = (tl.sum(ddA_cs, axis=1) + ddA_cs_last)[:, None] - tl.cumsum(ddA_cs, axis=1) + ddA_cs
    A_head = tl.load(A + head, mask=head < heads, other=0.0).to(tl.float32)
    dt_offsets = (token.to(tl.int64)[None, :] * batch + b) * heads + head[:, None]
    tl.store(grad_dt + dt_offsets, ddA * A_head[:, None] + g_x, mask=mask & (token < length)[None, :])
    tl.store(grad_A + chunk_offsets, tl.sum(ddA * dt_tile, axis=1), mask=head < heads)
