"""What hand-written kernels ask of the strides of their tensors, and copies of the few that lie otherwise."""

from __future__ import annotations

from torch import Tensor


def contiguous_rows(x: Tensor) -> Tensor:
    """Rows may lie apart; the elements of one must not."""
    return x if x.stride(-1) == 1 else x.contiguous()


def align_cos_sin(cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor, int, int]:
    """cos and sin [S, 1 or B, 1, n] in rows that lie alike, and their strides along S and B: 0 where all of B have the same."""
    if cos.stride() != sin.stride() or cos.stride(-1) != 1:
        cos, sin = cos.contiguous(), sin.contiguous()
    return cos, sin, cos.stride(0), cos.stride(1) if cos.shape[1] > 1 else 0
