"""The gated delta rule in Triton: the UT transforms of all chunks, states at their boundaries, then outputs or gradients of all at once.

The equations are those of `kernels/ssm/chunk_delta_rule.py`, but for one: the values that a chunk writes are
v_new = T beta (v - exp(s) k S), with the UT transform T = (I + L)^{-1}, instead of U - W S. The difference is taken in float32, and T has
fewer bytes than U and W; in exchange the sequential kernel has a GEMM more for each chunk. How long a chunk is changes no result but by
rounding, so the kernels take their own. `delta_rule/tiles.py` has the notation.

| step                                                | reads, besides gates            | writes                                  |
|-----------------------------------------------------|---------------------------------|-----------------------------------------|
| `delta_rule/ut_transform.py`                             | k                               | T                                       |
| `delta_rule/states.py`, sequential                       | k, v, T                         | states, v_new                           |
| `delta_rule/outputs.py`                                  | q, k, v_new, states             | o                                       |
| backward: the first two again; `delta_rule/outputs.py`   | q, k, do                        | d_v_new                                 |
| `delta_rule/states.py`, sequential, in reverse           | q, k, do, d_v_new, T            | gradients of states; d_rhs over d_v_new |
| `delta_rule/intra_chunk_grads.py`                        | q, k, v, do, d_rhs, v_new twice | dv, parts of dq, dk, dg and dbeta       |
| `delta_rule/input_grads.py`, queries                     | q, do, states                   | dq                                      |
| `delta_rule/input_grads.py`, keys                        | k, d_rhs, v_new, states and grads | dk, dg, dbeta                         |

States of 64 tokens each, with N = P = 128, have twice the bytes of v in the same dtype; T has half the bytes of v.

S sequence, B batch, H value heads, P value head dim, G key heads, N key head dim.
"""

from __future__ import annotations

from typing import Unpack

from torch import Tensor

from petatron.kernels.ssm.chunk_delta_rule import DeltaGrads
from petatron.kernels.ssm.chunked_sequence import ChunkOptions
from petatron.kernels.strides import contiguous_rows
from petatron.kernels.triton.ssm.delta_rule.input_grads import DeltaIntermediates, input_grads
from petatron.kernels.triton.ssm.delta_rule.outputs import chunk_outputs, intra_chunk_v_new_grads
from petatron.kernels.triton.ssm.delta_rule.states import chunk_state_grads, chunk_states
from petatron.kernels.triton.ssm.delta_rule.tiles import delta_chunks
from petatron.kernels.triton.ssm.delta_rule.ut_transform import ut_transform
from petatron.kernels.triton.ssm.scan_tiles import chunk_tokens


def chunk_delta_rule(*delta_inputs: Tensor, **options: Unpack[ChunkOptions]) -> tuple[Tensor, Tensor]:
    """See the reference; `chunk_size` is an upper bound."""
    q, k, v = map(contiguous_rows, delta_inputs[:3])
    chunk = chunk_tokens(options["chunk_size"], k)
    chunks = delta_chunks(q, k, v, *delta_inputs[3:], options.get("starts_SB"), chunk)
    states, v_new, final_state = chunk_states(k, v, ut_transform(k, chunks), chunks, options.get("initial_state"))
    return chunk_outputs(q, k, v_new, states, chunks), final_state


def chunk_delta_rule_backward(
    grad_o_SBHP: Tensor, grad_final_state: Tensor | None, *delta_inputs: Tensor, **options: Unpack[ChunkOptions]
) -> DeltaGrads:
    """See the reference; `chunk_size` is an upper bound."""
    initial_state = options.get("initial_state")
    grad_o, q, k, v = map(contiguous_rows, (grad_o_SBHP, *delta_inputs[:3]))
    chunk = chunk_tokens(options["chunk_size"], k)
    chunks = delta_chunks(q, k, v, *delta_inputs[3:], options.get("starts_SB"), chunk)
    T = ut_transform(k, chunks)
    states, v_new, _ = chunk_states(k, v, T, chunks, initial_state)
    grad_v_new = intra_chunk_v_new_grads(q, k, grad_o, chunks)
    grad_states, grad_rhs, grad_initial_state = chunk_state_grads(q, k, grad_o, grad_v_new, T, chunks, grad_final_state)
    intermediates = DeltaIntermediates(states, grad_states, v_new, grad_rhs)
    return (
        *input_grads(grad_o, q, k, v, *delta_inputs[3:], intermediates, chunks),
        None if initial_state is None else grad_initial_state.to(initial_state.dtype),
    )
