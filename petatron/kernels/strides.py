"""Checks the strides and alignment that kernels require, and copies the few tensors with others."""

from __future__ import annotations

from torch import Tensor

_COPY_BYTES = 16


def is_aligned(tensor: Tensor) -> bool:
    """Whether the first element's address is 16-byte aligned, for kernels that copy 16 bytes at a time."""
    return tensor.data_ptr() % _COPY_BYTES == 0


def contiguous_rows(x: Tensor) -> Tensor:
    """Makes each row contiguous; the rows may be strided."""
    return x if x.stride(-1) == 1 else x.contiguous()


def rows_and_stride(x_RD: Tensor) -> tuple[Tensor, int]:
    """Makes each row contiguous, and returns the rows with the stride between them."""
    stride, inner = x_RD.stride()
    return (x_RD, stride) if inner == 1 else (x_RD.contiguous(), x_RD.shape[1])


def token_strides(x: Tensor, *, length: int, batch: int, batch_first: bool) -> tuple[int, int]:
    """Returns the strides along S and B of a tensor [S, B, D], or of its rows [R, D] in the given order."""
    if x.dim() == 3:
        return x.stride(0), x.stride(1)
    row = x.stride(0)
    return (row, length * row) if batch_first else (batch * row, row)


def tokens_of_rows(rows: Tensor, *, batch: int, batch_first: bool) -> Tensor:
    """Returns the view [S, B, ...] of rows [R, ...] of `batch` sequences."""
    if batch_first:
        return rows.view(batch, -1, *rows.shape[1:]).transpose(0, 1)
    return rows.view(-1, batch, *rows.shape[1:])


def empty_heads(like: Tensor, length: int, batch: int, heads: int, width: int, *, batch_first: bool) -> Tensor:
    """Returns an uninitialized tensor [S, B, H, E] of the dtype of another, in memory [B, S, ...] if `batch_first`."""
    if batch_first:
        row = heads * width
        return like.new_empty_strided((length, batch, heads, width), (row, length * row, width, 1))
    return like.new_empty((length, batch, heads, width))


def align_cos_sin(cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor, int, int]:
    """Returns cos and sin [S, 1 or B, 1, n] with equal strides, and those along S and B: 0 where all of B share them."""
    strides = cos.stride()
    if sin.stride() != strides or strides[-1] != 1:
        cos, sin = cos.contiguous(), sin.contiguous()
        strides = cos.stride()
    return cos, sin, strides[0], strides[1] if cos.shape[1] > 1 else 0
