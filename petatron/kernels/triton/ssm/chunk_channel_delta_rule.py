"""The gated delta rule with a decay of every key channel in Triton, forward and backward. The functions are
those of `chunk_delta_rule.py`, which take either kind of decay; some steps are other ones here.

| step                                                    | reads, besides gates       | writes                                |
|---------------------------------------------------------|----------------------------|---------------------------------------|
| `delta/channel_decays.py`                               | q, k, g                    | s; q exp(s), k exp(s), k exp(s_Q - s) |
| `delta/channel_intra_chunk.py`                          | q, k, s                    | A, T                                  |
| `delta/states.py`, sequential                           | decayed k, v, T            | states, v_new                         |
| `delta/outputs.py`                                      | decayed q, A, v_new, states| o                                     |
| backward: the first three again; `delta/outputs.py`     | A, do                      | d_v_new                               |
| `delta/states.py`, sequential, in reverse               | decayed q, k, do, d_v_new, T | gradients of states; d_rhs over d_v_new |
| `delta/channel_grads.py`                                | all but decayed q, k, A, T | all gradients                         |

Decays of channels are inside the products, so every value head has queries, keys, A and gradients of queries and keys of its own.

S sequence, B batch, H value heads, P value head dim, G key heads, N key head dim.
"""

from petatron.kernels.triton.ssm.chunk_delta_rule import chunk_delta_rule, chunk_delta_rule_backward

__all__ = ["chunk_delta_rule", "chunk_delta_rule_backward"]
