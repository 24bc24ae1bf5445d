"""Gradients of the delta rule with decays of channels, from states, what chunks write, and the gradients of both: all chunks at once.

With S the state before a chunk, dS' the gradient of the state after it, w what it writes and dy the gradient of its system's right-hand
side (`states.py`), the gradients of a chunk's scores and of its system (`channel_scores.py`) are dA = do w^T and dL = -dy w^T. From there
on channels do not mix, and a program goes through blocks of them. Through the states,

    dq += exp(s) (do S^T)       dk += -beta exp(s) (dy S^T) + exp(s_Q - s) (w dS'^T)

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

# pyright: reportAttributeAccessIssue=false, reportCallIssue=false, reportIndexIssue=false, reportArgumentType=false
# pyright: reportPossiblyUnboundVariable=false, reportReturnType=false, reportGeneralTypeIssues=false
from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from petatron.kernels.ssm.delta_recurrence import query_factor
from petatron.kernels.triton.ssm.delta.channel_scores import load_sums, node_decays, tree_levels, two_halves
from petatron.kernels.triton.ssm.delta.grads import DeltaIntermediates, row_grads
from petatron.kernels.triton.ssm.delta.tiles import DeltaChunks, chunk_row, load_columns, row_tile, state_base
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
    made: DeltaIntermediates,
    chunks: DeltaChunks,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Returns the gradients of q, k, v, g and beta in their dtypes."""

    def new(like: Tensor, dtype: torch.dtype | None = None) -> Tensor:
        return torch.empty(like.shape, dtype=dtype or like.dtype, device=like.device)

    grad_v, grad_g, grad_beta = new(v_SBHP), new(g_SBHN), new(beta_SBH)
    sums = tuple(new(g_SBHN, torch.float32) for _ in range(3))
    grid = (chunks.num_chunks, chunks.heads, chunks.batch)
    constants = chunks.constants(v_SBHP, columns=_COLUMNS)
    constants |= {"CHANNELS": min(_CHANNELS, constants.pop("KEY_DIM")), "num_warps": _WARPS, "num_stages": 1}
    rows = (q_SBGN, k_SBGN, v_SBHP, grad_o_SBHP, made.written, made.grad_sides)
    strides = tuple(tensor.stride()[:3] for tensor in (*rows, sums[0]))
    partial_beta = torch.empty_like(chunks.betas)
    _state_grads[grid](
        rows, strides, chunks.gates, (made.states, made.grad_states), (*sums, partial_beta), chunks.sizes, **constants
    )
    _tree_grads[grid](
        rows,
        strides,
        chunks.gates,
        _tree_masks(k_SBGN, chunks),
        (*sums, partial_beta),
        (grad_v, grad_g, grad_beta),
        chunks.sizes,
        LEVELS=tree_levels(chunks),
        **constants,
    )
    grads = new(q_SBGN), new(k_SBGN)
    scales = query_factor(chunks.key_dim), 1.0
    for x, factors, of_head, grad, scale in zip(
        (q_SBGN, k_SBGN), (chunks.q_factors, chunks.k_factors), sums[:2], grads, scales, strict=True
    ):
        _row_grads[(chunks.num_chunks, chunks.groups, chunks.batch)](
            (x, factors, of_head, grad),
            tuple(tensor.stride()[:3] for tensor in (x, of_head, grad)),
            chunks.sizes,
            scale,
            CHUNK=chunks.chunk,
            KEY_DIM=triton.next_power_of_2(chunks.key_dim),
            num_warps=4,
        )
    return *grads, grad_v, grad_g, grad_beta


def _tree_masks(rows: Tensor, chunks: DeltaChunks) -> tuple[Tensor, Tensor]:
    """Returns for all levels of the tree which tokens are pairs, and which tokens' x a token's g gets, as ones and zeros [levels, Q, Q].

    To read them takes a tenth of the instructions of computing them.
    """
    shape = (tree_levels(chunks), chunks.chunk, chunks.chunk)
    pairs = torch.empty(shape, dtype=rows.dtype, device=rows.device)
    sums_dtype = torch.float32 if rows.dtype == torch.float32 else torch.bfloat16
    near = torch.empty(shape, dtype=sums_dtype, device=rows.device)
    _write_tree_masks[shape[:1]](pairs, near, CHUNK=chunks.chunk)
    return pairs, near


