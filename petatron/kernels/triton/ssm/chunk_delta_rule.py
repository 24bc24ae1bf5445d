"""The gated delta rule in Triton: inverses of all chunks' systems, states at their boundaries, then outputs or gradients of all at once.

The equations are those of `kernels/ssm/chunk_delta_rule.py`, but for one: what a chunk writes is T beta (v - exp(s) k S_c), with
T = (I + L)^{-1}, instead of U - W S_c. The difference is taken in float32, and T has fewer bytes than U and W; in exchange the sequential
kernel has a GEMM more for each chunk. How long a chunk is changes no result but by rounding, so the kernels take their own.

| step                                                | reads, besides gates       | writes                          |
|-----------------------------------------------------|----------------------------|---------------------------------|
| `delta/inverses.py`                                 | k                          | T                               |
| `delta/states.py`, sequential                       | k, v, T                    | states, written values w        |
| `delta/outputs.py`                                  | q, k, w, states            | o                               |
| backward: the first two again; written gradients    | q, k, do                   | dw                              |
| `delta/states.py`, sequential, in reverse           | q, k, do, dw, T            | gradients of states; dy over dw |
| `delta/score_grads.py`                              | q, k, v, do, dy, w twice   | dv, sums for dq and dk          |
| `delta/grads.py`, queries                           | q, do, states              | dq                              |
| `delta/grads.py`, keys                              | k, dy, w, states and grads | dk, dg, dbeta                   |

States of 64 tokens each, with N = P = 128, have twice the bytes of v in the same dtype; T has half the bytes of v.

S sequence, B batch, H value heads, P value head dim, G key heads, N key head dim.
"""

from __future__ import annotations

from torch import Tensor

from petatron.kernels.ssm.chunk_delta_rule import DeltaGrads
from petatron.kernels.strides import contiguous_rows
from petatron.kernels.triton.ssm.delta.grads import DeltaIntermediates, chunk_grads
from petatron.kernels.triton.ssm.delta.inverses import chunk_inverses
from petatron.kernels.triton.ssm.delta.outputs import chunk_outputs, chunk_written_grads
from petatron.kernels.triton.ssm.delta.states import chunk_state_grads, chunk_states
from petatron.kernels.triton.ssm.delta.tiles import chunk_tokens, delta_chunks


def chunk_delta_rule(
    q_SBGN: Tensor,
    k_SBGN: Tensor,
    v_SBHP: Tensor,
    g_SBH: Tensor,
    beta_SBH: Tensor,
    *,
    chunk_size: int,
    starts_SB: Tensor | None = None,
    initial_state: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """See the reference; `chunk_size` is an upper bound."""
    q, k, v = (contiguous_rows(tensor) for tensor in (q_SBGN, k_SBGN, v_SBHP))
    chunks = delta_chunks(q, k, v, g_SBH, beta_SBH, starts_SB, chunk_tokens(chunk_size, k))
    states, written, final = chunk_states(k, v, chunk_inverses(k, chunks), chunks, initial_state)
    return chunk_outputs(q, k, written, states, chunks), final


def chunk_delta_rule_backward(
    grad_o_SBHP: Tensor,
    grad_final_state: Tensor | None,
    q_SBGN: Tensor,
    k_SBGN: Tensor,
    v_SBHP: Tensor,
    g_SBH: Tensor,
    beta_SBH: Tensor,
    *,
    chunk_size: int,
    starts_SB: Tensor | None = None,
    initial_state: Tensor | None = None,
) -> DeltaGrads:
    """See the reference; `chunk_size` is an upper bound."""
    grad_o, q, k, v = (contiguous_rows(tensor) for tensor in (grad_o_SBHP, q_SBGN, k_SBGN, v_SBHP))
    chunks = delta_chunks(q, k, v, g_SBH, beta_SBH, starts_SB, chunk_tokens(chunk_size, k))
    inverses = chunk_inverses(k, chunks)
    states, written, _ = chunk_states(k, v, inverses, chunks, initial_state)
    grad_written = chunk_written_grads(q, k, grad_o, chunks)
    grad_states, grad_sides, grad_initial = chunk_state_grads(
        q, k, grad_o, grad_written, inverses, chunks, grad_final_state
    )
    made = DeltaIntermediates(states, grad_states, written, grad_sides)
    return (
        *chunk_grads(grad_o, q, k, v, g_SBH, beta_SBH, made, chunks),
        None if initial_state is None else grad_initial.to(initial_state.dtype),
    )
