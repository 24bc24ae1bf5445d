"""The log-probability of tokens in the distribution that they are drawn from: one function for the sampler and the trainer.

    log p(t) = z_t / T - log(sum_v exp(z_v / T)),        d log p(t) / dz = (onehot(t) - p) / T

with logits z and a temperature T. Filters (top-k, top-p, min-p) draw from a part of that distribution: what is recorded of a token is its
log-probability in the whole one, which training can compute too, and beside it the probability that was kept; their quotient is the
probability with which the token was drawn. Bits depend on the row alone, whatever it is computed with (`kernels/batch_invariant`), so where
logits are equal, log-probabilities are.

R rows, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import cache
from typing import Any

import torch
from torch import Tensor

from petatron.base.autograd_op import AutogradOp, first_derivative
from petatron.kernels.compute_dtype import to_compute_dtype
from petatron.kernels.registry import KernelContext, choose_kernel

_CHUNK_ELEMENTS = 1 << 26
"""Logits of this many are in at least float32 at a time."""
Statistics = Callable[[Tensor, Tensor, int], Tensor]


def policy_log_probs(logits: Tensor, labels: Tensor, temperature: float | Tensor = 1.0) -> Tensor:
    """Returns the log-probability of each label, in at least float32, and with gradients; a label that is no id has any number.

    logits are [..., V] and labels [...]; so is a temperature that differs by row. 0 is greedy, and counts as 1.

    >>> policy_log_probs(torch.tensor([[0.0, 0.0], [0.0, 30.0]]), torch.tensor([1, 1]))
    tensor([-0.6931,  0.0000])
    """
    rows = logits.reshape(-1, logits.shape[-1])
    divisor_R = row_temperatures(temperature, labels, rows)
    if torch.is_grad_enabled() and logits.requires_grad:
        log_probs = _PolicyLogProbs.apply(rows, labels.reshape(-1), divisor_R)
    else:
        log_probs = _forward(rows, labels.reshape(-1), divisor_R)[0]
    return log_probs.view(labels.shape)  # pyright: ignore[reportReturnType]


def row_temperatures(temperature: float | Tensor, labels: Tensor, logits_RV: Tensor) -> Tensor | None:
    """Returns what each row of logits is divided by; None: nothing."""
    if isinstance(temperature, Tensor):
        divisor = temperature
    elif temperature in (0.0, 1.0):
        return None
    else:
        divisor = torch.tensor(temperature, dtype=torch.float64, device=logits_RV.device)
    dtype = to_compute_dtype(logits_RV.new_empty(0)).dtype
    wide = divisor.to(logits_RV.device, dtype)  # pyright: ignore[reportAttributeAccessIssue]
    wide = wide.masked_fill(wide == 0.0, 1.0)
    return wide.expand(labels.shape).reshape(-1)


def scaled_rows(logits_RV: Tensor, divisor_R: Tensor | None) -> Tensor:
    """Returns logits over temperature in at least float32, which may be the logits themselves."""
    wide = to_compute_dtype(logits_RV)
    return wide if divisor_R is None else wide / divisor_R.unsqueeze(1)


@cache
def fastest_statistics(device: torch.device, dtype: torch.dtype) -> Statistics:
    """Returns maximum, sum of exponentials below it and target logit below it, of rows of a dtype: see `CrossEntropyKernels`."""
    context = KernelContext.of(device, dtype, allow_compile=False, batch_invariant=True)
    return choose_kernel("softmax and loss", context).functions.statistics


def row_statistics(scaled_RV: Tensor, labels_R: Tensor) -> Tensor:
    """Returns them of rows over temperature, [3, R]."""
    statistics = fastest_statistics(scaled_RV.device, scaled_RV.dtype)
    return statistics(scaled_RV.contiguous(), labels_R, scaled_RV.shape[1])


def _forward(logits_RV: Tensor, labels_R: Tensor, divisor_R: Tensor | None) -> tuple[Tensor, Tensor]:
    """Returns the log-probabilities, and the log of the sum of exponentials."""
    log_probs = torch.empty(
        labels_R.shape, dtype=to_compute_dtype(logits_RV.new_empty(0)).dtype, device=labels_R.device
    )
    log_totals = torch.empty_like(log_probs)
    for part in _chunks(logits_RV):
        scaled = scaled_rows(logits_RV[part], None if divisor_R is None else divisor_R[part])
        highest, total, below = row_statistics(scaled, labels_R[part])
        log = total.log()
        log_probs[part], log_totals[part] = below - log, highest + log
    return log_probs, log_totals


def _chunks(logits_RV: Tensor) -> Iterator[slice]:
    size = max(1, _CHUNK_ELEMENTS // max(1, logits_RV.shape[1]))
    return (slice(start, start + size) for start in range(0, logits_RV.shape[0], size))


class _PolicyLogProbs(AutogradOp):
    @staticmethod
    def forward(ctx: Any, logits_RV: Tensor, labels_R: Tensor, divisor_R: Tensor | None) -> Tensor:
        log_probs, log_totals = _forward(logits_RV, labels_R, divisor_R)
        ctx.save_for_backward(logits_RV, labels_R, log_totals, divisor_R)
        return log_probs

    @staticmethod
    @first_derivative
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        logits_RV, labels_R, log_totals, divisor_R = ctx.saved_tensors
        logits_grad, grad_R = torch.empty_like(logits_RV), grads[0]
        grad_R = grad_R if divisor_R is None else grad_R / divisor_R
        for part in _chunks(logits_RV):
            scaled = scaled_rows(logits_RV[part], None if divisor_R is None else divisor_R[part])
            minus_shares = (scaled - log_totals[part].unsqueeze(1)).exp_().neg_()
            labels = labels_R[part].unsqueeze(1)
            is_id = (labels >= 0) & (labels < scaled.shape[1])
            minus_shares.scatter_add_(1, labels.clamp(0, scaled.shape[1] - 1), is_id.to(scaled.dtype))
            logits_grad[part] = minus_shares * (grad_R[part].unsqueeze(1) * is_id)
        return logits_grad, None, None
