"""Causal attention on one device: PyTorch's scaled-dot-product kernels where they can, else blocks and tiles.

A token sees itself and the tokens before it, at most `window` of them, and none behind the start of its document. Without
windows and documents that is what every kernel knows. With them, one kernel knows it on NVIDIA devices in half precision;
everywhere else the sequence is cut into pieces (`mask.py`), so neither time nor memory is spent on what nobody sees.

S sequence, B batch, H query heads, K key/value heads, E head width.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from petatron.kernels.attention import flash
from petatron.kernels.attention.blocks import Answered, PartialAttention, block_backward, zero_gradients
from petatron.kernels.attention.mask import BlockMask, Bounds
from petatron.kernels.attention.tiles import Dropout


def causal_attention(
    q_SBHE: Tensor,
    k_SBKE: Tensor,
    v_SBKE: Tensor,
    *,
    window: int | None = None,
    dropout: float = 0.0,
    document_starts_BS: Tensor | None = None,
) -> Tensor:
    """Softmax attention in which a token sees itself and the tokens of its document before it, `window` of them at most.

    `document_starts_BS` holds the first position of each token's document.
    """
    length = q_SBHE.shape[0]
    slides = window is not None and window < length
    if not slides and document_starts_BS is None:
        return _plain(q_SBHE, k_SBKE, v_SBKE, dropout)
    if flash.serves_packed(q_SBHE, v_SBKE):
        limit = window if slides else None
        return flash.packed(q_SBHE, k_SBKE, v_SBKE, window=limit, starts_BS=document_starts_BS, dropout=dropout)
    bounds = Bounds.build(length, window=window, document_starts_BS=document_starts_BS, device=q_SBHE.device)
    whole = (range(length),)
    return block_attention(q_SBHE, k_SBKE, v_SBKE, BlockMask(whole, whole, bounds), dropout=dropout)


def block_attention(q_SBHE: Tensor, k_SBKE: Tensor, v_SBKE: Tensor, mask: BlockMask, *, dropout: float = 0.0) -> Tensor:
    """Attention of any queries over any keys, by the positions that the mask gives them."""
    return _BlockAttention.apply(q_SBHE, k_SBKE, v_SBKE, mask, Dropout.draw(dropout))  # pyright: ignore[reportReturnType]


def _plain(q_SBHE: Tensor, k_SBKE: Tensor, v_SBKE: Tensor, dropout: float) -> Tensor:
    q, k, v = (x.permute(1, 2, 0, 3) for x in (q_SBHE, k_SBKE, v_SBKE))
    out = F.scaled_dot_product_attention(
        q, k, v, is_causal=True, dropout_p=dropout, enable_gqa=q.shape[1] != k.shape[1]
    )
    return out.permute(2, 0, 1, 3)


class _BlockAttention(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, mask: BlockMask, dropout: Dropout | None) -> Tensor:
        partial = PartialAttention(q, value_width=v.shape[-1])
        partial.meet(k, v, mask, dropout=dropout)
        out = partial.out_SBHE.to(q.dtype)
        ctx.save_for_backward(q, k, v, out, partial.lse_BHS)
        ctx.mask, ctx.dropout = mask, dropout
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, out, lse = ctx.saved_tensors
        answered = Answered.of(q, out_SBHE=out, lse_BHS=lse, grad_SBHE=grads[0])
        found = zero_gradients(q, k, v)
        block_backward(answered, k, v, ctx.mask, into=found, dropout=ctx.dropout)
        return *(grad.to(q.dtype) for grad in found), None, None