@triton.jit
def _write_tree_masks(pairs, near, CHUNK: tl.constexpr):
    level = tl.program_id(0)
    row, column = tl.arange(0, CHUNK)[:, None], tl.arange(0, CHUNK)[None, :]
    at = (level * CHUNK + row) * CHUNK + column
    tl.store(pairs + at, two_halves(level, CHUNK).to(pairs.dtype.element_ty))
    wanted = tl.where(((row >> level) & 1) == 1, column >= row, column < row)
    tl.store(near + at, (((row >> level) == (column >> level)) & wanted).to(near.dtype.element_ty))


@triton.jit
def _row_grads(tensors, strides, sizes, scale, CHUNK: tl.constexpr, KEY_DIM: tl.constexpr):
    """Adds up the gradients of normalised rows over the value heads that share them, and turns the sum into that of the rows."""
    chunk, group, b = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    x, factors, of_heads, grad = tensors
    length, num_chunks, heads, heads_per_group, key_dim, _ = sizes
    token = chunk * CHUNK + tl.arange(0, CHUNK)
    factor = tl.load(factors + chunk_row(group, chunk, b, heads // heads_per_group, num_chunks, CHUNK))
    total = tl.zeros((CHUNK, KEY_DIM), dtype=tl.float32)
    for head in range(group * heads_per_group, (group + 1) * heads_per_group):
        total += load_rows(of_heads, strides[1], token, b, head, key_dim, length, KEY_DIM)
    row = load_rows(x, strides[0], token, b, group, key_dim, length, KEY_DIM)
    to, there = row_tile(strides[2], token, b, group, 0, key_dim, length, KEY_DIM)
    tl.store(grad + to, row_grads(total, row, factor, scale).to(grad.dtype.element_ty), mask=there)


@triton.jit
def _state_grads(
    tensors,
    strides,
    gates,
    states,
    sums,
    sizes,
    CHUNK: tl.constexpr,
    CHANNELS: tl.constexpr,
    COLUMNS: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Writes what comes through the states: parts of the gradients of normalised rows, of g and of beta."""
    chunk, head, b = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    length, num_chunks, heads, _, key_dim, _ = sizes
    token, documents = chunk * CHUNK + tl.arange(0, CHUNK), gates[4]
    row, column = tl.arange(0, CHUNK)[:, None], tl.arange(0, CHUNK)[None, :]
    at = chunk_row(head, chunk, b, heads, num_chunks, CHUNK)
    beta = tl.load(gates[1] + at)[:, None]
    if documents is not None:
        own = document_of(documents, token, b, length)[:, None]
        from_before = own == document_before(documents, chunk, b, length, CHUNK)
        to_after = own == document_of(documents, chunk * CHUNK + CHUNK - 1, b, length)
    strength = tl.zeros((CHUNK,), dtype=tl.float32)
    for begin in range(0, key_dim, CHANNELS):
        query, key = _unit_rows(tensors, strides, gates, begin, head, chunk, b, sizes, CHUNK, CHANNELS, PRECISION)
        total = load_sums(gates[0], tl.arange(0, CHUNK), begin, head, chunk, b, sizes, CHUNK, CHANNELS)
        end = load_sums(gates[0], tl.full((1,), CHUNK - 1, tl.int32), begin, head, chunk, b, sizes, CHUNK, CHANNELS)
        of_query, of_key, of_end, kept = _through_states(
            tensors, strides, states, begin, head, chunk, b, sizes, CHUNK, CHANNELS, COLUMNS, PRECISION
        )
        to_token, to_end = tl.exp2(total), tl.exp2(end - total)
        if documents is not None:
            to_token, to_end = tl.where(from_before, to_token, 0.0), tl.where(to_after, to_end, 0.0)
        whole = tl.sum(tl.where(row == CHUNK - 1, to_token, 0.0), axis=0)
        of_query, of_key, of_end = of_query * to_token, of_key * -to_token, of_end * to_end
        strength += tl.sum(of_key * key, axis=1)
        of_key *= beta
        decays = _sums_of(column >= row, query * of_query + key * of_key, PRECISION)
        decays += _sums_of(column < row, key * of_end, PRECISION) + (whole * kept)[None, :]
        to, there = row_tile(strides[6], token, b, head, begin, key_dim, length, CHANNELS)
        tl.store(sums[0] + to, of_query, mask=there)
        tl.store(sums[1] + to, of_key + of_end, mask=there)
        tl.store(sums[2] + to, decays, mask=there)
    tl.store(sums[3] + at, strength)


@triton.jit
def _tree_grads(
    tensors,
    strides,
    gates,
    masks,
    sums,
    grads,
    sizes,
    LEVELS: tl.constexpr,
    CHUNK: tl.constexpr,
    CHANNELS: tl.constexpr,
    COLUMNS: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Adds what tokens of one chunk are to each other; writes the gradients of v, g and beta."""
    chunk, head, b = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    length, num_chunks, heads, _, key_dim, _ = sizes
    grad_v, grad_g, grad_beta = grads
    token, documents = chunk * CHUNK + tl.arange(0, CHUNK), gates[4]
    row, column = tl.arange(0, CHUNK)[:, None], tl.arange(0, CHUNK)[None, :]
    at = chunk_row(head, chunk, b, heads, num_chunks, CHUNK)
    beta = tl.load(gates[1] + at)[:, None]
    by_scores, by_system, strength = _square_grads(
        tensors, strides, grad_v, beta, head, chunk, b, sizes, CHUNK, COLUMNS, PRECISION
    )
    if documents is not None:
        own = document_of(documents, token, b, length)
        together = own[:, None] == own[None, :]
        by_scores, by_system = tl.where(together, by_scores, 0.0), tl.where(together, by_system, 0.0)
    same = tl.sum(tl.where(row == column, by_scores, 0.0), axis=1)[:, None]
    by_scores = tl.where(column < row, by_scores, 0.0)
    dtype = tensors[0].dtype.element_ty
    of_keys = (by_scores + tl.trans(by_system * beta)).to(dtype)
    of_mixed = (by_system + tl.trans(by_scores)).to(dtype)
    strength += tl.load(sums[3] + at)
    for begin in range(0, key_dim, CHANNELS):
        query, key = _unit_rows(tensors, strides, gates, begin, head, chunk, b, sizes, CHUNK, CHANNELS, PRECISION)
        total = load_sums(gates[0], tl.arange(0, CHUNK), begin, head, chunk, b, sizes, CHUNK, CHANNELS)
        to, there = row_tile(strides[6], token, b, head, begin, key_dim, length, CHANNELS)
        decays = tl.load(sums[2] + to, mask=there, other=0.0)
        of_query, of_key = same * key, same * query
        for level in range(LEVELS):
            decay = node_decays(total, level, gates[0], begin, head, chunk, b, sizes, CHUNK, CHANNELS)
            second = ((row >> level) & 1) == 1
            square = (level * CHUNK + row) * CHUNK + column
            pairs, near = tl.load(masks[0] + square), tl.load(masks[1] + square)
            early, mixed = (key * decay).to(dtype), (tl.where(second, query, key) * decay).to(dtype)
            of_early = tl.dot(of_keys * pairs, early, input_precision=PRECISION) * decay
            of_both = tl.dot(of_mixed * pairs, mixed, input_precision=PRECISION) * decay
            strength += tl.sum(tl.where(second, of_both * key, 0.0), axis=1)
            by_query = tl.where(second, of_early, 0.0)
            by_key = tl.where(second, of_both * beta, of_early + of_both)
            decays += _sums_of(near, query * by_query + key * by_key, PRECISION)
            of_query += by_query
            of_key += by_key
        tl.store(sums[0] + to, of_query + tl.load(sums[0] + to, mask=there, other=0.0), mask=there)
        tl.store(sums[1] + to, of_key + tl.load(sums[1] + to, mask=there, other=0.0), mask=there)
        tl.store(grad_g + to, decays.to(grad_g.dtype.element_ty), mask=there)
    of_head = (token.to(tl.int64) * tl.num_programs(2) + b) * heads + head
    tl.store(grad_beta + of_head, strength.to(grad_beta.dtype.element_ty), mask=token < length)


@triton.jit
def _unit_rows(
    tensors,
    strides,
    gates,
    begin,
    head,
    chunk,
    b,
    sizes,
    CHUNK: tl.constexpr,
    CHANNELS: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Returns some channels of normalised queries and keys [CHUNK, CHANNELS].

    They come from GEMMs with the identity, which have them in the registers where other GEMMs have their results.
    """
    length, num_chunks, heads, heads_per_group, key_dim, _ = sizes
    token, group = chunk * CHUNK + tl.arange(0, CHUNK), head // heads_per_group
    of_group = chunk_row(group, chunk, b, heads // heads_per_group, num_chunks, CHUNK)
    unit = (tl.arange(0, CHUNK)[:, None] == tl.arange(0, CHUNK)[None, :]).to(tensors[0].dtype.element_ty)
    rows, inside = row_tile(strides[0], token, b, group, begin, key_dim, length, CHANNELS)
    query = tl.dot(unit, tl.load(tensors[0] + rows, mask=inside, other=0.0), input_precision=PRECISION)
    rows, inside = row_tile(strides[1], token, b, group, begin, key_dim, length, CHANNELS)
    key = tl.dot(unit, tl.load(tensors[1] + rows, mask=inside, other=0.0), input_precision=PRECISION)
    return query * tl.load(gates[2] + of_group)[:, None], key * tl.load(gates[3] + of_group)[:, None]


@triton.jit
def _square_grads(
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
    """Returns dA for j <= i and dL for j < i [i, j], and dy . v of each token; writes the gradients of values, beta dy."""
    token = chunk * CHUNK + tl.arange(0, CHUNK)
    row, column = tl.arange(0, CHUNK)[:, None], tl.arange(0, CHUNK)[None, :]
    by_scores = tl.zeros((CHUNK, CHUNK), dtype=tl.float32)
    by_system = tl.zeros((CHUNK, CHUNK), dtype=tl.float32)
    strength = tl.zeros((CHUNK,), dtype=tl.float32)
    for begin in range(0, sizes[5], COLUMNS):
        value = load_columns(tensors[2], strides[2], token, b, head, begin, sizes, COLUMNS)
        out = load_columns(tensors[3], strides[3], token, b, head, begin, sizes, COLUMNS)
        new = load_columns(tensors[4], strides[4], token, b, head, begin, sizes, COLUMNS)
        rows, inside = row_tile(strides[5], token, b, head, begin, sizes[5], sizes[0], COLUMNS)
        side = tl.load(tensors[5] + rows, mask=inside, other=0.0)
        by_scores = tl.dot(out, tl.trans(new), by_scores, input_precision=PRECISION)
        by_system = tl.dot(side, tl.trans(new), by_system, input_precision=PRECISION)
        strength += tl.sum(side.to(tl.float32) * value.to(tl.float32), axis=1)
        tl.store(grad_v + rows, (side * beta).to(grad_v.dtype.element_ty), mask=inside)
    return tl.where(column <= row, by_scores, 0.0), tl.where(column < row, -by_system, 0.0), strength


@triton.jit
def _through_states(
    tensors,
    strides,
    states,
    begin,
    head,
    chunk,
    b,
    sizes,
    CHUNK: tl.constexpr,
    CHANNELS: tl.constexpr,
    COLUMNS: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Returns do S^T, dy S^T and w dS'^T [CHUNK, CHANNELS], and the sums of S dS' over the columns of the state [CHANNELS]."""
    key_dim, value_dim = sizes[4], sizes[5]
    token = chunk * CHUNK + tl.arange(0, CHUNK)
    of_query = tl.zeros((CHUNK, CHANNELS), dtype=tl.float32)
    of_key = tl.zeros((CHUNK, CHANNELS), dtype=tl.float32)
    of_end = tl.zeros((CHUNK, CHANNELS), dtype=tl.float32)
    kept = tl.zeros((CHANNELS,), dtype=tl.float32)
    n = begin + tl.arange(0, CHANNELS)[:, None]
    for first in range(0, value_dim, COLUMNS):
        p = first + tl.arange(0, COLUMNS)[None, :]
        at, there = state_base(b, chunk, head, sizes) + n * value_dim + p, (n < key_dim) & (p < value_dim)
        state = tl.load(states[0] + at, mask=there, other=0.0)
        out = load_columns(tensors[3], strides[3], token, b, head, first, sizes, COLUMNS)
        of_query = tl.dot(out, tl.trans(state), of_query, input_precision=PRECISION)
        side = load_columns(tensors[5], strides[5], token, b, head, first, sizes, COLUMNS)
        of_key = tl.dot(side, tl.trans(state), of_key, input_precision=PRECISION)
        grad = tl.load(states[1] + at, mask=there, other=0.0)
        new = load_columns(tensors[4], strides[4], token, b, head, first, sizes, COLUMNS)
        of_end = tl.dot(new, tl.trans(grad), of_end, input_precision=PRECISION)
        kept += tl.sum(state.to(tl.float32) * grad.to(tl.float32), axis=1)
    return of_query, of_key, of_end, kept


@triton.jit
def _sums_of(wanted, x, PRECISION: tl.constexpr):
    """Returns the sums [tokens, CHANNELS] of the wanted rows of x, for half precision rounded to bfloat16, which no gradient leaves."""
    if PRECISION == "tf32x3":
        result = tl.dot(wanted.to(tl.float32), x, input_precision=PRECISION)
    else:
        result = tl.dot(wanted.to(tl.bfloat16), x.to(tl.bfloat16))
    return result
