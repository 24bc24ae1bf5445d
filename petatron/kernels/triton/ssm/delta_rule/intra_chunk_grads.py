"""Gradients of the delta rule through the matrices A and L inside chunks (intra-chunk), and of the values: all chunks at once.

With v_new the values that a chunk writes and d_rhs the gradient of its triangular system's right-hand side (`states.py`):

    A_ij = exp(s_i - s_j) (q_i . k_j)            j <= i        dA = do v_new^T
    L_ij = beta_i exp(s_i - s_j) (k_i . k_j)     j < i         dL = -d_rhs v_new^T

The same kernel for both, one launch after the other. A program has one chunk of one key head and loops over the value heads that share
it: their gradients of q . k, or of k . k, are one sum in registers, and one or two GEMMs make parts of dq and dk of it. The second launch
reads d_rhs, and so also writes dv = beta d_rhs.

S sequence, B batch, H value heads, P value head dim, G key heads, N key head dim.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from petatron.kernels.triton.ssm.delta_rule.tiles import DeltaChunks, gate_offsets, load_value_columns, row_tile
from petatron.kernels.triton.ssm.scan_tiles import decay_matrix, document_of, load_rows

_COLUMNS = 32


def intra_chunk_grads(
    grad_o_SBHP: Tensor,
    q_SBGN: Tensor,
    k_SBGN: Tensor,
    v_SBHP: Tensor,
    v_new_SBHP: Tensor,
    grad_rhs_SBHP: Tensor,
    grad_v_SBHP: Tensor,
    chunks: DeltaChunks,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Returns the intra-chunk parts of the gradients of normalized q and k [S, B, G, N], of g and of beta [B, H, padded length], all in
    float32.

    grad_v_SBHP: contiguous, as the two before it; the gradients of values are written to it.
    """
    partial_q, partial_k = (
        torch.empty(rows.shape, dtype=torch.float32, device=rows.device) for rows in (q_SBGN, k_SBGN)
    )
    partial_g, partial_beta = torch.empty_like(chunks.g_cumsum), torch.empty_like(chunks.g_cumsum)
    for rows, upstream, through_L in ((q_SBGN, grad_o_SBHP, False), (k_SBGN, grad_rhs_SBHP, True)):
        tensors = (rows, k_SBGN, upstream, v_new_SBHP, v_SBHP)
        _intra_chunk_grads[(chunks.num_chunks, chunks.groups, chunks.batch)](
            tensors,
            tuple(tensor.stride()[:3] for tensor in tensors),
            chunks.gates,
            (partial_q, partial_k, partial_q.stride()[:3]),
            (partial_g, partial_beta, grad_v_SBHP),
            chunks.sizes,
            THROUGH_L=through_L,
            **chunks.constants(v_SBHP, columns=_COLUMNS),
            num_warps=4,
            num_stages=1,
        )
    return partial_q, partial_k, partial_g, partial_beta


