"""From the product that makes queries, keys and values to heads, the first two turned by their positions.

Pair i of a head, (x_i, x_{i + n/2}), becomes (x_i cos - x_{i + n/2} sin, x_{i + n/2} cos + x_i sin) for the first n elements of the
head; the rest stays. The way back turns by the opposite angle and puts the three gradients side by side. This is the
reference, which also runs on the CPU.

Tensors are [S, B, ...] to look at; their memory may have the batch first, which is how attention kernels like it.
S sequence, B batch, H query heads, K key/value heads, E head width, n rotated width.
"""

from __future__ import annotations

import torch
from torch import Tensor


def split_qkv_rope(
    qkv: Tensor, cos: Tensor, sin: Tensor, *, num_heads: int, num_kv_heads: int, batch_first: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """q [S, B, H, E], k and v [S, B, K, E]; cos and sin are [S, 1 or B, 1, n]."""
    q, k, v = split_qkv(qkv, num_heads=num_heads, num_kv_heads=num_kv_heads)
    q, k, v = (
        make_contiguous(part, batch_first=batch_first) for part in (apply_rope(q, cos, sin), apply_rope(k, cos, sin), v)
    )
    return q, k, v


def split_qkv_rope_backward(dq: Tensor, dk: Tensor, dv: Tensor, cos: Tensor, sin: Tensor, *, out: Tensor) -> Tensor:
    """Write the gradient of qkv to `out`, which lies in memory as qkv did, and return it."""
    to_q, to_k, to_v = split_qkv(out, num_heads=dq.shape[2], num_kv_heads=dk.shape[2])
    to_q.copy_(apply_rope(dq, cos, -sin))
    to_k.copy_(apply_rope(dk, cos, -sin))
    to_v.copy_(dv)
    return out


def split_qkv(qkv: Tensor, *, num_heads: int, num_kv_heads: int) -> tuple[Tensor, Tensor, Tensor]:
    """Views q [S, B, H, E], k and v [S, B, K, E] of [S, B, (H + 2K) E], in which they lie side by side."""
    width = qkv.shape[-1] // (num_heads + 2 * num_kv_heads)
    q, k, v = qkv.unflatten(-1, (-1, width)).split((num_heads, num_kv_heads, num_kv_heads), dim=2)
    return q, k, v


def apply_rope(x_SBHE: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Turn the first `cos.shape[-1]` elements of each head."""
    width = cos.shape[-1]
    turned, rest = x_SBHE[..., :width], x_SBHE[..., width:]
    first, second = turned.chunk(2, dim=-1)
    turned = turned * cos + torch.cat((-second, first), dim=-1) * sin
    return turned if rest.shape[-1] == 0 else torch.cat((turned, rest), dim=-1)


def make_contiguous(x: Tensor, *, batch_first: bool) -> Tensor:
    """The same, dense, with the batch or the sequence first in memory."""
    return x.transpose(0, 1).contiguous().transpose(0, 1) if batch_first else x.contiguous()
