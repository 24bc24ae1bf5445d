"""Gradients of the delta rule's scores and systems, and what they add to those of its inputs: all chunks at once.

With w what a chunk writes and dy the gradient of its system's right-hand side (`states.py`), for scores A and the system's L:

    A_ij = exp(s_i - s_j) (q_i . k_j)            j <= i        dA = do w^T
    L_ij = beta_i exp(s_i - s_j) (k_i . k_j)     j < i         dL = -dy w^T

The same kernel for both, one launch after the other. A program has one chunk of one key head and loops over the value heads that share
it: their gradients of q . k, or of k . k, are one sum in registers, and one or two GEMMs make parts of dq and dk of it. The second launch
reads dy, and so also writes dv = beta dy.

S sequence, B batch, H value heads, P value head dim, G key heads, N key head dim.
"""

# pyright: reportAttributeAccessIssue=false, reportCallIssue=false, reportIndexIssue=false, reportArgumentType=false
# pyright: reportPossiblyUnboundVariable=false, reportReturnType=false, reportGeneralTypeIssues=false
from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from petatron.kernels.triton.ssm.delta.tiles import DeltaChunks, chunk_row, load_columns, row_tile
from petatron.kernels.triton.ssm.scan_tiles import decay_matrix, document_of, load_rows

_COLUMNS = 32


