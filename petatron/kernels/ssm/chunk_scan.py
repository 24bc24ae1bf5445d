"""The selective scan of Mamba-2 in chunks (Dao and Gu, state-space duality): GEMMs instead of one step per token. The reference.

With s the running sum of dt A inside a chunk of Q tokens, and h_c the state that enters chunk c,

    inside a chunk    y_i = sum over j <= i of exp(s_i - s_j) (C_i . B_j) dt_j x_j            a masked Q x Q GEMM, as attention's
    chunk state       z_c = sum over j of exp(s_Q - s_j) dt_j x_j B_j^T                       what the chunk adds to the state
    state passing     h_c = sum over k < c of exp(s_Q of chunks k + 1 ... c - 1) z_k          a masked GEMM over chunks
    output            y_i += exp(s_i) h_c C_i,     y_i += D x_i

Both masked decays are one function: exp(e_i - e_j) where j <= i and no document begins after j and up to i. All exponents are at
most 0. The initial state is the chunk state of a chunk before the first; the state after the last chunk is the final one. A
sequence is padded to whole chunks with dt = 0, which neither decays a state nor adds to it.

Backward recomputes all of this from the inputs, so nothing else is saved. A gradient of exp(e_i - e_j) is the gradient of the
product it is in, times that product: its row sums go to e_i and its column sums, negated, to e_j.

S sequence, B batch, H heads, P head dim, G groups, N state dim; inside, c chunks of q (or k) tokens, g groups of r heads each.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from petatron.kernels.compute_dtype import compute_dtype
from petatron.kernels.ssm.chunks import decay_matrix, from_chunks, reverse_cumsum, to_chunks

ScanGrads = tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor | None]
"""Of x, dt, A, B, C, D and the initial state."""


def chunk_scan(
    x_SBHP: Tensor,
    dt_SBH: Tensor,
    A_H: Tensor,
    B_SBGN: Tensor,
    C_SBGN: Tensor,
    D_H: Tensor,
    *,
    chunk_size: int,
    starts_SB: Tensor | None = None,
    initial_state: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Returns the outputs of all tokens [S, B, H, P], and the state [B, H, P, N] after the last, in at least float32.

    dt_SBH: step sizes, at least 0, with bias and softplus applied, in at least float32; A_H: at most 0.
    starts_SB: whether a token begins a document; the state before it is dropped, also the initial one.
    initial_state: the state [B, H, P, N] before the first token; None: zero.
    """
    inputs = _chunked(x_SBHP, dt_SBH, A_H, B_SBGN, C_SBGN, chunk_size, starts_SB)
    decays = _decays(inputs)
    scaled_x = inputs.x * inputs.dt[..., None]
    chunk_states = _chunk_states(inputs, decays, scaled_x, initial_state)
    states = torch.einsum("bgrck,bkgrpn->bcgrpn", decays.between_chunks, chunk_states)
    scores = (inputs.C @ inputs.B.mT)[:, :, :, None] * decays.inside
    y = scores @ scaled_x + decays.to_token[..., None] * (inputs.C[:, :, :, None] @ states[:, :-1].mT)
    y_SBHP = from_chunks(y, x_SBHP.shape[0]) + D_H.to(y.dtype)[:, None] * x_SBHP
    return y_SBHP.to(x_SBHP.dtype), states[:, -1].flatten(1, 2)


