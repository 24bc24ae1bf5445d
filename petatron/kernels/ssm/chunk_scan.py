"""The selective scan of Mamba-2 in chunks (Dao and Gu, "Transformers are SSMs": state-space duality, SSD): GEMMs instead of one step per
token. The reference.

With dA = dt A the log decay of a token, s its cumulative sum inside a chunk of Q tokens (`dA_cumsum`), and h_c the state before chunk c,

    intra-chunk       y_i = sum over j <= i of L_ij (C_i . B_j) dt_j x_j,  L_ij = exp(s_i - s_j)     (L * C B^T) (dt x), as attention's
    chunk state       z_c = sum over j of exp(s_Q - s_j) dt_j x_j B_j^T                              what the chunk adds to the state
    state passing     h_c = sum over k < c of exp(s_Q of chunks k + 1 ... c - 1) z_k                 a masked GEMM over chunks
    inter-chunk       y_i += exp(s_i) h_c C_i
    skip              y_i += D x_i

Both masked decays are one function (exp(segsum) in the paper's code): exp(e_i - e_j) where j <= i and no document begins after j and up to
i. All exponents are at most 0. The initial state is the chunk state of a chunk before the first; the state after the last chunk is the
final one. A sequence is padded to whole chunks with dt = 0, which neither decays a state nor adds to it.

Backward recomputes all of this from the inputs, so nothing else is saved. A gradient of exp(e_i - e_j) is the gradient of the
product it is in, times that product: its row sums go to e_i and its column sums, negated, to e_j. `grad_dA` and `grad_dA_cumsum` are ddA
and ddA_cumsum of mamba_ssm; dA itself is no gradient.

S sequence, B batch, H heads, P head dim, G groups, N state dim; inside, c chunks of q (or k) tokens, g groups of r heads each.
"""

from __future__ import annotations

from typing import NamedTuple, Unpack

import torch
from torch import Tensor

from petatron.kernels.compute_dtype import compute_dtype
from petatron.kernels.ssm.chunked_sequence import ChunkOptions, decay_matrix, from_chunks, reverse_cumsum, to_chunks

ScanGrads = tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor | None]
"""Of x, dt, A, B, C, D and the initial state."""


def chunk_scan(*scan_inputs: Tensor, **options: Unpack[ChunkOptions]) -> tuple[Tensor, Tensor]:
    """Returns the outputs of all tokens [S, B, H, P], and the state [B, H, P, N] after the last, in at least float32.

    scan_inputs: x [S, B, H, P]; dt [S, B, H], step sizes, at least 0, with bias and softplus applied, in at least float32; A [H], at most
    0; B and C [S, B, G, N]; D [H].
    """
    x_SBHP, dt_SBH, A_H, B_SBGN, C_SBGN, D_H = scan_inputs
    initial_state = options.get("initial_state")
    inputs = _chunked(x_SBHP, dt_SBH, A_H, B_SBGN, C_SBGN, options["chunk_size"], options.get("starts_SB"))
    decays = _decays(inputs)
    dt_x = inputs.x * inputs.dt[..., None]
    chunk_states = _chunk_states(inputs, decays, dt_x, initial_state)
    states = torch.einsum("bgrck,bkgrpn->bcgrpn", decays.between_chunks, chunk_states)
    L_CB = (inputs.C @ inputs.B.mT)[:, :, :, None] * decays.L
    y = L_CB @ dt_x + decays.from_start[..., None] * (inputs.C[:, :, :, None] @ states[:, :-1].mT)
    y_SBHP = from_chunks(y, x_SBHP.shape[0]) + D_H.to(y.dtype)[:, None] * x_SBHP
    return y_SBHP.to(x_SBHP.dtype), states[:, -1].flatten(1, 2)


