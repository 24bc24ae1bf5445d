"""The gated delta rule in chunks: GEMMs and one triangular solve per chunk instead of one step per token. The reference.

What a token writes depends on what the tokens before it wrote. With s the running sum of g inside a chunk of Q tokens and S_c the
state that enters it, the values w_i written by a chunk (beta_i times the difference in the definition, `delta_recurrence.py`) solve

    w_i + beta_i sum over j < i of exp(s_i - s_j) (k_i . k_j) w_j  =  beta_i v_i - beta_i exp(s_i) S_c^T k_i

a unit lower triangular system (I + L) w = beta v - (beta exp(s) k) S_c: w = U - W S_c, with U and W the solutions of its two sides
(the WY form of a product of Householder-like matrices). So all but the states is independent of the chunks before:

    output            o_i = exp(s_i) S_c^T q_i + sum over j <= i of exp(s_i - s_j) (q_i . k_j) w_j
    state passing     S_{c+1} = exp(s_Q) S_c + E^T w,   E_j = exp(s_Q - s_j) k_j

and the sequential part is two GEMMs per chunk, for w and the next state. A decay exp(s_i - s_j) is zero if a document begins after j
and up to i; all exponents are at most 0. A sequence is padded to whole chunks with g = beta = 0, which leaves a state as it is.

Backward recomputes all of this from the inputs, so nothing else is saved. Gradients of states and of w go from the last chunk to the
first; a gradient of the solution X = (I + L)^{-1} Y is that of Y, (I + L)^{-T} dX, and of L, -dY X^T. A gradient of exp(s_i - s_j) is
one of every g from j + 1 to i; these are added up without taking differences, since decays may be so strong that nothing else is left.

S sequence, B batch, H value heads, P value head dim, G key heads, N key head dim; inside, c chunks of q (or k) tokens, g key heads of
r value heads each.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from petatron.kernels.compute_dtype import compute_dtype
from petatron.kernels.ssm.chunks import decay_matrix, from_chunks, reverse_cumsum, to_chunks
from petatron.kernels.ssm.delta_recurrence import l2_normalise, l2_normalise_backward, query_scale

DeltaGrads = tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor | None]
"""Of q, k, v, g, beta and the initial state."""


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
    """Returns the outputs of all tokens [S, B, H, P], and the state [B, H, N, P] after the last, in at least float32.

    q_SBGN, k_SBGN: not yet normalised. g_SBH: logarithms of decays, at most 0, in at least float32. beta_SBH: from 0 to 1.
    starts_SB: whether a token begins a document; the state before it is dropped, also the initial one.
    initial_state: the state [B, H, N, P] before the first token; None: zero.
    """
    inputs = _chunked(q_SBGN, k_SBGN, v_SBHP, g_SBH, beta_SBH, chunk_size, starts_SB)
    decays = _decays(inputs.g, inputs.resets)
    system = _solve(inputs, decays)
    states, written = pass_states(system.U, system.W, system.E, decays.whole[..., None, None], initial_state)
    scores = (inputs.q @ inputs.k.mT) * decays.inside
    o = (inputs.q * decays.to_token[..., None]) @ states[:, :-1] + scores @ written
    return from_chunks(o, v_SBHP.shape[0]).to(v_SBHP.dtype), states[:, -1].flatten(1, 2)


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
    """Returns the gradients of the inputs in their dtypes; that of the initial state is None where there is none."""
    length = v_SBHP.shape[0]
    inputs = _chunked(q_SBGN, k_SBGN, v_SBHP, g_SBH, beta_SBH, chunk_size, starts_SB)
    decays = _decays(inputs.g, inputs.resets)
    system = _solve(inputs, decays)
    states, written = pass_states(system.U, system.W, system.E, decays.whole[..., None, None], initial_state)
    entering = states[:, :-1]
    grad = to_chunks(grad_o_SBHP.to(inputs.v.dtype), inputs.chunk_size).unflatten(2, inputs.v.shape[2:4])
    scores = (inputs.q @ inputs.k.mT) * decays.inside
    decayed_q = inputs.q * decays.to_token[..., None]
    grad_states, grad_written = _pass_state_grads(
        system, decays.whole, (decayed_q, scores.mT @ grad, grad), grad_final_state
    )
    leaving = grad_states[:, 1:]
    grads = _product_grads(grad, system, (entering, written), (leaving, grad_written))
    grad_g = _decay_grads(grads, scores, inputs, decays, system, (entering * leaving).sum(dim=(-2, -1)))
    grad_q, grad_k = _query_key_grads(grads, inputs, decays)
    grad_beta = _beta_grads(grads, inputs, decays, system)
    return (
        l2_normalise_backward(
            from_chunks(grad_q[:, :, :, None], length), q_SBGN, factor=query_scale(q_SBGN.shape[-1])
        ).to(q_SBGN.dtype),
        l2_normalise_backward(from_chunks(grad_k[:, :, :, None], length), k_SBGN).to(k_SBGN.dtype),
        from_chunks(grads.v_side * inputs.beta[..., None], length).to(v_SBHP.dtype),
        from_chunks(grad_g[..., None], length).squeeze(-1).to(g_SBH.dtype),
        from_chunks(grad_beta[..., None], length).squeeze(-1).to(beta_SBH.dtype),
        None if initial_state is None else grad_states[:, 0].flatten(1, 2).to(initial_state.dtype),
    )


class _ChunkedInputs(NamedTuple):
    """The inputs in at least float32, normalised and cut into chunks. resets: documents begun in the chunk, up to each token."""

    q: Tensor  # [b, c, g, 1, q, n]
    k: Tensor  # [b, c, g, 1, q, n]
    v: Tensor  # [b, c, g, r, q, p]
    g: Tensor  # [b, c, g, r, q]
    beta: Tensor  # [b, c, g, r, q]
    resets: Tensor | None  # [b, c, 1, 1, q]
    chunk_size: int


class _Decays(NamedTuple):
    """inside: from token to token. to_token: from the start of the chunk to each token. to_end: from each token to the end of the chunk.

    whole: over the chunk.
    """

    inside: Tensor  # [b, c, g, r, q, k]
    to_token: Tensor  # [b, c, g, r, q]
    to_end: Tensor  # [b, c, g, r, q]
    whole: Tensor  # [b, c, g, r]


class _System(NamedTuple):
    """lower: I + L. U, W: the solutions of its two sides. E: keys decayed to the end."""

    kk: Tensor  # [b, c, g, 1, q, k]
    lower: Tensor  # [b, c, g, r, q, k]
    U: Tensor  # [b, c, g, r, q, p]
    W: Tensor  # [b, c, g, r, q, n]
    E: Tensor  # [b, c, g, r, q, n]


def _chunked(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, chunk_size: int, starts: Tensor | None
) -> _ChunkedInputs:
    dtype, groups = compute_dtype(torch.promote_types(v.dtype, g.dtype)), k.shape[2]
    chunk_size = min(chunk_size, v.shape[0])
    heads = (groups, v.shape[2] // groups)
    g, beta = (to_chunks(x.to(dtype)[..., None], chunk_size).squeeze(-1).unflatten(2, heads) for x in (g, beta))
    resets = None if starts is None else to_chunks(starts[:, :, None, None].to(torch.int32), chunk_size)
    return _ChunkedInputs(
        q=to_chunks(l2_normalise(q.to(dtype), factor=query_scale(q.shape[-1])), chunk_size).unsqueeze(3),
        k=to_chunks(l2_normalise(k.to(dtype)), chunk_size).unsqueeze(3),
        v=to_chunks(v.to(dtype), chunk_size).unflatten(2, heads),
        g=g,
        beta=beta,
        resets=None if resets is None else resets[..., 0].cumsum(dim=-1).unsqueeze(3),
        chunk_size=chunk_size,
    )


def _decays(g: Tensor, resets: Tensor | None) -> _Decays:
    sums = g.cumsum(dim=-1)
    to_token, to_end = sums.exp(), (sums[..., -1:] - sums).exp()
    if resets is not None:
        to_token = to_token.masked_fill(resets != 0, 0.0)
        to_end = to_end.masked_fill(resets != resets[..., -1:], 0.0)
    return _Decays(decay_matrix(sums, resets), to_token, to_end, to_token[..., -1])


def _solve(inputs: _ChunkedInputs, decays: _Decays) -> _System:
    kk, beta = inputs.k @ inputs.k.mT, inputs.beta[..., None]
    identity = torch.eye(inputs.chunk_size, dtype=kk.dtype, device=kk.device)
    lower = (beta * kk * decays.inside).tril(-1) + identity
    k_side = inputs.k * (beta * decays.to_token[..., None])
    sides = torch.cat((beta * inputs.v, k_side), dim=-1)
    solution = torch.linalg.solve_triangular(lower, sides, upper=False, unitriangular=True)
    U, W = solution.split((inputs.v.shape[-1], k_side.shape[-1]), dim=-1)
    return _System(kk, lower, U, W, inputs.k * decays.to_end[..., None])


def pass_states(U: Tensor, W: Tensor, E: Tensor, whole: Tensor, initial_state: Tensor | None) -> tuple[Tensor, Tensor]:
    """Returns the states before each chunk and after the last [b, c + 1, g, r, n, p], and the values written [b, c, g, r, q, p].

    whole: decays over whole chunks, [b, c, g, r, n or 1, 1].
    """
    shape = (*U.shape[:1], *U.shape[2:4], W.shape[-1], U.shape[-1])
    state = U.new_zeros(shape) if initial_state is None else initial_state.to(U.dtype).reshape(shape)
    states, written = [state], []
    for U_c, W_c, E_c, decay in zip(*(part.unbind(1) for part in (U, W, E, whole)), strict=True):
        written.append(U_c - W_c @ state)
        state = decay * state + E_c.mT @ written[-1]
        states.append(state)
    return torch.stack(states, dim=1), torch.stack(written, dim=1)


def _pass_state_grads(
    system: _System, whole: Tensor, of_outputs: tuple[Tensor, Tensor, Tensor], grad_final_state: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Returns the gradients of the states before each chunk and after the last, and of the values written.

    of_outputs: decayed queries, the gradients of values written by the outputs alone, those of the outputs.
    """
    decayed_q, own_written, grad_o = of_outputs
    shape = (*grad_o.shape[:1], *grad_o.shape[2:4], system.W.shape[-1], grad_o.shape[-1])
    grad = grad_o.new_zeros(shape) if grad_final_state is None else grad_final_state.to(grad_o.dtype).reshape(shape)
    grads, grads_written = [grad], []
    parts = (part.unbind(1)[::-1] for part in (system.W, system.E, whole, decayed_q, own_written, grad_o))
    for W, E, decay, q, own, of_chunk in zip(*parts, strict=True):
        grads_written.append(own + E @ grad)
        grad = decay[..., None, None] * grad + q.mT @ of_chunk - W.mT @ grads_written[-1]
        grads.append(grad)
    return torch.stack(grads[::-1], dim=1), torch.stack(grads_written[::-1], dim=1)


