"""One step of the causal convolution in Triton: a program reads its channels of a window, convolves and shifts them in place.

B sequences, C channels, W taps.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from petatron.kernels.triton.pdl import pdl_options_for, pdl_wait_and_trigger
from petatron.kernels.triton.ssm.decode.step_tiles import contiguous_tokens

_CHANNELS = 256


def conv_step(x_BC: Tensor, weight_CW: Tensor, bias_C: Tensor | None, *, windows: Tensor, slots_B: Tensor) -> Tensor:
    """See the reference."""
    x = contiguous_tokens(x_BC)
    count, channels = x.shape
    y = torch.empty((count, channels), dtype=x.dtype, device=x.device)
    _conv_step[(triton.cdiv(channels, _CHANNELS), count)](
        (x, weight_CW.contiguous(), bias_C, windows, slots_B, y),
        channels,
        x.stride(0),
        TAPS=weight_CW.shape[1],
        CHANNELS=_CHANNELS,
        num_warps=2,
        **pdl_options_for(count, x),
    )
    return y


@triton.jit
def _conv_step(tensors, channels, x_stride, TAPS: tl.constexpr, CHANNELS: tl.constexpr, USE_PDL: tl.constexpr):
    """y = silu(bias + sum over k < W of weight_k token_k), with the last token x and the others the window, which moves on by one."""
    x, weight, bias, windows, slots, y = tensors
    pdl_wait_and_trigger(USE_PDL)
    sequence = tl.program_id(1).to(tl.int64)
    channel = tl.program_id(0) * CHANNELS + tl.arange(0, CHANNELS)
    mask = channel < channels
    window = windows + tl.load(slots + sequence).to(tl.int64) * (TAPS - 1) * channels + channel
    preactivation = tl.zeros((CHANNELS,), tl.float32)
    if bias is not None:
        preactivation += tl.load(bias + channel, mask=mask, other=0.0).to(tl.float32)
    for tap in tl.static_range(TAPS):
        if tap < TAPS - 1:
            token = tl.load(window + tap * channels, mask=mask, other=0.0)
        else:
            token = tl.load(x + sequence * x_stride + channel, mask=mask, other=0.0)
        if tap > 0:  # a thread has read what it overwrites
            tl.store(window + (tap - 1) * channels, token.to(windows.dtype.element_ty), mask=mask)
        tap_weight = tl.load(weight + channel * TAPS + tap, mask=mask, other=0.0).to(tl.float32)
        preactivation += token.to(tl.float32) * tap_weight
    y_pointers = y + sequence * channels + channel
    tl.store(y_pointers, (preactivation * tl.sigmoid(preactivation)).to(y.dtype.element_ty), mask=mask)
