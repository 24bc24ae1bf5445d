"""Triton helpers that the kernels of the selective scan share: tiles of the inputs, dA_cumsum, and the decays of a chunk.

Notation of all scan kernels, for a chunk of Q tokens of one sequence and one head (the names are those of "Transformers are SSMs" and of
mamba_ssm; `kernels/ssm/chunk_scan.py` has the algebra):

    dA_i        = dt_i A                                  the log decay of a token: not a gradient, though written like one
    s_i         = dA_1 + .. + dA_i                        `dA_cumsum`; `dA_cs` is its tile, `dA_cs_last` is s_Q
    from_start  = exp(s_i)                                the decay from the start of the chunk to a token
    to_end      = exp(s_Q - s_j)                          the decay from a token to the end of the chunk
    chunk_decay = exp(s_Q)                                the decay over the chunk
    L_ij        = exp(s_i - s_j)               j <= i     the decay mask, else 0
    CB          = C B^T                                   the same for all heads of a group
    M_ij        = L_ij CB_ij dt_j                         the chunk's block of the SSM's matrix: intra-chunk y = M x
    h           = the state before the chunk              `states`

Gradients are `grad_x` in memory, and in registers dy, dB, dC, dCB, dM, ddt, ddA (of dA) and ddA_cs (of dA_cs). No exponent is above 0.

`documents` (seq_idx in mamba_ssm) numbers the documents of a sequence from the first token on: 0 until one begins, so that an initial
state belongs to document 0. A decay between tokens of two documents is 0. Tokens are padded to whole chunks with dt = 0, which neither
decays a state nor adds to it.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

_HEADS = 16
_CHUNK = 64
_WIDE_STATE = 128
"""A wider state leaves fewer registers for a chunk."""


class ChunkDecays(NamedTuple):
    """What all kernels read of dt and A: dt and dA_cumsum [B, H, padded length] in float32, and the document of each token [B, S]."""

    dt: Tensor
    dA_cumsum: Tensor
    documents: Tensor | None
    chunk_size: int

    @property
    def num_chunks(self) -> int:
        return self.dA_cumsum.shape[-1] // self.chunk_size

    @property
    def by_token(self) -> tuple[Tensor, Tensor, Tensor | None]:
        """What kernels take as `by_token`: dt, dA_cumsum, documents."""
        return self.dt, self.dA_cumsum, self.documents


def chunk_cumsum(dt_SBH: Tensor, A_H: Tensor, starts_SB: Tensor | None, chunk_size: int) -> ChunkDecays:
    """Returns dt and the cumulative sum of dt A inside each chunk, in rows of tokens."""
    length, batch, heads = dt_SBH.shape
    num_chunks = triton.cdiv(length, chunk_size)
    dt = torch.empty((batch, heads, num_chunks * chunk_size), dtype=torch.float32, device=dt_SBH.device)
    dA_cumsum = torch.empty_like(dt)
    grid = (num_chunks, batch, triton.cdiv(heads, _HEADS))
    _chunk_cumsum[grid](dt_SBH, A_H, dt, dA_cumsum, length, heads, *dt_SBH.stride(), CHUNK=chunk_size, HEADS=_HEADS)
    return ChunkDecays(dt, dA_cumsum, document_numbers(starts_SB), chunk_size)


def scan_constants(decays: ChunkDecays, x_SBHP: Tensor, B_SBGN: Tensor, head_parts: int) -> dict[str, Any]:
    """Returns the sizes of the tiles of kernels that have some heads of a group, and how their GEMMs are done."""
    return {
        "HEAD_PARTS": head_parts,
        "CHUNK": decays.chunk_size,
        "HEAD_DIM": triton.next_power_of_2(max(x_SBHP.shape[3], 16)),
        "STATE_DIM": triton.next_power_of_2(max(B_SBGN.shape[3], 16)),
        "PRECISION": dot_precision(x_SBHP),
    }


def document_numbers(starts_SB: Tensor | None) -> Tensor | None:
    """Returns the number of each token's document [B, S]; 0 until one begins, as what was before the first token has."""
    return None if starts_SB is None else starts_SB.t().cumsum(dim=1, dtype=torch.int32)


def num_head_parts(heads: int, *, programs: int, wanted: int) -> int:
    """Returns into how many equal parts a group's heads are cut, so that there are enough programs.

    >>> num_head_parts(80, programs=256, wanted=1024), num_head_parts(5, programs=1, wanted=4), num_head_parts(8, programs=900, wanted=600)
    (4, 5, 1)
    """
    return next(
        parts for parts in range(1, heads + 1) if heads % parts == 0 and (parts * programs >= wanted or parts == heads)
    )


def chunk_tokens(limit: int, k_SBGN: Tensor) -> int:
    """Returns the tokens of a chunk: a power of two from 16, the fewest rows of a GEMM, to what registers allow."""
    tokens = _CHUNK
    if k_SBGN.shape[3] > _WIDE_STATE or k_SBGN.dtype == torch.float32:
        tokens //= 2
    return max(1 << min(tokens, limit).bit_length() - 1, 16)