class _ProductGrads(NamedTuple):
    """The gradients of what is multiplied: scores, decayed queries, keys decayed to the end, L, and the two sides of the system."""

    scores: Tensor  # [b, c, g, r, q, k]
    decayed_q: Tensor  # [b, c, g, r, q, n]
    E: Tensor  # [b, c, g, r, q, n]
    L: Tensor  # [b, c, g, r, q, k]
    v_side: Tensor  # [b, c, g, r, q, p]; of beta v
    k_side: Tensor  # [b, c, g, r, q, n]; of beta exp(s) k


def _product_grads(
    grad: Tensor, system: _System, made: tuple[Tensor, Tensor], made_grads: tuple[Tensor, Tensor]
) -> _ProductGrads:
    """grad: of the outputs. made: the states before the chunks, and the values written.

    made_grads: of the states after the chunks, and of the values written.
    """
    (entering, written), (leaving, grad_written) = made, made_grads
    sides = torch.cat((grad_written, -grad_written @ entering.mT), dim=-1)
    sides = torch.linalg.solve_triangular(system.lower.mT, sides, upper=True, unitriangular=True)
    solution = torch.cat((system.U, system.W), dim=-1)
    v_side, k_side = sides.split((system.U.shape[-1], system.W.shape[-1]), dim=-1)
    return _ProductGrads(
        scores=grad @ written.mT,
        decayed_q=grad @ entering.mT,
        E=written @ leaving.mT,
        L=-(sides @ solution.mT).tril(-1),
        v_side=v_side,
        k_side=k_side,
    )