def chunk_scan_backward(
    grad_y_SBHP: Tensor, grad_final_state: Tensor | None, *scan_inputs: Tensor, **options: Unpack[ChunkOptions]
) -> ScanGrads:
    """Returns the gradients of the inputs in their dtypes; that of the initial state is None where there is none."""
    x_SBHP, dt_SBH, A_H, B_SBGN, C_SBGN, D_H = scan_inputs
    length, initial_state = x_SBHP.shape[0], options.get("initial_state")
    inputs = _chunked(x_SBHP, dt_SBH, A_H, B_SBGN, C_SBGN, options["chunk_size"], options.get("starts_SB"))
    decays = _decays(inputs)
    dt_x = inputs.x * inputs.dt[..., None]
    chunk_states = _chunk_states(inputs, decays, dt_x, initial_state)
    states = torch.einsum("bgrck,bkgrpn->bcgrpn", decays.between_chunks, chunk_states)
    C, B = inputs.C[:, :, :, None], inputs.B[:, :, :, None]
    grad_y = to_chunks(grad_y_SBHP.to(inputs.x.dtype), inputs.chunk_size).unflatten(2, inputs.x.shape[2:4])

    # Intra-chunk.
    L_CB = (inputs.C @ inputs.B.mT)[:, :, :, None] * decays.L
    grad_L_CB = grad_y @ dt_x.mT
    grad_dt_x = L_CB.mT @ grad_y
    grad_CB = (grad_L_CB * decays.L).sum(dim=3)
    grad_C, grad_B = grad_CB @ inputs.B, grad_CB.mT @ inputs.C
    grad_exponents = grad_L_CB * L_CB
    grad_dA_cumsum = grad_exponents.sum(dim=-1) - grad_exponents.sum(dim=-2)

    # Inter-chunk: the output of the states before the chunks.
    states_before = states[:, :-1]
    decayed_grad_y = grad_y * decays.from_start[..., None]
    grad_C = grad_C + (decayed_grad_y @ states_before).sum(dim=3)
    grad_dA_cumsum = grad_dA_cumsum + (decayed_grad_y * (C @ states_before.mT)).sum(dim=-1)
    final = torch.zeros_like(states[:, -1]) if grad_final_state is None else grad_final_state.reshape_as(states[:, -1])
    grad_states = torch.cat((decayed_grad_y.mT @ C, final[:, None].to(grad_y.dtype)), dim=1)

    # State passing.
    grad_chunk_states = torch.einsum("bgrck,bcgrpn->bkgrpn", decays.between_chunks, grad_states)
    grad_exponents = torch.einsum("bcgrpn,bkgrpn->bgrck", grad_states, chunk_states) * decays.between_chunks
    grad_chunk_cumsum = (grad_exponents.sum(dim=-1) - grad_exponents.sum(dim=-2))[..., 1:]
    grad_dA_cs_last = reverse_cumsum(grad_chunk_cumsum).movedim(-1, 1)

    # Chunk states: the first is the initial state, which no chunk adds.
    grad_added = grad_chunk_states[:, 1:]
    grad_dt_x_by_states = B @ grad_added.mT * decays.to_end[..., None]
    grad_dt_x = grad_dt_x + grad_dt_x_by_states
    grad_B = grad_B + ((dt_x * decays.to_end[..., None]) @ grad_added).sum(dim=3)
    grad_exponents = (grad_dt_x_by_states * dt_x).sum(dim=-1)
    grad_dA_cumsum = grad_dA_cumsum - grad_exponents
    grad_dA_cs_last = grad_dA_cs_last + grad_exponents.sum(dim=-1)
    grad_last = grad_dA_cumsum[..., -1:] + grad_dA_cs_last[..., None]
    grad_dA_cumsum = torch.cat((grad_dA_cumsum[..., :-1], grad_last), dim=-1)

    grad_dA = reverse_cumsum(grad_dA_cumsum)
    grad_dt = grad_dA * inputs.A[:, :, None] + (grad_dt_x * inputs.x).sum(dim=-1)
    grad_A = (grad_dA * inputs.dt).sum(dim=(0, 1, 4)).flatten()
    skip_grad = grad_y_SBHP.to(inputs.x.dtype)
    grad_x = from_chunks(grad_dt_x * inputs.dt[..., None], length) + D_H.to(skip_grad.dtype)[:, None] * skip_grad
    grad_D = (skip_grad * x_SBHP).sum(dim=(0, 1, 3))
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
    """L: the decay mask, from token to token of a chunk. from_start: exp(s_i), from the state before the chunk to each token.

    to_end: exp(s_Q - s_j), from each token to the end of its chunk.
    between_chunks: from the state after a chunk, or the initial one, to that before another.
    """

    L: Tensor  # [b, c, g, r, q, k]
    between_chunks: Tensor  # [b, g, r, c + 1, k + 1]
    from_start: Tensor  # [b, c, g, r, q]
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
    dA_cumsum = (inputs.dt * inputs.A[:, :, None]).cumsum(dim=-1)
    dA_cs_last = dA_cumsum[..., -1]
    chunk_cumsum = torch.nn.functional.pad(dA_cs_last.cumsum(dim=1), (0, 0, 0, 0, 1, 0)).movedim(1, -1)
    from_start, to_end = dA_cumsum.exp(), (dA_cs_last[..., None] - dA_cumsum).exp()
    if inputs.resets is None:
        return _Decays(decay_matrix(dA_cumsum), decay_matrix(chunk_cumsum), from_start, to_end)
    resets = inputs.resets[:, :, None, None]
    chunk_resets = torch.nn.functional.pad(inputs.resets[..., -1].cumsum(dim=1), (1, 0))[:, None, None]
    return _Decays(
        decay_matrix(dA_cumsum, resets),
        decay_matrix(chunk_cumsum, chunk_resets),
        from_start.masked_fill(resets != 0, 0.0),
        to_end.masked_fill(resets != resets[..., -1:], 0.0),
    )


def _chunk_states(inputs: _ChunkedInputs, decays: _Decays, dt_x: Tensor, initial_state: Tensor | None) -> Tensor:
    """Returns the initial state and what each chunk adds, (to_end dt x)^T B [b, c + 1, g, r, p, n]."""
    added = (dt_x * decays.to_end[..., None]).mT @ inputs.B[:, :, :, None]
    shape = (added.shape[0], 1, *added.shape[2:])
    initial = added.new_zeros(shape) if initial_state is None else initial_state.to(added.dtype).reshape(shape)
    return torch.cat((initial, added), dim=1)
