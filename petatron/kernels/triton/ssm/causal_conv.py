"""The short causal convolution of Mamba in Triton: one pass over the input in each direction.

A tile of tokens and channels is read once for each tap, all but the first time from the cache. Backward is two passes: the gradient of
the preactivation z, the sum before silu, in the input's dtype, with a tile's part of the gradients of weight and bias; then the
convolution of it, in reverse. (One pass that recomputes the gradient at each of the W tokens took 3.5 ms, these two take 0.85.) The
gradients of weight and bias are added over tiles afterwards in a fixed order.

Device memory traffic in bf16, Mamba-2 2.7B (S 4096, B 8, C 5376), at 4.0 TB/s: forward 704 MB, 0.18 ms; backward 1,762 MB, 0.44 ms.

S sequence, B batch, C channels, W taps.
"""

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
_GRAD_TOKENS = 8
_TILES = 32
"""Tiles of tokens over which a program of backward sums the gradients of weight and bias."""
_MAX_TAPS = 4


def causal_conv(
    x_SBC: Tensor,
    weight_CW: Tensor,
    bias_C: Tensor | None,
    window: Tensor | None = None,
    starts_SB: Tensor | None = None,
) -> Tensor:
    """See the reference."""
    x_SBC = contiguous_rows(x_SBC)
    length, batch, channels = x_SBC.shape
    y_SBC = torch.empty(x_SBC.shape, dtype=x_SBC.dtype, device=x_SBC.device)
    window = None if window is None else window.contiguous()
    _conv_forward[(triton.cdiv(length, _TOKENS), triton.cdiv(channels, _CHANNELS), batch)](
        (x_SBC, window, weight_CW.contiguous(), bias_C, document_numbers(starts_SB), y_SBC),
        (length, channels, *x_SBC.stride()[:2]),
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
    window: Tensor | None = None,
    starts_SB: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None]:
    """See the reference, which also takes more taps than are here."""
    if weight_CW.shape[1] > _MAX_TAPS:
        return reference.causal_conv_backward(grad_SBC, x_SBC, weight_CW, bias_C, starts_SB=starts_SB, window=window)
    x_SBC, grad_SBC = contiguous_rows(x_SBC), contiguous_rows(grad_SBC)
    length, batch, channels = x_SBC.shape
    taps, documents = weight_CW.shape[1], document_numbers(starts_SB)
    grad_preactivation, grad_x = (torch.empty(x_SBC.shape, dtype=x_SBC.dtype, device=x_SBC.device) for _ in range(2))
    programs = triton.cdiv(length, _GRAD_TOKENS * _TILES)
    shape = (programs, batch, triton.next_power_of_2(taps + 1), channels)
    weight_bias_grads = torch.empty(shape, dtype=torch.float32, device=x_SBC.device)
    weight = weight_CW.contiguous()
    inputs = (grad_SBC, x_SBC, None if window is None else window.contiguous(), weight, bias_C, documents)
    _preactivation_grads[(programs, triton.cdiv(channels, _CHANNELS), batch)](
        (*inputs, grad_preactivation, weight_bias_grads),
        (length, channels, *grad_SBC.stride()[:2], *x_SBC.stride()[:2]),
        TAPS=taps,
        TOKENS=_GRAD_TOKENS,
        CHANNELS=_CHANNELS,
        TILES=_TILES,
        GRAD_ROWS=shape[2],
    )
    _input_grads[(triton.cdiv(length, _TOKENS), triton.cdiv(channels, _CHANNELS), batch)](
        grad_preactivation, weight, documents, grad_x, length, channels, TAPS=taps, TOKENS=_TOKENS, CHANNELS=_CHANNELS
    )
    grads = weight_bias_grads.sum(dim=(0, 1))
    grad_window = None
    if window is not None:  # only the first tokens see it
        first = slice(0, taps - 1)
        starts = None if starts_SB is None else starts_SB[first]
        inputs = (grad_SBC[first], x_SBC[first], weight_CW, bias_C)
        grad_window = reference.causal_conv_backward(*inputs, starts_SB=starts, window=window)[3]
    return grad_x, grads[:taps].t(), None if bias_C is None else grads[taps], grad_window