def chunk_score_grads(
    grad_o_SBHP: Tensor,
    q_SBGN: Tensor,
    k_SBGN: Tensor,
    v_SBHP: Tensor,
    written_SBHP: Tensor,
    grad_sides_SBHP: Tensor,
    grad_v_SBHP: Tensor,
    chunks: DeltaChunks,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Returns parts of the gradients of normalised q and k [S, B, G, N], of g and of beta [B, H, padded length], all in float32.

    grad_v_SBHP: contiguous, as the two before it; the gradients of values are written to it.
    """
    q_sums, k_sums = (torch.empty(rows.shape, dtype=torch.float32, device=rows.device) for rows in (q_SBGN, k_SBGN))
    partial_g, partial_beta = torch.empty_like(chunks.sums), torch.empty_like(chunks.sums)
    for rows, upstream, of_keys in ((q_SBGN, grad_o_SBHP, False), (k_SBGN, grad_sides_SBHP, True)):
        tensors = (rows, k_SBGN, upstream, written_SBHP, v_SBHP)
        _score_grads[(chunks.num_chunks, chunks.groups, chunks.batch)](
            tensors,
            tuple(tensor.stride()[:3] for tensor in tensors),
            chunks.gates,
            (q_sums, k_sums, q_sums.stride()[:3]),
            (partial_g, partial_beta, grad_v_SBHP),
            chunks.sizes,
            KEYS=of_keys,
            **chunks.constants(v_SBHP, columns=_COLUMNS),
            num_warps=4,
            num_stages=1,
        )
    return q_sums, k_sums, partial_g, partial_beta


@triton.jit
def _score_grads(
    tensors,
    strides,
    gates,
    sums_over_heads,
    partial,
    sizes,
    KEYS: tl.constexpr,
    CHUNK: tl.constexpr,
    KEY_DIM: tl.constexpr,
    COLUMNS: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Of scores, written to both sums over heads, or with KEYS of L, added to that of keys."""
    chunk, group, b = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    length, num_chunks, heads, heads_per_group, key_dim, _ = sizes
    token = chunk * CHUNK + tl.arange(0, CHUNK)
    of_group = chunk_row(group, chunk, b, heads // heads_per_group, num_chunks, CHUNK)
    factor, k_factor = tl.load(gates[3 if KEYS else 2] + of_group), tl.load(gates[3] + of_group)
    row = load_rows(tensors[0], strides[0], token, b, group, key_dim, length, KEY_DIM)
    key = load_rows(tensors[1], strides[1], token, b, group, key_dim, length, KEY_DIM)
    scores = tl.dot(row, tl.trans(key), input_precision=PRECISION) * factor[:, None] * k_factor[None, :]
    scores_grad = tl.zeros((CHUNK, CHUNK), dtype=tl.float32)
    first = group * heads_per_group
    for head in range(first, first + heads_per_group):
        at = chunk_row(head, chunk, b, heads, num_chunks, CHUNK)
        grad = _decayed_grads(tensors, strides, gates, head, chunk, b, sizes, KEYS, CHUNK, COLUMNS, PRECISION)
        if KEYS:
            beta = tl.load(gates[1] + at)
            by_value = _value_grads(tensors, strides, partial[2], beta, head, token, b, sizes, CHUNK, COLUMNS)
            tl.store(partial[1] + at, by_value + tl.sum(grad * scores, axis=1))
            grad *= beta[:, None]
        scores_grad += grad
        crossing = _crossing_sums(grad * scores, CHUNK)
        tl.store(partial[0] + at, crossing + tl.load(partial[0] + at) if KEYS else crossing)
    q_sums, k_sums, sum_strides = sums_over_heads
    to, there = row_tile(sum_strides, token, b, group, 0, key_dim, length, KEY_DIM)
    if KEYS:
        both = ((scores_grad + tl.trans(scores_grad)) * k_factor[None, :]).to(key.dtype)
        before = tl.load(k_sums + to, mask=there, other=0.0)
        tl.store(k_sums + to, before + tl.dot(both, key, input_precision=PRECISION), mask=there)
    else:
        of_keys = (scores_grad * k_factor[None, :]).to(key.dtype)
        tl.store(q_sums + to, tl.dot(of_keys, key, input_precision=PRECISION), mask=there)
        of_rows = tl.trans((scores_grad * factor[:, None]).to(key.dtype))
        tl.store(k_sums + to, tl.dot(of_rows, row, input_precision=PRECISION), mask=there)


@triton.jit
def _decayed_grads(
    tensors,
    strides,
    gates,
    head,
    chunk,
    b,
    sizes,
    KEYS: tl.constexpr,
    CHUNK: tl.constexpr,
    COLUMNS: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Returns exp(s_i - s_j) times the gradient of scores, do w^T, or with KEYS of L, -dy w^T below the diagonal [i, j]."""
    length, num_chunks, heads, value_dim = sizes[0], sizes[1], sizes[2], sizes[5]
    token = chunk * CHUNK + tl.arange(0, CHUNK)
    grad = tl.zeros((CHUNK, CHUNK), dtype=tl.float32)
    for begin in range(0, value_dim, COLUMNS):
        upstream = load_columns(tensors[2], strides[2], token, b, head, begin, sizes, COLUMNS)
        new = load_columns(tensors[3], strides[3], token, b, head, begin, sizes, COLUMNS)
        grad = tl.dot(upstream, tl.trans(new), grad, input_precision=PRECISION)
    own = token if gates[4] is None else document_of(gates[4], token, b, length)
    total = tl.load(gates[0] + chunk_row(head, chunk, b, heads, num_chunks, CHUNK))
    grad *= decay_matrix(total, own, CHUNK, gates[4] is not None)
    if KEYS:
        grad = tl.where(tl.arange(0, CHUNK)[None, :] < tl.arange(0, CHUNK)[:, None], -grad, 0.0)
    return grad


@triton.jit
def _value_grads(
    tensors, strides, grad_v, beta, head, token, b, sizes, CHUNK: tl.constexpr, COLUMNS: tl.constexpr
):  # fmt: skip
    """Writes the gradients of values, beta dy, and returns dy . v of each token."""
    result = tl.zeros((CHUNK,), dtype=tl.float32)
    for begin in range(0, sizes[5], COLUMNS):
        value = load_columns(tensors[4], strides[4], token, b, head, begin, sizes, COLUMNS).to(tl.float32)
        rows, inside = row_tile(strides[2], token, b, head, begin, sizes[5], sizes[0], COLUMNS)
        side = tl.load(tensors[2] + rows, mask=inside, other=0.0).to(tl.float32)
        result += tl.sum(side * value, axis=1)
        tl.store(grad_v + rows, (side * beta[:, None]).to(grad_v.dtype.element_ty), mask=inside)
    return result


@triton.jit
def _crossing_sums(products, CHUNK: tl.constexpr):
    """Returns for each token t the sum of the products [i, j] with j < t <= i."""
    row, column = tl.arange(0, CHUNK)[:, None], tl.arange(0, CHUNK)[None, :]
    sums = tl.cumsum(tl.where(column < row, products, 0.0), axis=1)
    of_next = tl.sum(tl.where(column < row, sums, 0.0), axis=0)  # j <= t < i: of the token after t
    return tl.sum(tl.where(column + 1 == row, of_next[None, :], 0.0), axis=1)
