"""One step of Mamba-2's recurrence in Triton: a state is read and written once, in its slot.

A program has some rows of a head's state. Bytes, Mamba-2 2.7B (80 heads of 64 x 128 in float32): 5.2 MB a sequence and layer, both ways;
the inputs are 21 KB.

B sequences, H heads, P head dim, G groups, N state dim.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from petatron.kernels.ssm.decode.scan_step import ScanParams
from petatron.kernels.triton.pdl import pdl_options_for, pdl_wait_and_trigger
from petatron.kernels.triton.ssm.decode.step_tiles import contiguous_tokens, softplus

_ELEMENTS = 4096
"""Of a program's tile: 32 registers a thread, and 16 KB that are read at once."""


def scan_step(
    x_BHP: Tensor, dt_BH: Tensor, B_BGN: Tensor, C_BGN: Tensor, heads: ScanParams, *, states: Tensor, slots_B: Tensor
) -> Tensor:
    """See the reference."""
    x, dt, B, C = map(contiguous_tokens, (x_BHP, dt_BH, B_BGN, C_BGN))
    count, num_heads, head_dim = x.shape
    groups, state_dim = B.shape[1:]
    y = torch.empty((count, num_heads, head_dim), dtype=x.dtype, device=x.device)
    columns = triton.next_power_of_2(state_dim)
    rows = min(triton.next_power_of_2(head_dim), max(_ELEMENTS // columns, 1))
    _scan_step[(triton.cdiv(head_dim, rows), num_heads, count)](
        (x, dt, B, C, *heads, states, slots_B, y),
        tuple(tensor.stride(0) for tensor in (x, dt, B, C)),
        HEADS_PER_GROUP=num_heads // groups,
        HEAD_DIM=head_dim,
        ROWS=rows,
        STATE_DIM=state_dim,
        COLUMNS=columns,
        num_warps=4,
        **pdl_options_for(count, x),
    )
    return y


@triton.jit
def _scan_step(
    tensors,
    strides,
    HEADS_PER_GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    ROWS: tl.constexpr,
    STATE_DIM: tl.constexpr,
    COLUMNS: tl.constexpr,
    USE_PDL: tl.constexpr,
):
    """h' = exp(dt A) h + dt x B^T,  y = h' C + D x,  with dt = softplus(dt + dt_bias) and A = -exp(A_log), for some rows of a state."""
    x, dt, B, C, A_log, dt_bias, D, states, slots, y = tensors
    x_stride, dt_stride, B_stride, C_stride = strides
    pdl_wait_and_trigger(USE_PDL)
    head, num_heads, sequence = tl.program_id(1), tl.num_programs(1), tl.program_id(2).to(tl.int64)
    row, column = tl.program_id(0) * ROWS + tl.arange(0, ROWS), tl.arange(0, COLUMNS)
    slot = tl.load(slots + sequence).to(tl.int64)
    state_pointers = (
        states + (slot * num_heads + head) * HEAD_DIM * STATE_DIM + row[:, None] * STATE_DIM + column[None, :]
    )
    state_mask = (row < HEAD_DIM)[:, None] & (column < STATE_DIM)[None, :]
    state = tl.load(state_pointers, mask=state_mask, other=0.0).to(tl.float32)

    dt_input = tl.load(dt + sequence * dt_stride + head).to(tl.float32)
    dt_head = softplus(dt_input + tl.load(dt_bias + head).to(tl.float32))
    decay = tl.exp(-dt_head * tl.exp(tl.load(A_log + head).to(tl.float32)))
    x_head = tl.load(x + sequence * x_stride + head * HEAD_DIM + row, mask=row < HEAD_DIM, other=0.0).to(tl.float32)
    group_offsets = head // HEADS_PER_GROUP * STATE_DIM + column
    B_group = tl.load(B + sequence * B_stride + group_offsets, mask=column < STATE_DIM, other=0.0).to(tl.float32)
    C_group = tl.load(C + sequence * C_stride + group_offsets, mask=column < STATE_DIM, other=0.0).to(tl.float32)

    state = decay * state + (dt_head * x_head)[:, None] * B_group[None, :]
    tl.store(state_pointers, state.to(states.dtype.element_ty), mask=state_mask)
    y_head = tl.sum(state * C_group[None, :], 1) + tl.load(D + head).to(tl.float32) * x_head
    y_pointers = y + (sequence * num_heads + head) * HEAD_DIM + row
    tl.store(y_pointers, y_head.to(y.dtype.element_ty), mask=row < HEAD_DIM)
