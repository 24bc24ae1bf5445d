"""Outputs of the selective scan from the states before its chunks: the chunk scan of mamba_ssm.

    y_i = exp(s_i) h C_i + sum over j <= i of L_ij (C_i . B_j) dt_j x_j + D x_i        inter-chunk, intra-chunk, skip

A program has one chunk of one sequence and loops over heads of a group: C and CB = C B^T are the same for all of them. `scan_tiles.py` has
the notation.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from petatron.kernels.triton.ssm.scan_tiles import (
    ChunkDecays,
    decay_matrix,
    document_of,
    load_rows,
    num_head_parts,
    scan_constants,
    state_masks,
    state_offsets,
)

_PROGRAMS = 1024
"""The wanted number of programs, if there are enough heads: some for every multiprocessor."""


def chunk_outputs(
    x_SBHP: Tensor, B_SBGN: Tensor, C_SBGN: Tensor, D_H: Tensor, decays: ChunkDecays, states: Tensor
) -> Tensor:
    """Returns the outputs of all tokens [S, B, H, P]."""
    length, batch, heads, head_dim = x_SBHP.shape
    groups, state_dim = B_SBGN.shape[2:]
    y_SBHP = torch.empty(x_SBHP.shape, dtype=x_SBHP.dtype, device=x_SBHP.device)
    head_parts = num_head_parts(heads // groups, programs=decays.num_chunks * batch * groups, wanted=_PROGRAMS)
    tensors = (x_SBHP, B_SBGN, C_SBGN, D_H)
    _chunk_outputs[(decays.num_chunks * head_parts, groups, batch)](
        tensors,
        decays.by_token,
        (states, y_SBHP),
        (length, decays.num_chunks, heads, heads // groups // head_parts, head_dim, state_dim),
        tuple(tensor.stride()[:3] for tensor in (*tensors[:3], y_SBHP)),
        **scan_constants(decays, x_SBHP, B_SBGN, head_parts),
        num_warps=8 if decays.chunk_size > 64 else 4,
        num_stages=3,
    )
    return y_SBHP


@triton.jit
def _chunk_outputs(
    tensors,
    by_token,
    states_and_y,
    sizes,
    strides,
    HEAD_PARTS: tl.constexpr,
    CHUNK: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    STATE_DIM: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """y = exp(s) C h^T + (L * CB * dt) x + D x for one chunk and some heads of a group."""
    chunk, head_part = tl.program_id(0) // HEAD_PARTS, tl.program_id(0) % HEAD_PARTS
    group, b = tl.program_id(1), tl.program_id(2)
    x, B, C, D = tensors
    dt, dA_cumsum, documents = by_token
    states, y = states_and_y
    length, num_chunks, heads, heads_per_part, head_dim, state_dim = sizes
    x_strides, B_strides, C_strides, y_strides = strides
    token = chunk * CHUNK + tl.arange(0, CHUNK)
    C_tile = load_rows(C, C_strides, token, b, group, state_dim, length, STATE_DIM)
    B_tile = load_rows(B, B_strides, token, b, group, state_dim, length, STATE_DIM)
    CB = tl.dot(C_tile, tl.trans(B_tile), input_precision=PRECISION)
    document = token if documents is None else document_of(documents, token, b, length)
    reads_state, _, _ = state_masks(documents, token, chunk, b, length, CHUNK)
    offsets, state_mask = state_offsets(head_dim, state_dim, HEAD_DIM, STATE_DIM)
    column = tl.arange(0, HEAD_DIM)[None, :]
    y_mask = (token < length)[:, None] & (column < head_dim)
    first_head = (group * HEAD_PARTS + head_part) * heads_per_part
    for head in range(first_head, first_head + heads_per_part):
        row_base = (b * heads + head).to(tl.int64) * num_chunks * CHUNK
        state_base = ((b.to(tl.int64) * num_chunks + chunk) * heads + head) * head_dim * state_dim
        state = tl.load(states + state_base + offsets, mask=state_mask, other=0.0)
        x_tile = load_rows(x, x_strides, token, b, head, head_dim, length, HEAD_DIM)
        dA_cs, dt_tile = tl.load(dA_cumsum + row_base + token), tl.load(dt + row_base + token)
        M = CB * decay_matrix(dA_cs, document, CHUNK, documents is not None) * dt_tile[None, :]
        y_tile = tl.dot(C_tile, tl.trans(state), input_precision=PRECISION)  # inter-chunk
        y_tile *= tl.where(reads_state, tl.exp(dA_cs), 0.0)[:, None]
        y_tile += tl.dot(M.to(x_tile.dtype), x_tile, input_precision=PRECISION)  # intra-chunk
        y_tile += tl.load(D + head).to(tl.float32) * x_tile.to(tl.float32)
        y_rows = y + token.to(tl.int64)[:, None] * y_strides[0] + b.to(tl.int64) * y_strides[1] + head * y_strides[2]
        tl.store(y_rows + column, y_tile.to(x_tile.dtype), mask=y_mask)
