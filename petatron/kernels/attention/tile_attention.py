"""Attention of one tile in plain matmuls: the reference of the fused kernels, and the fallback where there is none.

Forward: the softmax over the tile's keys alone, and the logarithm of its denominator (log-sum-exp), by which tiles are
merged. Backward, with the log-sum-exp L and the output O over *all* keys (Dao et al., FlashAttention):

    P = exp(S - L)     dV = (P*M)^T dO     dS = P * (M * (dO V^T) - rowsum(dO * O))     dQ = dS K     dK = dS^T Q

where S are the scaled scores of the tile and M its dropout mask over 1 - rate, or 1. Scores capped by c (`score_modifiers.py`) add the
factor 1 - (S / c)^2 to dS, S being the capped ones. A bias that is added to scores has the gradient dS. Every tile is independent of the
others, so they can be summed in any order, on any rank.

Query heads that share a kv head are additional rows of the same matmul, so keys are never repeated. Everything is computed in
at least float32. B batch, H query heads, K kv heads, E head dim, Q rows, T columns.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from petatron.kernels.attention.score_modifiers import capped_
from petatron.kernels.compute_dtype import compute_dtype

_BITS = (1 << 64) - 1


@dataclass(frozen=True, slots=True)
class AttentionDropout:
    """Dropout whose mask is a function of the seed and the tile, so that backward drops the same weights."""

    rate: float
    seed: int

    @classmethod
    def draw(cls, rate: float) -> AttentionDropout | None:
        """Draws a seed from the host's default RNG stream, which recompute restores."""
        return cls(rate, int(torch.randint(1 << 62, ()).item())) if rate > 0.0 else None

    def keep_mask(self, key: int, shape: torch.Size, like: Tensor) -> Tensor:
        """Returns 0 for dropped weights, else 1 / (1 - rate)."""
        generator = torch.Generator(like.device).manual_seed(_mix_seed(_mix_seed(self.seed) ^ key))
        keep = torch.rand(shape, generator=generator, device=like.device) >= self.rate
        return keep.to(like.dtype).div_(1.0 - self.rate)


def _mix_seed(x: int) -> int:
    """Maps 64-bit numbers so that neighbors look unrelated (the finalizer of splitmix64), to 32 bits."""
    x = (x + 0x9E3779B97F4A7C15) & _BITS
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & _BITS
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & _BITS
    return (x ^ (x >> 31)) & 0xFFFFFFFF


class TileRules(NamedTuple):
    """What a tile has besides its tensors: which scores are masked, dropout with the tile's key, the cap of scores and their biases."""

    masked_out: Tensor | None
    dropout: tuple[AttentionDropout, int] | None = None
    softcap: float | None = None
    bias_HQT: Tensor | None = None


def tile_forward(q_BHQE: Tensor, k_BKTE: Tensor, v_BKTE: Tensor, rules: TileRules) -> tuple[Tensor, Tensor]:
    """Returns output [B, H, Q, E] and log-sum-exp [B, H, Q]; 0 and -inf for a fully masked row."""
    masked_out, dropout, softcap, bias_HQT = rules
    scores = _masked(_scores(q_BHQE, k_BKTE, softcap, bias_HQT), masked_out)
    lse = scores.logsumexp(dim=-1)
    weights = scores.sub_(lse.clamp(min=torch.finfo(lse.dtype).min).unsqueeze(-1)).exp_()
    if dropout is not None:
        weights *= dropout[0].keep_mask(dropout[1], weights.shape, weights)
    out = weights.flatten(2, 3) @ v_BKTE.to(weights.dtype)
    return out.view(*q_BHQE.shape[:3], -1), lse.flatten(1, 2)


def tile_backward(
    grad_BHQE: Tensor,
    q_BHQE: Tensor,
    k_BKTE: Tensor,
    v_BKTE: Tensor,
    rules: TileRules,
    *,
    lse_BHQ: Tensor,
    delta_BHQ: Tensor,
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """Returns the gradients of q, k, v and the bias; `lse` and `delta`, the row sums of gradient times output, are those over all keys."""
    masked_out, dropout, softcap, bias_HQT = rules
    scores = _scores(q_BHQE, k_BKTE, softcap, bias_HQT)
    slope = None if softcap is None else 1.0 - (scores / softcap).square_()
    scores = _masked(scores, masked_out)
    grouped = scores.shape[:4]
    weights = scores.sub_(lse_BHQ.view(grouped).unsqueeze(-1)).exp_()
    if masked_out is not None:  # a fully masked row has log-sum-exp -inf
        weights = weights.masked_fill_(_over_heads(masked_out), 0.0)
    q, grad = (_group_query_heads(x, k_BKTE.shape[1], weights.dtype) for x in (q_BHQE, grad_BHQE))
    k, v = k_BKTE.to(weights.dtype), v_BKTE.to(weights.dtype)
    grad_weights = (grad @ v.mT).view(weights.shape)
    dropped_out = weights
    if dropout is not None:
        keep = dropout[0].keep_mask(dropout[1], weights.shape, weights)
        grad_weights, dropped_out = grad_weights.mul_(keep), weights * keep
    grad_v = dropped_out.flatten(2, 3).mT @ grad
    grad_scores = grad_weights.sub_(delta_BHQ.view(grouped).unsqueeze(-1)).mul_(weights)
    grad_scores = (grad_scores if slope is None else grad_scores.mul_(slope)).flatten(2, 3)
    grad_bias = None if bias_HQT is None else grad_scores.view(grad_scores.shape[0], *bias_HQT.shape).sum(0)
    grad_scores *= q_BHQE.shape[-1] ** -0.5
    return (grad_scores @ k).view(q_BHQE.shape), grad_scores.mT @ q, grad_v, grad_bias


def _scores(q_BHQE: Tensor, k_BKTE: Tensor, softcap: float | None, bias_HQT: Tensor | None) -> Tensor:
    """Returns scaled, biased and capped scores [B, K, H/K, Q, T]."""
    dtype = compute_dtype(q_BHQE.dtype)
    batch, heads, rows, width = q_BHQE.shape
    groups = k_BKTE.shape[1]
    q = _group_query_heads(q_BHQE, groups, dtype) * width**-0.5
    scores = (q @ k_BKTE.to(dtype).mT).view(batch, groups, heads // groups, rows, -1)
    if bias_HQT is not None:
        scores += bias_HQT.to(dtype).view(scores.shape[1:])
    return scores if softcap is None else capped_(scores, softcap)


def _masked(scores: Tensor, masked_out: Tensor | None) -> Tensor:
    return scores if masked_out is None else scores.masked_fill_(_over_heads(masked_out), float("-inf"))


def _group_query_heads(x_BHQE: Tensor, groups: int, dtype: torch.dtype) -> Tensor:
    """[B, K, H/K * Q, E]: the query heads of a kv head as more rows."""
    return x_BHQE.to(dtype).reshape(x_BHQE.shape[0], groups, -1, x_BHQE.shape[-1])


def _over_heads(masked_out: Tensor) -> Tensor:
    """[Q, T] or [B, Q, T] to be broadcast over [B, K, H/K, Q, T]."""
    return masked_out if masked_out.dim() == 2 else masked_out[:, None, None]
