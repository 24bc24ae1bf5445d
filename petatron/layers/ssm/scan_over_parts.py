"""Mamba-2 over contiguous parts of the sequence, where context-parallel ranks have one each: a state passed between the parts.

The scan is linear in the state that enters a part. With z_r the state after rank r's part that its own tokens make, from a
zero state, and d_r the decay over all of it (zero where a document begins in it),

    h_r = d_{r-1} h_{r-1} + z_{r-1},      y_i = (own part's scan)_i + exp(decays up to i) h_r C_i

Every rank runs its scan at once, from zero. One all-gather of all z and d, the size of a state each, then gives every rank the state
that enters its part, and a GEMM adds what that contributes: no rank waits for another's scan. Backward is the same in reverse, by
autograd: a reduce-scatter brings the gradients of z and d to their ranks.

S sequence of this rank's part, B batch, H heads, P head dim, G groups, N state dim; those of this rank.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from petatron.layers.comm_slot import SequenceParts
from petatron.layers.ssm.chunked_recurrence import chunked_recurrence
from petatron.layers.ssm.ops import ScanInputs


def scan_over_parts(
    inputs: ScanInputs, parts: SequenceParts, *, kernels: Any, chunk_size: int, starts_SB: Tensor | None
) -> Tensor:
    """The scan over this rank's part of the sequence, with the state of the parts before."""
    y_SBHP, own_state = chunked_recurrence(inputs, kernels=kernels, chunk_size=chunk_size, starts_SB=starts_SB)
    decay_SBH = _decay_from_start(inputs, starts_SB)
    entering = _entering_state(own_state, decay_SBH[-1], parts)
    return y_SBHP + _contribution(entering, inputs.C_SBGN, decay_SBH).to(y_SBHP.dtype)


def _decay_from_start(inputs: ScanInputs, starts_SB: Tensor | None) -> Tensor:
    """Returns the decay of the state that enters the part, up to and including each token."""
    decay_SBH = (inputs.dt_SBH * inputs.A_H).cumsum(dim=0).exp()
    return decay_SBH if starts_SB is None else decay_SBH.masked_fill(starts_SB.cummax(dim=0).values[..., None], 0.0)


def _entering_state(own_state: Tensor, decay_BH: Tensor, parts: SequenceParts) -> Tensor:
    """Returns the state before this rank's part, of the parts of all ranks before it."""
    packed = torch.cat((own_state.flatten(1), decay_BH.flatten(1)), dim=1).unsqueeze(0)
    gathered = parts.gather(packed)
    states, decays = gathered.split((own_state[0].numel(), decay_BH.shape[1]), dim=-1)
    # The sum of none depends on what was gathered: the first rank takes part in the reduce-scatter of gradients as well.
    entering = states[:0].sum(dim=0).view_as(own_state)
    for rank in range(parts.rank):
        entering = decays[rank][..., None, None] * entering + states[rank].view_as(own_state)
    return entering


def _contribution(entering: Tensor, C_SBGN: Tensor, decay_SBH: Tensor) -> Tensor:
    """Returns what the state that enters the part adds to each token's output [S, B, H, P]."""
    groups = C_SBGN.shape[2]
    by_group = entering.unflatten(1, (groups, -1))
    outputs = torch.einsum("sbgn,bgrpn->sbgrp", C_SBGN.to(entering.dtype), by_group).flatten(2, 3)
    return decay_SBH[..., None] * outputs
