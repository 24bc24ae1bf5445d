"""Plain PyTorch versions of every op with a faster twin: the specification the twins are tested against."""

from __future__ import annotations

import torch
from torch import Tensor


def attention(
    q: Tensor, k: Tensor, v: Tensor, *, window: int | None = None, document_starts_BS: Tensor | None = None
) -> Tensor:
    """Causal softmax attention; q is [S, B, H, E], k and v are [S, B, K, E] with K dividing H.

    A token sees at most `window` tokens, and none before its entry of `document_starts_BS`.
    """
    group = q.shape[2] // k.shape[2]
    k, v = k.repeat_interleave(group, dim=2), v.repeat_interleave(group, dim=2)
    scores = torch.einsum("sbhe,tbhe->bhst", q, k) * q.shape[-1] ** -0.5
    ahead = torch.arange(q.shape[0], device=q.device)[:, None] - torch.arange(k.shape[0], device=q.device)
    hidden = ahead < 0
    if window is not None:
        hidden |= ahead >= window
    if document_starts_BS is not None:
        behind = torch.arange(k.shape[0], device=q.device) < document_starts_BS[:, :, None]
        hidden = (hidden | behind).unsqueeze(1)
    weights = scores.masked_fill(hidden, float("-inf")).softmax(dim=-1)
    return torch.einsum("bhst,tbhe->sbhe", weights, v)


def cross_entropy(logits: Tensor, targets: Tensor) -> Tensor:
    """Token losses: minus the log-probability of each target, in at least float32."""
    wide = logits.to(torch.promote_types(logits.dtype, torch.float32))
    return -wide.log_softmax(dim=-1).gather(-1, targets.unsqueeze(-1)).squeeze(-1)
