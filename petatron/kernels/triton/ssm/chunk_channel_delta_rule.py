"""The gated delta rule with a decay of every key channel in Triton. `chunk_delta_rule.py` has the steps; two are other ones here.

| step                                                | reads, besides gates       | writes                          |
|-----------------------------------------------------|----------------------------|---------------------------------|
| `delta/channel_rows.py`                             | q, k, g                    | sums of g; rows with decays     |
| `delta/channel_scores.py`                           | q, k, sums                 | scores A, T                     |
| `delta/states.py`, sequential                       | rows, v, T                 | states, written values w        |
| `delta/outputs.py`                                  | rows, A, w, states         | o                               |
| backward: the first three again; written gradients  | A, do                      | dw                              |
| `delta/states.py`, sequential, in reverse           | rows, do, dw, T            | gradients of states; dy over dw |
| `delta/channel_grads.py`                            | all but rows, A and T      | all gradients                   |

Decays of channels are inside the products, so every value head has rows, scores and gradients of queries and keys of its own.
The registry chooses the forward pass alone: `docs/delta.md` says what kept the backward pass from being right on a GPU.

S sequence, B batch, H value heads, P value head dim, G key heads, N key head dim.
"""

from __future__ import annotations

from torch import Tensor

from petatron.kernels.ssm.chunk_delta_rule import DeltaGrads
from petatron.kernels.strides import contiguous_rows
from petatron.kernels.triton.ssm.delta.channel_grads import channel_grads
from petatron.kernels.triton.ssm.delta.channel_rows import decayed_rows
from petatron.kernels.triton.ssm.delta.channel_scores import channel_scores
from petatron.kernels.triton.ssm.delta.grads import DeltaIntermediates
from petatron.kernels.triton.ssm.delta.outputs import chunk_outputs, chunk_written_grads
from petatron.kernels.triton.ssm.delta.states import chunk_state_grads, chunk_states
from petatron.kernels.triton.ssm.delta.tiles import chunk_tokens, delta_chunks


def chunk_delta_rule(
    q_SBGN: Tensor,
    k_SBGN: Tensor,
    v_SBHP: Tensor,
    g_SBHN: Tensor,
    beta_SBH: Tensor,
    *,
    chunk_size: int,
    starts_SB: Tensor | None = None,
    initial_state: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """See the reference; `chunk_size` is an upper bound."""
    q, k, v, g = (contiguous_rows(tensor) for tensor in (q_SBGN, k_SBGN, v_SBHP, g_SBHN))
    chunks = delta_chunks(q, k, v, g, beta_SBH, starts_SB, chunk_tokens(chunk_size, k))
    rows = decayed_rows(q, k, g, chunks)
    scores, inverses = channel_scores(q, k, chunks)
    states, written, final = chunk_states(k, v, inverses, chunks, initial_state, rows)
    return chunk_outputs(q, k, written, states, chunks, rows, scores), final


def chunk_delta_rule_backward(
    grad_o_SBHP: Tensor,
    grad_final_state: Tensor | None,
    q_SBGN: Tensor,
    k_SBGN: Tensor,
    v_SBHP: Tensor,
    g_SBHN: Tensor,
    beta_SBH: Tensor,
    *,
    chunk_size: int,
    starts_SB: Tensor | None = None,
    initial_state: Tensor | None = None,
) -> DeltaGrads:
    """See the reference; `chunk_size` is an upper bound."""
    grad_o, q, k, v, g = (contiguous_rows(tensor) for tensor in (grad_o_SBHP, q_SBGN, k_SBGN, v_SBHP, g_SBHN))
    chunks = delta_chunks(q, k, v, g, beta_SBH, starts_SB, chunk_tokens(chunk_size, k))
    rows = decayed_rows(q, k, g, chunks)
    scores, inverses = channel_scores(q, k, chunks)
    states, written, _ = chunk_states(k, v, inverses, chunks, initial_state, rows)
    grad_written = chunk_written_grads(q, k, grad_o, chunks, scores)
    grad_states, grad_sides, grad_initial = chunk_state_grads(
        q, k, grad_o, grad_written, inverses, chunks, grad_final_state, rows
    )
    made = DeltaIntermediates(states, grad_states, written, grad_sides)
    return (
        *channel_grads(grad_o, q, k, v, g_SBHN, beta_SBH, made, chunks),
        None if initial_state is None else grad_initial.to(initial_state.dtype),
    )