def dot_precision(x: Tensor) -> str:
    """Returns the precision of GEMMs of float32 operands: three of TF32, which are as exact, unless the inputs are in half precision."""
    return "tf32x3" if x.dtype == torch.float32 else "tf32"


@triton.jit
def _chunk_cumsum(
    dt, A, dt_out, dA_cumsum, length, heads, dt_s, dt_b, dt_h, CHUNK: tl.constexpr, HEADS: tl.constexpr
):  # fmt: skip
    """dA_cumsum_i = sum over j <= i of dt_j A inside a chunk, for some heads; [S, B, H] becomes [B, H, padded length]."""
    chunk, b = tl.program_id(0), tl.program_id(1)
    token = chunk * CHUNK + tl.arange(0, CHUNK)[:, None]
    head = tl.program_id(2) * HEADS + tl.arange(0, HEADS)[None, :]
    head_mask = head < heads
    mask = head_mask & (token < length)
    dt_tile = tl.load(dt + token.to(tl.int64) * dt_s + b * dt_b + head * dt_h, mask=mask, other=0.0)
    dt_tile = dt_tile.to(tl.float32)
    dA_cs = tl.cumsum(dt_tile * tl.load(A + head, mask=head_mask, other=0.0).to(tl.float32), axis=0)
    offsets = (b * heads + head).to(tl.int64) * (tl.num_programs(0) * CHUNK) + token
    tl.store(dt_out + offsets, dt_tile, mask=head_mask)
    tl.store(dA_cumsum + offsets, dA_cs, mask=head_mask)


@triton.jit
def load_rows(tensor, strides, token, b, head, width, length, WIDTH: tl.constexpr):
    """Loads rows of tokens [tokens, WIDTH] of a head or group, with zeros beyond the end and the width."""
    column = tl.arange(0, WIDTH)[None, :]
    mask = (token < length)[:, None] & (column < width)
    row_pointers = tensor + token.to(tl.int64)[:, None] * strides[0] + b.to(tl.int64) * strides[1] + head * strides[2]
    return tl.load(row_pointers + column, mask=mask, other=0.0)


@triton.jit
def state_offsets(head_dim, state_dim, HEAD_DIM: tl.constexpr, STATE_DIM: tl.constexpr):
    """Returns the offsets of a state's elements [HEAD_DIM, STATE_DIM] from its first, and their mask."""
    p, n = tl.arange(0, HEAD_DIM)[:, None], tl.arange(0, STATE_DIM)[None, :]
    return p * state_dim + n, (p < head_dim) & (n < state_dim)


@triton.jit
def document_before(documents, chunk, b, length, CHUNK: tl.constexpr):
    """Returns the document that the state before a chunk belongs to."""
    last_token = tl.maximum(chunk * CHUNK - 1, 0)
    return tl.where(chunk > 0, tl.load(documents + b * length + last_token), 0)


@triton.jit
def document_of(documents, token, b, length):
    """Returns the documents of tokens; padding has the last token's."""
    return tl.load(documents + b * length + tl.minimum(token, length - 1))


@triton.jit
def state_masks(documents, token, chunk, b, length, CHUNK: tl.constexpr):
    """Returns which tokens read the state before a chunk, which write to the state after it, and whether the first passes to that."""
    reads_state, writes_state, passes_state = token >= 0, token >= 0, True
    if documents is not None:
        document = document_of(documents, token, b, length)
        state_document = document_before(documents, chunk, b, length, CHUNK)
        last_document = document_of(documents, chunk * CHUNK + CHUNK - 1, b, length)
        reads_state, writes_state = document == state_document, document == last_document
        passes_state = state_document == last_document
    return reads_state, writes_state, passes_state


@triton.jit
def causal_pairs(documents, token, b, length, CHUNK: tl.constexpr):
    """Returns which pairs of a chunk's tokens [i, j] have j <= i, of one document."""
    causal = tl.arange(0, CHUNK)[None, :] <= tl.arange(0, CHUNK)[:, None]
    if documents is not None:
        document = document_of(documents, token, b, length)
        causal = causal & (document[:, None] == document[None, :])
    return causal


@triton.jit
def decay_matrix(dA_cs, document, CHUNK: tl.constexpr, DOCUMENTS: tl.constexpr, TRANSPOSED: tl.constexpr = False):
    """Returns the decay mask L_ij = exp(s_i - s_j) [i, j], or transposed [j, i], for j <= i of one document, else 0."""
    row, column = tl.arange(0, CHUNK)[:, None], tl.arange(0, CHUNK)[None, :]
    exponent = dA_cs[:, None] - dA_cs[None, :]
    causal = column <= row
    if TRANSPOSED:
        exponent, causal = -exponent, row <= column
    if DOCUMENTS:
        causal = causal & (document[:, None] == document[None, :])
    return tl.exp(tl.where(causal, exponent, float("-inf")))
