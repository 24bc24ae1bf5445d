"""Splits the QKV GEMM's output into heads, and applies qk-norm and rope to queries and keys.

A head x of width E becomes y = x / rms(x) * weight, with one weight for all query heads and one for all key heads, and rope is
applied to the first n elements of y (`rope.py`). Values are a view of the QKV output, which is saved anyway.

Backward needs nothing else. Rotating the output's gradient by the opposite angle gives the gradient of y; with h = that x weight
and r = 1 / rms(x)

    gradient of x = r (h - x r mean(h x r)),        gradient of weight = sum over tokens and heads of (gradient of y) x r

This is the reference, which also runs on the CPU. S sequence, B batch, H query heads, K kv heads, E head dim.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from petatron.kernels.compute_dtype import to_compute_dtype
from petatron.kernels.norm import rms_norm, rms_norm_backward
from petatron.kernels.rope import apply_rope, make_contiguous, split_qkv

TensorPair = tuple[Tensor, Tensor]
TensorTriple = tuple[Tensor, Tensor, Tensor]
RmsNorm = Callable[..., TensorTriple]
"""`norm.rms_norm`, or one with other sums."""


@dataclass(frozen=True, slots=True)
class QKNormSpec:
    """The heads of a QKV row and their norm; `zero_centered_gamma`: weights are stored as an offset from one."""

    num_heads: int
    num_kv_heads: int
    eps: float
    zero_centered_gamma: bool

    def split(self, qkv: Tensor) -> TensorTriple:
        """Returns views [S, B, heads, E] of queries, keys and values."""
        return split_qkv(qkv, num_heads=self.num_heads, num_kv_heads=self.num_kv_heads)


def split_qkv_norm_rope(
    qkv: Tensor, weights: TensorPair, rope_cos_sin: TensorPair, norm: QKNormSpec, *, batch_first: bool
) -> TensorTriple:
    """Returns q [S, B, H, E] and k [S, B, K, E] as new tensors, v as a view; cos and sin are [S, 1 or B, 1, n]."""
    return norm_and_rotate(qkv, weights, rope_cos_sin, norm, batch_first=batch_first, rms_norm=rms_norm)


def norm_and_rotate(
    qkv: Tensor,
    weights: TensorPair,
    rope_cos_sin: TensorPair,
    norm: QKNormSpec,
    *,
    batch_first: bool,
    rms_norm: RmsNorm,
) -> TensorTriple:
    """Does it with an implementation of RMSNorm."""
    *parts, v = norm.split(qkv)

    def normed(x: Tensor, weight: Tensor) -> Tensor:
        rows = x.reshape(-1, x.shape[-1])
        return rms_norm(rows, weight, eps=norm.eps, zero_centered_gamma=norm.zero_centered_gamma)[1].view(x.shape)

    q, k = (
        make_contiguous(apply_rope(normed(part, weight), *rope_cos_sin), batch_first=batch_first)
        for part, weight in zip(parts, weights, strict=True)
    )
    return q, k, v


def split_qkv_norm_rope_backward(
    grads: TensorTriple, qkv: Tensor, weights: TensorPair, rope_cos_sin: TensorPair, norm: QKNormSpec, *, out: Tensor
) -> TensorPair:
    """Writes the gradient of qkv to `out`, which has qkv's memory layout; returns those of the weights, in at least float32."""
    cos, sin = rope_cos_sin
    *parts, _ = norm.split(qkv)
    *targets, to_v = norm.split(out)
    to_v.copy_(grads[2])
    weight_grads = []
    for grad, x, weight, target in zip(grads[:2], parts, weights, targets, strict=True):
        rows = x.reshape(-1, x.shape[-1])
        rstd = torch.rsqrt(to_compute_dtype(rows).square().mean(dim=-1) + norm.eps)
        norm_grad = apply_rope(to_compute_dtype(grad), cos, -sin).reshape(rows.shape)
        row_grads, weight_grad, _ = rms_norm_backward(
            norm_grad, rows, rstd, weight, zero_centered_gamma=norm.zero_centered_gamma, recompute_output=False
        )
        target.copy_(row_grads.view(x.shape))
        assert weight_grad is not None
        weight_grads.append(weight_grad)
    return weight_grads[0], weight_grads[1]
