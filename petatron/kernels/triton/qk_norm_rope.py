"""Splits queries and keys from the QKV output and applies qk-norm and rope, in one pass; and its backward.

A head is a row of width E. With r = 1 / sqrt(mean(x^2) + eps) it becomes n = x r w, of which pair i, (n_i, n_{i + t/2}) for i < t/2,
is rotated by the token's angle, t being the rotary dim. Backward rotates the gradient by the opposite angle, which gives the
gradient g of n, and then

    gradient of x = r (w g - x r mean(w g x r)),        gradient of w = sum over rows of g x r

r is recomputed from x, which is read anyway: one more sum of a row in registers, and nothing saved or read for it. A row is held as
the first and the second elements of its pairs, so that a thread has both; elements that are not rotated are paired likewise, with
angle zero.

Rows of all tokens and heads are numbered consecutively, in memory order of the heads; a program processes as many as fill its
registers, of queries or of keys, whatever the number of heads. In backward a program processes several such tiles in sequence,
accumulates the weight's gradient in registers, and prefetches its next tile before it computes this one. The few thousand sums are
added afterwards in a fixed order: no atomic adds, the same result every time. Programs of a third kind copy the gradient of the
values. (In forward, values are a view.)

Device memory traffic in bf16, Qwen3-4B (R = S B 16384, H 32, K 8, E 128), at 4.0 TB/s:

| kernel                        | elements per token        | bytes per token | ms    |
|-------------------------------|---------------------------|-----------------|-------|
| split_qkv_norm_rope           | 2 (H + K) E               | 20480           | 0.084 |
| split_qkv_norm_rope_backward  | 3 (H + K) E + 2 K E       | 34816           | 0.144 |

The backward row includes the partial sums, at most 4096 (1 + K / H) of E float32 written and read.

S sequence, B batch, H query heads, K kv heads, E head dim.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from petatron.kernels.qk_norm_rope import QKNormSpec, TensorPair, TensorTriple
from petatron.kernels.strides import align_cos_sin, contiguous_rows
from petatron.kernels.triton.kernel_launch import kernel_launcher

_WARPS = 4
_ELEMENTS = 512 * _WARPS
"""Elements of a tile: 16 per thread."""

_PROGRAMS = 4096
"""The most programs for queries in backward: every multiprocessor gets dozens, and the sums stay few."""


@triton.jit
def _qk_norm_rope_forward(
    q_from,
    k_from,
    q_to,
    k_to,
    q_weight,
    k_weight,
    cos,
    sin,
    eps,
    length,
    batch,
    from_s,
    from_b,
    cos_s,
    cos_b,
    NUM_HEADS: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr,
    WIDTH: tl.constexpr,
    ROTARY_DIM: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    ZERO_CENTERED_GAMMA: tl.constexpr,
    BATCH_FIRST: tl.constexpr,
):
    """Programs of queries come first, then those of keys."""
    tile = tl.program_id(0)
    queries = tl.cdiv(length * batch * NUM_HEADS, ROWS)
    columns, size = _pair_columns(WIDTH, ROTARY_DIM, COLUMNS), (length, batch, eps)
    strides, rotation = (from_s, from_b, WIDTH), (cos, sin, cos_s, cos_b)
    if tile < queries:
        tensors = (q_from, strides, q_to, q_weight, rotation)
        _norm_rope_tile(tensors, tile, size, columns, NUM_HEADS, WIDTH, ROWS, ZERO_CENTERED_GAMMA, BATCH_FIRST)
    else:
        tensors = (k_from, strides, k_to, k_weight, rotation)
        _norm_rope_tile(
            tensors, tile - queries, size, columns, NUM_KV_HEADS, WIDTH, ROWS, ZERO_CENTERED_GAMMA, BATCH_FIRST
        )


@triton.jit
def _norm_rope_tile(
    tensors,
    tile,
    size,
    columns,
    NUM_HEADS: tl.constexpr,
    WIDTH: tl.constexpr,
    ROWS: tl.constexpr,
    ZERO_CENTERED_GAMMA: tl.constexpr,
    BATCH_FIRST: tl.constexpr,
):
    x, strides, to, weight, rotation = tensors
    length, batch, eps = size
    dtype: tl.constexpr = to.dtype.element_ty
    row = tile * ROWS + tl.arange(0, ROWS)
    at, there = _row_positions(row, length, batch, NUM_HEADS, BATCH_FIRST)
    first, second = _load_pairs(_row_pointers(x, at, strides), columns, there)
    cosine, sine = _load_cos_sin(rotation, at, columns, there)
    first, second = first.to(tl.float32), second.to(tl.float32)
    rstd = _rstd(tl.sum(first * first + second * second, axis=1)[:, None], there, eps, WIDTH)
    first_weight, second_weight = _load_weights(weight, columns, ROWS, ZERO_CENTERED_GAMMA)
    first, second = first * rstd * first_weight, second * rstd * second_weight
    first, second = first * cosine - second * sine, second * cosine + first * sine
    _store_pairs(to + row.to(tl.int64)[:, None] * WIDTH, first.to(dtype), second.to(dtype), columns, there)


@triton.jit
def _pair_columns(WIDTH: tl.constexpr, ROTARY_DIM: tl.constexpr, COLUMNS: tl.constexpr):
    """Returns the columns of the pairs' first and second elements, whether these exist, and whether they are rotated."""
    half: tl.constexpr = ROTARY_DIM // 2
    rest: tl.constexpr = (WIDTH - ROTARY_DIM + 1) // 2
    pair = tl.arange(0, COLUMNS)[None, :]
    first, second, inside, both = pair, pair + half, pair < half + rest, pair < half + rest
    if ROTARY_DIM < WIDTH:
        first = tl.where(pair < half, pair, pair + half)
        second = first + tl.where(pair < half, half, rest)
        both = inside & (second < WIDTH)
    return first, second, inside, both, pair < half


