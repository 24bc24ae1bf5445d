"""The gated delta rule over contiguous parts of the sequence, where context-parallel ranks have one each.

The state that enters a part comes from the parts before. The rule is affine in that state: a part makes M S + Z of an entering state S,
with a matrix M [N, N] for each head (`scan_over_parts.py` has a scalar there), and the output of token i gets S^T r_i more, with a vector
r_i [N]. The columns of a state do not mix, so M and all r_i are what the rule itself makes of the identity matrix as initial state with
values of zero. One run over values of width P + N, from the state (0 | I), thus gives every rank its own outputs and Z in the first P
columns, and r and M in the other N. One all-gather of all (Z | M) then gives every rank the state that enters its part,

    S_r = M_{r-1} S_{r-1} + Z_{r-1}

and a GEMM with r_i adds its contribution: no rank waits for another's run. Where a document begins, M and the r_i after it are zero.
Backward is the same in reverse, by autograd: a reduce-scatter brings the gradients of Z and M to their ranks.

S sequence of this rank's part, B batch, H value heads, P value head dim, N key head dim; those of this rank.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from petatron.layers.comm_slot import SequenceParts
from petatron.layers.ssm.chunked_recurrence import chunked_recurrence
from petatron.layers.ssm.delta_ops import DeltaInputs


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
    entering = _entering_state(affine_map, value_dim, parts)
    return from_zero + torch.einsum("sbhn,bhnp->sbhp", responses.to(entering.dtype), entering).to(from_zero.dtype)


def _entering_state(affine_map: Tensor, value_dim: int, parts: SequenceParts) -> Tensor:
    """Returns the state before this rank's part, from what every part makes of a state.

    affine_map: (Z | M) of this rank's part [B, H, N, P + N].
    """
    gathered = parts.gather(affine_map.unsqueeze(0))
    states, transitions = gathered.split((value_dim, affine_map.shape[-2]), dim=-1)
    # The sum of none depends on what was gathered: the first rank takes part in the reduce-scatter of gradients as well.
    entering = states[:0].sum(dim=0)
    for rank in range(parts.rank):
        entering = transitions[rank] @ entering + states[rank]
    return entering
