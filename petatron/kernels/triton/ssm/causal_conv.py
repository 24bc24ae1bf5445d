"""The short causal convolution of Mamba in Triton: one pass over the input in each direction.

A tile of tokens and channels is read once for each tap, all but the first time from the cache. Backward is two passes: the gradient of
the sum before the activation, in the input's dtype, with the sums of a tile that the gradients of weight and bias are made of; then
the convolution of it, in reverse. (One pass that recomputes the gradient at each of the W tokens took 3.5 ms, these two take 0.85.)
The sums of all tiles are added afterwards in a fixed order.

Device memory traffic in bf16, Mamba-2 2.7B (S 4096, B 8, C 5376), at 4.0 TB/s: forward 704 MB, 0.18 ms; backward 1,762 MB, 0.44 ms.

S sequence, B batch, C channels, W taps.
"""

# pyright: reportAttributeAccessIssue=false, reportCallIssue=false, reportIndexIssue=false, reportArgumentType=false
# pyright: reportPossiblyUnboundVariable=false, reportReturnType=false, reportGeneralTypeIssues=false
from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from petatron.kernels.ssm import causal_conv as reference
from petatron.kernels.strides import contiguous_rows
from petatron.kernels.triton.ssm.scan_tiles import document_numbers

_CHANNELS = 128
_TOKENS = 32
_SUM_TOKENS = 8
_TILES = 32
"""Tiles of tokens whose sums a program of backward adds."""
_MOST_TAPS = 4


def causal_conv(
    x_SBC: Tensor,
    weight_CW: Tensor,
    bias_C: Tensor | None,
    *,
    starts_SB: Tensor | None = None,
    window: Tensor | None = None,
) -> Tensor:
    """See the reference."""
    x_SBC = contiguous_rows(x_SBC)
    length, batch, channels = x_SBC.shape
    y_SBC = torch.empty(x_SBC.shape, dtype=x_SBC.dtype, device=x_SBC.device)
    _conv_forward[(triton.cdiv(length, _TOKENS), triton.cdiv(channels, _CHANNELS), batch)](
        x_SBC,
        None if window is None else window.contiguous(),
        weight_CW.contiguous(),
        bias_C,
        document_numbers(starts_SB),
        y_SBC,
        length,
        channels,
        *x_SBC.stride()[:2],
        TAPS=weight_CW.shape[1],
        TOKENS=_TOKENS,
        CHANNELS=_CHANNELS,
    )
    return y_SBC


def causal_conv_backward(
    grad_SBC: Tensor,
    x_SBC: Tensor,
    weight_CW: Tensor,
    bias_C: Tensor | None,
    *,
    starts_SB: Tensor | None = None,
    window: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None]:
    """See the reference, which also takes more taps than are here."""
    if weight_CW.shape[1] > _MOST_TAPS:
        return reference.causal_conv_backward(grad_SBC, x_SBC, weight_CW, bias_C, starts_SB=starts_SB, window=window)
    x_SBC, grad_SBC = contiguous_rows(x_SBC), contiguous_rows(grad_SBC)
    length, batch, channels = x_SBC.shape
    taps, documents = weight_CW.shape[1], document_numbers(starts_SB)
    inner_grad, grad_x = (torch.empty(x_SBC.shape, dtype=x_SBC.dtype, device=x_SBC.device) for _ in range(2))
    programs = triton.cdiv(length, _SUM_TOKENS * _TILES)
    shape = (programs, batch, triton.next_power_of_2(taps + 1), channels)
    sums = torch.empty(shape, dtype=torch.float32, device=x_SBC.device)
    weight = weight_CW.contiguous()
    _inner_grads[(programs, triton.cdiv(channels, _CHANNELS), batch)](
        grad_SBC,
        x_SBC,
        None if window is None else window.contiguous(),
        weight,
        bias_C,
        documents,
        inner_grad,
        sums,
        length,
        channels,
        *grad_SBC.stride()[:2],
        *x_SBC.stride()[:2],
        TAPS=taps,
        TOKENS=_SUM_TOKENS,
        CHANNELS=_CHANNELS,
        TILES=_TILES,
        SUMS=shape[2],
    )
    _input_grads[(triton.cdiv(length, _TOKENS), triton.cdiv(channels, _CHANNELS), batch)](
        inner_grad, weight, documents, grad_x, length, channels, TAPS=taps, TOKENS=_TOKENS, CHANNELS=_CHANNELS
    )
    totals = sums.sum(dim=(0, 1))
    grad_window = None
    if window is not None:  # only the first tokens see it
        seen = slice(0, taps - 1)
        starts = None if starts_SB is None else starts_SB[seen]
        first = (grad_SBC[seen], x_SBC[seen], weight_CW, bias_C)
        grad_window = reference.causal_conv_backward(*first, starts_SB=starts, window=window)[3]
    return grad_x, totals[:taps].t(), None if bias_C is None else totals[taps], grad_window