@triton.jit
def _conv_forward(tensors, sizes, TAPS: tl.constexpr, TOKENS: tl.constexpr, CHANNELS: tl.constexpr):
    """y_t = silu(bias + sum over k < W of weight_k x_{t - W + 1 + k}) for a tile of tokens and channels."""
    x, window, weight, bias, documents, y = tensors
    length, channels, x_s, x_b = sizes
    b = tl.program_id(2)
    token = tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)
    channel = tl.program_id(1) * CHANNELS + tl.arange(0, CHANNELS)
    inputs = (x, window, documents, b, length, channels, x_s, x_b)
    preactivation = _convolution(inputs, weight, bias, token, channel, TAPS, TOKENS, CHANNELS)
    offsets = (token.to(tl.int64)[:, None] * tl.num_programs(2) + b) * channels + channel[None, :]
    mask = (token < length)[:, None] & (channel < channels)[None, :]
    tl.store(y + offsets, (preactivation * tl.sigmoid(preactivation)).to(y.dtype.element_ty), mask=mask)


@triton.jit
def _preactivation_grads(
    tensors,
    sizes,
    TAPS: tl.constexpr,
    TOKENS: tl.constexpr,
    CHANNELS: tl.constexpr,
    TILES: tl.constexpr,
    GRAD_ROWS: tl.constexpr,
):
    """dz = dy silu'(z) with z the preactivation;  gradients of bias: sum over t of dz_t, of weight_k: sum over t of dz_t x_{t - W + 1 + k}.

    Four taps by name (x_1 is x_{t - 1}): an input that is read serves both, and the sums stay with the threads that have them until the
    end.
    """
    grad_y, x, window, weight, bias, documents, grad_preactivation, weight_bias_grads = tensors
    length, channels, grad_y_s, grad_y_b, x_s, x_b = sizes
    b, batch = tl.program_id(2), tl.num_programs(2)
    channel = tl.program_id(1) * CHANNELS + tl.arange(0, CHANNELS)
    inputs = (x, window, documents, b, length, channels, x_s, x_b)
    bias_tile = tl.zeros((1, CHANNELS), dtype=tl.float32)
    if bias is not None:
        bias_tile += tl.load(bias + channel, mask=channel < channels, other=0.0).to(tl.float32)[None, :]
    bias_grad = tl.zeros((TOKENS, CHANNELS), dtype=tl.float32)
    tap_grad_0, tap_grad_1, tap_grad_2, tap_grad_3 = bias_grad, bias_grad, bias_grad, bias_grad
    first_tile = tl.program_id(0) * TILES
    for tile in range(first_tile, tl.minimum(first_tile + TILES, tl.cdiv(length, TOKENS))):
        token = tile * TOKENS + tl.arange(0, TOKENS)
        mask = (token < length)[:, None] & (channel < channels)[None, :]
        x_0 = _load_shifted(inputs, token, channel, 0, TAPS)
        preactivation = bias_tile + x_0 * _load_tap(weight, channel, TAPS - 1, channels, TAPS)
        if TAPS > 1:
            x_1 = _load_shifted(inputs, token, channel, 1, TAPS)
            preactivation += x_1 * _load_tap(weight, channel, TAPS - 2, channels, TAPS)
        if TAPS > 2:
            x_2 = _load_shifted(inputs, token, channel, 2, TAPS)
            preactivation += x_2 * _load_tap(weight, channel, TAPS - 3, channels, TAPS)
        if TAPS > 3:
            x_3 = _load_shifted(inputs, token, channel, 3, TAPS)
            preactivation += x_3 * _load_tap(weight, channel, TAPS - 4, channels, TAPS)
        sigmoid = tl.sigmoid(preactivation)
        dy_pointers = grad_y + token.to(tl.int64)[:, None] * grad_y_s + b.to(tl.int64) * grad_y_b + channel[None, :]
        dy = tl.load(dy_pointers, mask=mask, other=0.0).to(tl.float32)
        dz = dy * sigmoid * (1.0 + preactivation * (1.0 - sigmoid))
        offsets = (token.to(tl.int64)[:, None] * batch + b) * channels + channel[None, :]
        tl.store(grad_preactivation + offsets, dz.to(grad_preactivation.dtype.element_ty), mask=mask)
        bias_grad += dz
        tap_grad_0 += dz * x_0
        if TAPS > 1:
            tap_grad_1 += dz * x_1
        if TAPS > 2:
            tap_grad_2 += dz * x_2
        if TAPS > 3:
            tap_grad_3 += dz * x_3
    # Rows of the result: the taps from the oldest on, then the bias.
    row = tl.arange(0, GRAD_ROWS)[:, None]
    grads = tl.where(row == TAPS - 1, tl.sum(tap_grad_0, axis=0)[None, :], tl.sum(bias_grad, axis=0)[None, :])
    grads = tl.where(row == TAPS - 2, tl.sum(tap_grad_1, axis=0)[None, :], grads)
    grads = tl.where(row == TAPS - 3, tl.sum(tap_grad_2, axis=0)[None, :], grads)
    grads = tl.where(row == TAPS - 4, tl.sum(tap_grad_3, axis=0)[None, :], grads)
    offsets = ((tl.program_id(0) * batch + b) * GRAD_ROWS + row) * channels + channel[None, :]
    tl.store(weight_bias_grads + offsets, grads, mask=(channel < channels)[None, :] & (row >= 0))


