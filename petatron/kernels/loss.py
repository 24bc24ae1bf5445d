"""Cross-entropy over a vocabulary that may be spread over ranks, without ever gathering the logits.

With local logits z over this rank's part of the vocabulary, the loss of a token with target t is

    log(sum exp(z - m)) + m - z_t,      m = max z over the whole vocabulary

so each rank needs two exchanges of one number per token: the maximum, and the pair (sum of exponentials, target logit),
where a rank that does not hold t contributes 0. The gradient, softmax(z) - onehot(t), is local. The exchanges are given by
the caller as functions; with the whole vocabulary on one device they are the identity.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

Exchange = Callable[[Tensor], Tensor]


class _CrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, logits: Tensor, targets: Tensor, first: int, max_over: Exchange, sum_over: Exchange
    ) -> Tensor:
        wide = logits.to(torch.promote_types(logits.dtype, torch.float32), copy=True)
        # A rank whose whole part is padding holds no column; its maximum is that of nothing.
        peak = wide.amax(dim=-1) if wide.shape[-1] else wide.new_full(wide.shape[:-1], float("-inf"))
        peak = max_over(peak)
        wide.sub_(peak.unsqueeze(-1))
        local = targets - first
        here = (local >= 0) & (local < wide.shape[-1])
        local = local.clamp(0, max(wide.shape[-1] - 1, 0)).unsqueeze(-1)
        picked = wide.gather(-1, local).squeeze(-1) * here if wide.shape[-1] else torch.zeros_like(peak)
        wide.exp_()
        total, target = sum_over(torch.stack((wide.sum(dim=-1), picked)))
        wide.div_(total.unsqueeze(-1))
        ctx.save_for_backward(wide, local, here)
        ctx.logits_dtype = logits.dtype
        return total.log() - target

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None, None, None]:
        softmax, local, here = ctx.saved_tensors
        grad = softmax  # in place, since memory is at its peak here; autograd refuses a second backward pass over it
        if grad.shape[-1]:
            grad.scatter_add_(-1, local, -here.to(grad.dtype).unsqueeze(-1))
        return grad.mul_(grads[0].unsqueeze(-1)).to(ctx.logits_dtype), None, None, None, None


def _same(x: Tensor) -> Tensor:
    return x


def cross_entropy(
    logits: Tensor, targets: Tensor, *, first: int = 0, max_over: Exchange = _same, sum_over: Exchange = _same
) -> Tensor:
    """Token losses; `logits` are columns `first`, `first + 1`, ... of the vocabulary, `targets` are global ids."""
    return _CrossEntropy.apply(logits, targets, first, max_over, sum_over)  # pyright: ignore[reportReturnType]
