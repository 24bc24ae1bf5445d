"""The short causal convolution of Mamba: each channel by itself, over the last W tokens, then silu. The reference.

    y_t = silu(bias + sum over k < W of weight_k x_{t - W + 1 + k})

Tokens before the first are those of a window that the caller may give: the end of the part of the sequence before. Tokens of another
document count as zero. Backward recomputes the sum before the activation, so nothing but the input is saved.

S sequence, B batch, C channels, W taps.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import Tensor

from petatron.kernels.compute_dtype import to_compute_dtype


def causal_conv(
    x_SBC: Tensor,
    weight_CW: Tensor,
    bias_C: Tensor | None,
    *,
    starts_SB: Tensor | None = None,
    window: Tensor | None = None,
) -> Tensor:
    """Returns silu(convolution) [S, B, C].

    starts_SB: whether a token begins a document, which sees none before it.
    window: the W - 1 tokens [W - 1, B, C] before the first; None: zeros.
    """
    return F.silu(_convolution(x_SBC, weight_CW, bias_C, starts_SB, window)).to(x_SBC.dtype)


def causal_conv_backward(
    grad_SBC: Tensor,
    x_SBC: Tensor,
    weight_CW: Tensor,
    bias_C: Tensor | None,
    *,
    starts_SB: Tensor | None = None,
    window: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None]:
    """Returns the gradients of input, weight, bias and window; those of weight and bias in at least float32."""
    inner = _convolution(x_SBC, weight_CW, bias_C, starts_SB, window)
    gate = inner.sigmoid()
    grad = to_compute_dtype(grad_SBC) * gate * (1.0 + inner * (1.0 - gate))
    wide, weight = _with_window(x_SBC, weight_CW.shape[1], window), to_compute_dtype(weight_CW)
    grad_wide, weight_grads = torch.zeros_like(wide), []
    for tap, rows, seen in _taps(wide, weight_CW.shape[1], starts_SB):
        seen_grad = grad if seen is None else grad * seen
        weight_grads.append((seen_grad * wide[rows]).sum(dim=(0, 1)))
        grad_wide[rows] += seen_grad * weight[:, tap]
    before = weight_CW.shape[1] - 1
    return (
        grad_wide[before:].to(x_SBC.dtype),
        torch.stack(weight_grads, dim=1),
        None if bias_C is None else grad.sum(dim=(0, 1)),
        None if window is None else grad_wide[:before].to(window.dtype),
    )


def _convolution(
    x: Tensor, weight_CW: Tensor, bias: Tensor | None, starts: Tensor | None, window: Tensor | None
) -> Tensor:
    wide, weight = _with_window(x, weight_CW.shape[1], window), to_compute_dtype(weight_CW)
    total = None if bias is None else to_compute_dtype(bias)
    for tap, rows, seen in _taps(wide, weight_CW.shape[1], starts):
        product = wide[rows] * weight[:, tap]
        product = product if seen is None else product * seen
        total = product if total is None else total + product
    assert total is not None
    return total


def _with_window(x_SBC: Tensor, num_taps: int, window: Tensor | None) -> Tensor:
    """Returns window and input in at least float32, one after the other."""
    x = to_compute_dtype(x_SBC)
    before = x.new_zeros((num_taps - 1, *x.shape[1:])) if window is None else window.to(x.dtype)
    return torch.cat((before, x))


def _taps(wide: Tensor, num_taps: int, starts_SB: Tensor | None) -> Iterator[tuple[int, slice, Tensor | None]]:
    """Yields each tap, the rows that it is multiplied with, and whether a token may see them [S, B, 1]; None: all may."""
    length = wide.shape[0] - num_taps + 1
    counts = None if starts_SB is None else F.pad(starts_SB.to(torch.int32).cumsum(dim=0), (0, 0, num_taps - 1, 0))
    for tap in range(num_taps):
        rows = slice(tap, tap + length)
        seen = None if counts is None else (counts[rows] == counts[num_taps - 1 :])[..., None].to(wide.dtype)
        yield tap, rows, seen
