"""Splits the QKV GEMM's output into heads, and applies rope to queries and keys.

Pair i of a head, (x_i, x_{i + n/2}), becomes (x_i cos - x_{i + n/2} sin, x_{i + n/2} cos + x_i sin) for the first n elements of the
head; the others are unchanged. Backward rotates by the opposite angle and concatenates the three gradients. This is the reference,
which also runs on the CPU.

Tensors have shape [S, B, ...]; their memory may be batch first, which attention kernels prefer.
S sequence, B batch, H query heads, K kv heads, E head dim, n rotary dim.
"""

from __future__ import annotations

import torch
from torch import Tensor

from petatron.kernels.strides import tokens_of_rows


def split_qkv_rope(
    qkv: Tensor,
    cos: Tensor,
    sin: Tensor,
    *,
    num_heads: int,
    num_kv_heads: int,
    batch_first: bool,
    batch: int | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Returns q [S, B, H, E], k and v [S, B, K, E], in memory [B, S, ...] if `batch_first`; cos and sin are [S, 1 or B, 1, n].

    `qkv` is [S, B, (H + 2K) E], or, with `batch`, the rows of `batch` sequences in that memory order.
    """
    qkv = qkv if batch is None else tokens_of_rows(qkv, batch=batch, batch_first=batch_first)
    heads = _heads(qkv, num_heads=num_heads, num_kv_heads=num_kv_heads)
    qk, v = heads.split_with_sizes((num_heads + num_kv_heads, num_kv_heads), dim=2)
    q, k = apply_rope(qk, cos, sin).split_with_sizes((num_heads, num_kv_heads), dim=2)
    q, k, v = (make_contiguous(x, batch_first=batch_first) for x in (q, k, v))
    return q, k, v


def split_qkv_rope_backward(
    dq: Tensor, dk: Tensor, dv: Tensor, cos: Tensor, sin: Tensor, *, out: Tensor, batch_first: bool = False
) -> Tensor:
    """Writes the gradient of qkv to `out`, and returns it.

    `out` has qkv's memory layout: [S, B, (H + 2K) E], or rows of it, in the order of `batch_first`.
    """
    return join_qkv_grads(apply_rope(dq, cos, -sin), apply_rope(dk, cos, -sin), dv, out=out, batch_first=batch_first)


def join_qkv_grads(dq: Tensor, dk: Tensor, dv: Tensor, *, out: Tensor, batch_first: bool = False) -> Tensor:
    """Writes the gradients of what `split_qkv` returns to the slices of `out`, and returns it; `out` is as above."""
    out_SBF = out if out.dim() == 3 else tokens_of_rows(out, batch=dq.shape[1], batch_first=batch_first)
    parts = split_qkv(out_SBF, num_heads=dq.shape[2], num_kv_heads=dk.shape[2])
    for part, grad in zip(parts, (dq, dk, dv), strict=True):
        part.copy_(grad)
    return out


def split_qkv(qkv: Tensor, *, num_heads: int, num_kv_heads: int) -> tuple[Tensor, Tensor, Tensor]:
    """Returns views q [S, B, H, E], k and v [S, B, K, E] of [S, B, (H + 2K) E]; H may be 0."""
    heads = _heads(qkv, num_heads=num_heads, num_kv_heads=num_kv_heads)
    q, k, v = heads.split_with_sizes((num_heads, num_kv_heads, num_kv_heads), dim=2)
    return q, k, v


def _heads(qkv: Tensor, *, num_heads: int, num_kv_heads: int) -> Tensor:
    count = num_heads + 2 * num_kv_heads
    return qkv.view(*qkv.shape[:-1], count, qkv.shape[-1] // count)


def apply_rope(x_SBHE: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotates the first `cos.shape[-1]` elements of each head."""
    width = cos.shape[-1]
    rotated = x_SBHE if width == x_SBHE.shape[-1] else x_SBHE[..., :width]
    first, second = rotated.chunk(2, dim=-1)
    rotated = rotated * cos + torch.cat((-second, first), dim=-1) * sin
    return rotated if width == x_SBHE.shape[-1] else torch.cat((rotated, x_SBHE[..., width:]), dim=-1)


def make_contiguous(x: Tensor, *, batch_first: bool) -> Tensor:
    """Makes x dense, with the batch or the sequence first in memory."""
    return x.transpose(0, 1).contiguous().transpose(0, 1) if batch_first else x.contiguous()
