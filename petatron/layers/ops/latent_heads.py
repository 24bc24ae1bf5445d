"""The heads of latent attention as autograd functions: nothing but cosines and sines is saved for backward."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor

from petatron.base.autograd_op import AutogradOp, first_derivative
from petatron.kernels.qk_norm_rope import TensorPair
from petatron.layers.forward_context import RopeCosSin


class LatentHeadKernels(Protocol):
    """See `kernels/attention/latent_heads.py`."""

    interleaved_rope: Callable[..., Tensor]
    interleaved_rope_backward: Callable[..., Tensor]
    join_rope_key: Callable[..., TensorPair]
    join_rope_key_backward: Callable[..., TensorPair]


class _RopeOp(AutogradOp):
    """Called with a kernel, its derivative, cosines and sines, and what is rotated by them; the derivative returns a tuple."""

    @staticmethod
    def forward(ctx: Any, kernel: Callable[..., Any], derivative: Callable[..., Any], *tensors: Tensor) -> Any:
        cos, sin, *inputs = tensors
        ctx.save_for_backward(cos, sin)
        ctx.derivative = derivative
        return kernel(*inputs, cos, sin)

    @staticmethod
    @first_derivative
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        return None, None, None, None, *ctx.derivative(*grads, *ctx.saved_tensors)


def interleaved_rope(
    x_SBHE: Tensor, rope_cos_sin: RopeCosSin, *, scale: float = 1.0, kernels: LatentHeadKernels
) -> Tensor:
    """Returns new heads times `scale`, with their rotary parts rotated."""
    rotate = partial(kernels.interleaved_rope, scale=scale)
    if not torch.is_grad_enabled():
        return rotate(x_SBHE, *rope_cos_sin)

    def derivative(*tensors: Tensor) -> tuple[Tensor]:
        return (kernels.interleaved_rope_backward(*tensors, scale=scale),)

    return _RopeOp.apply(rotate, derivative, *rope_cos_sin, x_SBHE)  # pyright: ignore[reportReturnType]


def join_rope_key(
    kv_SBHM: Tensor, rotary_SBR: Tensor, rope_cos_sin: RopeCosSin, *, nope_dim: int, kernels: LatentHeadKernels
) -> TensorPair:
    """Returns new keys, each joined to the rotated rotary key of its token, and values."""
    join = partial(kernels.join_rope_key, nope_dim=nope_dim)
    if not torch.is_grad_enabled():
        return join(kv_SBHM, rotary_SBR, *rope_cos_sin)
    return _RopeOp.apply(join, kernels.join_rope_key_backward, *rope_cos_sin, kv_SBHM, rotary_SBR)  # pyright: ignore[reportReturnType]