def chunk_scan_backward(
    grad_y_SBHP: Tensor,
    grad_final_state: Tensor | None,
    x_SBHP: Tensor,
    dt_SBH: Tensor,
    A_H: Tensor,
    B_SBGN: Tensor,
    C_SBGN: Tensor,
    D_H: Tensor,
    *,
    chunk_size: int,
    starts_SB: Tensor | None = None,
    initial_state: Tensor | None = None,
) -> ScanGrads:
    """Returns the gradients of the inputs in their dtypes; that of the initial state is None where there is none."""
    length = x_SBHP.shape[0]
    inputs = _chunked(x_SBHP, dt_SBH, A_H, B_SBGN, C_SBGN, chunk_size, starts_SB)
    decays = _decays(inputs)
    scaled_x = inputs.x * inputs.dt[..., None]
    chunk_states = _chunk_states(inputs, decays, scaled_x, initial_state)
    states = torch.einsum("bgrck,bkgrpn->bcgrpn", decays.between_chunks, chunk_states)
    C, B = inputs.C[:, :, :, None], inputs.B[:, :, :, None]
    grad = to_chunks(grad_y_SBHP.to(inputs.x.dtype), inputs.chunk_size).unflatten(2, inputs.x.shape[2:4])

    # Inside a chunk.
    scores = (inputs.C @ inputs.B.mT)[:, :, :, None] * decays.inside
    grad_scores = grad @ scaled_x.mT
    grad_scaled_x = scores.mT @ grad
    grad_CB = (grad_scores * decays.inside).sum(dim=3)
    grad_C, grad_B = grad_CB @ inputs.B, grad_CB.mT @ inputs.C
    exponents = grad_scores * scores
    grad_sums = exponents.sum(dim=-1) - exponents.sum(dim=-2)

    # The output of the states that enter the chunks.
    entering = states[:, :-1]
    decayed_grad = grad * decays.to_token[..., None]
    grad_C = grad_C + (decayed_grad @ entering).sum(dim=3)
    grad_sums = grad_sums + (decayed_grad * (C @ entering.mT)).sum(dim=-1)
    last = torch.zeros_like(states[:, -1]) if grad_final_state is None else grad_final_state.reshape_as(states[:, -1])
    grad_states = torch.cat((decayed_grad.mT @ C, last[:, None].to(grad.dtype)), dim=1)

    # State passing.
    grad_chunk_states = torch.einsum("bgrck,bcgrpn->bkgrpn", decays.between_chunks, grad_states)
    exponents = torch.einsum("bcgrpn,bkgrpn->bgrck", grad_states, chunk_states) * decays.between_chunks
    grad_boundaries = (exponents.sum(dim=-1) - exponents.sum(dim=-2))[..., 1:]
    grad_last_sums = reverse_cumsum(grad_boundaries).movedim(-1, 1)

    # What each chunk adds to the state.
    own = grad_chunk_states[:, 1:]
    from_states = B @ own.mT * decays.to_end[..., None]
    grad_scaled_x = grad_scaled_x + from_states
    grad_B = grad_B + ((scaled_x * decays.to_end[..., None]) @ own).sum(dim=3)
    exponents = (from_states * scaled_x).sum(dim=-1)
    grad_sums = grad_sums - exponents
    grad_last_sums = grad_last_sums + exponents.sum(dim=-1)
    grad_sums = torch.cat((grad_sums[..., :-1], grad_sums[..., -1:] + grad_last_sums[..., None]), dim=-1)

    grad_log_decay = reverse_cumsum(grad_sums)
    grad_dt = grad_log_decay * inputs.A[:, :, None] + (grad_scaled_x * inputs.x).sum(dim=-1)
    grad_A = (grad_log_decay * inputs.dt).sum(dim=(0, 1, 4)).flatten()
    wide_grad = grad_y_SBHP.to(inputs.x.dtype)
    grad_x = from_chunks(grad_scaled_x * inputs.dt[..., None], length) + D_H.to(wide_grad.dtype)[:, None] * wide_grad
    grad_D = (wide_grad * x_SBHP).sum(dim=(0, 1, 3))
    grad_dt_SBH = from_chunks(grad_dt[..., None], length).squeeze(-1)
    return (
        grad_x.to(x_SBHP.dtype),
        grad_dt_SBH.to(dt_SBH.dtype),
        grad_A.to(A_H.dtype),
        from_chunks(grad_B[:, :, :, None], length).to(B_SBGN.dtype),
        from_chunks(grad_C[:, :, :, None], length).to(C_SBGN.dtype),
        grad_D.to(D_H.dtype),
        None if initial_state is None else grad_chunk_states[:, 0].flatten(1, 2).to(initial_state.dtype),
    )