@triton.jit
def _row_positions(row, length, batch, NUM_HEADS: tl.constexpr, BATCH_FIRST: tl.constexpr):
    """Returns rows' indices in the sequence, the batch and the heads, each as a column; and whether such rows exist."""
    token, head = row // NUM_HEADS, row % NUM_HEADS
    s = token % length if BATCH_FIRST else token // batch
    b = token // length if BATCH_FIRST else token % batch
    at = (s.to(tl.int64)[:, None], b.to(tl.int64)[:, None], head.to(tl.int64)[:, None])
    return at, (row < length * batch * NUM_HEADS)[:, None]


@triton.jit
def _row_pointers(tensor, at, strides):
    return tensor + at[0] * strides[0] + at[1] * strides[1] + at[2] * strides[2]


@triton.jit
def _load_pairs(rows, columns, there):
    first = tl.load(rows + columns[0], mask=there & columns[2], other=0.0)
    return first, tl.load(rows + columns[1], mask=there & columns[3], other=0.0)


@triton.jit
def _store_pairs(rows, first, second, columns, there):
    tl.store(rows + columns[0], first, mask=there & columns[2])
    tl.store(rows + columns[1], second, mask=there & columns[3])


@triton.jit
def _load_cos_sin(rotation, at, columns, there):
    """Loads cos and sin; 1 and 0 for elements that are not rotated."""
    cos, sin, stride_s, stride_b = rotation
    place, mask = at[0] * stride_s + at[1] * stride_b + columns[0], there & columns[4]
    cosine = tl.load(cos + place, mask=mask, other=1.0).to(tl.float32)
    return cosine, tl.load(sin + place, mask=mask, other=0.0).to(tl.float32)


@triton.jit
def _load_weights(weight, columns, ROWS: tl.constexpr, ZERO_CENTERED_GAMMA: tl.constexpr):
    """Loads the weight for every row of the tile: each thread reads its own elements, and none are exchanged."""
    every = tl.zeros((ROWS, 1), dtype=tl.int32)
    first, second = _load_pairs(weight + every, columns, every == 0)
    first, second = first.to(tl.float32), second.to(tl.float32)
    if ZERO_CENTERED_GAMMA:
        first, second = 1.0 + first, 1.0 + second
    return first, second


@triton.jit
def _rstd(squares, there, eps, WIDTH: tl.constexpr):
    """Returns 1 / rms; one for rows that do not exist, so that nothing of them becomes infinite, whatever eps is."""
    return tl.rsqrt(tl.where(there, squares / WIDTH + eps, 1.0))


