"""The strides that hand-written kernels require, and copies of the few tensors with others."""

from __future__ import annotations

from torch import Tensor


def contiguous_rows(x: Tensor) -> Tensor:
    """Makes each row contiguous; the rows may be strided."""
    return x if x.stride(-1) == 1 else x.contiguous()


def empty_heads(like_SBHE: Tensor, width: int, *, batch_first: bool) -> Tensor:
    """Returns an uninitialised tensor of heads of `width`, in memory [B, S, ...] if `batch_first`."""
    length, batch, heads, _ = like_SBHE.shape
    if batch_first:
        row = heads * width
        return like_SBHE.new_empty_strided((length, batch, heads, width), (row, length * row, width, 1))
    return like_SBHE.new_empty((length, batch, heads, width))


def align_cos_sin(cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor, int, int]:
    """Returns cos and sin [S, 1 or B, 1, n] with equal strides, and those along S and B: 0 where all of B share them."""
    if cos.stride() != sin.stride() or cos.stride(-1) != 1:
        cos, sin = cos.contiguous(), sin.contiguous()
    return cos, sin, cos.stride(0), cos.stride(1) if cos.shape[1] > 1 else 0
