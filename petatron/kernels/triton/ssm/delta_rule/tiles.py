"""Triton helpers that the kernels of the gated delta rule share: gates, inverse norms of queries and keys, decay factors, tiles of states.

Notation of all kernels here, for a chunk of Q tokens of one sequence and one value head (the names are those of the papers and of
flash-linear-attention; `kernels/ssm/chunk_delta_rule.py` has the algebra):

    s_i         = g_1 + .. + g_i                                  `g_cumsum`, the cumulative log decay inside the chunk
    from_start  = exp(s_i)                                        the decay from the start of the chunk to a token
    to_end      = exp(s_Q - s_j)                                  the decay from a token to the end of the chunk
    chunk_decay = exp(s_Q)                                        the decay over the chunk
    A_ij        = exp(s_i - s_j) (q_i . k_j)           j <= i     the attention matrix inside the chunk
    L_ij        = beta_i exp(s_i - s_j) (k_i . k_j)    j < i      k k^T with decays and beta
    T           = (I + L)^{-1}                                    the UT transform
    v_new       = T rhs,  rhs = beta (v - exp(s) k S)             the values that the chunk writes to its state S

All decays are 0 where a document begins in between.

Queries and keys are read as they are: normalizing them is a factor of each row, its inverse norm, which is applied to sums in float32 or
to the other operand of a GEMM, so nothing is rounded for it. Tokens are padded to whole chunks with g = beta = 0.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from petatron.kernels.ssm.delta_recurrence import L2_EPS, query_scale
from petatron.kernels.triton.ssm.scan_tiles import document_before, document_numbers, document_of, dot_precision

_HEADS = 16
_COLUMNS = 64
"""Columns of a state in a tile."""


class DeltaChunks(NamedTuple):
    """What every kernel reads besides q, k, v and states: gates, inverse norms, documents; and the sizes.

    g_cumsum, betas: s, the cumulative log decays inside a chunk, and beta [B, H, padded length], in float32. Where channels have decays,
    g_cumsum is [B, H, padded length, N], times log2 e.
    q_inverse_norms, k_inverse_norms: what normalizes a row, 1 / (|q| sqrt(N)) and 1 / |k| [B, G, padded length].
    documents: the document of each token [B, S].
    """

    g_cumsum: Tensor
    betas: Tensor
    q_inverse_norms: Tensor
    k_inverse_norms: Tensor
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
        return self.k_inverse_norms.shape[1]

    @property
    def num_chunks(self) -> int:
        return self.betas.shape[-1] // self.chunk

    @property
    def gates(self) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor | None]:
        """What kernels take as `gates`: g_cumsum, betas, q_inverse_norms, k_inverse_norms, documents."""
        return self[:5]

    @property
    def sizes(self) -> tuple[int, ...]:
        """What kernels take as `sizes`: length, num_chunks, heads, heads_per_group, key_dim, value_dim."""
        return self.length, self.num_chunks, self.heads, self.heads // self.groups, self.key_dim, self.value_dim

    def constants(self, rows: Tensor, *, columns: int = _COLUMNS) -> dict[str, Any]:
        """Returns the sizes of tiles, and how the GEMMs of such rows are done; columns: the most of a state in a tile."""
        return {
            "CHUNK": self.chunk,
            "KEY_DIM": triton.next_power_of_2(max(self.key_dim, 16)),
            "COLUMNS": min(columns, triton.next_power_of_2(max(self.value_dim, 16))),
            "PRECISION": dot_precision(rows),
        }


class DecayedQK(NamedTuple):
    """Normalized queries and keys of value heads with the decays of channels in them (`channel_decays.py`).

    q_from_start, k_from_start: q exp(s) and k exp(s) [S, B, H, N]. k_to_end: k exp(s_Q - s) [S, B, H, N].
    chunk_decays: exp(s_Q), over whole chunks [B, H, c, N], in float32.
    """

    q_from_start: Tensor
    k_from_start: Tensor
    k_to_end: Tensor
    chunk_decays: Tensor

    def sizes(self, chunks: DeltaChunks) -> tuple[int, ...]:
        """Every value head has its own queries and keys."""
        length, num_chunks, heads, _, key_dim, value_dim = chunks.sizes
        return length, num_chunks, heads, 1, key_dim, value_dim


def delta_chunks(
    q_SBGN: Tensor, k_SBGN: Tensor, v_SBHP: Tensor, g: Tensor, beta_SBH: Tensor, starts_SB: Tensor | None, chunk: int
) -> DeltaChunks:
    """Returns what all kernels read of the gates, and of the norms of queries and keys.

    g: [S, B, H], or [S, B, H, N], whose cumulative sums are left for `channel_decays.py` to write.
    """
    length, batch, heads, value_dim = v_SBHP.shape
    groups, key_dim = k_SBGN.shape[2:]
    num_chunks = triton.cdiv(length, chunk)

    def new(rows: int, *channels: int) -> Tensor:
        return torch.empty((batch, rows, num_chunks * chunk, *channels), dtype=torch.float32, device=v_SBHP.device)

    gates = (new(heads, *g.shape[3:]), new(heads), new(groups), new(groups), document_numbers(starts_SB))
    chunks = DeltaChunks(*gates, length, key_dim, value_dim, chunk)
    _gate_rows[(num_chunks, triton.cdiv(heads, _HEADS), batch)](
        g if g.dim() == 3 else None,
        beta_SBH,
        chunks.g_cumsum,
        chunks.betas,
        length,
        heads,
        g.stride()[:3],
        beta_SBH.stride(),
        CHUNK=chunk,
        HEADS=_HEADS,
    )
    for rows, inverse_norms, scale in (
        (q_SBGN, chunks.q_inverse_norms, query_scale(key_dim)),
        (k_SBGN, chunks.k_inverse_norms, 1.0),
    ):
        _inverse_norms[(num_chunks, groups, batch)](
            rows,
            inverse_norms,
            scale,
            length,
            key_dim,
            rows.stride()[:3],
            EPS=L2_EPS,
            CHUNK=chunk,
            KEY_DIM=triton.next_power_of_2(key_dim),
        )
    return chunks


@triton.jit
def _gate_rows(
    g, beta, g_cumsum, betas, length, heads, g_strides, beta_strides, CHUNK: tl.constexpr, HEADS: tl.constexpr
):  # fmt: skip
    """Writes s, the cumulative sums of g inside a chunk, and beta as rows of tokens, for some heads. g: None: decays of channels."""
    b = tl.program_id(2)
    token = tl.program_id(0) * CHUNK + tl.arange(0, CHUNK)[:, None]
    head = tl.program_id(1) * HEADS + tl.arange(0, HEADS)[None, :]
    mask, input_mask = head < heads, (head < heads) & (token < length)
    wide_token = token.to(tl.int64)
    beta_tile = tl.load(
        beta + wide_token * beta_strides[0] + b * beta_strides[1] + head * beta_strides[2], mask=input_mask, other=0.0
    )
    offsets = (b * heads + head).to(tl.int64) * (tl.num_programs(0) * CHUNK) + token
    if g is not None:
        log_decay = tl.load(
            g + wide_token * g_strides[0] + b * g_strides[1] + head * g_strides[2], mask=input_mask, other=0.0
        )
        tl.store(g_cumsum + offsets, tl.cumsum(log_decay.to(tl.float32), axis=0), mask=mask)
    tl.store(betas + offsets, beta_tile.to(tl.float32), mask=mask)


@triton.jit
def _inverse_norms(
    rows,
    inverse_norms,
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
    row_offsets = token.to(tl.int64)[:, None] * strides[0] + b.to(tl.int64) * strides[1] + group * strides[2]
    mask = (token < length)[:, None] & (column < key_dim)
    x = tl.load(rows + row_offsets + column, mask=mask, other=0.0).to(tl.float32)
    offsets = (b * tl.num_programs(1) + group).to(tl.int64) * (tl.num_programs(0) * CHUNK) + token
    tl.store(inverse_norms + offsets, scale / tl.sqrt(tl.sum(x * x, axis=1) + EPS))


@triton.jit
def gate_offsets(row, chunk, b, num_rows, num_chunks, CHUNK: tl.constexpr):
    """Returns the offsets of a chunk's tokens [CHUNK] in a row of [B, num_rows, padded length]: of a head's gates or a group's norms."""
    return (b * num_rows + row).to(tl.int64) * num_chunks * CHUNK + chunk * CHUNK + tl.arange(0, CHUNK)