@triton.jit
def _conv_forward(
    x,
    window,
    weight,
    bias,
    documents,
    y,
    length,
    channels,
    x_s,
    x_b,
    TAPS: tl.constexpr,
    TOKENS: tl.constexpr,
    CHANNELS: tl.constexpr,
):
    b = tl.program_id(2)
    token = tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)
    channel = tl.program_id(1) * CHANNELS + tl.arange(0, CHANNELS)
    inputs = (x, window, documents, b, length, channels, x_s, x_b)
    inner = _convolution(inputs, weight, bias, token, channel, TAPS, TOKENS, CHANNELS)
    to = (token.to(tl.int64)[:, None] * tl.num_programs(2) + b) * channels + channel[None, :]
    there = (token < length)[:, None] & (channel < channels)[None, :]
    tl.store(y + to, (inner * tl.sigmoid(inner)).to(y.dtype.element_ty), mask=there)


@triton.jit
def _inner_grads(
    dy,
    x,
    window,
    weight,
    bias,
    documents,
    inner_grad,
    sums,
    length,
    channels,
    dy_s,
    dy_b,
    x_s,
    x_b,
    TAPS: tl.constexpr,
    TOKENS: tl.constexpr,
    CHANNELS: tl.constexpr,
    TILES: tl.constexpr,
    SUMS: tl.constexpr,
):
    """The gradient of the sum before the activation; and summed over tokens, itself and its products with the inputs of each tap.

    Four taps by name: an input that is read serves both, and the sums stay with the threads that have them until the end.
    """
    b, batch = tl.program_id(2), tl.num_programs(2)
    channel = tl.program_id(1) * CHANNELS + tl.arange(0, CHANNELS)
    inputs = (x, window, documents, b, length, channels, x_s, x_b)
    shift = tl.zeros((1, CHANNELS), dtype=tl.float32)
    if bias is not None:
        shift += tl.load(bias + channel, mask=channel < channels, other=0.0).to(tl.float32)[None, :]
    plain_sum = tl.zeros((TOKENS, CHANNELS), dtype=tl.float32)
    sum_0, sum_1, sum_2, sum_3 = plain_sum, plain_sum, plain_sum, plain_sum
    first = tl.program_id(0) * TILES
    for tile in range(first, tl.minimum(first + TILES, tl.cdiv(length, TOKENS))):
        token = tile * TOKENS + tl.arange(0, TOKENS)
        there = (token < length)[:, None] & (channel < channels)[None, :]
        seen_0 = _tap(inputs, token, channel, 0, TAPS)
        inner = shift + seen_0 * _weight(weight, channel, TAPS - 1, channels, TAPS)
        if TAPS > 1:
            seen_1 = _tap(inputs, token, channel, 1, TAPS)
            inner += seen_1 * _weight(weight, channel, TAPS - 2, channels, TAPS)
        if TAPS > 2:
            seen_2 = _tap(inputs, token, channel, 2, TAPS)
            inner += seen_2 * _weight(weight, channel, TAPS - 3, channels, TAPS)
        if TAPS > 3:
            seen_3 = _tap(inputs, token, channel, 3, TAPS)
            inner += seen_3 * _weight(weight, channel, TAPS - 4, channels, TAPS)
        gate = tl.sigmoid(inner)
        from_y = dy + token.to(tl.int64)[:, None] * dy_s + b.to(tl.int64) * dy_b + channel[None, :]
        grad = tl.load(from_y, mask=there, other=0.0).to(tl.float32) * gate * (1.0 + inner * (1.0 - gate))
        to = (token.to(tl.int64)[:, None] * batch + b) * channels + channel[None, :]
        tl.store(inner_grad + to, grad.to(inner_grad.dtype.element_ty), mask=there)
        plain_sum += grad
        sum_0 += grad * seen_0
        if TAPS > 1:
            sum_1 += grad * seen_1
        if TAPS > 2:
            sum_2 += grad * seen_2
        if TAPS > 3:
            sum_3 += grad * seen_3
    # Rows of the result: the taps from the oldest on, then the bias.
    row = tl.arange(0, SUMS)[:, None]
    total = tl.where(row == TAPS - 1, tl.sum(sum_0, axis=0)[None, :], tl.sum(plain_sum, axis=0)[None, :])
    total = tl.where(row == TAPS - 2, tl.sum(sum_1, axis=0)[None, :], total)
    total = tl.where(row == TAPS - 3, tl.sum(sum_2, axis=0)[None, :], total)
    total = tl.where(row == TAPS - 4, tl.sum(sum_3, axis=0)[None, :], total)
    to = ((tl.program_id(0) * batch + b) * SUMS + row) * channels + channel[None, :]
    tl.store(sums + to, total, mask=(channel < channels)[None, :] & (row >= 0))


