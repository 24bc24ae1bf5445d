"""Recurrences token by token, by their one step: the definition that every form in chunks is held against."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from petatron.kernels.compute_dtype import compute_dtype
from petatron.kernels.ssm.delta_recurrence import delta_update
from petatron.kernels.ssm.mamba2_recurrence import state_update


def scan_by_token(
    x_SBHP: Tensor,
    dt_SBH: Tensor,
    A_H: Tensor,
    B_SBGN: Tensor,
    C_SBGN: Tensor,
    D_H: Tensor,
    *,
    starts_SB: Tensor | None = None,
    initial_state: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """The outputs of all tokens [S, B, H, P], and the state [B, H, P, N] after the last."""

    def update(state: Tensor, x: Tensor, dt: Tensor, B: Tensor, C: Tensor) -> tuple[Tensor, Tensor]:
        return state_update(state, x, dt, A_H, B, C, D_H)

    state = initial_state
    if state is None:
        state = x_SBHP.new_zeros((*x_SBHP.shape[1:], B_SBGN.shape[-1]), dtype=compute_dtype(x_SBHP.dtype))
    return _by_token(update, (x_SBHP, dt_SBH, B_SBGN, C_SBGN), state, starts_SB)


def delta_rule_by_token(
    *inputs: Tensor, starts_SB: Tensor | None = None, initial_state: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """The outputs of all tokens [S, B, H, P] of q, k, v, g and beta, and the state [B, H, N, P] after the last."""
    _, k_SBGN, v_SBHP, _, _ = inputs
    state = initial_state
    if state is None:
        _, batch, heads, value_dim = v_SBHP.shape
        state = v_SBHP.new_zeros((batch, heads, k_SBGN.shape[-1], value_dim), dtype=compute_dtype(v_SBHP.dtype))
    return _by_token(delta_update, inputs, state, starts_SB)


def _by_token(
    update: Callable[..., tuple[Tensor, Tensor]], inputs: Sequence[Tensor], state: Tensor, starts_SB: Tensor | None
) -> tuple[Tensor, Tensor]:
    outputs: list[Tensor] = []
    for token, parts in enumerate(zip(*inputs, strict=True)):
        if starts_SB is not None:
            state = state.masked_fill(starts_SB[token, :, None, None, None], 0.0)
        output, state = update(state, *parts)
        outputs.append(output)
    return torch.stack(outputs), state
