"""Assembles the heads of latent attention from the outputs of its up-projections, with rope; and the backward: see `layers/mla.py`.

A query head is [part without position | rotary part] and gets its rotary part rotated. A key head is its own part without position
joined to the rotary key that all heads share; values are split off. Pair i of a rotary part is (x_2i, x_2i+1), interleaved as in
DeepSeek's weights, and becomes

    y_i = x_2i cos_i - x_2i+1 sin_i,        y_{i + R/2} = x_2i+1 cos_i + x_2i sin_i

in the order that `rope.py` rotates; scores do not depend on the order. Cosines and sines are R wide, both halves equal. Backward rotates
by the opposite angle, and adds up the rotary key's gradient over heads.

This is the reference, which also runs on the CPU. S sequence, B batch, H heads, E width of a query or key head, N of its part without
position, R rotary width, V of a value head, M = N + V.
"""

from __future__ import annotations

import torch
from torch import Tensor

from petatron.kernels.compute_dtype import to_compute_dtype
from petatron.kernels.rope import apply_rope


def interleaved_rope(x_SBHE: Tensor, cos: Tensor, sin: Tensor, *, scale: float = 1.0) -> Tensor:
    """Returns heads times `scale` with their rotary parts, the last `cos.shape[-1]` elements, rotated."""
    nope, rotary = _split(x_SBHE, cos)
    x_SBHE = torch.cat((nope, apply_rope(_interleaved_to_halves(rotary), cos, sin)), dim=-1)
    return x_SBHE if scale == 1.0 else x_SBHE * scale


def interleaved_rope_backward(grad_SBHE: Tensor, cos: Tensor, sin: Tensor, *, scale: float = 1.0) -> Tensor:
    """Returns the gradient of the heads before rotation and scaling."""
    nope, rotary = _split(grad_SBHE if scale == 1.0 else grad_SBHE * scale, cos)
    return torch.cat((nope, _halves_to_interleaved(apply_rope(rotary, cos, -sin))), dim=-1)


def join_rope_key(
    kv_SBHM: Tensor, rotary_SBR: Tensor, cos: Tensor, sin: Tensor, *, nope_dim: int
) -> tuple[Tensor, Tensor]:
    """Returns keys [S, B, H, E] and values [S, B, H, V] as new tensors; a head of `kv_SBHM` has its parts of both."""
    nope, v_SBHV = kv_SBHM.split((nope_dim, kv_SBHM.shape[-1] - nope_dim), dim=-1)
    rotary_SB1R = apply_rope(_interleaved_to_halves(rotary_SBR).unsqueeze(2), cos, sin)
    k_SBHE = torch.cat((nope, rotary_SB1R.expand(-1, -1, nope.shape[2], -1)), dim=-1)
    return k_SBHE, v_SBHV.contiguous()  # a view would keep the keys' part of the GEMM's output for backward


def join_rope_key_backward(grad_k_SBHE: Tensor, grad_v_SBHV: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    """Returns the gradients of the up-projection's output [S, B, H, N + V] and of the rotary key [S, B, R]."""
    nope, rotary = _split(grad_k_SBHE, cos)
    summed = to_compute_dtype(rotary).sum(dim=2, keepdim=True)
    rotated = apply_rope(summed, cos, -sin).squeeze(2)
    return torch.cat((nope, grad_v_SBHV), dim=-1), _halves_to_interleaved(rotated).to(grad_k_SBHE.dtype)


def _split(heads: Tensor, cos: Tensor) -> tuple[Tensor, Tensor]:
    rotary_dim = cos.shape[-1]
    nope, rotary = heads.split((heads.shape[-1] - rotary_dim, rotary_dim), dim=-1)
    return nope, rotary


def _interleaved_to_halves(rotary: Tensor) -> Tensor:
    return rotary.unflatten(-1, (-1, 2)).transpose(-1, -2).flatten(-2)


def _halves_to_interleaved(rotary: Tensor) -> Tensor:
    return rotary.unflatten(-1, (2, -1)).transpose(-1, -2).flatten(-2)