@triton.jit
def _qk_norm_rope_backward(
    q_grad,
    k_grad,
    v_grad,
    q_from,
    k_from,
    q_to,
    k_to,
    v_to,
    q_weight,
    k_weight,
    cos,
    sin,
    sums_PE,
    eps,
    length,
    batch,
    q_s,
    q_b,
    q_h,
    k_s,
    k_b,
    k_h,
    v_s,
    v_b,
    v_h,
    row_s,
    row_b,
    cos_s,
    cos_b,
    NUM_HEADS: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr,
    WIDTH: tl.constexpr,
    ROTARY_DIM: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    STEPS: tl.constexpr,
    ZERO_CENTERED_GAMMA: tl.constexpr,
    BATCH_FIRST: tl.constexpr,
):
    """Programs of queries come first, then those of keys, then those of values."""
    program = tl.program_id(0)
    queries = tl.cdiv(length * batch * NUM_HEADS, ROWS * STEPS)
    keys = tl.cdiv(length * batch * NUM_KV_HEADS, ROWS * STEPS)
    sums, strides = sums_PE + program.to(tl.int64) * WIDTH, (row_s, row_b, WIDTH)
    rotation, columns, size = (cos, sin, cos_s, cos_b), _pair_columns(WIDTH, ROTARY_DIM, COLUMNS), (length, batch, eps)
    if program < queries:
        tensors = (q_grad, (q_s, q_b, q_h), q_from, q_to, strides, q_weight, rotation, sums)
        _norm_rope_backward_tiles(
            tensors, program, size, columns, NUM_HEADS, WIDTH, ROWS, COLUMNS, STEPS, ZERO_CENTERED_GAMMA, BATCH_FIRST
        )
    elif program < queries + keys:
        tensors = (k_grad, (k_s, k_b, k_h), k_from, k_to, strides, k_weight, rotation, sums)
        local = program - queries
        _norm_rope_backward_tiles(
            tensors, local, size, columns, NUM_KV_HEADS, WIDTH, ROWS, COLUMNS, STEPS, ZERO_CENTERED_GAMMA, BATCH_FIRST
        )
    else:
        row = (program - queries - keys) * STEPS * ROWS + tl.arange(0, ROWS)
        for _ in range(STEPS):
            at, there = _row_positions(row, length, batch, NUM_KV_HEADS, BATCH_FIRST)
            first, second = _load_pairs(_row_pointers(v_grad, at, (v_s, v_b, v_h)), columns, there)
            _store_pairs(_row_pointers(v_to, at, strides), first, second, columns, there)
            row += ROWS


@triton.jit
def _norm_rope_backward_tiles(
    tensors,
    program,
    size,
    columns,
    NUM_HEADS: tl.constexpr,
    WIDTH: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    STEPS: tl.constexpr,
    ZERO_CENTERED_GAMMA: tl.constexpr,
    BATCH_FIRST: tl.constexpr,
):
    """Processes a program's tiles in sequence: gradients of rows, and their part of the weight's."""
    grad, grad_strides, x, to, strides, weight, rotation, sums = tensors
    length, batch, eps = size
    dtype: tl.constexpr = to.dtype.element_ty
    first_sum, second_sum = tl.zeros((ROWS, COLUMNS), tl.float32), tl.zeros((ROWS, COLUMNS), tl.float32)
    row = program * STEPS * ROWS + tl.arange(0, ROWS)
    at, there = _row_positions(row, length, batch, NUM_HEADS, BATCH_FIRST)
    grad_first, grad_second = _load_pairs(_row_pointers(grad, at, grad_strides), columns, there)
    x_first, x_second = _load_pairs(_row_pointers(x, at, strides), columns, there)
    for step in range(STEPS):
        at, there = _row_positions(row, length, batch, NUM_HEADS, BATCH_FIRST)
        write = _row_pointers(to, at, strides)
        cosine, sine = _load_cos_sin(rotation, at, columns, there)
        first_weight, second_weight = _load_weights(weight, columns, ROWS, ZERO_CENTERED_GAMMA)
        row += ROWS
        after, more = _row_positions(row, length, batch, NUM_HEADS, BATCH_FIRST)
        more = more & (step + 1 < STEPS)  # the next rows belong to another program
        grad_first_after, grad_second_after = _load_pairs(_row_pointers(grad, after, grad_strides), columns, more)
        x_first_after, x_second_after = _load_pairs(_row_pointers(x, after, strides), columns, more)

        g_first, g_second = grad_first.to(tl.float32), grad_second.to(tl.float32)
        g_first, g_second = g_first * cosine + g_second * sine, g_second * cosine - g_first * sine
        first, second = x_first.to(tl.float32), x_second.to(tl.float32)
        inner_first, inner_second = g_first * first_weight, g_second * second_weight
        squares = tl.sum(first * first + second * second, axis=1)[:, None]
        along = tl.sum(inner_first * first + inner_second * second, axis=1)[:, None]
        rstd = _rstd(squares, there, eps, WIDTH)
        along *= rstd / WIDTH
        first, second = first * rstd, second * rstd
        first_sum += g_first * first
        second_sum += g_second * second
        inner_first, inner_second = (inner_first - first * along) * rstd, (inner_second - second * along) * rstd
        _store_pairs(write, inner_first.to(dtype), inner_second.to(dtype), columns, there)
        grad_first, grad_second, x_first, x_second = grad_first_after, grad_second_after, x_first_after, x_second_after
    first_sum, second_sum = tl.sum(first_sum, axis=0)[None, :], tl.sum(second_sum, axis=0)[None, :]
    _store_pairs(sums, first_sum, second_sum, columns, columns[2])


