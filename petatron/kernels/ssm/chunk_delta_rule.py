"""The gated delta rule in chunks: GEMMs and one triangular solve per chunk instead of one step per token. The reference.

What a token writes depends on what the tokens before it wrote. With s the cumulative sum of g inside a chunk of Q tokens and S the state
before it, the values v_new that a chunk writes (beta times the difference in the definition, `delta_recurrence.py`) solve

    v_new_i + sum over j < i of L_ij v_new_j  =  beta_i v_i - beta_i exp(s_i) S^T k_i          L_ij = beta_i exp(s_i - s_j) (k_i . k_j)

a unit lower triangular system (I + L) v_new = beta v - (beta exp(s) k) S. So v_new = U - W S, with U and W the solutions for its two
right-hand sides, beta v and beta exp(s) k: the WY representation of a product of Householder-like matrices, by the UT transform
T = (I + L)^{-1} (Yang et al., parallelizing linear transformers with the delta rule; v_new is its name in flash-linear-attention). So all
but the states is independent of the chunks before:

    output           o_i = exp(s_i) S^T q_i + sum over j <= i of A_ij v_new_j                  inter-chunk and intra-chunk
                     A_ij = exp(s_i - s_j) (q_i . k_j)                                         the attention matrix
    state passing    S' = exp(s_Q) S + sum over j of exp(s_Q - s_j) k_j v_new_j^T

and the sequential part is two GEMMs per chunk, for v_new and the next state. A decay exp(s_i - s_j) is zero if a document begins after j
and up to i; all exponents are at most 0. A sequence is padded to whole chunks with g = beta = 0, which leaves a state as it is.

Backward recomputes all of this from the inputs, so nothing else is saved. Gradients of states and of v_new go from the last chunk to the
first; a gradient of the solution X = (I + L)^{-1} Y is that of Y, (I + L)^{-T} dX, and of L, -dY X^T. A gradient of exp(s_i - s_j) is
one of every g from j + 1 to i; these are added up without taking differences, since decays may be so strong that nothing else is left.

S sequence, B batch, H value heads, P value head dim, G key heads, N key head dim; inside, c chunks of q (or k) tokens, g key heads of
r value heads each.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Unpack

import torch
from torch import Tensor

from petatron.kernels.compute_dtype import compute_dtype
from petatron.kernels.ssm.chunks import ChunkOptions, decay_matrix, from_chunks, reverse_cumsum, to_chunks
from petatron.kernels.ssm.delta_recurrence import l2_normalize, l2_normalize_backward, query_scale

DeltaGrads = tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor | None]
"""Of q, k, v, g, beta and the initial state."""


def chunk_delta_rule(*delta_inputs: Tensor, **options: Unpack[ChunkOptions]) -> tuple[Tensor, Tensor]:
    """Returns the outputs of all tokens [S, B, H, P], and the state [B, H, N, P] after the last, in at least float32.

    delta_inputs: queries and keys [S, B, G, N], not yet normalized; values [S, B, H, P]; g [S, B, H], logarithms of decays, at most 0, in
    at least float32; beta [S, B, H], from 0 to 1.
    """
    v_SBHP, initial_state = delta_inputs[2], options.get("initial_state")
    inputs = chunked_inputs(delta_inputs, min(options["chunk_size"], v_SBHP.shape[0]), options.get("starts_SB"))
    decays = _decays(inputs.g, inputs.resets)
    wy = _wy_representation(inputs, decays)
    states, v_new = pass_states(wy.U, wy.W, wy.k_to_end, decays.chunk[..., None, None], initial_state)
    A = (inputs.q @ inputs.k.mT) * decays.intra_chunk
    o = (inputs.q * decays.from_start[..., None]) @ states[:, :-1] + A @ v_new
    return from_chunks(o, v_SBHP.shape[0]).to(v_SBHP.dtype), states[:, -1].flatten(1, 2)


def chunk_delta_rule_backward(
    grad_o_SBHP: Tensor, grad_final_state: Tensor | None, *delta_inputs: Tensor, **options: Unpack[ChunkOptions]
) -> DeltaGrads:
    """Returns the gradients of the inputs in their dtypes; that of the initial state is None where there is none."""
    q_SBGN, k_SBGN, v_SBHP, g_SBH, beta_SBH = delta_inputs
    length, initial_state = v_SBHP.shape[0], options.get("initial_state")
    inputs = chunked_inputs(delta_inputs, min(options["chunk_size"], length), options.get("starts_SB"))
    decays = _decays(inputs.g, inputs.resets)
    wy = _wy_representation(inputs, decays)
    states, v_new = pass_states(wy.U, wy.W, wy.k_to_end, decays.chunk[..., None, None], initial_state)
    states_before = states[:, :-1]
    grad_o = to_chunks(grad_o_SBHP.to(inputs.v.dtype), inputs.chunk_size).unflatten(2, inputs.v.shape[2:4])
    A = (inputs.q @ inputs.k.mT) * decays.intra_chunk
    q_from_start = inputs.q * decays.from_start[..., None]
    grad_states, grad_v_new = _pass_state_grads(
        wy, decays.chunk, (q_from_start, A.mT @ grad_o, grad_o), grad_final_state
    )
    grad_states_after = grad_states[:, 1:]
    grads = _operand_grads(grad_o, wy, (states_before, v_new), (grad_states_after, grad_v_new))
    grad_chunk_decay = (states_before * grad_states_after).sum(dim=(-2, -1))
    grad_g = _decay_grads(grads, A, inputs, decays, wy, grad_chunk_decay)
    grad_q, grad_k = _query_key_grads(grads, inputs, decays)
    return (
        l2_normalize_backward(
            from_chunks(grad_q[:, :, :, None], length), q_SBGN, scale=query_scale(q_SBGN.shape[-1])
        ).to(q_SBGN.dtype),
        l2_normalize_backward(from_chunks(grad_k[:, :, :, None], length), k_SBGN).to(k_SBGN.dtype),
        from_chunks(grads.U_rhs * inputs.beta[..., None], length).to(v_SBHP.dtype),
        from_chunks(grad_g[..., None], length).squeeze(-1).to(g_SBH.dtype),
        from_chunks(_beta_grads(grads, inputs, decays, wy)[..., None], length).squeeze(-1).to(beta_SBH.dtype),
        None if initial_state is None else grad_states[:, 0].flatten(1, 2).to(initial_state.dtype),
    )


class ChunkedDeltaInputs(NamedTuple):
    """The inputs in at least float32, normalized and cut into chunks. resets: documents begun in the chunk, up to each token."""

    q: Tensor  # [b, c, g, 1, q, n]
    k: Tensor  # [b, c, g, 1, q, n]
    v: Tensor  # [b, c, g, r, q, p]
    g: Tensor  # [b, c, g, r, q], or [b, c, g, r, q, n] with decays of channels
    beta: Tensor  # [b, c, g, r, q]
    resets: Tensor | None  # [b, c, 1, 1, q]
    chunk_size: int


class _Decays(NamedTuple):
    """The decays of a chunk: exp of differences of s, the cumulative sum of g.

    intra_chunk: exp(s_i - s_j) for j <= i. from_start: exp(s_i), from the start of the chunk to each token. to_end: exp(s_Q - s_j), from
    each token to the end of the chunk. chunk: exp(s_Q).
    """

    intra_chunk: Tensor  # [b, c, g, r, q, k]
    from_start: Tensor  # [b, c, g, r, q]
    to_end: Tensor  # [b, c, g, r, q]
    chunk: Tensor  # [b, c, g, r]


class _WYRepresentation(NamedTuple):
    """kk: k k^T. I_plus_L: the unit lower triangular matrix. U, W: (I + L)^{-1} beta v and (I + L)^{-1} beta exp(s) k.

    k_to_end: exp(s_Q - s) k, the keys decayed to the end of the chunk.
    """

    kk: Tensor  # [b, c, g, 1, q, k]
    I_plus_L: Tensor  # [b, c, g, r, q, k]
    U: Tensor  # [b, c, g, r, q, p]
    W: Tensor  # [b, c, g, r, q, n]
    k_to_end: Tensor  # [b, c, g, r, q, n]


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


def _decays(g: Tensor, resets: Tensor | None) -> _Decays:
    g_cumsum = g.cumsum(dim=-1)
    from_start, to_end = g_cumsum.exp(), (g_cumsum[..., -1:] - g_cumsum).exp()
    if resets is not None:
        from_start = from_start.masked_fill(resets != 0, 0.0)
        to_end = to_end.masked_fill(resets != resets[..., -1:], 0.0)
    return _Decays(decay_matrix(g_cumsum, resets), from_start, to_end, from_start[..., -1])


def _wy_representation(inputs: ChunkedDeltaInputs, decays: _Decays) -> _WYRepresentation:
    """Solves (I + L) (U | W) = (beta v | beta exp(s) k)."""
    kk, beta = inputs.k @ inputs.k.mT, inputs.beta[..., None]
    identity = torch.eye(inputs.chunk_size, dtype=kk.dtype, device=kk.device)
    I_plus_L = (beta * kk * decays.intra_chunk).tril(-1) + identity
    W_rhs = inputs.k * (beta * decays.from_start[..., None])
    rhs = torch.cat((beta * inputs.v, W_rhs), dim=-1)
    solution = torch.linalg.solve_triangular(I_plus_L, rhs, upper=False, unitriangular=True)
    U, W = solution.split((inputs.v.shape[-1], W_rhs.shape[-1]), dim=-1)
    return _WYRepresentation(kk, I_plus_L, U, W, inputs.k * decays.to_end[..., None])


def pass_states(
    U: Tensor, W: Tensor, k_to_end: Tensor, chunk_decays: Tensor, initial_state: Tensor | None
) -> tuple[Tensor, Tensor]:
    """The inter-chunk recurrence: v_new = U - W S, S' = chunk_decay S + k_to_end^T v_new.

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


