"""Recurrences over contiguous parts of the sequence, where context-parallel ranks have one each: a state passed between the parts.

Every rank runs its part at once, and one all-gather then gives every rank the state that enters its part; a GEMM adds what that
contributes: no rank waits for another's run. Backward is the same in reverse, by autograd: a reduce-scatter brings gradients to their
ranks.

**The scan** (Mamba-2) is linear in the state that enters a part. With z_r the state after rank r's part that its own tokens make, from a
zero state, and d_r the decay over all of it (zero where a document begins in it),

    h_r = d_{r-1} h_{r-1} + z_{r-1},      y_i = (own part's scan)_i + exp(decays up to i) h_r C_i

All z and d are gathered, the size of a state each.

**The gated delta rule** is affine in that state: a part makes M S + Z of an entering state S, with a matrix M [N, N] for each head, and the
output of token i gets S^T r_i more, with a vector r_i [N]. The columns of a state do not mix, so M and all r_i are what the rule itself
makes of the identity matrix as initial state with values of zero. One run over values of width P + N, from the state (0 | I), thus gives
every rank its own outputs and Z in the first P columns, and r and M in the other N. All (Z | M) are gathered:

    S_r = M_{r-1} S_{r-1} + Z_{r-1}

Where a document begins, M and the r_i after it are zero.

S sequence of this rank's part, B batch, H (value) heads, P (value) head dim, G groups, N state or key head dim; those of this rank.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from petatron.layers.parallel_slots import SequenceParts
from petatron.layers.ssm.autograd_ops import DeltaInputs, ScanInputs
from petatron.layers.ssm.chunked_recurrence import chunked_recurrence


def scan_over_parts(
    inputs: ScanInputs, parts: SequenceParts, *, kernels: Any, chunk_size: int, starts_SB: Tensor | None
) -> Tensor:
    """The scan over this rank's part of the sequence, with the state of the parts before."""
    y_SBHP, state = chunked_recurrence(inputs, kernels=kernels, chunk_size=chunk_size, starts_SB=starts_SB)
    # The decay of the state that enters the part, up to and including each token.
    decay_SBH = (inputs.dt_SBH * inputs.A_H).cumsum(dim=0).exp()
    if starts_SB is not None:
        decay_SBH = decay_SBH.masked_fill(starts_SB.cummax(dim=0).values[..., None], 0.0)
    packed = torch.cat((state.flatten(1), decay_SBH[-1].flatten(1)), dim=1).unsqueeze(0)
    states, decays = parts.gather(packed).split((state[0].numel(), decay_SBH.shape[-1]), dim=-1)
    states = states.unflatten(-1, state.shape[1:])
    entering = _entering_state(states, parts, lambda rank, before: decays[rank][..., None, None] * before)
    by_group = entering.unflatten(1, (inputs.C_SBGN.shape[2], -1))
    outputs = torch.einsum("sbgn,bgrpn->sbgrp", inputs.C_SBGN.to(entering.dtype), by_group).flatten(2, 3)
    return y_SBHP + (decay_SBH[..., None] * outputs).to(y_SBHP.dtype)


def delta_rule_over_parts(
    inputs: DeltaInputs, parts: SequenceParts, *, kernels: Any, chunk_size: int, starts_SB: Tensor | None
) -> Tensor:
    """The delta rule over this rank's part of the sequence, with the state of the parts before."""
    _, batch, heads, value_dim = inputs.v_SBHP.shape
    key_dim = inputs.k_SBGN.shape[-1]
    wide_v = torch.nn.functional.pad(inputs.v_SBHP, (0, key_dim))
    unit = torch.eye(key_dim, value_dim + key_dim, dtype=inputs.g.dtype, device=inputs.g.device)
    outputs, affine_map = chunked_recurrence(
        inputs._replace(v_SBHP=wide_v),
        kernels=kernels,
        chunk_size=chunk_size,
        starts_SB=starts_SB,
        initial_state=unit.roll(value_dim, dims=1).expand(batch, heads, -1, -1),
    )
    from_zero, responses = outputs.split((value_dim, key_dim), dim=-1)
    states, transitions = parts.gather(affine_map.unsqueeze(0)).split((value_dim, key_dim), dim=-1)
    entering = _entering_state(states, parts, lambda rank, before: transitions[rank] @ before)
    return from_zero + torch.einsum("sbhn,bhnp->sbhp", responses.to(entering.dtype), entering).to(from_zero.dtype)


def _entering_state(states: Tensor, parts: SequenceParts, after_part: Callable[[int, Tensor], Tensor]) -> Tensor:
    """Returns the state before this rank's part, from the states [ranks, ...] that every part makes of zero.

    `after_part` returns what a rank's part makes of a state besides.
    """
    # The sum of none depends on what was gathered: the first rank takes part in the reduce-scatter of gradients as well.
    entering = states[:0].sum(dim=0)
    for rank in range(parts.rank):
        entering = after_part(rank, entering) + states[rank]
    return entering