@dataclass(frozen=True, slots=True)
class _LaunchPlan:
    """The tiles of queries and keys, and the kernels' shape arguments."""

    length: int
    batch: int
    norm: QKNormSpec
    width: int
    rotary_dim: int

    @property
    def columns(self) -> int:
        """Pairs of a row, rotated or not."""
        return triton.next_power_of_2(self.rotary_dim // 2 + (self.width - self.rotary_dim + 1) // 2)

    @property
    def rows(self) -> int:
        return max(_ELEMENTS // (2 * self.columns), 1)

    def tiles(self, heads: int, steps: int = 1) -> int:
        return triton.cdiv(self.length * self.batch * heads, self.rows * steps)

    def constants(self, *, batch_first: bool) -> dict[str, int]:
        return {
            "NUM_HEADS": self.norm.num_heads,
            "NUM_KV_HEADS": self.norm.num_kv_heads,
            "WIDTH": self.width,
            "ROTARY_DIM": self.rotary_dim,
            "ROWS": self.rows,
            "COLUMNS": self.columns,
            "ZERO_CENTERED_GAMMA": self.norm.zero_centered_gamma,
            "BATCH_FIRST": batch_first,
            "num_warps": _WARPS,
        }


def split_qkv_norm_rope(
    qkv: Tensor, weights: TensorPair, rope_cos_sin: TensorPair, norm: QKNormSpec, *, batch_first: bool
) -> TensorTriple:
    """Returns q [S, B, H, E] and k [S, B, K, E] as new tensors, v as a view; cos and sin are [S, 1 or B, 1, n]."""
    rows = contiguous_rows(qkv)
    q_from, k_from, v = norm.split(rows)
    plan = _LaunchPlan(*qkv.shape[:2], norm, v.shape[-1], rope_cos_sin[0].shape[-1])
    order = (plan.batch, plan.length) if batch_first else (plan.length, plan.batch)
    q, k = (torch.empty((*order, *x.shape[2:]), dtype=x.dtype, device=x.device) for x in (q_from, k_from))
    cos, sin, cos_s, cos_b = align_cos_sin(*rope_cos_sin)
    programs = plan.tiles(norm.num_heads) + plan.tiles(norm.num_kv_heads)
    tensors = q_from, k_from, q, k, *(weight.contiguous() for weight in weights), cos, sin
    numbers = norm.eps, plan.length, plan.batch, *rows.stride()[:2], cos_s, cos_b
    kernel_launcher(_qk_norm_rope_forward, **plan.constants(batch_first=batch_first))(programs, tensors, numbers)
    return (q.transpose(0, 1), k.transpose(0, 1), v) if batch_first else (q, k, v)


def split_qkv_norm_rope_backward(
    grads: TensorTriple, qkv: Tensor, weights: TensorPair, rope_cos_sin: TensorPair, norm: QKNormSpec, *, out: Tensor
) -> TensorPair:
    """Writes the gradient of qkv to `out`, which has qkv's memory layout; returns those of the weights, in float32."""
    assert out.stride() == qkv.stride() and out.stride(-1) == 1, (
        "the heads of a token must be adjacent, with equal strides in both"
    )
    sources = [contiguous_rows(grad) for grad in grads]
    plan = _LaunchPlan(*qkv.shape[:2], norm, sources[0].shape[-1], rope_cos_sin[0].shape[-1])
    steps = triton.next_power_of_2(max(triton.cdiv(plan.tiles(norm.num_heads), _PROGRAMS), 1))  # few to compile for
    queries, keys = plan.tiles(norm.num_heads, steps), plan.tiles(norm.num_kv_heads, steps)
    sums_PE = torch.empty((queries + keys, plan.width), dtype=torch.float32, device=qkv.device)
    cos, sin, cos_s, cos_b = align_cos_sin(*rope_cos_sin)
    weights = tuple(weight.contiguous() for weight in weights)
    tensors = *sources, *norm.split(qkv)[:2], *norm.split(out), *weights, cos, sin, sums_PE
    strides = *(stride for grad in sources for stride in grad.stride()[:3]), *qkv.stride()[:2], cos_s, cos_b
    numbers = norm.eps, plan.length, plan.batch, *strides
    constants = plan.constants(batch_first=sources[0].stride(1) > sources[0].stride(0))
    kernel_launcher(_qk_norm_rope_backward, STEPS=steps, **constants)(queries + 2 * keys, tensors, numbers)
    return sums_PE[:queries].sum(0), sums_PE[queries:].sum(0)
