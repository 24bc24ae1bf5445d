"""cuDNN's attention of dense batches, the fastest on Hopper: twice as fast as FlashAttention-2 there.

PyTorch caches a plan for each shape and memory layout of q, k and v; a new one takes a twentieth of a second, once in forward
and once in backward. In PyTorch 2.11 the key of a backward plan does not include the layout of the output's gradient, although
the plan depends on it: a second layout with the same shapes would be read as if it were the first. `backward` therefore always
passes a gradient in the layout of the output. The same version builds a plan anew at *every* call with variable sequence lengths,
which is why sequences are padded to equal lengths here.

All functions take [B, H, S, E] with kv heads not repeated, in any memory order whose last dimension is dense.
"""

from __future__ import annotations

from functools import cache

import torch
from torch import Tensor

_backward = torch.ops.aten._scaled_dot_product_cudnn_attention_backward.default
_HOPPER = (9, 0)
_MIN_VERSION = 91500
"""cuDNN 9.15: from here on PyTorch itself prefers it on Hopper."""

_WIDEST = 128
_WIDER = ((192, 128), (192, 192), (256, 256))
"""Widths of keys and values beyond it that were tried: twice FlashAttention-2's speed and more (docs/performance-log.md)."""

MIN_SEQUENCE_LENGTH = 64
"""The shortest sequence that is worth a plan; generation, a token at a time, does not use it."""


def unsupported_tensors_reason(q: Tensor, v: Tensor) -> str | None:
    """Returns why cuDNN cannot, or should not, run on these tensors; None when it should."""
    widths = q.shape[-1], v.shape[-1]
    equal = widths[0] == widths[1] and widths[0] % 8 == 0 and widths[0] <= _WIDEST
    if not equal and widths not in _WIDER:
        return f"heads of {widths[0]} and {widths[1]} values; equal multiples of 8 up to {_WIDEST}, 192, 256, and 192 with 128 are served"
    return _lacking_on(q.device, q.dtype) or _not_deterministic()


def unsupported_reason(device: str, capability: tuple[int, int], dtype: torch.dtype) -> str | None:
    """Returns what a kind of device lacks for it, whatever the shapes; None: nothing."""
    return _lacking(device, capability, dtype) or _not_deterministic()


@cache
def _lacking_on(device: torch.device, dtype: torch.dtype) -> str | None:
    cuda = device.type == "cuda"
    return _lacking(device.type, torch.cuda.get_device_capability(device) if cuda else (0, 0), dtype)


def _lacking(device: str, capability: tuple[int, int], dtype: torch.dtype) -> str | None:
    if device != "cuda" or torch.version.cuda is None:
        return "the device is no NVIDIA GPU"
    if capability != _HOPPER:
        return "the device is no Hopper GPU"
    if dtype not in (torch.float16, torch.bfloat16):
        return f"{dtype} is not half precision"
    version = torch.backends.cudnn.version()
    if version is None or version < _MIN_VERSION:
        return f"cuDNN {version} is older than 9.15"
    return None


def _not_deterministic() -> str | None:
    asked = torch.are_deterministic_algorithms_enabled()
    return "its backward pass is not deterministic, which was asked for" if asked else None


def forward(q: Tensor, k: Tensor, v: Tensor, *, causal: bool) -> tuple[Tensor, Tensor]:
    """Returns the output, in the memory order of q, and log-sum-exp."""
    out, lse, *_ = torch._scaled_dot_product_cudnn_attention(q, k, v, None, True, 0.0, causal, False)
    return out, lse


def backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, *, out: Tensor, lse: Tensor, causal: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """Returns the gradients of q, k and v."""
    grad = _with_strides_of(out, grad)
    unread = _unread_random_state(q.device)
    # Bias and lengths are None for a dense batch without a mask.
    return _backward(grad, q, k, v, out, lse, unread, unread, None, None, None, q.shape[2], k.shape[2], 0.0, causal)


@cache
def _unread_random_state(device: torch.device) -> Tensor:
    """Returns a number in place of the random state, which is not read without dropout."""
    return torch.zeros((), dtype=torch.int64, device=device)


def _with_strides_of(out: Tensor, grad: Tensor) -> Tensor:
    if grad.stride() == out.stride():
        return grad
    if all(ours == theirs or size == 1 for ours, theirs, size in zip(grad.stride(), out.stride(), out.shape)):
        return grad.as_strided(out.shape, out.stride())  # the stride of a dimension of size one is not used
    return torch.empty_like(out).copy_(grad)
