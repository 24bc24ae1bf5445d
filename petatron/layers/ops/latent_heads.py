"""The heads of latent attention as autograd functions: nothing but cosines and sines is saved for backward."""

from __future__ import annotations

from collections.abc import Callable
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


class _InterleavedRope(AutogradOp):
    @staticmethod
    def forward(ctx: Any, q: Tensor, cos: Tensor, sin: Tensor, scale: float, kernels: LatentHeadKernels) -> Tensor:
        ctx.save_for_backward(cos, sin)
        ctx.scale, ctx.kernels = scale, kernels
        return kernels.interleaved_rope(q, cos, sin, scale=scale)

    @staticmethod
    @first_derivative
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        [grad] = grads
        return ctx.kernels.interleaved_rope_backward(grad, *ctx.saved_tensors, scale=ctx.scale), None, None, None, None


class _JoinRopeKey(AutogradOp):
    @staticmethod
    def forward(
        ctx: Any, kv: Tensor, rotary: Tensor, cos: Tensor, sin: Tensor, nope_dim: int, kernels: LatentHeadKernels
    ) -> TensorPair:
        ctx.save_for_backward(cos, sin)
        ctx.kernels = kernels
        return kernels.join_rope_key(kv, rotary, cos, sin, nope_dim=nope_dim)

    @staticmethod
    @first_derivative
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        grad_kv, grad_rotary = ctx.kernels.join_rope_key_backward(*grads, *ctx.saved_tensors)
        return grad_kv, grad_rotary, None, None, None, None


def interleaved_rope(
    x_SBHE: Tensor, rope_cos_sin: RopeCosSin, *, scale: float = 1.0, kernels: LatentHeadKernels
) -> Tensor:
    """Returns new heads times `scale`, with their rotary parts rotated."""
    if not torch.is_grad_enabled():
        return kernels.interleaved_rope(x_SBHE, *rope_cos_sin, scale=scale)
    return _InterleavedRope.apply(x_SBHE, *rope_cos_sin, scale, kernels)  # pyright: ignore[reportReturnType]


def join_rope_key(
    kv_SBHM: Tensor, rotary_SBR: Tensor, rope_cos_sin: RopeCosSin, *, nope_dim: int, kernels: LatentHeadKernels
) -> TensorPair:
    """Returns new keys, each joined to the rotated rotary key of its token, and values."""
    if not torch.is_grad_enabled():
        return kernels.join_rope_key(kv_SBHM, rotary_SBR, *rope_cos_sin, nope_dim=nope_dim)
    return _JoinRopeKey.apply(kv_SBHM, rotary_SBR, *rope_cos_sin, nope_dim, kernels)  # pyright: ignore[reportReturnType]
