"""Causal attention through PyTorch's scaled-dot-product kernels (cuDNN, flash or math, whichever the device has).

S sequence, B batch, H query heads, K key/value heads, E head width.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor


def causal_attention(
    q_SBHE: Tensor, k_SBKE: Tensor, v_SBKE: Tensor, *, window: int | None = None, dropout: float = 0.0
) -> Tensor:
    """Softmax attention in which a token sees itself and the tokens before it, at most `window` of them."""
    q, k, v = (x.permute(1, 2, 0, 3) for x in (q_SBHE, k_SBKE, v_SBKE))
    length = q.shape[2]
    mask = None if window is None or window >= length else _window_mask(length, window, q.device)
    out = F.scaled_dot_product_attention(
        q, k, v, attn_mask=mask, is_causal=mask is None, dropout_p=dropout, enable_gqa=q.shape[1] != k.shape[1]
    )
    return out.permute(2, 0, 1, 3)


def _window_mask(length: int, window: int, device: torch.device) -> Tensor:
    """True where query i may see key j: i - window < j <= i."""
    ones = torch.ones(length, length, dtype=torch.bool, device=device)
    return ones.tril_() & ~ones.tril(-window)
