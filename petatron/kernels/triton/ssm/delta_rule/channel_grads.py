"""Gradients of the delta rule with decays of channels, through the states (inter-chunk) and inside chunks: all chunks at once.

With S the state before a chunk, dS' the gradient of the state after it, v_new the values it writes and d_rhs the gradient of its triangular
system's right-hand side (`states.py`), the gradients of a chunk's A and L (`channel_intra_chunk.py`) are dA = do v_new^T and
dL = -d_rhs v_new^T. From there on channels do not mix, and a program goes through blocks of them. Through the states,

    dq += exp(s) (do S^T)       dk += -beta exp(s) (d_rhs S^T) + exp(s_Q - s) (v_new dS'^T)

A level of the tree has f = exp(-|s - s_m|), and dA and dL of the pairs that cross m: rows are in second halves of nodes, columns in first
ones. Their transposes have the other rows and columns, so two GEMMs are enough for all four,

    X = (dA + (beta dL)^T) (f k)                       Y = (dL + dA^T) z,  z = f q in second halves, f k in first
    dq += f X, dk += beta f Y in second halves         dk += f (X + Y) in first halves

The gradient of g at a token is that of every decay over it, times the decay. With x = q dq + k dk of one level, a token of a second half
gets x of all from it to the end of that half, a token of a first half x of all before it in the half; likewise of decays from the start
of the chunk and to its end. All are sums of few terms, as GEMMs with a matrix of ones and zeros: q dq - k dk of all levels together,
summed up from the end, would be the same with terms that cancel, where strong decays leave little.

Two kernels, through the states and through the tree: in one, ptxas 12.8 reads a uniform register that it never wrote.

S sequence, B batch, H value heads, P value head dim, G key heads, N key head dim; c chunks.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from petatron.kernels.ssm.delta_recurrence import query_scale
from petatron.kernels.triton.ssm.delta_rule.channel_intra_chunk import (
    load_g_cumsum,
    node_decays,
    node_pairs,
    tree_levels,
)
from petatron.kernels.triton.ssm.delta_rule.input_grads import DeltaIntermediates, l2_normalize_grads
from petatron.kernels.triton.ssm.delta_rule.tiles import (
    DeltaChunks,
    gate_offsets,
    load_value_columns,
    row_tile,
    state_base,
)
from petatron.kernels.triton.ssm.scan_tiles import document_before, document_of, load_rows

_CHANNELS = 32
_COLUMNS = 32
_WARPS = 4


def channel_grads(
    grad_o_SBHP: Tensor,
    q_SBGN: Tensor,
    k_SBGN: Tensor,
    v_SBHP: Tensor,
    g_SBHN: Tensor,
    beta_SBH: Tensor,
    intermediates: DeltaIntermediates,
    chunks: DeltaChunks,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Returns the gradients of q, k, v, g and beta in their dtypes."""
    states, grad_states, v_new, grad_rhs = intermediates

    def new(like: Tensor, dtype: torch.dtype | None = None) -> Tensor:
        return torch.empty(like.shape, dtype=dtype or like.dtype, device=like.device)

    grad_v, grad_g, grad_beta = new(v_SBHP), new(g_SBHN), new(beta_SBH)
    partial_q, partial_k, partial_g = (new(g_SBHN, torch.float32) for _ in range(3))
    partial = (partial_q, partial_k, partial_g, torch.empty_like(chunks.betas))
    grid = (chunks.num_chunks, chunks.heads, chunks.batch)
    constants = chunks.constants(v_SBHP, columns=_COLUMNS)
    constants |= {"CHANNELS": min(_CHANNELS, constants.pop("KEY_DIM")), "num_warps": _WARPS, "num_stages": 1}
    tensors = (q_SBGN, k_SBGN, v_SBHP, grad_o_SBHP, v_new, grad_rhs)
    strides = tuple(tensor.stride()[:3] for tensor in (*tensors, partial_q))
    _channel_inter_chunk_grads[grid](
        tensors, strides, chunks.gates, (states, grad_states), partial, chunks.sizes, **constants
    )
    _channel_intra_chunk_grads[grid](
        tensors,
        strides,
        chunks.gates,
        _tree_masks(k_SBGN, chunks),
        partial,
        (grad_v, grad_g, grad_beta),
        chunks.sizes,
        LEVELS=tree_levels(chunks),
        **constants,
    )
    grad_q, grad_k = new(q_SBGN), new(k_SBGN)
    for rows, inverse_norms, head_grads, grad, scale in (
        (q_SBGN, chunks.q_inverse_norms, partial_q, grad_q, query_scale(chunks.key_dim)),
        (k_SBGN, chunks.k_inverse_norms, partial_k, grad_k, 1.0),
    ):
        _channel_group_grads[(chunks.num_chunks, chunks.groups, chunks.batch)](
            (rows, inverse_norms, head_grads, grad),
            tuple(tensor.stride()[:3] for tensor in (rows, head_grads, grad)),
            chunks.sizes,
            scale,
            CHUNK=chunks.chunk,
            KEY_DIM=triton.next_power_of_2(chunks.key_dim),
            num_warps=4,
        )
    return grad_q, grad_k, grad_v, grad_g, grad_beta


