"""What the kernels of the selective scan share: tiles of the inputs, and the decays of a chunk.

A chunk is CHUNK tokens of one sequence. With s the running sum of dt A inside the chunk, all decays are exponentials of differences
of s, none above 0. `documents` numbers the documents of a sequence from the first token on: 0 until one begins, so that an initial
state belongs to document 0. A decay between tokens of two documents is 0.

Tokens are padded to whole chunks with dt = 0, which neither decays a state nor adds to it.
"""

# pyright: reportAttributeAccessIssue=false, reportCallIssue=false, reportIndexIssue=false, reportArgumentType=false
# pyright: reportPossiblyUnboundVariable=false, reportReturnType=false, reportGeneralTypeIssues=false
from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

_HEADS = 16


class ChunkDecays(NamedTuple):
    """Step sizes dt and running sums of dt A by head [B, H, padded length] in float32, and the document of each token [B, S]."""

    steps: Tensor
    sums: Tensor
    documents: Tensor | None
    chunk: int

    @property
    def num_chunks(self) -> int:
        return self.sums.shape[-1] // self.chunk


def chunk_decays(dt_SBH: Tensor, A_H: Tensor, starts_SB: Tensor | None, chunk: int) -> ChunkDecays:
    """Returns what all kernels read of dt and A."""
    length, batch, heads = dt_SBH.shape
    chunks = triton.cdiv(length, chunk)
    steps = torch.empty((batch, heads, chunks * chunk), dtype=torch.float32, device=dt_SBH.device)
    sums = torch.empty_like(steps)
    grid = (chunks, batch, triton.cdiv(heads, _HEADS))
    _decay_sums[grid](dt_SBH, A_H, steps, sums, length, heads, *dt_SBH.stride(), CHUNK=chunk, HEADS=_HEADS)
    return ChunkDecays(steps, sums, document_numbers(starts_SB), chunk)


def document_numbers(starts_SB: Tensor | None) -> Tensor | None:
    """Returns the number of each token's document [B, S]; 0 until one begins, as what was before the first token has."""
    return None if starts_SB is None else starts_SB.t().cumsum(dim=1, dtype=torch.int32)


def head_parts(heads: int, *, programs: int, wanted: int) -> int:
    """Returns into how many equal parts a group's heads are cut, so that there are enough programs.

    >>> head_parts(80, programs=256, wanted=1024), head_parts(5, programs=1, wanted=4), head_parts(8, programs=900, wanted=600)
    (4, 5, 1)
    """
    return next(
        parts for parts in range(1, heads + 1) if heads % parts == 0 and (parts * programs >= wanted or parts == heads)
    )


def dot_precision(x: Tensor) -> str:
    """Returns the precision of GEMMs of float32 operands: three of TF32, which are as exact, unless the inputs are in half precision."""
    return "tf32x3" if x.dtype == torch.float32 else "tf32"


@triton.jit
def _decay_sums(
    dt, A, steps, sums, length, heads, dt_s, dt_b, dt_h, CHUNK: tl.constexpr, HEADS: tl.constexpr
):  # fmt: skip
    """Sums dt A inside a chunk, for some heads, and turns both into rows of tokens."""
    chunk, b = tl.program_id(0), tl.program_id(1)
    token = chunk * CHUNK + tl.arange(0, CHUNK)[:, None]
    head = tl.program_id(2) * HEADS + tl.arange(0, HEADS)[None, :]
    there = head < heads
    step = tl.load(dt + token.to(tl.int64) * dt_s + b * dt_b + head * dt_h, mask=there & (token < length), other=0.0)
    step = step.to(tl.float32)
    total = tl.cumsum(step * tl.load(A + head, mask=there, other=0.0).to(tl.float32), axis=0)
    to = (b * heads + head).to(tl.int64) * (tl.num_programs(0) * CHUNK) + token
    tl.store(steps + to, step, mask=there)
    tl.store(sums + to, total, mask=there)


@triton.jit
def load_rows(tensor, strides, token, b, head, width, length, WIDTH: tl.constexpr):
    """Loads rows of tokens [tokens, WIDTH] of a head or group, with zeros beyond the end and the width."""
    column = tl.arange(0, WIDTH)[None, :]
    there = (token < length)[:, None] & (column < width)
    rows = tensor + token.to(tl.int64)[:, None] * strides[0] + b.to(tl.int64) * strides[1] + head * strides[2]
    return tl.load(rows + column, mask=there, other=0.0)


@triton.jit
def state_offsets(head_dim, state_dim, HEAD_DIM: tl.constexpr, STATE_DIM: tl.constexpr):
    """Returns the offsets of a state's elements [HEAD_DIM, STATE_DIM] from its first, and which there are."""
    p, n = tl.arange(0, HEAD_DIM)[:, None], tl.arange(0, STATE_DIM)[None, :]
    return p * state_dim + n, (p < head_dim) & (n < state_dim)


@triton.jit
def document_before(documents, chunk, b, length, CHUNK: tl.constexpr):
    """Returns the document that the state before a chunk belongs to."""
    before = tl.maximum(chunk * CHUNK - 1, 0)
    return tl.where(chunk > 0, tl.load(documents + b * length + before), 0)


@triton.jit
def document_of(documents, token, b, length):
    """Returns the documents of tokens; padding has the last token's."""
    return tl.load(documents + b * length + tl.minimum(token, length - 1))


@triton.jit
def decay_matrix(sums, own, CHUNK: tl.constexpr, DOCUMENTS: tl.constexpr, TRANSPOSED: tl.constexpr = False):
    """Returns exp(s_i - s_j) [i, j], or [j, i], for j <= i of one document, else 0."""
    row, column = tl.arange(0, CHUNK)[:, None], tl.arange(0, CHUNK)[None, :]
    difference = sums[:, None] - sums[None, :]
    allowed = column <= row
    if TRANSPOSED:
        difference, allowed = -difference, row <= column
    if DOCUMENTS:
        allowed = allowed & (own[:, None] == own[None, :])
    return tl.exp(tl.where(allowed, difference, float("-inf")))
