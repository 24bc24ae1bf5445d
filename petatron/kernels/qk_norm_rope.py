"""From the product that makes queries, keys and values to heads, of which queries and keys are normalised, then turned.

A head x of width E becomes y = x / rms(x) * weight, with one weight for all query heads and one for all key heads, and the first
n elements of y are turned by the token's position (`rope.py`). Values stay where they are: a view of the product, which has
to be kept anyway.

Nothing but the product is needed for the way back. From the gradient of what was turned, turned by the opposite angle, comes
the gradient of y; with h = that x weight and r = 1 / rms(x)

    gradient of x = r (h - x r mean(h x r)),        gradient of weight = sum over tokens and heads of (gradient of y) x r

This is the reference, which also runs on the CPU. S sequence, B batch, H query heads, K key/value heads, E head width.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from petatron.kernels.compute_dtype import to_compute_dtype
from petatron.kernels.norm import rms_norm, rms_norm_backward
from petatron.kernels.rope import apply_rope, make_contiguous, split_qkv

TensorPair = tuple[Tensor, Tensor]
TensorTriple = tuple[Tensor, Tensor, Tensor]


@dataclass(frozen=True, slots=True)
class QKNormSpec:
    """How a row falls into heads, and how these are normalised; `zero_centered_gamma`: weights are kept as an offset from one."""

    num_heads: int
    num_kv_heads: int
    eps: float
    zero_centered_gamma: bool

    def split(self, qkv: Tensor) -> TensorTriple:
        """Views [S, B, heads, E] of queries, keys and values that lie side by side."""
        return split_qkv(qkv, num_heads=self.num_heads, num_kv_heads=self.num_kv_heads)


def split_qkv_norm_rope(
    qkv: Tensor, weights: TensorPair, rope_cos_sin: TensorPair, norm: QKNormSpec, *, batch_first: bool
) -> TensorTriple:
    """q [S, B, H, E] and k [S, B, K, E] in memory of their own, v a view; cos and sin are [S, 1 or B, 1, n]."""
    *parts, v = norm.split(qkv)
    q, k = (
        make_contiguous(apply_rope(_rms_norm_heads(part, weight, norm), *rope_cos_sin), batch_first=batch_first)
        for part, weight in zip(parts, weights, strict=True)
    )
    return q, k, v


def _rms_norm_heads(x: Tensor, weight: Tensor, norm: QKNormSpec) -> Tensor:
    return rms_norm(x.reshape(-1, x.shape[-1]), weight, eps=norm.eps, zero_centered_gamma=norm.zero_centered_gamma)[
        1
    ].view(x.shape)


def split_qkv_norm_rope_backward(
    grads: TensorTriple, qkv: Tensor, weights: TensorPair, rope_cos_sin: TensorPair, norm: QKNormSpec, *, out: Tensor
) -> TensorPair:
    """Write the gradient of qkv to `out`, which lies in memory as qkv does; returns those of the weights, in at least float32."""
    cos, sin = rope_cos_sin
    *parts, _ = norm.split(qkv)
    *targets, to_v = norm.split(out)
    to_v.copy_(grads[2])
    found = []
    for grad, x, weight, target in zip(grads[:2], parts, weights, targets, strict=True):
        rows = x.reshape(-1, x.shape[-1])
        rstd = torch.rsqrt(to_compute_dtype(rows).square().mean(dim=-1) + norm.eps)
        turned = apply_rope(to_compute_dtype(grad), cos, -sin).reshape(rows.shape)
        row_grads, weight_grad, _ = rms_norm_backward(
            turned, rows, rstd, weight, zero_centered_gamma=norm.zero_centered_gamma, recompute_output=False
        )
        target.copy_(row_grads.view(x.shape))
        found.append(weight_grad)
    return found[0], found[1]
