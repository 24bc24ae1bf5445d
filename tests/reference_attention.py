"""Attention in plain PyTorch with a dense mask: the specification that the faster kernels are tested against."""

from __future__ import annotations

import torch
from torch import Tensor


def attention(
    q: Tensor, k: Tensor, v: Tensor, *, window: int | None = None, document_starts_BS: Tensor | None = None
) -> Tensor:
    """Causal softmax attention; q is [S, B, H, E], k and v are [S, B, K, E] with K dividing H.

    A token attends to at most `window` tokens, and to none before its entry of `document_starts_BS`.
    """
    group = q.shape[2] // k.shape[2]
    k, v = k.repeat_interleave(group, dim=2), v.repeat_interleave(group, dim=2)
    scores = torch.einsum("sbhe,tbhe->bhst", q, k) * q.shape[-1] ** -0.5
    distance = torch.arange(q.shape[0], device=q.device)[:, None] - torch.arange(k.shape[0], device=q.device)
    masked = distance < 0
    if window is not None:
        masked |= distance >= window
    if document_starts_BS is not None:
        other_document = torch.arange(k.shape[0], device=q.device) < document_starts_BS[:, :, None]
        masked = (masked | other_document).unsqueeze(1)
    weights = scores.masked_fill(masked, float("-inf")).softmax(dim=-1)
    return torch.einsum("bhst,tbhe->sbhe", weights, v)
