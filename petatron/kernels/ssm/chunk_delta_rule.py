"""The gated delta rule in chunks: GEMMs and one triangular solve per chunk instead of one step per token. The reference.

The value that a token writes depends on the values that earlier tokens wrote. Let s be the cumulative sum of g inside a chunk of Q tokens
and S the state before the chunk. The values v_new that the chunk writes (beta times the difference in `delta_recurrence.py`) solve

    v_new_i + sum over j < i of L_ij v_new_j  =  beta_i v_i - beta_i exp(s_i) S^T k_i          L_ij = beta_i exp(s_i - s_j) (k_i . k_j)

a unit lower triangular system (I + L) v_new = beta v - (beta exp(s) k) S. So v_new = U - W S, where U and W solve the system for the
right-hand sides beta v and beta exp(s) k: the WY representation of a product of Householder-like matrices, computed by the UT transform
T = (I + L)^{-1} (Yang et al., parallelizing linear transformers with the delta rule; flash-linear-attention also says v_new). U and W of
all chunks are computed at once; only the states depend on earlier chunks:

    output           o_i = exp(s_i) S^T q_i + sum over j <= i of A_ij v_new_j                  inter-chunk and intra-chunk
                     A_ij = exp(s_i - s_j) (q_i . k_j)                                         the attention matrix
    state passing    S' = exp(s_Q) S + sum over j of exp(s_Q - s_j) k_j v_new_j^T

The sequential part is two GEMMs per chunk, for v_new and the next state. A decay exp(s_i - s_j) is zero if a document begins after j
and up to i; all exponents are at most 0. A sequence is padded to whole chunks with g = beta = 0, which leaves the state unchanged.

Backward saves only the inputs and recomputes the rest under autograd. The logarithm of a decay is a sum of g, never a difference of two
cumulative sums: with strong decays such a difference would cancel in the gradients.

S sequence, B batch, H value heads, P value head dim, G key heads, N key head dim; inside, c chunks of q (or k) tokens, g key heads of
r value heads each.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Unpack

import torch
from torch import Tensor

from petatron.kernels.compute_dtype import compute_dtype
from petatron.kernels.ssm.chunked_sequence import ChunkOptions, from_chunks, recurrence_grads, sums_after, to_chunks
from petatron.kernels.ssm.delta_recurrence import l2_normalize, query_scale

DeltaGrads = tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor | None]
"""The gradients of q, k, v, g, beta and the initial state."""


def chunk_delta_rule(*delta_inputs: Tensor, **options: Unpack[ChunkOptions]) -> tuple[Tensor, Tensor]:
    """Returns the outputs [S, B, H, P], and the final state [B, H, N, P] in at least float32.

    delta_inputs: queries and keys [S, B, G, N], not yet normalized; values [S, B, H, P]; g [S, B, H], logarithms of decays, at most 0, in
    at least float32; beta [S, B, H], from 0 to 1.
    """
    v_SBHP, initial_state = delta_inputs[2], options.get("initial_state")
    inputs = chunked_inputs(delta_inputs, min(options["chunk_size"], v_SBHP.shape[0]), options.get("starts_SB"))
    intra_chunk, from_start, to_end = _decays(inputs.g, inputs.resets)
    U, W = _wy_representation(inputs, intra_chunk, from_start)
    states, v_new = pass_states(U, W, inputs.k * to_end, from_start[..., -1:, :], initial_state)
    A = (inputs.q @ inputs.k.mT) * intra_chunk
    o = (inputs.q * from_start) @ states[:, :-1] + A @ v_new
    return from_chunks(o, v_SBHP.shape[0]).to(v_SBHP.dtype), states[:, -1].flatten(1, 2)


def chunk_delta_rule_backward(
    grad_o_SBHP: Tensor, grad_final_state: Tensor | None, *delta_inputs: Tensor, **options: Unpack[ChunkOptions]
) -> DeltaGrads:
    """Returns the gradients of the inputs in their dtypes; None for the initial state if there is none."""
    return recurrence_grads(chunk_delta_rule, (grad_o_SBHP, grad_final_state), delta_inputs, **options)  # pyright: ignore[reportReturnType]


class ChunkedDeltaInputs(NamedTuple):
    """The inputs in at least float32, normalized and cut into chunks. resets: the count of documents begun in the chunk up to a token."""

    q: Tensor  # [b, c, g, 1, q, n]
    k: Tensor  # [b, c, g, 1, q, n]
    v: Tensor  # [b, c, g, r, q, p]
    g: Tensor  # [b, c, g, r, q], or [b, c, g, r, q, n] with decays of channels
    beta: Tensor  # [b, c, g, r, q]
    resets: Tensor | None  # [b, c, 1, 1, q]
    chunk_size: int


def chunked_inputs(inputs: Sequence[Tensor], chunk_size: int, starts: Tensor | None) -> ChunkedDeltaInputs:
    """Cuts q, k, v, g and beta into chunks."""
    q, k, v, g, beta = inputs
    dtype, heads = compute_dtype(torch.promote_types(v.dtype, g.dtype)), (k.shape[2], v.shape[2] // k.shape[2])
    resets = None if starts is None else to_chunks(starts[:, :, None, None].to(torch.int32), chunk_size)

    def by_head(x: Tensor) -> Tensor:
        x = x.to(dtype)
        chunks = to_chunks(x[..., None], chunk_size).squeeze(-1) if x.dim() == 3 else to_chunks(x, chunk_size)
        return chunks.unflatten(2, heads)

    return ChunkedDeltaInputs(
        q=to_chunks(l2_normalize(q.to(dtype), scale=query_scale(q.shape[-1])), chunk_size).unsqueeze(3),
        k=to_chunks(l2_normalize(k.to(dtype)), chunk_size).unsqueeze(3),
        v=by_head(v),
        g=by_head(g),
        beta=by_head(beta),
        resets=None if resets is None else resets[..., 0].cumsum(dim=-1).unsqueeze(3),
        chunk_size=chunk_size,
    )


def _decays(g: Tensor, resets: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
    """Returns exp(s_i - s_j) for j <= i, else 0 [b, c, g, r, q, k], and [b, c, g, r, q, 1] exp(s_i), from the start of the chunk to each
    token, and exp(s_Q - s_j), from each token to its end."""
    size = g.shape[-1]
    hidden = torch.ones(size, size, dtype=torch.bool, device=g.device).triu(1)
    sums = g[..., None].expand(*g.shape, size).tril(-1).cumsum(dim=-2)
    from_start, to_end = g.cumsum(dim=-1).exp(), sums_after(g, dim=-1).exp()
    if resets is not None:
        hidden = hidden | (resets[..., :, None] != resets[..., None, :])
        from_start = from_start.masked_fill(resets != 0, 0.0)
        to_end = to_end.masked_fill(resets != resets[..., -1:], 0.0)
    return sums.masked_fill(hidden, -torch.inf).exp(), from_start[..., None], to_end[..., None]


def _wy_representation(inputs: ChunkedDeltaInputs, intra_chunk: Tensor, from_start: Tensor) -> Sequence[Tensor]:
    """Returns U and W, which solve (I + L) (U | W) = (beta v | beta exp(s) k)."""
    kk, beta = inputs.k @ inputs.k.mT, inputs.beta[..., None]
    identity = torch.eye(inputs.chunk_size, dtype=kk.dtype, device=kk.device)
    I_plus_L = (beta * kk * intra_chunk).tril(-1) + identity
    rhs = torch.cat((beta * inputs.v, inputs.k * (beta * from_start)), dim=-1)
    solution = torch.linalg.solve_triangular(I_plus_L, rhs, upper=False, unitriangular=True)
    return solution.split((inputs.v.shape[-1], inputs.k.shape[-1]), dim=-1)


def pass_states(
    U: Tensor, W: Tensor, k_to_end: Tensor, chunk_decays: Tensor, initial_state: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Runs the inter-chunk recurrence: v_new = U - W S, S' = chunk_decay S + k_to_end^T v_new.

    Returns the states before each chunk and after the last [b, c + 1, g, r, n, p], and v_new [b, c, g, r, q, p].

    chunk_decays: exp(s_Q), over whole chunks, [b, c, g, r, n or 1, 1].
    """
    shape = (*U.shape[:1], *U.shape[2:4], W.shape[-1], U.shape[-1])
    state = U.new_zeros(shape) if initial_state is None else initial_state.to(U.dtype).reshape(shape)
    states, v_new = [state], []
    for U_c, W_c, k_c, decay in zip(*(part.unbind(1) for part in (U, W, k_to_end, chunk_decays)), strict=True):
        v_new.append(U_c - W_c @ state)
        state = decay * state + k_c.mT @ v_new[-1]
        states.append(state)
    return torch.stack(states, dim=1), torch.stack(v_new, dim=1)
