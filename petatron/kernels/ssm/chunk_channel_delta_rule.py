"""The gated delta rule in chunks, with a decay of every key channel (Kimi delta attention). The reference.

`chunk_delta_rule.py` has the algebra: one unit triangular system per chunk (the WY representation), and states passed with two GEMMs. With
a decay of every key channel n, the decay between two tokens j < i is inside their inner product,

    sum over n of k_i[n] exp(s_i[n] - s_j[n]) k_j[n]          s the cumulative sum of g inside a chunk

A GEMM needs a factor of i times a factor of j. exp(s_i) and exp(-s_j) will not do, since the second overflows. So the tokens of a chunk
are the leaves of a binary tree: j and i are in different halves of exactly one node, and with m the last token of its first half

    exp(s_i - s_j)  =  exp(sum of g from m + 1 to i) x exp(sum of g from j + 1 to m)

where no exponent is above 0, however strong the decays are. One level of the tree is one batched GEMM, of keys (or queries) of second
halves with keys of first halves, and a chunk of Q tokens has log2 Q levels. Sums of g begin at the middle of a node, so that no
difference of long sums is taken.

Backward recomputes the forward pass under autograd, so nothing but the inputs is saved.

S sequence, B batch, H value heads, P value head dim, G key heads, N key head dim; inside, c chunks of q (or k) tokens, g key heads of
r value heads each.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from petatron.kernels.compute_dtype import compute_dtype
from petatron.kernels.ssm.chunk_delta_rule import DeltaGrads, pass_states
from petatron.kernels.ssm.chunks import from_chunks, reverse_cumsum, to_chunks
from petatron.kernels.ssm.delta_recurrence import l2_normalize, query_scale


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
    """Returns the outputs of all tokens [S, B, H, P], and the state [B, H, N, P] after the last, in at least float32.

    q_SBGN, k_SBGN: not yet normalized. g_SBHN: logarithms of decays, at most 0, in at least float32. beta_SBH: from 0 to 1.
    chunk_size: an upper bound; chunks have a power of two of tokens.
    starts_SB: whether a token begins a document; the state before it is dropped, also the initial one.
    initial_state: the state [B, H, N, P] before the first token; None: zero.
    """
    size = _power_of_two_chunk(chunk_size, v_SBHP.shape[0])
    inputs = _chunked((q_SBGN, k_SBGN, v_SBHP, g_SBHN, beta_SBH), size, starts_SB)
    from_start, to_end = _decays(inputs.g, inputs.resets)
    A, kk = _intra_chunk_matrices(inputs)
    beta = inputs.beta[..., None]
    rhs = torch.cat((beta * inputs.v, beta * from_start * inputs.k), dim=-1)
    I_plus_L = beta * kk + torch.eye(size, dtype=kk.dtype, device=kk.device)
    solution = torch.linalg.solve_triangular(I_plus_L, rhs, upper=False, unitriangular=True)
    U, W = solution.split((inputs.v.shape[-1], inputs.k.shape[-1]), dim=-1)
    states, v_new = pass_states(U, W, inputs.k * to_end, from_start[..., -1, :, None], initial_state)
    o = (inputs.q * from_start) @ states[:, :-1] + A @ v_new
    return from_chunks(o, v_SBHP.shape[0]).to(v_SBHP.dtype), states[:, -1].flatten(1, 2)


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
    """Returns the gradients of the inputs in their dtypes; that of the initial state is None where there is none."""
    inputs = (q_SBGN, k_SBGN, v_SBHP, g_SBHN, beta_SBH, *(() if initial_state is None else (initial_state,)))
    leaves = [tensor.detach().requires_grad_() for tensor in inputs]
    with torch.enable_grad():
        o, state = chunk_delta_rule(
            *leaves[:5],
            chunk_size=chunk_size,
            starts_SB=starts_SB,
            initial_state=None if initial_state is None else leaves[5],
        )
    outputs, grads = ([o], [grad_o_SBHP]) if grad_final_state is None else ([o, state], [grad_o_SBHP, grad_final_state])
    input_grads = torch.autograd.grad(outputs, leaves, grads)
    q, k, v, g, beta = input_grads[:5]
    return q, k, v, g, beta, None if initial_state is None else input_grads[5]


class _ChunkedInputs(NamedTuple):
    """The inputs in at least float32, normalized and cut into chunks. resets: documents begun in the chunk, up to each token."""

    q: Tensor  # [b, c, g, 1, q, n]
    k: Tensor  # [b, c, g, 1, q, n]
    v: Tensor  # [b, c, g, r, q, p]
    g: Tensor  # [b, c, g, r, q, n]
    beta: Tensor  # [b, c, g, r, q]
    resets: Tensor | None  # [b, c, 1, 1, q]


def _power_of_two_chunk(chunk_size: int, length: int) -> int:
    """Returns the largest power of two that is no more than the chunk size, or the smallest that covers a shorter sequence."""
    return min(1 << (chunk_size.bit_length() - 1), 1 << (length - 1).bit_length())


def _chunked(inputs: tuple[Tensor, ...], size: int, starts: Tensor | None) -> _ChunkedInputs:
    q, k, v, g, beta = inputs
    dtype, heads = compute_dtype(torch.promote_types(v.dtype, g.dtype)), (k.shape[2], v.shape[2] // k.shape[2])
    resets = None if starts is None else to_chunks(starts[:, :, None, None].to(torch.int32), size)
    return _ChunkedInputs(
        q=to_chunks(l2_normalize(q.to(dtype), scale=query_scale(q.shape[-1])), size).unsqueeze(3),
        k=to_chunks(l2_normalize(k.to(dtype)), size).unsqueeze(3),
        v=to_chunks(v.to(dtype), size).unflatten(2, heads),
        g=to_chunks(g.to(dtype), size).unflatten(2, heads),
        beta=to_chunks(beta.to(dtype)[..., None], size).squeeze(-1).unflatten(2, heads),
        resets=None if resets is None else resets[..., 0].cumsum(dim=-1).unsqueeze(3),
    )


def _decays(g: Tensor, resets: Tensor | None) -> tuple[Tensor, Tensor]:
    """Returns exp(s_i) and exp(s_Q - s_i) [b, c, g, r, q, n], the decays from a chunk's start to each token, and from it to the end."""
    from_start, to_end = g.cumsum(dim=-2).exp(), _exclusive_reverse_cumsum(g).exp()
    if resets is not None:
        from_start = from_start.masked_fill((resets != 0)[..., None], 0.0)
        to_end = to_end.masked_fill((resets != resets[..., -1:])[..., None], 0.0)
    return from_start, to_end