def _tree_masks(rows: Tensor, chunks: DeltaChunks) -> tuple[Tensor, Tensor]:
    """Returns two masks of all levels of the tree as ones and zeros [levels, Q, Q]: which tokens are pairs (`node_pairs`), and of which
    tokens j a token's g gets x_j.

    To read them takes a tenth of the instructions of computing them.
    """
    shape = (tree_levels(chunks), chunks.chunk, chunks.chunk)
    pairs = torch.empty(shape, dtype=rows.dtype, device=rows.device)
    sums_dtype = torch.float32 if rows.dtype == torch.float32 else torch.bfloat16
    g_grad_terms = torch.empty(shape, dtype=sums_dtype, device=rows.device)
    _write_tree_masks[shape[:1]](pairs, g_grad_terms, CHUNK=chunks.chunk)
    return pairs, g_grad_terms


@triton.jit
def _write_tree_masks(pairs, g_grad_terms, CHUNK: tl.constexpr):
    level = tl.program_id(0)
    row, column = tl.arange(0, CHUNK)[:, None], tl.arange(0, CHUNK)[None, :]
    offsets = (level * CHUNK + row) * CHUNK + column
    tl.store(pairs + offsets, node_pairs(level, CHUNK).to(pairs.dtype.element_ty))
    crosses = tl.where(((row >> level) & 1) == 1, column >= row, column < row)
    tl.store(
        g_grad_terms + offsets,
        (((row >> level) == (column >> level)) & crosses).to(g_grad_terms.dtype.element_ty),
    )


