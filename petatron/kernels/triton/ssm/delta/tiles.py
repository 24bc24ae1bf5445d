"""What the kernels of the gated delta rule share: gates by head, factors that normalise queries and keys, tiles of states.

A chunk is CHUNK tokens of one sequence. With s the running sum of g inside it, `to_token` is exp(s_i), the decay from the start of the
chunk to a token, `to_end` exp(s_Q - s_j), from a token to its end, and `whole` exp(s_Q); all are 0 where a document begins in between.

Queries and keys are read as they are: normalising them is a factor of each row, which is applied to sums in float32 or to the other
operand of a GEMM, so nothing is rounded for it. Tokens are padded to whole chunks with g = beta = 0.
"""

# pyright: reportAttributeAccessIssue=false, reportCallIssue=false, reportIndexIssue=false, reportArgumentType=false
# pyright: reportPossiblyUnboundVariable=false, reportReturnType=false, reportGeneralTypeIssues=false
from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from petatron.kernels.ssm.delta_recurrence import L2_EPS, query_factor
from petatron.kernels.triton.ssm.scan_tiles import document_before, document_numbers, document_of, dot_precision

_CHUNK = 64
_WIDE_KEY = 128
"""A state of more rows leaves fewer registers for a chunk."""
_HEADS = 16
_COLUMNS = 64
"""Columns of a state in a tile."""


def chunk_tokens(most: int, k_SBGN: Tensor) -> int:
    """Returns the tokens of a chunk: a power of two from 16, the fewest rows of a GEMM, to what registers allow."""
    tokens = _CHUNK
    if k_SBGN.shape[3] > _WIDE_KEY or k_SBGN.dtype == torch.float32:
        tokens //= 2
    return max(1 << min(tokens, most).bit_length() - 1, 16)


class DeltaChunks(NamedTuple):
    """What every kernel reads besides rows: gates, factors of rows, documents; and the sizes.

    sums, betas: running sums of g inside a chunk, and beta [B, H, padded length], in float32. q_factors, k_factors: what normalises a
    row [B, G, padded length]. documents: the document of each token [B, S]. Where channels have decays, sums are [B, H, padded length, N],
    times log2 e.
    """

    sums: Tensor
    betas: Tensor
    q_factors: Tensor
    k_factors: Tensor
    documents: Tensor | None
    length: int
    key_dim: int
    value_dim: int
    chunk: int

    @property
    def batch(self) -> int:
        return self.betas.shape[0]

    @property
    def heads(self) -> int:
        return self.betas.shape[1]

    @property
    def groups(self) -> int:
        return self.k_factors.shape[1]

    @property
    def num_chunks(self) -> int:
        return self.betas.shape[-1] // self.chunk

    @property
    def gates(self) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor | None]:
        return self[:5]

    @property
    def sizes(self) -> tuple[int, ...]:
        return self.length, self.num_chunks, self.heads, self.heads // self.groups, self.key_dim, self.value_dim

    def constants(self, rows: Tensor, *, columns: int = _COLUMNS) -> dict[str, Any]:
        """Returns the sizes of tiles, and how the GEMMs of such rows are done; columns: the most of a state in a tile."""
        return {
            "CHUNK": self.chunk,
            "KEY_DIM": triton.next_power_of_2(max(self.key_dim, 16)),
            "COLUMNS": min(columns, triton.next_power_of_2(max(self.value_dim, 16))),
            "PRECISION": dot_precision(rows),
        }


class DecayedRows(NamedTuple):
    """Normalised queries and keys of value heads with decays of channels in them, from the start of their chunk, and keys with those
    to its end [S, B, H, N]; and the decays over whole chunks [B, H, c, N], in float32."""

    q: Tensor
    k: Tensor
    k_ends: Tensor
    wholes: Tensor

    def sizes(self, chunks: DeltaChunks) -> tuple[int, ...]:
        """Every value head has its own rows."""
        length, num_chunks, heads, _, key_dim, value_dim = chunks.sizes
        return length, num_chunks, heads, 1, key_dim, value_dim