@triton.jit
def _input_grads(
    inner_grad,
    weight,
    documents,
    grad_x,
    length,
    channels,
    TAPS: tl.constexpr,
    TOKENS: tl.constexpr,
    CHANNELS: tl.constexpr,
):
    b, batch = tl.program_id(2), tl.num_programs(2)
    token = tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)
    channel = tl.program_id(1) * CHANNELS + tl.arange(0, CHANNELS)
    inside = (channel < channels)[None, :]
    result = tl.zeros((TOKENS, CHANNELS), dtype=tl.float32)
    for later in tl.static_range(TAPS):
        # For the token so many after, this one is at tap TAPS - 1 - later.
        at = token + later
        there = at < length
        if documents is not None:
            there = there & (_document(documents, at, b, length) == _document(documents, token, b, length))
        rows = inner_grad + (at.to(tl.int64)[:, None] * batch + b) * channels + channel[None, :]
        grad = tl.load(rows, mask=there[:, None] & inside, other=0.0).to(tl.float32)
        result += grad * _weight(weight, channel, TAPS - 1 - later, channels, TAPS)
    to = (token.to(tl.int64)[:, None] * batch + b) * channels + channel[None, :]
    tl.store(grad_x + to, result.to(grad_x.dtype.element_ty), mask=(token < length)[:, None] & inside)


@triton.jit
def _convolution(
    inputs, weight, bias, token, channel, TAPS: tl.constexpr, TOKENS: tl.constexpr, CHANNELS: tl.constexpr
):
    """Returns the sum before the activation [tokens, channels]."""
    channels = inputs[5]
    total = tl.zeros((TOKENS, CHANNELS), dtype=tl.float32)
    if bias is not None:
        total += tl.load(bias + channel, mask=channel < channels, other=0.0).to(tl.float32)[None, :]
    for tap in tl.static_range(TAPS):
        seen = _tap(inputs, token, channel, TAPS - 1 - tap, TAPS)
        total += seen * _weight(weight, channel, tap, channels, TAPS)
    return total


@triton.jit
def _tap(inputs, token, channel, before, TAPS: tl.constexpr):
    """Returns the inputs so many tokens before, zero where they are of another document or not there."""
    x, window, documents, b, length, channels, x_s, x_b = inputs
    at = token - before
    inside = (channel < channels)[None, :]
    wanted = token < length
    if documents is not None:
        wanted = wanted & (_document(documents, at, b, length) == _document(documents, token, b, length))
    rows = x + at.to(tl.int64)[:, None] * x_s + b.to(tl.int64) * x_b + channel[None, :]
    found = tl.load(rows, mask=(wanted & (at >= 0))[:, None] & inside, other=0.0).to(tl.float32)
    if window is not None:
        row = (at + TAPS - 1).to(tl.int64)[:, None] * tl.num_programs(2) + b  # the last is the token before the first
        earlier = (wanted & (at < 0) & (at >= 1 - TAPS))[:, None] & inside
        found += tl.load(window + row * channels + channel[None, :], mask=earlier, other=0.0).to(tl.float32)
    return found


@triton.jit
def _document(documents, token, b, length):
    """Returns the documents of tokens; 0 before the first."""
    inside = (token >= 0) & (token < length)
    return tl.load(documents + b * length + token, mask=inside, other=0)


@triton.jit
def _weight(weight, channel, tap, channels, TAPS: tl.constexpr):
    return tl.load(weight + channel * TAPS + tap, mask=channel < channels, other=0.0).to(tl.float32)[None, :]
