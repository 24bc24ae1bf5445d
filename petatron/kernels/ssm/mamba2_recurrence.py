"""The selective state-space recurrence of Mamba-2, token by token: the definition that every faster form is held against.

Each head has a state h [P, N], a scalar decay A < 0 and a step size dt > 0 of every token:

    h_t = exp(dt_t A) h_{t-1} + dt_t x_t B_t^T          y_t = h_t C_t + D x_t

Heads are in G groups that share B and C, as query heads share a kv head. Where a token begins a document, h_{t-1} counts as zero.

S sequence, B batch, H heads, P head dim, G groups, N state dim.
"""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor

from petatron.kernels.compute_dtype import to_compute_dtype


def step_sizes(dt: Tensor, dt_bias_H: Tensor) -> Tensor:
    """Returns softplus(dt + bias), in at least float32."""
    return F.softplus(to_compute_dtype(dt) + to_compute_dtype(dt_bias_H))


def decay_rates(A_log_H: Tensor) -> Tensor:
    """Returns A = -exp(A_log), in at least float32."""
    return -to_compute_dtype(A_log_H).exp()


def state_update(
    state_BHPN: Tensor, x_BHP: Tensor, dt_BH: Tensor, A_H: Tensor, B_BGN: Tensor, C_BGN: Tensor, D_H: Tensor
) -> tuple[Tensor, Tensor]:
    """Returns the output of one token of each sequence, and the state after it.

    A step of decoding is as fast as it reads and writes states: it does so three times here.
    """
    heads = (B_BGN.shape[1], -1)  # groups, and heads of each
    x, dt = to_compute_dtype(x_BHP), to_compute_dtype(dt_BH)
    B, C = (to_compute_dtype(part) for part in (B_BGN, C_BGN))
    decay = (dt * to_compute_dtype(A_H)).exp()
    dt_x = (dt[..., None] * x).unflatten(1, heads)
    state = (decay[..., None, None] * state_BHPN).unflatten(1, heads)
    state.addcmul_(dt_x[..., None], B[:, :, None, None, :])
    y = (state @ C[:, :, None, :, None]).squeeze(-1).flatten(1, 2) + to_compute_dtype(D_H)[:, None] * x
    return y.to(x_BHP.dtype), state.flatten(1, 2)
