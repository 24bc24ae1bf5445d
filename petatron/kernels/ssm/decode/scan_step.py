"""One step of Mamba-2's recurrence: a token of each sequence, taken into the state that its slot has. The reference.

    dt = softplus(dt + dt_bias),  A = -exp(A_log)          h' = exp(dt A) h + dt x B^T          y = h' C + D x

B sequences, H heads, P head dim, G groups, N state dim.
"""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

from petatron.kernels.ssm.mamba2_recurrence import decay_rates, state_update, step_sizes


class ScanParams(NamedTuple):
    """The parameters of the heads of a layer."""

    A_log_H: Tensor
    dt_bias_H: Tensor
    D_H: Tensor


def scan_step(
    x_BHP: Tensor, dt_BH: Tensor, B_BGN: Tensor, C_BGN: Tensor, heads: ScanParams, *, states: Tensor, slots_B: Tensor
) -> Tensor:
    """Returns the output [B, H, P] of one token of each sequence, and writes the state after it to the sequence's slot.

    dt_BH: before bias and softplus. states: [slots, H, P, N].
    """
    dt, A = step_sizes(dt_BH, heads.dt_bias_H), decay_rates(heads.A_log_H)
    y, state = state_update(states.index_select(0, slots_B), x_BHP, dt, A, B_BGN, C_BGN, heads.D_H)
    states.index_copy_(0, slots_B, state.to(states.dtype))
    return y