def _intra_chunk_matrices(inputs: _ChunkedInputs) -> tuple[Tensor, Tensor]:
    """Returns the decayed products [b, c, g, r, q, k] of queries with keys up to their own, which are A, and of keys with keys before
    them, which are L without beta."""
    products = _decayed_products(torch.stack((inputs.q, inputs.k), dim=-2), inputs.k, inputs.g)
    if inputs.resets is not None:
        resets = inputs.resets.unsqueeze(-2)
        products = products.masked_fill(resets[..., :, None] != resets[..., None, :], 0.0)
    qk, kk = products.unbind(-3)
    return qk + torch.diag_embed((inputs.q * inputs.k).sum(dim=-1)), kk


def _decayed_products(rows: Tensor, columns: Tensor, g: Tensor) -> Tensor:
    """Returns the sums over n of rows_i[n] exp(s_i[n] - s_j[n]) columns_j[n] for j < i [.., m, q, k].

    rows: m of each token [.., q, m, n]. columns: [.., q, n]. Level by level of the tree: a node's matrix has those of its halves on the
    diagonal, and below it the products of its second half with its first.
    """
    size, half, count = g.shape[-2], 1, rows.shape[-2]
    products = g.new_zeros((*g.shape[:-2], size, count, 1, 1))
    while half < size:
        first, second = g.unflatten(-2, (-1, 2, half)).unbind(-3)
        second_rows = rows.unflatten(-3, (-1, 2, half)).select(-4, 1) * second.cumsum(dim=-2).exp().unsqueeze(-2)
        first_columns = columns.unflatten(-2, (-1, 2, half)).select(-3, 0) * _exclusive_reverse_cumsum(first).exp()
        off_diagonal = (second_rows.flatten(-3, -2) @ first_columns.mT).unflatten(-2, (half, count)).transpose(-3, -2)
        within_first, within_second = products.unflatten(-4, (-1, 2)).unbind(-4)
        upper = torch.cat((within_first, torch.zeros_like(off_diagonal)), dim=-1)
        products = torch.cat((upper, torch.cat((off_diagonal, within_second), dim=-1)), dim=-2)
        half *= 2
    return products.squeeze(-4)


def _exclusive_reverse_cumsum(g: Tensor) -> Tensor:
    """Returns the sums [.., q, n] of g over the tokens after each."""
    return reverse_cumsum(F.pad(g[..., 1:, :], (0, 0, 0, 1)), dim=-2)
