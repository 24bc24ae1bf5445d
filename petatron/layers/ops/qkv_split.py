"""From the product that makes queries, keys and values to heads that attention takes, turned by their positions."""

from __future__ import annotations

from typing import Any, Protocol

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from petatron.kernels.qk_norm_rope import HeadNorm, Pair, Three
from petatron.layers.forward_context import Rotation
from petatron.layers.norm import RMSNorm, give
from petatron.layers.token_layout import batch_first

Norms = tuple[RMSNorm, RMSNorm]
"""Of queries and of keys."""


class RotateKernels(Protocol):
    """`kernels/rope.py` or a faster twin."""

    def split_rotate(
        self, qkv: Tensor, cos: Tensor, sin: Tensor, *, heads: int, groups: int, batch_major: bool
    ) -> tuple[Tensor, Tensor, Tensor]: ...

    def split_rotate_backward(
        self, dq: Tensor, dk: Tensor, dv: Tensor, cos: Tensor, sin: Tensor, *, out: Tensor
    ) -> Tensor: ...


class NormedHeadsKernels(Protocol):
    """`kernels/qk_norm_rope.py` or a faster twin."""

    def split_norm_rotate(
        self, qkv: Tensor, weights: Pair, rotation: Pair, norm: HeadNorm, *, batch_major: bool
    ) -> Three: ...

    def split_norm_rotate_backward(
        self, grads: Three, qkv: Tensor, weights: Pair, rotation: Pair, norm: HeadNorm, *, out: Tensor
    ) -> Pair: ...


class _SplitRotate(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, qkv: Tensor, cos: Tensor, sin: Tensor, heads: int, groups: int, kernels: RotateKernels
    ) -> tuple[Tensor, Tensor, Tensor]:
        ctx.save_for_backward(cos, sin)
        ctx.kernels, ctx.shape, ctx.stride = kernels, qkv.shape, qkv.stride()
        return kernels.split_rotate(qkv, cos, sin, heads=heads, groups=groups, batch_major=batch_first(qkv))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        cos, sin = ctx.saved_tensors
        out = torch.empty_strided(ctx.shape, ctx.stride, dtype=grads[0].dtype, device=grads[0].device)
        return ctx.kernels.split_rotate_backward(*grads, cos, sin, out=out), None, None, None, None, None


def split_rotate(
    qkv: Tensor, rotation: Rotation, *, heads: int, groups: int, kernels: RotateKernels
) -> tuple[Tensor, Tensor, Tensor]:
    """q [S, B, H, E], k and v [S, B, K, E] in memory of their own, ordered as `qkv` is; q and k are turned."""
    return _SplitRotate.apply(qkv, *rotation, heads, groups, kernels)  # pyright: ignore[reportReturnType]


class _SplitNormRotate(torch.autograd.Function):
    """Keeps the product, of which the values are a view, and nothing of what is normalised."""

    @staticmethod
    def forward(ctx: Any, norms: Norms, norm: HeadNorm, kernels: NormedHeadsKernels, *tensors: Tensor) -> Three:
        qkv, q_weight, k_weight, cos, sin = tensors
        ctx.save_for_backward(*tensors)
        ctx.norms, ctx.norm, ctx.kernels = norms, norm, kernels
        return kernels.split_norm_rotate(qkv, (q_weight, k_weight), (cos, sin), norm, batch_major=batch_first(qkv))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        qkv, q_weight, k_weight, cos, sin = ctx.saved_tensors
        out = torch.empty_strided(qkv.shape, qkv.stride(), dtype=qkv.dtype, device=qkv.device)
        found = ctx.kernels.split_norm_rotate_backward(grads, qkv, (q_weight, k_weight), (cos, sin), ctx.norm, out=out)
        given = (give(norm, norm.weight, grad) for norm, grad in zip(ctx.norms, found, strict=True))
        return None, None, None, out, *given, None, None


def split_norm_rotate(
    qkv: Tensor, rotation: Rotation, norms: Norms, *, heads: int, groups: int, kernels: NormedHeadsKernels
) -> Three:
    """q [S, B, H, E] and k [S, B, K, E], normalised and turned, in memory ordered as `qkv` is; v is a view of it."""
    norm = HeadNorm(heads, groups, norms[0].eps, norms[0].from_one)
    weights = (each.weight for each in norms)
    return _SplitNormRotate.apply(norms, norm, kernels, qkv, *weights, *rotation)  # pyright: ignore[reportReturnType]
