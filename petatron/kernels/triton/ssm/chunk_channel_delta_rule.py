"""The gated delta rule with a decay of every key channel in Triton, forward and backward. `chunk_delta_rule.py` has the steps; some are
other ones here.

| step                                                    | reads, besides gates       | writes                                |
|---------------------------------------------------------|----------------------------|---------------------------------------|
| `delta_rule/channel_decays.py`                               | q, k, g                    | s; q exp(s), k exp(s), k exp(s_Q - s) |
| `delta_rule/channel_intra_chunk.py`                          | q, k, s                    | A, T                                  |
| `delta_rule/states.py`, sequential                           | decayed k, v, T            | states, v_new                         |
| `delta_rule/outputs.py`                                      | decayed q, A, v_new, states| o                                     |
| backward: the first three again; `delta_rule/outputs.py`     | A, do                      | d_v_new                               |
| `delta_rule/states.py`, sequential, in reverse               | decayed q, k, do, d_v_new, T | gradients of states; d_rhs over d_v_new |
| `delta_rule/channel_grads.py`                                | all but decayed q, k, A, T | all gradients                         |

Decays of channels are inside the products, so every value head has queries, keys, A and gradients of queries and keys of its own.

S sequence, B batch, H value heads, P value head dim, G key heads, N key head dim.
"""

from __future__ import annotations

from typing import Unpack

from torch import Tensor

from petatron.kernels.ssm.chunk_delta_rule import DeltaGrads
from petatron.kernels.ssm.chunked_sequence import ChunkOptions
from petatron.kernels.strides import contiguous_rows
from petatron.kernels.triton.ssm.delta_rule.channel_decays import decayed_qk
from petatron.kernels.triton.ssm.delta_rule.channel_grads import channel_grads
from petatron.kernels.triton.ssm.delta_rule.channel_intra_chunk import channel_intra_chunk
from petatron.kernels.triton.ssm.delta_rule.input_grads import DeltaIntermediates
from petatron.kernels.triton.ssm.delta_rule.outputs import chunk_outputs, intra_chunk_v_new_grads
from petatron.kernels.triton.ssm.delta_rule.states import chunk_state_grads, chunk_states
from petatron.kernels.triton.ssm.delta_rule.tiles import delta_chunks
from petatron.kernels.triton.ssm.scan_tiles import chunk_tokens


def chunk_delta_rule(*delta_inputs: Tensor, **options: Unpack[ChunkOptions]) -> tuple[Tensor, Tensor]:
    """See the reference; `chunk_size` is an upper bound."""
    q, k, v, g = map(contiguous_rows, delta_inputs[:4])
    chunk = chunk_tokens(options["chunk_size"], k)
    chunks = delta_chunks(q, k, v, g, delta_inputs[4], options.get("starts_SB"), chunk)
    decayed = decayed_qk(q, k, g, chunks)
    A, T = channel_intra_chunk(q, k, chunks)
    states, v_new, final_state = chunk_states(k, v, T, chunks, options.get("initial_state"), decayed)
    return chunk_outputs(q, k, v_new, states, chunks, decayed, A), final_state


def chunk_delta_rule_backward(
    grad_o_SBHP: Tensor, grad_final_state: Tensor | None, *delta_inputs: Tensor, **options: Unpack[ChunkOptions]
) -> DeltaGrads:
    """See the reference; `chunk_size` is an upper bound."""
    initial_state = options.get("initial_state")
    grad_o, q, k, v, g = map(contiguous_rows, (grad_o_SBHP, *delta_inputs[:4]))
    chunk = chunk_tokens(options["chunk_size"], k)
    chunks = delta_chunks(q, k, v, g, delta_inputs[4], options.get("starts_SB"), chunk)
    decayed = decayed_qk(q, k, g, chunks)
    A, T = channel_intra_chunk(q, k, chunks)
    states, v_new, _ = chunk_states(k, v, T, chunks, initial_state, decayed)
    grad_v_new = intra_chunk_v_new_grads(q, k, grad_o, chunks, A)
    grad_states, grad_rhs, grad_initial_state = chunk_state_grads(
        q, k, grad_o, grad_v_new, T, chunks, grad_final_state, decayed
    )
    intermediates = DeltaIntermediates(states, grad_states, v_new, grad_rhs)
    return (
        *channel_grads(grad_o, q, k, v, *delta_inputs[3:], intermediates, chunks),
        None if initial_state is None else grad_initial_state.to(initial_state.dtype),
    )