@triton.jit
def token_decays(gates, head, chunk, b, sizes, CHUNK: tl.constexpr):
    """Returns from_start exp(s_i) and to_end exp(s_Q - s_i) of a chunk's tokens [CHUNK], and its chunk_decay exp(s_Q)."""
    length, num_chunks, heads = sizes[0], sizes[1], sizes[2]
    g_cumsum, _, _, _, documents = gates
    s = tl.load(g_cumsum + gate_offsets(head, chunk, b, heads, num_chunks, CHUNK))
    s_end = tl.load(g_cumsum + (b * heads + head).to(tl.int64) * num_chunks * CHUNK + chunk * CHUNK + CHUNK - 1)
    from_start, to_end, chunk_decay = tl.exp(s), tl.exp(s_end - s), tl.exp(s_end)
    if documents is not None:
        document = document_of(documents, chunk * CHUNK + tl.arange(0, CHUNK), b, length)
        state_document = document_before(documents, chunk, b, length, CHUNK)
        last_document = document_of(documents, chunk * CHUNK + CHUNK - 1, b, length)
        from_start = tl.where(document == state_document, from_start, 0.0)
        to_end = tl.where(document == last_document, to_end, 0.0)
        chunk_decay = tl.where(state_document == last_document, chunk_decay, 0.0)
    return from_start, to_end, chunk_decay


