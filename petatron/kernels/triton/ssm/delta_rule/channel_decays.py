"""Queries and keys of the delta rule with decays of channels in them, for what meets states (inter-chunk): all chunks at once.

With s the cumulative sum of a channel's g inside a chunk of Q tokens, the kernels of `states.py` and `outputs.py` read

    q_i exp(s_i)        k_i exp(s_i)        k_j exp(s_Q - s_j)        exp(s_Q), of the state

where no exponent is above 0, and what a document begins in between is 0. q and k are normalized here: the decays are rounded to the
dtype of the rows as it is. Tokens of one chunk meet each other in `channel_intra_chunk.py`, which reads s. It is stored times log2 e:
a GPU has an instruction for powers of two, and those of e take four more.

S sequence, B batch, H value heads, P value head dim, G key heads, N key head dim; c chunks.
"""

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

from petatron.kernels.triton.ssm.delta_rule.tiles import DecayedQK, DeltaChunks, gate_offsets, row_tile
from petatron.kernels.triton.ssm.scan_tiles import document_before, document_of

_CHANNELS = 32


def decayed_qk(q_SBGN: Tensor, k_SBGN: Tensor, g_SBHN: Tensor, chunks: DeltaChunks) -> DecayedQK:
    """Returns the queries and keys with decays; writes the g_cumsum of `chunks`."""
    shape = (chunks.length, chunks.batch, chunks.heads, chunks.key_dim)
    rows = [torch.empty(shape, dtype=k_SBGN.dtype, device=k_SBGN.device) for _ in range(3)]
    chunk_decays = chunks.g_cumsum.new_empty((chunks.batch, chunks.heads, chunks.num_chunks, chunks.key_dim))
    channels = min(_CHANNELS, triton.next_power_of_2(chunks.key_dim))
    decayed = DecayedQK(*rows, chunk_decays)
    _decayed_qk[(chunks.num_chunks * triton.cdiv(chunks.key_dim, channels), chunks.heads, chunks.batch)](
        (q_SBGN, k_SBGN, g_SBHN),
        tuple(tensor.stride()[:3] for tensor in (q_SBGN, k_SBGN, g_SBHN, decayed.q_from_start)),
        chunks.gates,
        tuple(decayed),
        chunks.sizes,
        CHUNK=chunks.chunk,
        CHANNELS=channels,
        LOG2_E=math.log2(math.e),
        num_warps=4,
    )
    return decayed


@triton.jit
def _decayed_qk(
    tensors, strides, gates, decayed, sizes, CHUNK: tl.constexpr, CHANNELS: tl.constexpr, LOG2_E: tl.constexpr
):
    q, k, g = tensors
    q_strides, k_strides, g_strides, decayed_strides = strides
    q_from_start, k_from_start, k_to_end, chunk_decays = decayed
    length, num_chunks, heads, heads_per_group, key_dim, _ = sizes
    g_cumsum, _, q_inverse_norms, k_inverse_norms, documents = gates
    channel_blocks = tl.cdiv(key_dim, CHANNELS)
    chunk, begin = tl.program_id(0) // channel_blocks, tl.program_id(0) % channel_blocks * CHANNELS
    head, b = tl.program_id(1), tl.program_id(2)
    token, group = chunk * CHUNK + tl.arange(0, CHUNK), head // heads_per_group
    channel = begin + tl.arange(0, CHANNELS)
    offsets, mask = row_tile(g_strides, token, b, head, begin, key_dim, length, CHANNELS)
    s = tl.cumsum(tl.load(g + offsets, mask=mask, other=0.0).to(tl.float32) * LOG2_E, axis=0)
    last_token = tl.arange(0, CHUNK)[:, None] == CHUNK - 1
    s_end = tl.sum(tl.where(last_token, s, 0.0), axis=0)
    s_offsets = gate_offsets(head, chunk, b, heads, num_chunks, CHUNK)[:, None] * key_dim + channel[None, :]
    tl.store(g_cumsum + s_offsets, s, mask=channel[None, :] < key_dim)

    from_start, to_end, chunk_decay = tl.exp2(s), tl.exp2(s_end[None, :] - s), tl.exp2(s_end)
    if documents is not None:
        document = document_of(documents, token, b, length)[:, None]
        state_document = document_before(documents, chunk, b, length, CHUNK)
        last_document = document_of(documents, chunk * CHUNK + CHUNK - 1, b, length)
        from_start = tl.where(document == state_document, from_start, 0.0)
        to_end = tl.where(document == last_document, to_end, 0.0)
        chunk_decay = tl.where(state_document == last_document, chunk_decay, 0.0)
    chunk_offsets = ((b * heads + head).to(tl.int64) * num_chunks + chunk) * key_dim + channel
    tl.store(chunk_decays + chunk_offsets, chunk_decay, mask=channel < key_dim)

    group_offsets = gate_offsets(group, chunk, b, heads // heads_per_group, num_chunks, CHUNK)
    out_offsets, out_mask = row_tile(decayed_strides, token, b, head, begin, key_dim, length, CHANNELS)
    offsets, mask = row_tile(q_strides, token, b, group, begin, key_dim, length, CHANNELS)
    query = (
        tl.load(q + offsets, mask=mask, other=0.0).to(tl.float32) * tl.load(q_inverse_norms + group_offsets)[:, None]
    )
    tl.store(q_from_start + out_offsets, (query * from_start).to(q_from_start.dtype.element_ty), mask=out_mask)
    offsets, mask = row_tile(k_strides, token, b, group, begin, key_dim, length, CHANNELS)
    key = tl.load(k + offsets, mask=mask, other=0.0).to(tl.float32) * tl.load(k_inverse_norms + group_offsets)[:, None]
    tl.store(k_from_start + out_offsets, (key * from_start).to(k_from_start.dtype.element_ty), mask=out_mask)
    tl.store(k_to_end + out_offsets, (key * to_end).to(k_to_end.dtype.element_ty), mask=out_mask)