@triton.jit
def _input_grads(
    grad_preactivation,
    weight,
    documents,
    grad_x,
    length,
    channels,
    TAPS: tl.constexpr,
    TOKENS: tl.constexpr,
    CHANNELS: tl.constexpr,
):
    """dx_t = sum over k < W of weight_k dz_{t + W - 1 - k}, of the same document: the convolution in reverse."""
    b, batch = tl.program_id(2), tl.num_programs(2)
    token = tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)
    channel = tl.program_id(1) * CHANNELS + tl.arange(0, CHANNELS)
    channel_mask = (channel < channels)[None, :]
    dx = tl.zeros((TOKENS, CHANNELS), dtype=tl.float32)
    for shift in tl.static_range(TAPS):
        # For the token `shift` positions later, this token is at tap TAPS - 1 - shift.
        later_token = token + shift
        token_mask = later_token < length
        if documents is not None:
            same_document = _document(documents, later_token, b, length) == _document(documents, token, b, length)
            token_mask = token_mask & same_document
        dz_pointers = grad_preactivation + (later_token.to(tl.int64)[:, None] * batch + b) * channels + channel[None, :]
        dz = tl.load(dz_pointers, mask=token_mask[:, None] & channel_mask, other=0.0).to(tl.float32)
        dx += dz * _load_tap(weight, channel, TAPS - 1 - shift, channels, TAPS)
    offsets = (token.to(tl.int64)[:, None] * batch + b) * channels + channel[None, :]
    tl.store(grad_x + offsets, dx.to(grad_x.dtype.element_ty), mask=(token < length)[:, None] & channel_mask)


@triton.jit
def _convolution(
    inputs, weight, bias, token, channel, TAPS: tl.constexpr, TOKENS: tl.constexpr, CHANNELS: tl.constexpr
):
    """Returns the preactivation z_t = bias + sum over k of weight_k x_{t - W + 1 + k} [tokens, channels]."""
    channels = inputs[5]
    preactivation = tl.zeros((TOKENS, CHANNELS), dtype=tl.float32)
    if bias is not None:
        preactivation += tl.load(bias + channel, mask=channel < channels, other=0.0).to(tl.float32)[None, :]
    for tap in tl.static_range(TAPS):
        x_tile = _load_shifted(inputs, token, channel, TAPS - 1 - tap, TAPS)
        preactivation += x_tile * _load_tap(weight, channel, tap, channels, TAPS)
    return preactivation


@triton.jit
def _load_shifted(inputs, token, channel, shift, TAPS: tl.constexpr):
    """Loads x_{t - shift}, from the window for tokens before the first; zero where it is of another document or missing."""
    x, window, documents, b, length, channels, x_s, x_b = inputs
    earlier_token = token - shift
    channel_mask = (channel < channels)[None, :]
    token_mask = token < length
    if documents is not None:
        same_document = _document(documents, earlier_token, b, length) == _document(documents, token, b, length)
        token_mask = token_mask & same_document
    x_pointers = x + earlier_token.to(tl.int64)[:, None] * x_s + b.to(tl.int64) * x_b + channel[None, :]
    x_mask = (token_mask & (earlier_token >= 0))[:, None] & channel_mask
    x_tile = tl.load(x_pointers, mask=x_mask, other=0.0).to(tl.float32)
    if window is not None:
        # The window's last row is the token before the first.
        row = (earlier_token + TAPS - 1).to(tl.int64)[:, None] * tl.num_programs(2) + b
        window_mask = (token_mask & (earlier_token < 0) & (earlier_token >= 1 - TAPS))[:, None] & channel_mask
        x_tile += tl.load(window + row * channels + channel[None, :], mask=window_mask, other=0.0).to(tl.float32)
    return x_tile


@triton.jit
def _document(documents, token, b, length):
    """Returns the documents of tokens; 0 before the first."""
    inside = (token >= 0) & (token < length)
    return tl.load(documents + b * length + token, mask=inside, other=0)


@triton.jit
def _load_tap(weight, channel, tap, channels, TAPS: tl.constexpr):
    """Loads the weights of a tap [1, channels]."""
    return tl.load(weight + channel * TAPS + tap, mask=channel < channels, other=0.0).to(tl.float32)[None, :]
