"""From the product that makes queries, keys and values to heads that attention takes, turned by their positions."""

from __future__ import annotations

from typing import Any, Protocol

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from petatron.layers.passing import Rotation
from petatron.layers.rows import batch_first


class RotateKernels(Protocol):
    """`kernels/rotate.py` or a faster twin."""

    def split_rotate(
        self, qkv: Tensor, cos: Tensor, sin: Tensor, *, heads: int, groups: int, batch_major: bool
    ) -> tuple[Tensor, Tensor, Tensor]: ...

    def split_rotate_backward(
        self, dq: Tensor, dk: Tensor, dv: Tensor, cos: Tensor, sin: Tensor, *, out: Tensor
    ) -> Tensor: ...


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
