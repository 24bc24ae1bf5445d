"""The rows of all chunks of the selective scan at once, from the states that enter them: y, or in reverse the gradient of x.

For few heads and sequences, whose walks alone would leave most of a GPU idle. A program has one chunk of one sequence and loops over
heads of a group, which share B and C; the equations are those of `scan_walk.py`.

S sequence, B batch, H heads, P head dim, G groups, N state dim; c chunks.
"""

# pyright: reportAttributeAccessIssue=false, reportCallIssue=false, reportIndexIssue=false, reportArgumentType=false
# pyright: reportPossiblyUnboundVariable=false, reportReturnType=false, reportGeneralTypeIssues=false
from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from petatron.kernels.triton.ssm.scan_scores import (
    block_size,
    chunk_rows,
    document_masks,
    row_tiles,
    score_tiles,
    state_tiles,
)
from petatron.kernels.triton.ssm.scan_tiles import ChunkDecays, ScanRows, dot_precision, head_parts, load_rows

_PROGRAMS = 1024
"""So many programs, if there are enough heads: some for every multiprocessor."""


def rows_from_states(rows: ScanRows, decays: ChunkDecays, states: Tensor) -> Tensor:
    """Returns y or the gradient of x. states: those that enter the chunks in the direction of the scan [B, c, H, N, P]."""
    (length, batch, heads, head_dim), (groups, state_dim) = rows.rows_SBHP.shape, rows.keys_SBGN.shape[2:]
    out = torch.empty(rows.rows_SBHP.shape, dtype=rows.rows_SBHP.dtype, device=rows.rows_SBHP.device)
    parts = head_parts(heads // groups, programs=decays.num_chunks * batch * groups, wanted=_PROGRAMS)
    chunk, width, columns = decays.chunk, block_size(head_dim), block_size(state_dim)
    _rows_from_states[(decays.num_chunks * parts, groups, batch)](
        row_tiles(rows.rows_SBHP, chunk, width),
        rows.queries_SBGN,
        score_tiles(rows.queries_SBGN, rows.keys_SBGN, decays, reverse=rows.reverse),
        state_tiles(states, columns, width),
        row_tiles(out, chunk, width),
        decays.steps,
        decays.sums,
        decays.documents,
        rows.D_H,
        length,
        decays.num_chunks,
        heads,
        heads // groups // parts,
        state_dim,
        rows.queries_SBGN.stride()[:3],
        PARTS=parts,
        CHUNK=chunk,
        HEAD_DIM=width,
        STATE_DIM=columns,
        REVERSE=rows.reverse,
        PRECISION=dot_precision(rows.rows_SBHP),
        num_warps=4,
        num_stages=2,
    )
    return out


@triton.jit
def _rows_from_states(
    row_tiles,
    queries,
    scores,
    states,
    out_tiles,
    steps,
    sums,
    documents,
    D,
    length,
    num_chunks,
    heads,
    heads_here,
    state_dim,
    query_strides,
    PARTS: tl.constexpr,
    CHUNK: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    STATE_DIM: tl.constexpr,
    REVERSE: tl.constexpr,
    PRECISION: tl.constexpr,
):
    chunk, part, group, b = tl.program_id(0) // PARTS, tl.program_id(0) % PARTS, tl.program_id(1), tl.program_id(2)
    begin = chunk * CHUNK
    token = begin + tl.arange(0, CHUNK)
    query = load_rows(queries, query_strides, token, b, group, state_dim, length, STATE_DIM)
    enters, leaves, _ = document_masks(documents, token, chunk, b, length, CHUNK)
    at = ((b * num_chunks + chunk) * tl.num_programs(1) + group) * CHUNK
    first = (group * PARTS + part) * heads_here
    for head in range(first, first + heads_here):
        by_head = (b * heads + head).to(tl.int64) * num_chunks * CHUNK
        state = states.load([b * num_chunks + chunk, head, 0, 0]).reshape(STATE_DIM, HEAD_DIM)
        from_state = tl.dot(query, state, input_precision=PRECISION)
        total, step = tl.load(sums + by_head + token), tl.load(steps + by_head + token)
        end = tl.load(sums + by_head + begin + CHUNK - 1)
        to_token, to_end = tl.where(enters, tl.exp2(total), 0.0), tl.where(leaves, tl.exp2(end - total), 0.0)
        rows = row_tiles.load([b, head, begin, 0]).reshape(CHUNK, HEAD_DIM)
        skip = tl.load(D + head).to(tl.float32)
        out = chunk_rows(from_state, rows, scores, at, total, step, to_token, to_end, skip, REVERSE, PRECISION)
        out_tiles.store([b, head, begin, 0], out.to(rows.dtype).reshape(1, 1, CHUNK, HEAD_DIM))
