"""The gated delta rule (Yang, Kautz and Hatamizadeh, gated delta networks), token by token: the definition of every faster form.

Each value head has a state S [N, P] that maps keys to values, a decay exp(g) with g <= 0 and a writing strength beta of every token:

    S_t = exp(g_t) S_{t-1} + beta_t k_t (v_t - (exp(g_t) S_{t-1})^T k_t)^T          o_t = S_t^T q_t

The state first forgets a little, then replaces what it has stored under the key k_t by the value v_t, as far as beta says. Keys and
queries are normalized to length 1 and queries divided by sqrt(N), all here. Value heads are in G groups that share queries and keys.
Where a token begins a document, S_{t-1} counts as zero.

Kimi delta attention has a decay of every key channel: g_t is a vector of N numbers, and exp(g_t) multiplies the rows of S. A head's one
decay is the case of N equal numbers; all functions here take either.

S sequence, B batch, H value heads, P value head dim, G key heads, N key head dim; g [.., H], or [.., H, N] with decays of channels.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from petatron.kernels.compute_dtype import to_compute_dtype
from petatron.kernels.ssm.mamba2_recurrence import decay_rates, step_sizes

L2_EPS = 1e-6
"""Added to the sum of squares of a query or key."""


def l2_normalize(x: Tensor, *, scale: float = 1.0) -> Tensor:
    """Returns scale x / |x| over the last dimension, in at least float32."""
    wide = to_compute_dtype(x)
    return wide * (torch.rsqrt(wide.square().sum(dim=-1, keepdim=True) + L2_EPS) * scale)


def query_scale(key_dim: int) -> float:
    """Returns 1 / sqrt(N), by which normalized queries are multiplied."""
    return 1.0 / math.sqrt(key_dim)


def delta_gates(b: Tensor, a: Tensor, A_log_H: Tensor, dt_bias: Tensor) -> tuple[Tensor, Tensor]:
    """Returns the log decay g = -exp(A_log) softplus(a + dt_bias) and the writing strength sigmoid(b), in at least float32.

    a [.., H] and dt_bias [H], or a [.., H, N] and dt_bias [H, N].
    """
    rates = decay_rates(A_log_H).view(-1, *(1,) * (dt_bias.dim() - 1))
    return rates * step_sizes(a, dt_bias), to_compute_dtype(b).sigmoid()


def delta_update(
    state_BHNP: Tensor, q_BGN: Tensor, k_BGN: Tensor, v_BHP: Tensor, g: Tensor, beta_BH: Tensor
) -> tuple[Tensor, Tensor]:
    """Returns the output of one token of each sequence, and the state after it."""
    heads_per_group = v_BHP.shape[1] // k_BGN.shape[1]
    q = l2_normalize(q_BGN, scale=query_scale(q_BGN.shape[-1])).repeat_interleave(heads_per_group, dim=1)
    k = l2_normalize(k_BGN).repeat_interleave(heads_per_group, dim=1)
    decayed_state = to_compute_dtype(g).exp().reshape(*state_BHNP.shape[:2], -1, 1) * state_BHNP
    old_value = (decayed_state * k[..., None]).sum(dim=-2)
    v_new = to_compute_dtype(beta_BH)[..., None] * (to_compute_dtype(v_BHP) - old_value)
    state = decayed_state + k[..., None] * v_new[..., None, :]
    return (state * q[..., None]).sum(dim=-2).to(v_BHP.dtype), state
