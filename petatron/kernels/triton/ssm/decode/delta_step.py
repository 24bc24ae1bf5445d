"""One step of the gated delta rule in Triton: a state is read and written once, in its slot.

A program has some columns of a head's state, those of as many value channels; what is stored under a key is a sum over its rows. Bytes,
Qwen3-Next (32 value heads of 128 x 128 in float32): 4.2 MB a sequence and layer, both ways; the inputs are 33 KB.

B sequences, H value heads, P value head dim, G key heads, N key head dim.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from petatron.kernels.ssm.decode.delta_step import DeltaGateInputs
from petatron.kernels.ssm.delta_recurrence import L2_EPS, query_scale
from petatron.kernels.triton.pdl import pdl_options_for, pdl_wait_and_trigger
from petatron.kernels.triton.ssm.decode.step_tiles import contiguous_tokens, softplus

_CHANNELS = 32
"""Value channels of a program: rows of 128 bytes."""


def delta_step(
    q_BGN: Tensor, k_BGN: Tensor, v_BHP: Tensor, gates: DeltaGateInputs, *, states: Tensor, slots_B: Tensor
) -> Tensor:
    """See the reference."""
    q, k, v, b, a = map(contiguous_tokens, (q_BGN, k_BGN, v_BHP, gates.b_BH, gates.a))
    count, heads, value_dim = v.shape
    key_heads, key_dim = k.shape[1:]
    o = torch.empty((count, heads, value_dim), dtype=v.dtype, device=v.device)
    channels = min(_CHANNELS, triton.next_power_of_2(value_dim))
    _delta_step[(triton.cdiv(value_dim, channels), heads, count)](
        (q, k, v, b, a, gates.A_log_H, gates.dt_bias, states, slots_B, o),
        query_scale(key_dim),
        L2_EPS,
        tuple(tensor.stride(0) for tensor in (q, k, v, b, a)),
        HEADS_PER_KEY=heads // key_heads,
        KEY_DIM=key_dim,
        ROWS=triton.next_power_of_2(key_dim),
        VALUE_DIM=value_dim,
        CHANNELS=channels,
        DECAY_BY_ROW=a.dim() == 3,
        num_warps=4,
        **pdl_options_for(count, v),
    )
    return o


@triton.jit
def _delta_step(
    tensors,
    q_scale,
    eps,
    strides,
    HEADS_PER_KEY: tl.constexpr,
    KEY_DIM: tl.constexpr,
    ROWS: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    CHANNELS: tl.constexpr,
    DECAY_BY_ROW: tl.constexpr,
    USE_PDL: tl.constexpr,
):
    """S' = exp(g) S + beta k (v - (exp(g) S)^T k)^T, o = S'^T q for some columns of one head's state S."""
    q, k, v, b, a, A_log, dt_bias, states, slots, o = tensors
    q_stride, k_stride, v_stride, b_stride, a_stride = strides
    pdl_wait_and_trigger(USE_PDL)
    head, num_heads, sequence = tl.program_id(1), tl.num_programs(1), tl.program_id(2).to(tl.int64)
    row, channel = tl.arange(0, ROWS), tl.program_id(0) * CHANNELS + tl.arange(0, CHANNELS)
    slot = tl.load(slots + sequence).to(tl.int64)
    state_pointers = (
        states + (slot * num_heads + head) * KEY_DIM * VALUE_DIM + row[:, None] * VALUE_DIM + channel[None, :]
    )
    state_mask = (row < KEY_DIM)[:, None] & (channel < VALUE_DIM)[None, :]
    state = tl.load(state_pointers, mask=state_mask, other=0.0).to(tl.float32)

    key_offsets = head // HEADS_PER_KEY * KEY_DIM + row
    query = _l2_normalized(q + sequence * q_stride + key_offsets, row < KEY_DIM, eps) * q_scale
    key = _l2_normalized(k + sequence * k_stride + key_offsets, row < KEY_DIM, eps)
    value_mask = channel < VALUE_DIM
    value = tl.load(v + sequence * v_stride + head * VALUE_DIM + channel, mask=value_mask, other=0.0).to(tl.float32)
    rate = tl.exp(tl.load(A_log + head).to(tl.float32))
    if DECAY_BY_ROW:
        row_offsets, row_mask = head * KEY_DIM + row, row < KEY_DIM
        step_input = tl.load(a + sequence * a_stride + row_offsets, mask=row_mask, other=0.0).to(tl.float32)
        step_input += tl.load(dt_bias + row_offsets, mask=row_mask, other=0.0).to(tl.float32)
        state = tl.exp(-rate * softplus(step_input))[:, None] * state
    else:
        step_input = tl.load(a + sequence * a_stride + head).to(tl.float32) + tl.load(dt_bias + head).to(tl.float32)
        state = tl.exp(-rate * softplus(step_input)) * state
    beta = tl.sigmoid(tl.load(b + sequence * b_stride + head).to(tl.float32))

    new_value = beta * (value - tl.sum(state * key[:, None], 0))
    state = state + key[:, None] * new_value[None, :]
    tl.store(state_pointers, state.to(states.dtype.element_ty), mask=state_mask)
    output = tl.sum(state * query[:, None], 0)
    output_pointers = o + (sequence * num_heads + head) * VALUE_DIM + channel
    tl.store(output_pointers, output.to(o.dtype.element_ty), mask=value_mask)


@triton.jit
def _l2_normalized(pointers, mask, eps):
    """Loads a vector x and returns x / sqrt(|x|^2 + eps)."""
    x = tl.load(pointers, mask=mask, other=0.0).to(tl.float32)
    return x * tl.rsqrt(tl.sum(x * x, 0) + eps)
