"""Softmax and loss of a chunk of logits, with a fixed order of sums: see `kernels/fused_linear_cross_entropy.py`. C tokens, V columns."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from petatron.kernels import fused_linear_cross_entropy as plain
from petatron.kernels.batch_invariant.row_functions import fixed_order_sum
from petatron.kernels.compute_dtype import to_compute_dtype
from petatron.kernels.fused_linear_cross_entropy import CrossEntropyKernels


def statistics(logits_CV: Tensor, targets_C: Tensor, num_columns: int) -> Tensor:
    """Returns [3, C]: maximum, sum of exponentials below it, target logit below it (0: not here)."""
    if not num_columns:
        return plain.statistics(logits_CV, targets_C, num_columns)
    wide = to_compute_dtype(logits_CV[:, :num_columns])
    max_logit = wide.amax(dim=1)
    below = wide - max_logit.unsqueeze(1)
    target_logit = below.gather(1, targets_C.clamp(0, num_columns - 1).unsqueeze(1)).squeeze(1)
    is_here = (targets_C >= 0) & (targets_C < num_columns)
    return torch.stack((max_logit, fixed_order_sum(below.exp_()), target_logit.masked_fill(~is_here, 0)))


def with_one_loss(kernels: CrossEntropyKernels) -> CrossEntropyKernels:
    """Returns the kernels whose loss has the same bits with a gradient as without one: of the statistics, in one place."""

    def losses_and_gradient_(logits_CV: Tensor, targets_C: Tensor, loss_weights_C: Tensor, num_columns: int) -> Tensor:
        max_logit, total, target_logit = kernels.statistics(logits_CV, targets_C, num_columns)
        log = total.log()
        kernels.gradient_(logits_CV, targets_C, loss_weights_C, max_logit + log, num_columns)
        return log - target_logit

    return replace(kernels, losses_and_gradient_=losses_and_gradient_)


REFERENCE = with_one_loss(replace(plain.REFERENCE, statistics=statistics))
