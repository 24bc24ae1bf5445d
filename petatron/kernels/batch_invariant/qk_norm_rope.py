"""Heads with qk-norm and rope, the norm with a fixed order of sums: see `kernels/qk_norm_rope.py`, whose derivative this has."""

from __future__ import annotations

from torch import Tensor

from petatron.kernels.batch_invariant.norm import rms_norm
from petatron.kernels.qk_norm_rope import (
    QKNormSpec,
    TensorPair,
    TensorTriple,
    norm_and_rotate,
    split_qkv_norm_rope_backward,
)

__all__ = ["split_qkv_norm_rope", "split_qkv_norm_rope_backward"]


def split_qkv_norm_rope(
    qkv: Tensor, weights: TensorPair, rope_cos_sin: TensorPair, norm: QKNormSpec, *, batch_first: bool
) -> TensorTriple:
    """Returns q [S, B, H, E] and k [S, B, K, E] as new tensors, v as a view."""
    return norm_and_rotate(qkv, weights, rope_cos_sin, norm, batch_first=batch_first, rms_norm=rms_norm)