def delta_chunks(
    q_SBGN: Tensor,
    k_SBGN: Tensor,
    v_SBHP: Tensor,
    g: Tensor,
    beta_SBH: Tensor,
    starts_SB: Tensor | None,
    chunk: int,
) -> DeltaChunks:
    """Returns what all kernels read of the gates, and of the lengths of queries and keys.

    g: [S, B, H], or [S, B, H, N], whose sums are left for `channel_rows.py` to write.
    """
    length, batch, heads, value_dim = v_SBHP.shape
    groups, key_dim = k_SBGN.shape[2:]
    chunks = triton.cdiv(length, chunk)

    def new(rows: int, *channels: int) -> Tensor:
        return torch.empty((batch, rows, chunks * chunk, *channels), dtype=torch.float32, device=v_SBHP.device)

    made = DeltaChunks(
        new(heads, *g.shape[3:]),
        new(heads),
        new(groups),
        new(groups),
        document_numbers(starts_SB),
        length,
        key_dim,
        value_dim,
        chunk,
    )
    _gate_rows[(chunks, triton.cdiv(heads, _HEADS), batch)](
        g if g.dim() == 3 else None,
        beta_SBH,
        made.sums,
        made.betas,
        length,
        heads,
        g.stride()[:3],
        beta_SBH.stride(),
        CHUNK=chunk,
        HEADS=_HEADS,
    )
    for rows, factors, scale in ((q_SBGN, made.q_factors, query_factor(key_dim)), (k_SBGN, made.k_factors, 1.0)):
        _row_factors[(chunks, groups, batch)](
            rows,
            factors,
            scale,
            length,
            key_dim,
            rows.stride()[:3],
            EPS=L2_EPS,
            CHUNK=chunk,
            KEY_DIM=triton.next_power_of_2(key_dim),
        )
    return made


@triton.jit
def _gate_rows(
    g, beta, sums, betas, length, heads, g_strides, beta_strides, CHUNK: tl.constexpr, HEADS: tl.constexpr
):  # fmt: skip
    """Sums g inside a chunk, for some heads, and turns the sums and beta into rows of tokens. g: None: decays of channels."""
    b = tl.program_id(2)
    token = tl.program_id(0) * CHUNK + tl.arange(0, CHUNK)[:, None]
    head = tl.program_id(1) * HEADS + tl.arange(0, HEADS)[None, :]
    there, read = head < heads, (head < heads) & (token < length)
    wide = token.to(tl.int64)
    strength = tl.load(
        beta + wide * beta_strides[0] + b * beta_strides[1] + head * beta_strides[2], mask=read, other=0.0
    )
    to = (b * heads + head).to(tl.int64) * (tl.num_programs(0) * CHUNK) + token
    if g is not None:
        log_decay = tl.load(g + wide * g_strides[0] + b * g_strides[1] + head * g_strides[2], mask=read, other=0.0)
        tl.store(sums + to, tl.cumsum(log_decay.to(tl.float32), axis=0), mask=there)
    tl.store(betas + to, strength.to(tl.float32), mask=there)


@triton.jit
def _row_factors(
    rows,
    factors,
    scale,
    length,
    key_dim,
    strides,
    EPS: tl.constexpr,
    CHUNK: tl.constexpr,
    KEY_DIM: tl.constexpr,
):
    """Writes scale / |row| for the rows of a chunk and key head."""
    group, b = tl.program_id(1), tl.program_id(2)
    token = tl.program_id(0) * CHUNK + tl.arange(0, CHUNK)
    column = tl.arange(0, KEY_DIM)[None, :]
    at = token.to(tl.int64)[:, None] * strides[0] + b.to(tl.int64) * strides[1] + group * strides[2]
    x = tl.load(rows + at + column, mask=(token < length)[:, None] & (column < key_dim), other=0.0).to(tl.float32)
    to = (b * tl.num_programs(1) + group).to(tl.int64) * (tl.num_programs(0) * CHUNK) + token
    tl.store(factors + to, scale / tl.sqrt(tl.sum(x * x, axis=1) + EPS))


@triton.jit
def chunk_row(row, chunk, b, of_row, num_chunks, CHUNK: tl.constexpr):
    """Returns the offsets of a chunk's tokens [CHUNK] in one of `of_row` rows per sequence, of sums, betas or factors."""
    return (b * of_row + row).to(tl.int64) * num_chunks * CHUNK + chunk * CHUNK + tl.arange(0, CHUNK)


@triton.jit
def token_decays(gates, head, chunk, b, sizes, CHUNK: tl.constexpr):
    """Returns the decays from the start of a chunk to its tokens, from them to its end, and over the chunk."""
    length, num_chunks, heads = sizes[0], sizes[1], sizes[2]
    documents = gates[4]
    at = chunk_row(head, chunk, b, heads, num_chunks, CHUNK)
    total = tl.load(gates[0] + at)
    end = tl.load(gates[0] + (b * heads + head).to(tl.int64) * num_chunks * CHUNK + chunk * CHUNK + CHUNK - 1)
    to_token, to_end, whole = tl.exp(total), tl.exp(end - total), tl.exp(end)
    if documents is not None:
        own = document_of(documents, chunk * CHUNK + tl.arange(0, CHUNK), b, length)
        before = document_before(documents, chunk, b, length, CHUNK)
        after = document_of(documents, chunk * CHUNK + CHUNK - 1, b, length)
        to_token, to_end = tl.where(own == before, to_token, 0.0), tl.where(own == after, to_end, 0.0)
        whole = tl.where(before == after, whole, 0.0)
    return to_token, to_end, whole


