"""One step of the gated delta rule: a token of each sequence, taken into the state that its slot has. The reference.

    g = -exp(A_log) softplus(a + dt_bias),  beta = sigmoid(b)
    S' = exp(g) S + beta k (v - (exp(g) S)^T k)^T          o = S'^T q

B sequences, H value heads, P value head dim, G key heads, N key head dim.
"""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

from petatron.kernels.ssm.delta_recurrence import delta_gates, delta_update


class DeltaGateInputs(NamedTuple):
    """What decay and writing strength are computed of: columns of a token, and parameters of the heads.

    a, dt_bias: [B, H] and [H], or [B, H, N] and [H, N] with a decay of every key channel.
    """

    b_BH: Tensor
    a: Tensor
    A_log_H: Tensor
    dt_bias: Tensor


def delta_step(
    q_BGN: Tensor, k_BGN: Tensor, v_BHP: Tensor, gates: DeltaGateInputs, *, states: Tensor, slots_B: Tensor
) -> Tensor:
    """Returns the output [B, H, P] of one token of each sequence, and writes the state after it to the sequence's slot.

    states: [slots, H, N, P].
    """
    o, state = delta_update(states.index_select(0, slots_B), q_BGN, k_BGN, v_BHP, *delta_gates(*gates))
    states.index_copy_(0, slots_B, state.to(states.dtype))
    return o
