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

from typing import Unpack

import torch
from torch import Tensor

from petatron.kernels.ssm.chunk_delta_rule import ChunkedDeltaInputs, DeltaGrads, chunked_inputs, pass_states
from petatron.kernels.ssm.chunked_sequence import ChunkOptions, from_chunks, recurrence_grads, sums_after


def chunk_delta_rule(*delta_inputs: Tensor, **options: Unpack[ChunkOptions]) -> tuple[Tensor, Tensor]:
    """Returns the outputs of all tokens [S, B, H, P], and the state [B, H, N, P] after the last, in at least float32.

    delta_inputs: queries and keys [S, B, G, N], not yet normalized; values [S, B, H, P]; g [S, B, H, N], logarithms of decays, at most 0,
    in at least float32; beta [S, B, H], from 0 to 1. The chunk size is an upper bound: chunks have a power of two of tokens.
    """
    v_SBHP = delta_inputs[2]
    size = _power_of_two_chunk(options["chunk_size"], v_SBHP.shape[0])
    inputs = chunked_inputs(delta_inputs, size, options.get("starts_SB"))
    from_start, to_end = _decays(inputs.g, inputs.resets)
    A, kk = _intra_chunk_matrices(inputs)
    beta = inputs.beta[..., None]
    rhs = torch.cat((beta * inputs.v, beta * from_start * inputs.k), dim=-1)
    I_plus_L = beta * kk + torch.eye(size, dtype=kk.dtype, device=kk.device)
    solution = torch.linalg.solve_triangular(I_plus_L, rhs, upper=False, unitriangular=True)
    U, W = solution.split((inputs.v.shape[-1], inputs.k.shape[-1]), dim=-1)
    states, v_new = pass_states(U, W, inputs.k * to_end, from_start[..., -1, :, None], options.get("initial_state"))
    o = (inputs.q * from_start) @ states[:, :-1] + A @ v_new
    return from_chunks(o, v_SBHP.shape[0]).to(v_SBHP.dtype), states[:, -1].flatten(1, 2)


def chunk_delta_rule_backward(
    grad_o_SBHP: Tensor, grad_final_state: Tensor | None, *delta_inputs: Tensor, **options: Unpack[ChunkOptions]
) -> DeltaGrads:
    """Returns the gradients of the inputs in their dtypes; that of the initial state is None where there is none."""
    return recurrence_grads(chunk_delta_rule, (grad_o_SBHP, grad_final_state), delta_inputs, **options)  # pyright: ignore[reportReturnType]


def _power_of_two_chunk(chunk_size: int, length: int) -> int:
    """Returns the largest power of two that is no more than the chunk size, or the smallest that covers a shorter sequence."""
    return min(1 << (chunk_size.bit_length() - 1), 1 << (length - 1).bit_length())


def _decays(g: Tensor, resets: Tensor | None) -> tuple[Tensor, Tensor]:
    """Returns exp(s_i) and exp(s_Q - s_i) [b, c, g, r, q, n], the decays from a chunk's start to each token, and from it to the end."""
    from_start, to_end = g.cumsum(dim=-2).exp(), sums_after(g, dim=-2).exp()
    if resets is not None:
        from_start = from_start.masked_fill((resets != 0)[..., None], 0.0)
        to_end = to_end.masked_fill((resets != resets[..., -1:])[..., None], 0.0)
    return from_start, to_end


def _intra_chunk_matrices(inputs: ChunkedDeltaInputs) -> tuple[Tensor, Tensor]:
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
        first_columns = columns.unflatten(-2, (-1, 2, half)).select(-3, 0) * sums_after(first, dim=-2).exp()
        off_diagonal = (second_rows.flatten(-3, -2) @ first_columns.mT).unflatten(-2, (half, count)).transpose(-3, -2)
        within_first, within_second = products.unflatten(-4, (-1, 2)).unbind(-4)
        upper = torch.cat((within_first, torch.zeros_like(off_diagonal)), dim=-1)
        products = torch.cat((upper, torch.cat((off_diagonal, within_second), dim=-1)), dim=-2)
        half *= 2
    return products.squeeze(-4)