def _decay_grads(
    grads: _ProductGrads, scores: Tensor, inputs: _ChunkedInputs, decays: _Decays, system: _System, by_whole: Tensor
) -> Tensor:
    """Returns the gradient of g: that of exp(x) is the gradient of the product it is in, times that product.

    `by_whole`: the gradients of the decays over whole chunks.
    """
    # From token j to token i: of every g after j and up to i.
    inside = (grads.scores * scores + grads.L * system.lower).tril(-1)
    crossing = reverse_cumsum(inside, dim=-2).tril(-1).sum(dim=-1)
    # From the start to token i: of every g up to i. To the end from token j: of every g after j.
    from_start = (grads.decayed_q * inputs.q + grads.k_side * inputs.k * inputs.beta[..., None]).sum(dim=-1)
    to_end = torch.nn.functional.pad((grads.E * system.E).sum(dim=-1)[..., :-1], (1, 0)).cumsum(dim=-1)
    whole = (by_whole * decays.whole)[..., None]
    return crossing + reverse_cumsum(from_start * decays.to_token, dim=-1) + to_end + whole


def _query_key_grads(grads: _ProductGrads, inputs: _ChunkedInputs, decays: _Decays) -> tuple[Tensor, Tensor]:
    """Returns the gradients of normalised queries and keys [b, c, g, q, n], added up over the value heads that share them."""
    to_token, beta = decays.to_token[..., None], inputs.beta[..., None]
    grad_qk, grad_kk = grads.scores * decays.inside, grads.L * beta * decays.inside
    grad_q = grad_qk @ inputs.k + grads.decayed_q * to_token
    grad_k = grad_qk.mT @ inputs.q + (grad_kk + grad_kk.mT) @ inputs.k
    grad_k = grad_k + grads.E * decays.to_end[..., None] + grads.k_side * (beta * to_token)
    return grad_q.sum(dim=3), grad_k.sum(dim=3)


def _beta_grads(grads: _ProductGrads, inputs: _ChunkedInputs, decays: _Decays, system: _System) -> Tensor:
    by_sides = (grads.v_side * inputs.v).sum(dim=-1) + (grads.k_side * inputs.k).sum(dim=-1) * decays.to_token
    return by_sides + (grads.L * decays.inside * system.kk).sum(dim=-1)
