"""The loss of each token together with the entropy of its whole distribution, of logits whose vocabulary may be sharded over ranks.

With p = softmax(z), m the maximum of z over the whole vocabulary, s = sum_v exp(z_v - m) and t the target,

    loss = log s - (z_t - m)                              d loss / dz = p - onehot(t)
    H = -sum_v p_v log p_v = log s - sum_v p_v (z_v - m)     dH / dz_v = -p_v (log p_v + H)

so ranks all-reduce the maximum, and then three numbers per token; gradients are local. Both come from one GEMM, whose logits are saved:
a loss that does not need entropies is cheaper without them (`fused_linear_cross_entropy.py`).

T tokens, V columns on this device (padding included).
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from petatron.base.autograd_op import AutogradOp, first_derivative
from petatron.kernels.compute_dtype import to_compute_dtype
from petatron.kernels.fused_linear_cross_entropy import VocabColumns

_CHUNK_ELEMENTS = 1 << 26
"""Logits of this many are in at least float32 at a time."""


def losses_and_entropies(logits_TV: Tensor, targets_T: Tensor, columns: VocabColumns) -> tuple[Tensor, Tensor]:
    """Returns the loss and the entropy of each token, in at least float32, and with gradients.

    >>> logits, columns = torch.tensor([[0.0, 0.0, 9.0]]), VocabColumns(2)
    >>> [x.item() for x in losses_and_entropies(logits, torch.tensor([1]), columns)] == [torch.tensor(2.0).log().item()] * 2
    True
    """
    return _LossesAndEntropies.apply(logits_TV, targets_T, columns)  # pyright: ignore[reportReturnType]


class _LossesAndEntropies(AutogradOp):
    @staticmethod
    def forward(ctx: Any, logits_TV: Tensor, targets_T: Tensor, columns: VocabColumns) -> tuple[Tensor, Tensor]:
        losses, entropies = (_like_targets(logits_TV, targets_T) for _ in range(2))
        log_totals = _like_targets(logits_TV, targets_T)
        for part in _chunks(logits_TV):
            wide = to_compute_dtype(logits_TV[part, : columns.num_columns])
            highest = wide.amax(dim=1)
            if columns.all_reduce_max is not None:
                highest = columns.all_reduce_max(highest)
            below = wide - highest.unsqueeze(1)
            exponentials = below.exp()
            local, is_here = _local_targets(targets_T[part], columns)
            target = below.gather(1, local.unsqueeze(1)).squeeze(1) * is_here
            sums = torch.stack([exponentials.sum(1), (exponentials * below).sum(1), target])
            if columns.all_reduce_sum is not None:
                sums = columns.all_reduce_sum(sums)
            total, weighted, target = sums
            losses[part], entropies[part] = total.log() - target, total.log() - weighted / total
            log_totals[part] = highest + total.log()
        ctx.columns = columns
        ctx.save_for_backward(logits_TV, targets_T, log_totals, entropies)
        return losses, entropies

    @staticmethod
    @first_derivative
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        logits_TV, targets_T, log_totals, entropies = ctx.saved_tensors
        columns: VocabColumns = ctx.columns
        of_losses, of_entropies = (grad.unsqueeze(1) for grad in grads)
        logits_grad = torch.zeros_like(logits_TV)
        for part in _chunks(logits_TV):
            log_shares = to_compute_dtype(logits_TV[part, : columns.num_columns]) - log_totals[part].unsqueeze(1)
            grad = of_losses[part] - of_entropies[part] * (log_shares + entropies[part].unsqueeze(1))
            grad = log_shares.exp_().mul_(grad)
            local, is_here = _local_targets(targets_T[part], columns)
            grad.scatter_add_(1, local.unsqueeze(1), -of_losses[part] * is_here.unsqueeze(1))
            logits_grad[part, : columns.num_columns] = grad.to(logits_grad.dtype)
        return logits_grad, None, None


def _like_targets(logits_TV: Tensor, targets_T: Tensor) -> Tensor:
    dtype = to_compute_dtype(logits_TV.new_empty(0)).dtype
    return torch.empty(targets_T.shape, dtype=dtype, device=logits_TV.device)


def _local_targets(targets_T: Tensor, columns: VocabColumns) -> tuple[Tensor, Tensor]:
    """Returns columns of this device, and whether each target is among them."""
    local = targets_T - columns.first_id
    is_here = (local >= 0) & (local < columns.num_columns)
    return local.clamp(0, columns.num_columns - 1), is_here


def _chunks(logits_TV: Tensor) -> Iterator[slice]:
    size = max(1, _CHUNK_ELEMENTS // max(1, logits_TV.shape[1]))
    return (slice(start, start + size) for start in range(0, logits_TV.shape[0], size))