@triton.jit
def row_decays(
    gates, wholes, head, group, chunk, b, sizes, CHUNK: tl.constexpr, KEY_DIM: tl.constexpr
):  # fmt: skip
    """Returns the factors of a chunk's queries and keys [CHUNK] from its start, of its keys to its end, and of the state over it.

    wholes: decays of channels over chunks [B, H, c, N], for rows with all other factors in them; None: decays of heads.
    """
    num_chunks, heads, heads_per_group, key_dim = sizes[1], sizes[2], sizes[3], sizes[4]
    if wholes is None:
        to_token, to_end, whole = token_decays(gates, head, chunk, b, sizes, CHUNK)
        of_group = chunk_row(group, chunk, b, heads // heads_per_group, num_chunks, CHUNK)
        k_factor = tl.load(gates[3] + of_group)
        q_start, k_start, k_end = to_token * tl.load(gates[2] + of_group), to_token * k_factor, to_end * k_factor
    else:
        q_start = tl.full((CHUNK,), 1.0, tl.float32)
        k_start, k_end = q_start, q_start
        at, n = ((b * heads + head).to(tl.int64) * num_chunks + chunk) * key_dim, tl.arange(0, KEY_DIM)[:, None]
        whole = tl.load(wholes + at + n, mask=n < key_dim, other=0.0)
    return q_start, k_start, k_end, whole


@triton.jit
def load_square(squares, head, chunk, b, sizes, CHUNK: tl.constexpr):
    """Loads what tokens of a chunk are to each other [CHUNK, CHUNK], of [B, H, c, Q, Q]."""
    at = squares + ((b * sizes[2] + head).to(tl.int64) * sizes[1] + chunk) * CHUNK * CHUNK
    return tl.load(at + tl.arange(0, CHUNK)[:, None] * CHUNK + tl.arange(0, CHUNK)[None, :])


@triton.jit
def store_square(squares, value, head, chunk, b, sizes, CHUNK: tl.constexpr):
    """Stores what tokens of a chunk are to each other [CHUNK, CHUNK], in [B, H, c, Q, Q]."""
    at = squares + ((b * sizes[2] + head).to(tl.int64) * sizes[1] + chunk) * CHUNK * CHUNK
    to = at + tl.arange(0, CHUNK)[:, None] * CHUNK + tl.arange(0, CHUNK)[None, :]
    tl.store(to, value.to(squares.dtype.element_ty))


@triton.jit
def state_base(b, chunk, head, sizes):
    """Returns where the state of a chunk and head begins in [B, c, H, N, P]."""
    _, num_chunks, heads, _, key_dim, value_dim = sizes
    return ((b.to(tl.int64) * num_chunks + chunk) * heads + head) * key_dim * value_dim


@triton.jit
def state_tile(begin, key_dim, value_dim, KEY_DIM: tl.constexpr, COLUMNS: tl.constexpr):
    """Returns the offsets of some columns of a state [KEY_DIM, COLUMNS] from its first element, and which there are."""
    n, p = tl.arange(0, KEY_DIM)[:, None], begin + tl.arange(0, COLUMNS)[None, :]
    return n * value_dim + p, (n < key_dim) & (p < value_dim)


@triton.jit
def load_state(states, head, chunk, b, begin, sizes, KEY_DIM: tl.constexpr, COLUMNS: tl.constexpr):
    """Loads some columns of the state of a chunk and head [KEY_DIM, COLUMNS]."""
    offsets, there = state_tile(begin, sizes[4], sizes[5], KEY_DIM, COLUMNS)
    return tl.load(states + state_base(b, chunk, head, sizes) + offsets, mask=there, other=0.0)


@triton.jit
def row_tile(strides, token, b, head, begin, width, length, COLUMNS: tl.constexpr):
    """Returns the offsets of some columns of tokens' rows [tokens, COLUMNS], and which there are."""
    column = begin + tl.arange(0, COLUMNS)[None, :]
    row = token.to(tl.int64)[:, None] * strides[0] + b.to(tl.int64) * strides[1] + head * strides[2]
    return row + column, (token < length)[:, None] & (column < width)


@triton.jit
def load_columns(tensor, strides, token, b, head, begin, sizes, COLUMNS: tl.constexpr):
    """Loads some columns of a head's rows [tokens, COLUMNS]."""
    rows, inside = row_tile(strides, token, b, head, begin, sizes[5], sizes[0], COLUMNS)
    return tl.load(tensor + rows, mask=inside, other=0.0)