class _ChunkedInputs(NamedTuple):
    """The inputs in at least float32, cut into chunks. resets: documents begun in the chunk, up to and including each token."""

    x: Tensor  # [b, c, g, r, q, p]
    dt: Tensor  # [b, c, g, r, q]
    A: Tensor  # [g, r]
    B: Tensor  # [b, c, g, q, n]
    C: Tensor  # [b, c, g, q, n]
    resets: Tensor | None  # [b, c, q]
    chunk_size: int


class _Decays(NamedTuple):
    """inside: from token to token. between_chunks: from the state after a chunk, or the initial one, to that before another.

    to_token: from the state that enters the chunk to each token. to_end: from each token to the end of its chunk.
    """

    inside: Tensor  # [b, c, g, r, q, k]
    between_chunks: Tensor  # [b, g, r, c + 1, k + 1]
    to_token: Tensor  # [b, c, g, r, q]
    to_end: Tensor  # [b, c, g, r, q]


def _chunked(
    x: Tensor, dt: Tensor, A: Tensor, B: Tensor, C: Tensor, chunk_size: int, starts: Tensor | None
) -> _ChunkedInputs:
    dtype, groups = compute_dtype(torch.promote_types(x.dtype, dt.dtype)), B.shape[2]
    chunk_size = min(chunk_size, x.shape[0])
    heads = (groups, x.shape[2] // groups)
    resets = None if starts is None else to_chunks(starts[:, :, None, None].to(torch.int32), chunk_size)
    return _ChunkedInputs(
        x=to_chunks(x.to(dtype), chunk_size).unflatten(2, heads),
        dt=to_chunks(dt.to(dtype)[..., None], chunk_size).squeeze(-1).unflatten(2, heads),
        A=A.to(dtype).view(heads),
        B=to_chunks(B.to(dtype), chunk_size),
        C=to_chunks(C.to(dtype), chunk_size),
        resets=None if resets is None else resets[:, :, 0, :, 0].cumsum(dim=-1),
        chunk_size=chunk_size,
    )


def _decays(inputs: _ChunkedInputs) -> _Decays:
    sums = (inputs.dt * inputs.A[:, :, None]).cumsum(dim=-1)
    last = sums[..., -1]
    boundaries = torch.nn.functional.pad(last.cumsum(dim=1), (0, 0, 0, 0, 1, 0)).movedim(1, -1)
    to_token, to_end = sums.exp(), (last[..., None] - sums).exp()
    if inputs.resets is None:
        return _Decays(decay_matrix(sums), decay_matrix(boundaries), to_token, to_end)
    resets = inputs.resets[:, :, None, None]
    chunk_resets = torch.nn.functional.pad(inputs.resets[..., -1].cumsum(dim=1), (1, 0))[:, None, None]
    return _Decays(
        decay_matrix(sums, resets),
        decay_matrix(boundaries, chunk_resets),
        to_token.masked_fill(resets != 0, 0.0),
        to_end.masked_fill(resets != resets[..., -1:], 0.0),
    )


def _chunk_states(inputs: _ChunkedInputs, decays: _Decays, scaled_x: Tensor, initial_state: Tensor | None) -> Tensor:
    """Returns the initial state and what each chunk adds [b, c + 1, g, r, p, n]."""
    own = (scaled_x * decays.to_end[..., None]).mT @ inputs.B[:, :, :, None]
    shape = (own.shape[0], 1, *own.shape[2:])
    first = own.new_zeros(shape) if initial_state is None else initial_state.to(own.dtype).reshape(shape)
    return torch.cat((first, own), dim=1)
