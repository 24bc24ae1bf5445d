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


def visible(
    kind: str,
    segments_BS: Tensor,
    *,
    window: int | None = None,
    chunk: int | None = None,
    first_k: int = 0,
    in_prefix_BS: Tensor | None = None,
) -> Tensor:
    """The dense mask [B, S, S] of self-attention from first principles: for every pair of tokens.

    segments_BS: a number for each document of a row, in which padding has numbers of its own.
    """
    length = segments_BS.shape[1]
    i, j = torch.arange(length)[:, None], torch.arange(length)
    starts = torch.tensor([[row.index(segment) for segment in row] for row in segments_BS.tolist()])
    if chunk is not None:
        starts = j - (j - starts) % chunk
    same_document = (starts[:, :, None] == starts[:, None]) & (segments_BS[:, :, None] == segments_BS[:, None])
    ahead = torch.tensor(kind == "full").expand_as(same_document)
    if kind == "prefix":
        assert in_prefix_BS is not None
        ahead = in_prefix_BS[:, :, None] & in_prefix_BS[:, None]
    seen = same_document & ((j <= i) | ahead)
    if window is None:
        return seen
    among_first = (j - starts[:, :, None] < first_k) & (j <= i)
    return seen & (((i - j).abs() < window) | among_first)


def masked_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    seen_BST: Tensor,
    *,
    softcap: float | None = None,
    sinks_H: Tensor | None = None,
    bias_HD: Tensor | None = None,
) -> Tensor:
    """Softmax attention with a dense mask; zero where a query sees nothing. `bias_HD` is that of `ScoreRules`."""
    group = q.shape[2] // k.shape[2]
    k, v = k.repeat_interleave(group, dim=2), v.repeat_interleave(group, dim=2)
    scores = torch.einsum("sbhe,tbhe->bhst", q, k) * q.shape[-1] ** -0.5
    if bias_HD is not None:
        distance = torch.arange(k.shape[0]) - torch.arange(q.shape[0])[:, None]
        last = bias_HD.shape[1] - 1
        scores = scores + bias_HD[:, (distance + last // 2).clamp(0, last)]
    scores = scores if softcap is None else softcap * torch.tanh(scores / softcap)
    scores = scores.masked_fill(~seen_BST[:, None], float("-inf"))
    rest = (
        torch.full_like(scores[..., :1], -1e30)
        if sinks_H is None
        else sinks_H.view(-1, 1, 1).expand_as(scores[..., :1])
    )
    weights = torch.cat((scores, rest), dim=-1).softmax(dim=-1)[..., :-1]
    return torch.einsum("bhst,tbhe->sbhe", weights, v)