@triton.jit
def _channel_group_grads(tensors, strides, sizes, scale, CHUNK: tl.constexpr, KEY_DIM: tl.constexpr):
    """Adds up the gradients of normalized rows over the value heads that share them, and turns the sum into that of the rows."""
    chunk, group, b = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    rows, inverse_norms, head_grads, grad = tensors
    row_strides, head_grad_strides, grad_strides = strides
    length, num_chunks, heads, heads_per_group, key_dim, _ = sizes
    token = chunk * CHUNK + tl.arange(0, CHUNK)
    group_offsets = gate_offsets(group, chunk, b, heads // heads_per_group, num_chunks, CHUNK)
    inverse_norm = tl.load(inverse_norms + group_offsets)
    sum_over_heads = tl.zeros((CHUNK, KEY_DIM), dtype=tl.float32)
    for head in range(group * heads_per_group, (group + 1) * heads_per_group):
        sum_over_heads += load_rows(head_grads, head_grad_strides, token, b, head, key_dim, length, KEY_DIM)
    row = load_rows(rows, row_strides, token, b, group, key_dim, length, KEY_DIM)
    offsets, mask = row_tile(grad_strides, token, b, group, 0, key_dim, length, KEY_DIM)
    tl.store(
        grad + offsets,
        l2_normalize_grads(sum_over_heads, row, inverse_norm, scale).to(grad.dtype.element_ty),
        mask=mask,
    )


@triton.jit
def _channel_inter_chunk_grads(
    tensors,
    strides,
    gates,
    states,
    partial,
    sizes,
    CHUNK: tl.constexpr,
    CHANNELS: tl.constexpr,
    COLUMNS: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Writes what comes through the states: parts of the gradients of normalized q and k, of g and of beta."""
    chunk, head, b = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    length, num_chunks, heads, _, key_dim, _ = sizes
    g_cumsum, betas, _, _, documents = gates
    partial_q, partial_k, partial_g, partial_beta = partial
    token = chunk * CHUNK + tl.arange(0, CHUNK)
    row, column = tl.arange(0, CHUNK)[:, None], tl.arange(0, CHUNK)[None, :]
    head_offsets = gate_offsets(head, chunk, b, heads, num_chunks, CHUNK)
    beta = tl.load(betas + head_offsets)[:, None]
    if documents is not None:
        document = document_of(documents, token, b, length)[:, None]
        reads_state = document == document_before(documents, chunk, b, length, CHUNK)
        writes_state = document == document_of(documents, chunk * CHUNK + CHUNK - 1, b, length)
    beta_grad = tl.zeros((CHUNK,), dtype=tl.float32)
    for begin in range(0, key_dim, CHANNELS):
        query, key = _normalized_qk(tensors, strides, gates, begin, (head, chunk, b), sizes, CHUNK, CHANNELS, PRECISION)
        s = load_g_cumsum(g_cumsum, tl.arange(0, CHUNK), begin, head, chunk, b, sizes, CHUNK, CHANNELS)
        last_row = tl.full((1,), CHUNK - 1, tl.int32)
        s_end = load_g_cumsum(g_cumsum, last_row, begin, head, chunk, b, sizes, CHUNK, CHANNELS)
        q_from_start_grad, k_from_start_grad, k_to_end_grad, chunk_decay_grad = _state_gemms(
            tensors, strides, states, begin, (head, chunk, b), sizes, CHUNK, CHANNELS, COLUMNS, PRECISION
        )
        from_start, to_end = tl.exp2(s), tl.exp2(s_end - s)
        if documents is not None:
            from_start, to_end = tl.where(reads_state, from_start, 0.0), tl.where(writes_state, to_end, 0.0)
        chunk_decay = tl.sum(tl.where(row == CHUNK - 1, from_start, 0.0), axis=0)
        query_grad = q_from_start_grad * from_start
        key_from_start_grad = k_from_start_grad * -from_start
        key_to_end_grad = k_to_end_grad * to_end
        beta_grad += tl.sum(key_from_start_grad * key, axis=1)
        key_from_start_grad *= beta
        g_grad = _masked_sums(column >= row, query * query_grad + key * key_from_start_grad, PRECISION)
        g_grad += (
            _masked_sums(column < row, key * key_to_end_grad, PRECISION) + (chunk_decay * chunk_decay_grad)[None, :]
        )
        offsets, mask = row_tile(strides[6], token, b, head, begin, key_dim, length, CHANNELS)
        tl.store(partial_q + offsets, query_grad, mask=mask)
        tl.store(partial_k + offsets, key_from_start_grad + key_to_end_grad, mask=mask)
        tl.store(partial_g + offsets, g_grad, mask=mask)
    tl.store(partial_beta + head_offsets, beta_grad)


@triton.jit
def _channel_intra_chunk_grads(
    tensors,
    strides,
    gates,
    masks,
    partial,
    grads,
    sizes,
    LEVELS: tl.constexpr,
    CHUNK: tl.constexpr,
    CHANNELS: tl.constexpr,
    COLUMNS: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Adds what comes through A and L, level by level of the tree; writes the gradients of v, g and beta."""
    chunk, head, b = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    length, num_chunks, heads, _, key_dim, _ = sizes
    g_cumsum, betas, _, _, documents = gates
    all_pairs, all_g_grad_terms = masks
    partial_q, partial_k, partial_g, partial_beta = partial
    grad_v, grad_g, grad_beta = grads
    token = chunk * CHUNK + tl.arange(0, CHUNK)
    row, column = tl.arange(0, CHUNK)[:, None], tl.arange(0, CHUNK)[None, :]
    head_offsets = gate_offsets(head, chunk, b, heads, num_chunks, CHUNK)
    beta = tl.load(betas + head_offsets)[:, None]
    A_grad, L_grad, beta_grad = _chunk_matrix_grads(
        tensors, strides, grad_v, beta, head, chunk, b, sizes, CHUNK, COLUMNS, PRECISION
    )
    if documents is not None:
        document = document_of(documents, token, b, length)
        same_document = document[:, None] == document[None, :]
        A_grad, L_grad = tl.where(same_document, A_grad, 0.0), tl.where(same_document, L_grad, 0.0)
    A_diagonal_grad = tl.sum(tl.where(row == column, A_grad, 0.0), axis=1)[:, None]
    A_grad = tl.where(column < row, A_grad, 0.0)
    dtype = tensors[0].dtype.element_ty
    X_weights = (A_grad + tl.trans(L_grad * beta)).to(dtype)
    Y_weights = (L_grad + tl.trans(A_grad)).to(dtype)
    beta_grad += tl.load(partial_beta + head_offsets)
    for begin in range(0, key_dim, CHANNELS):
        query, key = _normalized_qk(tensors, strides, gates, begin, (head, chunk, b), sizes, CHUNK, CHANNELS, PRECISION)
        s = load_g_cumsum(g_cumsum, tl.arange(0, CHUNK), begin, head, chunk, b, sizes, CHUNK, CHANNELS)
        offsets, mask = row_tile(strides[6], token, b, head, begin, key_dim, length, CHANNELS)
        g_grad = tl.load(partial_g + offsets, mask=mask, other=0.0)
        query_grad, key_grad = A_diagonal_grad * key, A_diagonal_grad * query
        for level in range(LEVELS):
            decay = node_decays(s, level, g_cumsum, begin, head, chunk, b, sizes, CHUNK, CHANNELS)
            second_half = ((row >> level) & 1) == 1
            matrix_offsets = (level * CHUNK + row) * CHUNK + column
            pairs, g_grad_terms = tl.load(all_pairs + matrix_offsets), tl.load(all_g_grad_terms + matrix_offsets)
            decayed_key, z = (key * decay).to(dtype), (tl.where(second_half, query, key) * decay).to(dtype)
            decayed_X = tl.dot(X_weights * pairs, decayed_key, input_precision=PRECISION) * decay
            decayed_Y = tl.dot(Y_weights * pairs, z, input_precision=PRECISION) * decay
            beta_grad += tl.sum(tl.where(second_half, decayed_Y * key, 0.0), axis=1)
            level_query_grad = tl.where(second_half, decayed_X, 0.0)
            level_key_grad = tl.where(second_half, decayed_Y * beta, decayed_X + decayed_Y)
            g_grad += _masked_sums(g_grad_terms, query * level_query_grad + key * level_key_grad, PRECISION)
            query_grad += level_query_grad
            key_grad += level_key_grad
        tl.store(partial_q + offsets, query_grad + tl.load(partial_q + offsets, mask=mask, other=0.0), mask=mask)
        tl.store(partial_k + offsets, key_grad + tl.load(partial_k + offsets, mask=mask, other=0.0), mask=mask)
        tl.store(grad_g + offsets, g_grad.to(grad_g.dtype.element_ty), mask=mask)
    beta_offsets = (token.to(tl.int64) * tl.num_programs(2) + b) * heads + head
    tl.store(grad_beta + beta_offsets, beta_grad.to(grad_beta.dtype.element_ty), mask=token < length)


@triton.jit
def _normalized_qk(
    tensors,
    strides,
    gates,
    begin,
    place,
    sizes,
    CHUNK: tl.constexpr,
    CHANNELS: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Returns some channels of normalized queries and keys [CHUNK, CHANNELS].

    They come from GEMMs with the identity, which have them in the registers where other GEMMs have their results.
    """
    length, num_chunks, heads, heads_per_group, key_dim, _ = sizes
    head, chunk, b = place
    q, k, _, _, _, _ = tensors
    _, _, q_inverse_norms, k_inverse_norms, _ = gates
    token, group = chunk * CHUNK + tl.arange(0, CHUNK), head // heads_per_group
    group_offsets = gate_offsets(group, chunk, b, heads // heads_per_group, num_chunks, CHUNK)
    identity = (tl.arange(0, CHUNK)[:, None] == tl.arange(0, CHUNK)[None, :]).to(q.dtype.element_ty)
    offsets, mask = row_tile(strides[0], token, b, group, begin, key_dim, length, CHANNELS)
    query = tl.dot(identity, tl.load(q + offsets, mask=mask, other=0.0), input_precision=PRECISION)
    offsets, mask = row_tile(strides[1], token, b, group, begin, key_dim, length, CHANNELS)
    key = tl.dot(identity, tl.load(k + offsets, mask=mask, other=0.0), input_precision=PRECISION)
    return (
        query * tl.load(q_inverse_norms + group_offsets)[:, None],
        key * tl.load(k_inverse_norms + group_offsets)[:, None],
    )


@triton.jit
def _chunk_matrix_grads(
    tensors,
    strides,
    grad_v,
    beta,
    head,
    chunk,
    b,
    sizes,
    CHUNK: tl.constexpr,
    COLUMNS: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Returns dA = do v_new^T for j <= i and dL = -d_rhs v_new^T for j < i [i, j], and d_rhs . v of each token; writes dv = beta d_rhs."""
    _, _, v, grad_o, v_new, grad_rhs = tensors
    token = chunk * CHUNK + tl.arange(0, CHUNK)
    row, column = tl.arange(0, CHUNK)[:, None], tl.arange(0, CHUNK)[None, :]
    A_grad = tl.zeros((CHUNK, CHUNK), dtype=tl.float32)
    negative_L_grad = tl.zeros((CHUNK, CHUNK), dtype=tl.float32)
    beta_grad = tl.zeros((CHUNK,), dtype=tl.float32)
    for begin in range(0, sizes[5], COLUMNS):
        value = load_value_columns(v, strides[2], token, b, head, begin, sizes, COLUMNS)
        output_grad = load_value_columns(grad_o, strides[3], token, b, head, begin, sizes, COLUMNS)
        new_value = load_value_columns(v_new, strides[4], token, b, head, begin, sizes, COLUMNS)
        offsets, mask = row_tile(strides[5], token, b, head, begin, sizes[5], sizes[0], COLUMNS)
        rhs_grad = tl.load(grad_rhs + offsets, mask=mask, other=0.0)
        A_grad = tl.dot(output_grad, tl.trans(new_value), A_grad, input_precision=PRECISION)
        negative_L_grad = tl.dot(rhs_grad, tl.trans(new_value), negative_L_grad, input_precision=PRECISION)
        beta_grad += tl.sum(rhs_grad.to(tl.float32) * value.to(tl.float32), axis=1)
        tl.store(grad_v + offsets, (rhs_grad * beta).to(grad_v.dtype.element_ty), mask=mask)
    return tl.where(column <= row, A_grad, 0.0), tl.where(column < row, -negative_L_grad, 0.0), beta_grad


@triton.jit
def _state_gemms(
    tensors,
    strides,
    states,
    begin,
    place,
    sizes,
    CHUNK: tl.constexpr,
    CHANNELS: tl.constexpr,
    COLUMNS: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Returns do S^T, d_rhs S^T and v_new dS'^T [CHUNK, CHANNELS], and the sums of S dS' over the columns of the state [CHANNELS].

    Which are gradients of q exp(s), of k exp(s) but for -beta, of k exp(s_Q - s), and of exp(s_Q).
    """
    key_dim, value_dim = sizes[4], sizes[5]
    head, chunk, b = place
    _, _, _, grad_o, v_new, grad_rhs = tensors
    token = chunk * CHUNK + tl.arange(0, CHUNK)
    q_from_start_grad = tl.zeros((CHUNK, CHANNELS), dtype=tl.float32)
    k_from_start_grad = tl.zeros((CHUNK, CHANNELS), dtype=tl.float32)
    k_to_end_grad = tl.zeros((CHUNK, CHANNELS), dtype=tl.float32)
    chunk_decay_grad = tl.zeros((CHANNELS,), dtype=tl.float32)
    n = begin + tl.arange(0, CHANNELS)[:, None]
    for first_column in range(0, value_dim, COLUMNS):
        p = first_column + tl.arange(0, COLUMNS)[None, :]
        offsets, mask = state_base(b, chunk, head, sizes) + n * value_dim + p, (n < key_dim) & (p < value_dim)
        state = tl.load(states[0] + offsets, mask=mask, other=0.0)
        output_grad = load_value_columns(grad_o, strides[3], token, b, head, first_column, sizes, COLUMNS)
        q_from_start_grad = tl.dot(output_grad, tl.trans(state), q_from_start_grad, input_precision=PRECISION)
        rhs_grad = load_value_columns(grad_rhs, strides[5], token, b, head, first_column, sizes, COLUMNS)
        k_from_start_grad = tl.dot(rhs_grad, tl.trans(state), k_from_start_grad, input_precision=PRECISION)
        state_grad = tl.load(states[1] + offsets, mask=mask, other=0.0)
        new_value = load_value_columns(v_new, strides[4], token, b, head, first_column, sizes, COLUMNS)
        k_to_end_grad = tl.dot(new_value, tl.trans(state_grad), k_to_end_grad, input_precision=PRECISION)
        chunk_decay_grad += tl.sum(state.to(tl.float32) * state_grad.to(tl.float32), axis=1)
    return q_from_start_grad, k_from_start_grad, k_to_end_grad, chunk_decay_grad


@triton.jit
def _masked_sums(mask, x, PRECISION: tl.constexpr):
    """Returns mask x [tokens, CHANNELS]: for each token the sum of the rows of x that its row of the mask has, for half precision
    rounded to bfloat16, which no gradient leaves."""
    if PRECISION == "tf32x3":
        result = tl.dot(mask.to(tl.float32), x, input_precision=PRECISION)
    else:
        result = tl.dot(mask.to(tl.bfloat16), x.to(tl.bfloat16))
    return result
