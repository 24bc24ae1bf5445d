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


def split_rotate(
    qkv: Tensor, cos: Tensor, sin: Tensor, *, heads: int, groups: int, batch_major: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """q [S, B, H, E], k and v [S, B, K, E]; cos and sin are [S, 1 or B, 1, n]."""
    q, k, v = split_heads(qkv, heads=heads, groups=groups)
    q, k, v = (laid_out(part, batch_major=batch_major) for part in (turn(q, cos, sin), turn(k, cos, sin), v))
    return q, k, v


def split_rotate_backward(dq: Tensor, dk: Tensor, dv: Tensor, cos: Tensor, sin: Tensor, *, out: Tensor) -> Tensor:
    """Write the gradient of qkv to `out`, which lies in memory as qkv did, and return it."""
    to_q, to_k, to_v = split_heads(out, heads=dq.shape[2], groups=dk.shape[2])
    to_q.copy_(turn(dq, cos, -sin))
    to_k.copy_(turn(dk, cos, -sin))
    to_v.copy_(dv)
    return out


def split_heads(qkv: Tensor, *, heads: int, groups: int) -> tuple[Tensor, Tensor, Tensor]:
    """Views q [S, B, H, E], k and v [S, B, K, E] of [S, B, (H + 2K) E], in which they lie side by side."""
    width = qkv.shape[-1] // (heads + 2 * groups)
    q, k, v = qkv.unflatten(-1, (-1, width)).split((heads, groups, groups), dim=2)
    return q, k, v


def turn(x_SBHE: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Turn the first `cos.shape[-1]` elements of each head."""
    width = cos.shape[-1]
    turned, rest = x_SBHE[..., :width], x_SBHE[..., width:]
    first, second = turned.chunk(2, dim=-1)
    turned = turned * cos + torch.cat((-second, first), dim=-1) * sin
    return turned if rest.shape[-1] == 0 else torch.cat((turned, rest), dim=-1)


def laid_out(x: Tensor, *, batch_major: bool) -> Tensor:
    """The same, dense, with the batch or the sequence first in memory."""
    return x.transpose(0, 1).contiguous().transpose(0, 1) if batch_major else x.contiguous()