@triton.jit
def _intra_chunk_grads(
    tensors,
    strides,
    gates,
    group_grads,
    head_grads,
    sizes,
    THROUGH_L: tl.constexpr,
    CHUNK: tl.constexpr,
    KEY_DIM: tl.constexpr,
    COLUMNS: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Through A: writes the parts of q, k and g. With THROUGH_L, through L: adds to those of k and g; writes that of beta, and dv.

    tensors: rows, which are q or with THROUGH_L k; k; upstream, do or d_rhs; v_new; v.
    """
    chunk, group, b = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    length, num_chunks, heads, heads_per_group, key_dim, _ = sizes
    rows, k, _, _, _ = tensors
    row_strides, k_strides, _, _, _ = strides
    _, betas, q_inverse_norms, k_inverse_norms, _ = gates
    partial_g, partial_beta, grad_v = head_grads
    token = chunk * CHUNK + tl.arange(0, CHUNK)
    group_offsets = gate_offsets(group, chunk, b, heads // heads_per_group, num_chunks, CHUNK)
    row_inverse_norm = tl.load((k_inverse_norms if THROUGH_L else q_inverse_norms) + group_offsets)
    k_inverse_norm = tl.load(k_inverse_norms + group_offsets)
    row = load_rows(rows, row_strides, token, b, group, key_dim, length, KEY_DIM)
    key = load_rows(k, k_strides, token, b, group, key_dim, length, KEY_DIM)
    products = tl.dot(row, tl.trans(key), input_precision=PRECISION)  # q . k, or k . k
    products = products * row_inverse_norm[:, None] * k_inverse_norm[None, :]
    products_grad = tl.zeros((CHUNK, CHUNK), dtype=tl.float32)
    first_head = group * heads_per_group
    for head in range(first_head, first_head + heads_per_group):
        head_offsets = gate_offsets(head, chunk, b, heads, num_chunks, CHUNK)
        grad = _decayed_matrix_grads(
            tensors, strides, gates, (head, chunk, b), sizes, THROUGH_L, CHUNK, COLUMNS, PRECISION
        )
        if THROUGH_L:
            beta = tl.load(betas + head_offsets)
            rhs_grad_dot_value = _value_grads(tensors, strides, grad_v, beta, (head, chunk, b), sizes, CHUNK, COLUMNS)
            tl.store(partial_beta + head_offsets, rhs_grad_dot_value + tl.sum(grad * products, axis=1))
            grad *= beta[:, None]
        products_grad += grad
        g_grad = _crossing_sums(grad * products, CHUNK)
        tl.store(partial_g + head_offsets, g_grad + tl.load(partial_g + head_offsets) if THROUGH_L else g_grad)
    partial_q, partial_k, partial_strides = group_grads
    offsets, mask = row_tile(partial_strides, token, b, group, 0, key_dim, length, KEY_DIM)
    if THROUGH_L:
        symmetric = ((products_grad + tl.trans(products_grad)) * k_inverse_norm[None, :]).to(key.dtype)
        through_A = tl.load(partial_k + offsets, mask=mask, other=0.0)
        tl.store(partial_k + offsets, through_A + tl.dot(symmetric, key, input_precision=PRECISION), mask=mask)
    else:
        key_weights = (products_grad * k_inverse_norm[None, :]).to(key.dtype)
        tl.store(partial_q + offsets, tl.dot(key_weights, key, input_precision=PRECISION), mask=mask)
        query_weights = tl.trans((products_grad * row_inverse_norm[:, None]).to(key.dtype))
        tl.store(partial_k + offsets, tl.dot(query_weights, row, input_precision=PRECISION), mask=mask)


@triton.jit
def _decayed_matrix_grads(
    tensors,
    strides,
    gates,
    place,
    sizes,
    THROUGH_L: tl.constexpr,
    CHUNK: tl.constexpr,
    COLUMNS: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Returns exp(s_i - s_j) dA with dA = do v_new^T, or with THROUGH_L exp(s_i - s_j) dL with dL = -d_rhs v_new^T for j < i [i, j]."""
    length, num_chunks, heads, value_dim = sizes[0], sizes[1], sizes[2], sizes[5]
    g_cumsum, _, _, _, documents = gates
    head, chunk, b = place
    token = chunk * CHUNK + tl.arange(0, CHUNK)
    grad = tl.zeros((CHUNK, CHUNK), dtype=tl.float32)
    for begin in range(0, value_dim, COLUMNS):
        upstream_grad = load_value_columns(tensors[2], strides[2], token, b, head, begin, sizes, COLUMNS)
        new_value = load_value_columns(tensors[3], strides[3], token, b, head, begin, sizes, COLUMNS)
        grad = tl.dot(upstream_grad, tl.trans(new_value), grad, input_precision=PRECISION)
    document = token if documents is None else document_of(documents, token, b, length)
    s = tl.load(g_cumsum + gate_offsets(head, chunk, b, heads, num_chunks, CHUNK))
    grad *= decay_matrix(s, document, CHUNK, documents is not None)
    if THROUGH_L:
        grad = tl.where(tl.arange(0, CHUNK)[None, :] < tl.arange(0, CHUNK)[:, None], -grad, 0.0)
    return grad


@triton.jit
def _value_grads(tensors, strides, grad_v, beta, place, sizes, CHUNK: tl.constexpr, COLUMNS: tl.constexpr):
    """Writes the gradients of values, beta d_rhs, and returns d_rhs . v of each token."""
    head, chunk, b = place
    token = chunk * CHUNK + tl.arange(0, CHUNK)
    dots = tl.zeros((CHUNK,), dtype=tl.float32)
    for begin in range(0, sizes[5], COLUMNS):
        value = load_value_columns(tensors[4], strides[4], token, b, head, begin, sizes, COLUMNS).to(tl.float32)
        offsets, mask = row_tile(strides[2], token, b, head, begin, sizes[5], sizes[0], COLUMNS)
        rhs_grad = tl.load(tensors[2] + offsets, mask=mask, other=0.0).to(tl.float32)
        dots += tl.sum(rhs_grad * value, axis=1)
        tl.store(grad_v + offsets, (rhs_grad * beta[:, None]).to(grad_v.dtype.element_ty), mask=mask)
    return dots


@triton.jit
def _crossing_sums(products, CHUNK: tl.constexpr):
    """Returns for each token t the sum of the products [i, j] with j < t <= i: those whose decay exp(s_i - s_j) has g_t in it."""
    row, column = tl.arange(0, CHUNK)[:, None], tl.arange(0, CHUNK)[None, :]
    row_cumsum = tl.cumsum(tl.where(column < row, products, 0.0), axis=1)
    of_next = tl.sum(tl.where(column < row, row_cumsum, 0.0), axis=0)  # j <= t < i: of the token after t
    return tl.sum(tl.where(column + 1 == row, of_next[None, :], 0.0), axis=1)
