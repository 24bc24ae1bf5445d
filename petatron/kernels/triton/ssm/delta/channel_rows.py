"""Queries and keys of the delta rule with decays of channels in them: all chunks at once.

With s the running sum of a channel's g inside a chunk of Q tokens, kernels that meet states read (`states.py`, `outputs.py`)

    q_i exp(s_i)        k_i exp(s_i)        k_j exp(s_Q - s_j)        exp(s_Q), of the state

where no exponent is above 0, and what a document begins in between is 0. q and k are normalised here: the decays are rounded to the
dtype of the rows as it is. Tokens of one chunk meet each other in `channel_scores.py`, which reads the sums. These are stored times log2 e:
a GPU has an instruction for powers of two, and those of e take four more.

S sequence, B batch, H value heads, P value head dim, G key heads, N key head dim; c chunks.
"""

# pyright: reportAttributeAccessIssue=false, reportCallIssue=false, reportIndexIssue=false, reportArgumentType=false
# pyright: reportPossiblyUnboundVariable=false, reportReturnType=false, reportGeneralTypeIssues=false
from __future__ import annotations

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

from petatron.kernels.triton.ssm.delta.tiles import DecayedRows, DeltaChunks, chunk_row, row_tile
from petatron.kernels.triton.ssm.scan_tiles import document_before, document_of

_CHANNELS = 32


def decayed_rows(q_SBGN: Tensor, k_SBGN: Tensor, g_SBHN: Tensor, chunks: DeltaChunks) -> DecayedRows:
    """Returns the rows; writes the sums of `chunks`."""
    shape = (chunks.length, chunks.batch, chunks.heads, chunks.key_dim)
    rows = [torch.empty(shape, dtype=k_SBGN.dtype, device=k_SBGN.device) for _ in range(3)]
    wholes = chunks.sums.new_empty((chunks.batch, chunks.heads, chunks.num_chunks, chunks.key_dim))
    channels = min(_CHANNELS, triton.next_power_of_2(chunks.key_dim))
    _decayed_rows[(chunks.num_chunks * triton.cdiv(chunks.key_dim, channels), chunks.heads, chunks.batch)](
        (q_SBGN, k_SBGN, g_SBHN),
        tuple(tensor.stride()[:3] for tensor in (q_SBGN, k_SBGN, g_SBHN, rows[0])),
        chunks.gates,
        (*rows, wholes),
        chunks.sizes,
        CHUNK=chunks.chunk,
        CHANNELS=channels,
        LOG2_E=math.log2(math.e),
        num_warps=4,
    )
    return DecayedRows(*rows, wholes)


@triton.jit
def _decayed_rows(
    tensors, strides, gates, made, sizes, CHUNK: tl.constexpr, CHANNELS: tl.constexpr, LOG2_E: tl.constexpr
):
    q, k, g = tensors
    length, num_chunks, heads, heads_per_group, key_dim, _ = sizes
    sums, _, q_factors, k_factors, documents = gates
    blocks = tl.cdiv(key_dim, CHANNELS)
    chunk, begin = tl.program_id(0) // blocks, tl.program_id(0) % blocks * CHANNELS
    head, b = tl.program_id(1), tl.program_id(2)
    token, group = chunk * CHUNK + tl.arange(0, CHUNK), head // heads_per_group
    column = begin + tl.arange(0, CHANNELS)
    rows, inside = row_tile(strides[2], token, b, head, begin, key_dim, length, CHANNELS)
    total = tl.cumsum(tl.load(g + rows, mask=inside, other=0.0).to(tl.float32) * LOG2_E, axis=0)
    last = tl.arange(0, CHUNK)[:, None] == CHUNK - 1
    end = tl.sum(tl.where(last, total, 0.0), axis=0)
    to = chunk_row(head, chunk, b, heads, num_chunks, CHUNK)[:, None] * key_dim + column[None, :]
    tl.store(sums + to, total, mask=column[None, :] < key_dim)

    to_token, to_end, whole = tl.exp2(total), tl.exp2(end[None, :] - total), tl.exp2(end)
    if documents is not None:
        own = document_of(documents, token, b, length)[:, None]
        before = document_before(documents, chunk, b, length, CHUNK)
        after = document_of(documents, chunk * CHUNK + CHUNK - 1, b, length)
        to_token, to_end = tl.where(own == before, to_token, 0.0), tl.where(own == after, to_end, 0.0)
        whole = tl.where(before == after, whole, 0.0)
    to = ((b * heads + head).to(tl.int64) * num_chunks + chunk) * key_dim + column
    tl.store(made[3] + to, whole, mask=column < key_dim)

    of_group = chunk_row(group, chunk, b, heads // heads_per_group, num_chunks, CHUNK)
    to, there = row_tile(strides[3], token, b, head, begin, key_dim, length, CHANNELS)
    rows, inside = row_tile(strides[0], token, b, group, begin, key_dim, length, CHANNELS)
    query = tl.load(q + rows, mask=inside, other=0.0).to(tl.float32) * tl.load(q_factors + of_group)[:, None]
    tl.store(made[0] + to, (query * to_token).to(made[0].dtype.element_ty), mask=there)
    rows, inside = row_tile(strides[1], token, b, group, begin, key_dim, length, CHANNELS)
    key = tl.load(k + rows, mask=inside, other=0.0).to(tl.float32) * tl.load(k_factors + of_group)[:, None]
    tl.store(made[1] + to, (key * to_token).to(made[1].dtype.element_ty), mask=there)
    tl.store(made[2] + to, (key * to_end).to(made[2].dtype.element_ty), mask=there)
