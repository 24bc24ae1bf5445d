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
    window: Tensor | None = None,
    starts_SB: Tensor | None = None,
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
    window: Tensor | None = None,
    starts_SB: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None]:
    """Returns the gradients of input, weight, bias and window; those of weight and bias in at least float32."""
    preactivation = _convolution(x_SBC, weight_CW, bias_C, starts_SB, window)
    sigmoid = preactivation.sigmoid()
    grad = to_compute_dtype(grad_SBC) * sigmoid * (1.0 + preactivation * (1.0 - sigmoid))
    x, weight = _with_window(x_SBC, weight_CW.shape[1], window), to_compute_dtype(weight_CW)
    grad_x, weight_grads = torch.zeros_like(x), []
    for tap, rows, same_document in _taps(x, weight_CW.shape[1], starts_SB):
        tap_grad = grad if same_document is None else grad * same_document
        weight_grads.append((tap_grad * x[rows]).sum(dim=(0, 1)))
        grad_x[rows] += tap_grad * weight[:, tap]
    window_size = weight_CW.shape[1] - 1
    return (
        grad_x[window_size:].to(x_SBC.dtype),
        torch.stack(weight_grads, dim=1),
        None if bias_C is None else grad.sum(dim=(0, 1)),
        None if window is None else grad_x[:window_size].to(window.dtype),
    )


def _convolution(
    x_SBC: Tensor, weight_CW: Tensor, bias: Tensor | None, starts: Tensor | None, window: Tensor | None
) -> Tensor:
    """Returns the preactivation, bias + sum over k of weight_k x_{t - W + 1 + k}, in at least float32."""
    x, weight = _with_window(x_SBC, weight_CW.shape[1], window), to_compute_dtype(weight_CW)
    preactivation = None if bias is None else to_compute_dtype(bias)
    for tap, rows, same_document in _taps(x, weight_CW.shape[1], starts):
        term = x[rows] * weight[:, tap]
        term = term if same_document is None else term * same_document
        preactivation = term if preactivation is None else preactivation + term
    assert preactivation is not None
    return preactivation


def _with_window(x_SBC: Tensor, num_taps: int, window: Tensor | None) -> Tensor:
    """Returns the window followed by the input [W - 1 + S, B, C], in at least float32."""
    x = to_compute_dtype(x_SBC)
    before = x.new_zeros((num_taps - 1, *x.shape[1:])) if window is None else window.to(x.dtype)
    return torch.cat((before, x))


def _taps(x_with_window: Tensor, num_taps: int, starts_SB: Tensor | None) -> Iterator[tuple[int, slice, Tensor | None]]:
    """Yields each tap, the rows it multiplies, and 1 where they are of the token's document, else 0 [S, B, 1]; None: all are."""
    length, window_size = x_with_window.shape[0] - num_taps + 1, num_taps - 1
    documents = None if starts_SB is None else F.pad(starts_SB.to(torch.int32).cumsum(dim=0), (0, 0, window_size, 0))
    for tap in range(num_taps):
        rows = slice(tap, tap + length)
        same_document = None
        if documents is not None:
            same_document = (documents[rows] == documents[window_size:])[..., None].to(x_with_window.dtype)
        yield tap, rows, same_document