@triton.jit
def decay_factors(
    gates, chunk_decays, head, group, chunk, b, sizes, CHUNK: tl.constexpr, KEY_DIM: tl.constexpr
):  # fmt: skip
    """Returns what multiplies a chunk's rows of q and k as they meet states: q_from_start, k_from_start and k_to_end [CHUNK], which
    are decays times inverse norms, and the chunk_decay of the state.

    chunk_decays: of channels [B, H, c, N], for rows that have all other factors in them (`DecayedQK`); None: decays of heads.
    """
    num_chunks, heads, heads_per_group, key_dim = sizes[1], sizes[2], sizes[3], sizes[4]
    _, _, q_inverse_norms, k_inverse_norms, _ = gates
    if chunk_decays is None:
        from_start, to_end, chunk_decay = token_decays(gates, head, chunk, b, sizes, CHUNK)
        group_offsets = gate_offsets(group, chunk, b, heads // heads_per_group, num_chunks, CHUNK)
        k_inverse_norm = tl.load(k_inverse_norms + group_offsets)
        q_from_start = from_start * tl.load(q_inverse_norms + group_offsets)
        k_from_start, k_to_end = from_start * k_inverse_norm, to_end * k_inverse_norm
    else:
        q_from_start = tl.full((CHUNK,), 1.0, tl.float32)
        k_from_start, k_to_end = q_from_start, q_from_start
        base = ((b * heads + head).to(tl.int64) * num_chunks + chunk) * key_dim
        n = tl.arange(0, KEY_DIM)[:, None]
        chunk_decay = tl.load(chunk_decays + base + n, mask=n < key_dim, other=0.0)
    return q_from_start, k_from_start, k_to_end, chunk_decay


@triton.jit
def load_chunk_matrix(matrices, head, chunk, b, sizes, CHUNK: tl.constexpr):
    """Loads a chunk's matrix [CHUNK, CHUNK], A or T, of [B, H, c, Q, Q]."""
    base = matrices + ((b * sizes[2] + head).to(tl.int64) * sizes[1] + chunk) * CHUNK * CHUNK
    return tl.load(base + tl.arange(0, CHUNK)[:, None] * CHUNK + tl.arange(0, CHUNK)[None, :])


@triton.jit
def store_chunk_matrix(matrices, value, head, chunk, b, sizes, CHUNK: tl.constexpr):
    """Stores a chunk's matrix [CHUNK, CHUNK], A or T, in [B, H, c, Q, Q]."""
    base = matrices + ((b * sizes[2] + head).to(tl.int64) * sizes[1] + chunk) * CHUNK * CHUNK
    pointers = base + tl.arange(0, CHUNK)[:, None] * CHUNK + tl.arange(0, CHUNK)[None, :]
    tl.store(pointers, value.to(matrices.dtype.element_ty))


@triton.jit
def state_base(b, chunk, head, sizes):
    """Returns the offset of the state of a chunk and head in [B, c, H, N, P]."""
    _, num_chunks, heads, _, key_dim, value_dim = sizes
    return ((b.to(tl.int64) * num_chunks + chunk) * heads + head) * key_dim * value_dim


@triton.jit
def state_tile(begin, key_dim, value_dim, KEY_DIM: tl.constexpr, COLUMNS: tl.constexpr):
    """Returns the offsets of some columns of a state [KEY_DIM, COLUMNS] from its first element, and their mask."""
    n, p = tl.arange(0, KEY_DIM)[:, None], begin + tl.arange(0, COLUMNS)[None, :]
    return n * value_dim + p, (n < key_dim) & (p < value_dim)


@triton.jit
def load_state(states, head, chunk, b, begin, sizes, KEY_DIM: tl.constexpr, COLUMNS: tl.constexpr):
    """Loads some columns of the state of a chunk and head [KEY_DIM, COLUMNS]."""
    offsets, mask = state_tile(begin, sizes[4], sizes[5], KEY_DIM, COLUMNS)
    return tl.load(states + state_base(b, chunk, head, sizes) + offsets, mask=mask, other=0.0)


@triton.jit
def row_tile(strides, token, b, head, begin, width, length, COLUMNS: tl.constexpr):
    """Returns the offsets of some columns of tokens' rows [tokens, COLUMNS], and their mask."""
    column = begin + tl.arange(0, COLUMNS)[None, :]
    row_offsets = token.to(tl.int64)[:, None] * strides[0] + b.to(tl.int64) * strides[1] + head * strides[2]
    return row_offsets + column, (token < length)[:, None] & (column < width)


@triton.jit
def load_value_columns(tensor, strides, token, b, head, begin, sizes, COLUMNS: tl.constexpr):
    """Loads some columns of a head's rows [tokens, COLUMNS] of v, or of what has its shape."""
    offsets, mask = row_tile(strides, token, b, head, begin, sizes[5], sizes[0], COLUMNS)
    return tl.load(tensor + offsets, mask=mask, other=0.0)