def _pass_state_grads(
    wy: _WYRepresentation,
    chunk_decays: Tensor,
    by_outputs: tuple[Tensor, Tensor, Tensor],
    grad_final_state: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """The inter-chunk recurrence in reverse: d_v_new = A^T do + k_to_end dS', dS = chunk_decay dS' + q_from_start^T do - W^T d_v_new.

    Returns the gradients of the states before each chunk and after the last, and of v_new.

    by_outputs: q_from_start, exp(s) q; A^T do, the gradient of v_new by the outputs of its own chunk; do.
    """
    q_from_start, intra_chunk_grad_v_new, grad_o = by_outputs
    shape = (*grad_o.shape[:1], *grad_o.shape[2:4], wy.W.shape[-1], grad_o.shape[-1])
    grad = grad_o.new_zeros(shape) if grad_final_state is None else grad_final_state.to(grad_o.dtype).reshape(shape)
    grad_states, grad_v_new = [grad], []
    operands = (wy.W, wy.k_to_end, chunk_decays, q_from_start, intra_chunk_grad_v_new, grad_o)
    by_chunk = zip(*(part.unbind(1)[::-1] for part in operands), strict=True)
    for W_c, k_c, decay, q_c, intra_chunk_c, grad_o_c in by_chunk:
        grad_v_new.append(intra_chunk_c + k_c @ grad)
        grad = decay[..., None, None] * grad + q_c.mT @ grad_o_c - W_c.mT @ grad_v_new[-1]
        grad_states.append(grad)
    return torch.stack(grad_states[::-1], dim=1), torch.stack(grad_v_new[::-1], dim=1)


class _OperandGrads(NamedTuple):
    """The gradients of the operands of a chunk's GEMMs and of its triangular system.

    A: do v_new^T. q_from_start: do S^T. k_to_end: v_new dS'^T. L: of the system. U_rhs, W_rhs: of its right-hand sides.
    """

    A: Tensor  # [b, c, g, r, q, k]
    q_from_start: Tensor  # [b, c, g, r, q, n]
    k_to_end: Tensor  # [b, c, g, r, q, n]
    L: Tensor  # [b, c, g, r, q, k]
    U_rhs: Tensor  # [b, c, g, r, q, p]; of beta v
    W_rhs: Tensor  # [b, c, g, r, q, n]; of beta exp(s) k


def _operand_grads(
    grad_o: Tensor, wy: _WYRepresentation, recurrence: tuple[Tensor, Tensor], recurrence_grads: tuple[Tensor, Tensor]
) -> _OperandGrads:
    """recurrence: the states before the chunks, and v_new. recurrence_grads: of the states after the chunks, and of v_new."""
    (states_before, v_new), (grad_states_after, grad_v_new) = recurrence, recurrence_grads
    grad_UW = torch.cat((grad_v_new, -grad_v_new @ states_before.mT), dim=-1)
    grad_rhs = torch.linalg.solve_triangular(wy.I_plus_L.mT, grad_UW, upper=True, unitriangular=True)
    UW = torch.cat((wy.U, wy.W), dim=-1)
    U_rhs, W_rhs = grad_rhs.split((wy.U.shape[-1], wy.W.shape[-1]), dim=-1)
    return _OperandGrads(
        A=grad_o @ v_new.mT,
        q_from_start=grad_o @ states_before.mT,
        k_to_end=v_new @ grad_states_after.mT,
        L=-(grad_rhs @ UW.mT).tril(-1),
        U_rhs=U_rhs,
        W_rhs=W_rhs,
    )


def _decay_grads(
    grads: _OperandGrads,
    A: Tensor,
    inputs: ChunkedDeltaInputs,
    decays: _Decays,
    wy: _WYRepresentation,
    grad_chunk_decay: Tensor,
) -> Tensor:
    """Returns the gradient of g: that of exp(x) is the gradient of the product it is in, times that product."""
    # exp(s_i - s_j): of every g after j and up to i.
    intra_chunk = (grads.A * A + grads.L * wy.I_plus_L).tril(-1)
    by_intra_chunk = reverse_cumsum(intra_chunk, dim=-2).tril(-1).sum(dim=-1)
    # exp(s_i): of every g up to i. exp(s_Q - s_j): of every g after j.
    from_start = (grads.q_from_start * inputs.q + grads.W_rhs * inputs.k * inputs.beta[..., None]).sum(dim=-1)
    by_to_end = torch.nn.functional.pad((grads.k_to_end * wy.k_to_end).sum(dim=-1)[..., :-1], (1, 0)).cumsum(dim=-1)
    by_chunk = (grad_chunk_decay * decays.chunk)[..., None]
    return by_intra_chunk + reverse_cumsum(from_start * decays.from_start, dim=-1) + by_to_end + by_chunk


def _query_key_grads(grads: _OperandGrads, inputs: ChunkedDeltaInputs, decays: _Decays) -> tuple[Tensor, Tensor]:
    """Returns the gradients of normalized queries and keys [b, c, g, q, n], added up over the value heads that share them."""
    from_start, beta = decays.from_start[..., None], inputs.beta[..., None]
    grad_qk, grad_kk = grads.A * decays.intra_chunk, grads.L * beta * decays.intra_chunk
    grad_q = grad_qk @ inputs.k + grads.q_from_start * from_start
    grad_k = grad_qk.mT @ inputs.q + (grad_kk + grad_kk.mT) @ inputs.k
    grad_k = grad_k + grads.k_to_end * decays.to_end[..., None] + grads.W_rhs * (beta * from_start)
    return grad_q.sum(dim=3), grad_k.sum(dim=3)


def _beta_grads(grads: _OperandGrads, inputs: ChunkedDeltaInputs, decays: _Decays, wy: _WYRepresentation) -> Tensor:
    """Returns the gradient of beta, by which the right-hand sides and L are multiplied."""
    by_rhs = (grads.U_rhs * inputs.v).sum(dim=-1) + (grads.W_rhs * inputs.k).sum(dim=-1) * decays.from_start
    return by_rhs + (grads.L * decays.intra_chunk * wy.kk).sum(dim=-1)
