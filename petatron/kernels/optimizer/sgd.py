"""SGD with momentum on flat buffers, by torch's fused kernel.

With g the gradient times the factor that unscales and clips, plus decay w,

    b = momentum b + g              w = w - lr b

Weight decay is part of the gradient, as is usual for SGD. The factor and whether the update is skipped are device scalars, so that
no step synchronizes with the host.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

_CHUNK = 1 << 24  # elements whose scaled gradient exists at a time


@dataclass(frozen=True, slots=True, kw_only=True)
class SgdRates:
    """The hyperparameters of one update, known to the host."""

    lr: float
    weight_decay: float
    momentum: float


@torch.no_grad()
def sgd(
    grad: Tensor,
    master: Tensor,
    momentum: Tensor | None,
    weight: Tensor | None,
    *,
    factor: Tensor,
    skipped: Tensor,
    rates: SgdRates,
) -> None:
    """Updates in place; `momentum` None means no momentum, `weight` None that the master is the model's own."""
    for begin in range(0, grad.numel(), _CHUNK):
        part = slice(begin, begin + _CHUNK)
        torch._fused_sgd_(
            [master[part]],
            [grad[part].to(master.dtype) * factor.to(master.dtype)],
            [] if momentum is None else [momentum[part]],
            weight_decay=rates.weight_decay,
            momentum=0.0 if momentum is None else rates.momentum,
            lr=rates.lr,
            dampening=0.0,
            nesterov=False,
            maximize=False,
            is_first_step=False,
            grad_scale=None,
            found_inf=skipped,
        )
        if weight is not None:
            weight[part].copy_(master[part])
