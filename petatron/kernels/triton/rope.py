"""Splits the QKV output into queries, keys and values and applies rope, in one pass; and its backward.

Pair i of a head is (x_i, x_{i + n/2}), i < n/2, where n is the rotary dim; elements from n on are unchanged:

    y_i = x_i cos_i - x_{i+n/2} sin_i,        y_{i+n/2} = x_{i+n/2} cos_i + x_i sin_i

The gradient is rotated by the opposite angle. Cosines and sines are n wide, both halves equal; only the first is read.

Both directions copy three tensors [S, B, heads, E] to three others, of which three are slices of one. So there is one kernel, which
takes the strides of all six and does not care which side the slices are on. Values are only copied: attention kernels read
contiguous heads faster than the slices. Without rope they read the slices, and only the gradients are joined, as copies.

A program handles one token, so that its cosines and sines are read once for all heads.

Device memory traffic in bf16, Llama-1B (R = S B 32768, H 32, K 8, E 64), at 4.0 TB/s:

| kernel                   | tensors of [R, (H + 2K) E] | bytes per element | ms    |
|--------------------------|----------------------------|-------------------|-------|
| split_qkv_rope           | 2                          | 4                 | 0.101 |
| split_qkv_rope_backward  | 2                          | 4                 | 0.101 |

S sequence, B batch, H query heads, K kv heads, E head dim.
"""

from __future__ import annotations

from functools import cache

import triton
import triton.language as tl
from torch import Tensor

from petatron.kernels.strides import align_cos_sin, contiguous_rows, empty_heads, token_strides
from petatron.kernels.triton.kernel_launch import KernelLauncher
from petatron.kernels.triton.pdl import pdl_options, pdl_wait_and_trigger, uses_pdl


@triton.jit
def _split_qkv_rope(
    qkv,
    q,
    k,
    v,
    cos,
    sin,
    length,
    batch,
    qkv_s,
    qkv_b,
    q_s,
    q_b,
    q_h,
    k_s,
    k_b,
    k_h,
    v_s,
    v_b,
    v_h,
    cos_s,
    cos_b,
    NUM_HEADS: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr,
    WIDTH: tl.constexpr,
    ROTARY_DIM: tl.constexpr,
    TILE: tl.constexpr,
    BATCH_FIRST: tl.constexpr,
    BACKWARD: tl.constexpr,
    USE_PDL: tl.constexpr,
):
    pdl_wait_and_trigger(USE_PDL)
    token = tl.program_id(0)  # in memory order of the heads
    s = (token % length if BATCH_FIRST else token // batch).to(tl.int64)
    b = (token // length if BATCH_FIRST else token % batch).to(tl.int64)
    cos += s * cos_s + b * cos_b
    sin += s * cos_s + b * cos_b
    qkv += s * qkv_s + b * qkv_b
    q += s * q_s + b * q_b
    k += s * k_s + b * k_b
    v += s * v_s + b * v_b
    fused_k, fused_v = qkv + NUM_HEADS * WIDTH, qkv + (NUM_HEADS + NUM_KV_HEADS) * WIDTH
    if BACKWARD:
        if ROTARY_DIM > 0:
            _rope_heads(q, q_h, qkv, WIDTH, cos, sin, NUM_HEADS, ROTARY_DIM, TILE, True)
            _rope_heads(k, k_h, fused_k, WIDTH, cos, sin, NUM_KV_HEADS, ROTARY_DIM, TILE, True)
        if ROTARY_DIM < WIDTH:
            if NUM_HEADS > 0:
                _copy_heads(q, q_h, qkv, WIDTH, NUM_HEADS, ROTARY_DIM, WIDTH, TILE)
            _copy_heads(k, k_h, fused_k, WIDTH, NUM_KV_HEADS, ROTARY_DIM, WIDTH, TILE)
        _copy_heads(v, v_h, fused_v, WIDTH, NUM_KV_HEADS, 0, WIDTH, TILE)
    else:
        _rope_heads(qkv, WIDTH, q, q_h, cos, sin, NUM_HEADS, ROTARY_DIM, TILE, False)
        _rope_heads(fused_k, WIDTH, k, k_h, cos, sin, NUM_KV_HEADS, ROTARY_DIM, TILE, False)
        if ROTARY_DIM < WIDTH:
            _copy_heads(qkv, WIDTH, q, q_h, NUM_HEADS, ROTARY_DIM, WIDTH, TILE)
            _copy_heads(fused_k, WIDTH, k, k_h, NUM_KV_HEADS, ROTARY_DIM, WIDTH, TILE)
        _copy_heads(fused_v, WIDTH, v, v_h, NUM_KV_HEADS, 0, WIDTH, TILE)


@triton.jit
def _rope_heads(
    source,
    source_stride,
    target,
    target_stride,
    cos,
    sin,
    NUM_HEADS: tl.constexpr,
    ROTARY_DIM: tl.constexpr,
    TILE: tl.constexpr,
    BACKWARD: tl.constexpr,
):
    """Rotates the pairs of all heads of a token, several heads at once."""
    half: tl.constexpr = ROTARY_DIM // 2
    columns: tl.constexpr = triton.next_power_of_2(half)
    at_once: tl.constexpr = min(triton.next_power_of_2(NUM_HEADS), max(TILE // (2 * columns), 1))
    pair = tl.arange(0, columns)
    inside = pair < half
    cosine = tl.load(cos + pair, mask=inside, other=0.0).to(tl.float32)[None, :]
    sine = tl.load(sin + pair, mask=inside, other=0.0).to(tl.float32)[None, :]
    if BACKWARD:
        sine = -sine
    dtype: tl.constexpr = target.dtype.element_ty
    for start in tl.static_range(0, NUM_HEADS, at_once):
        head = start + tl.arange(0, at_once)
        mask = (head < NUM_HEADS)[:, None] & inside[None, :]
        this = head.to(tl.int64)[:, None]  # gradients may come with their heads outermost
        read = source + this * source_stride + pair[None, :]
        write = target + this * target_stride + pair[None, :]
        first = tl.load(read, mask=mask, other=0.0).to(tl.float32)
        second = tl.load(read + half, mask=mask, other=0.0).to(tl.float32)
        tl.store(write, (first * cosine - second * sine).to(dtype), mask=mask)
        tl.store(write + half, (second * cosine + first * sine).to(dtype), mask=mask)


@triton.jit
def _copy_heads(
    source,
    source_stride,
    target,
    target_stride,
    NUM_HEADS: tl.constexpr,
    FIRST: tl.constexpr,
    WIDTH: tl.constexpr,
    TILE: tl.constexpr,
):
    """Copies elements from FIRST on, of all heads of a token."""
    columns: tl.constexpr = triton.next_power_of_2(WIDTH - FIRST)
    at_once: tl.constexpr = min(triton.next_power_of_2(NUM_HEADS), max(TILE // columns, 1))
    element = FIRST + tl.arange(0, columns)
    for start in tl.static_range(0, NUM_HEADS, at_once):
        head = start + tl.arange(0, at_once)
        mask = (head < NUM_HEADS)[:, None] & (element < WIDTH)[None, :]
        this = head.to(tl.int64)[:, None]
        values = tl.load(source + this * source_stride + element[None, :], mask=mask, other=0.0)
        tl.store(target + this * target_stride + element[None, :], values, mask=mask)


@cache
def _launcher(
    heads: int, kv_heads: int, width: int, rotary_dim: int, batch_first: bool, backward: bool, pdl: bool
) -> KernelLauncher:
    warps = 4 if heads * width <= 4096 else 8
    return KernelLauncher(
        _split_qkv_rope,
        NUM_HEADS=heads,
        NUM_KV_HEADS=kv_heads,
        WIDTH=width,
        ROTARY_DIM=rotary_dim,
        TILE=512 * warps,
        BATCH_FIRST=batch_first,
        BACKWARD=backward,
        num_warps=warps,
        **pdl_options(pdl),
    )


def _launch(
    qkv: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cos: Tensor,
    sin: Tensor,
    *,
    rotary_dim: int,
    batch_first: bool,
    rows_batch_first: bool,
    backward: bool,
) -> None:
    """Launches for qkv [S, B, (H + 2K) E] or its rows, and q, k and v, [S, B, heads, E]; nothing is rotated if `rotary_dim` is 0.

    `batch_first`: the order of the programs, which should be that of q, k and v in memory; `rows_batch_first`: that of rows.
    """
    length, batch, heads, width = q.shape
    cos, sin, cos_s, cos_b = align_cos_sin(cos, sin) if rotary_dim else (v, v, 0, 0)
    strides = token_strides(qkv, length=length, batch=batch, batch_first=rows_batch_first)
    tokens = length * batch
    launch = _launcher(heads, k.shape[2], width, rotary_dim, batch_first, backward, uses_pdl(tokens, v))
    launch(
        tokens,
        (qkv, q, k, v, cos, sin),
        (length, batch, *strides, *q.stride()[:3], *k.stride()[:3], *v.stride()[:3], cos_s, cos_b),
    )


def split_qkv_rope(
    qkv: Tensor,
    cos: Tensor,
    sin: Tensor,
    *,
    num_heads: int,
    num_kv_heads: int,
    batch_first: bool,
    batch: int | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """See the reference."""
    source = contiguous_rows(qkv)
    length, batch = qkv.shape[:2] if batch is None else (qkv.shape[0] // batch, batch)
    width = qkv.shape[-1] // (num_heads + 2 * num_kv_heads)
    q, k, v = (
        empty_heads(source, length, batch, heads, width, batch_first=batch_first)
        for heads in (num_heads, num_kv_heads, num_kv_heads)
    )
    order = {"batch_first": batch_first, "rows_batch_first": batch_first}
    _launch(source, q, k, v, cos, sin, rotary_dim=cos.shape[-1], **order, backward=False)
    return q, k, v


def split_qkv_rope_backward(
    dq: Tensor, dk: Tensor, dv: Tensor, cos: Tensor, sin: Tensor, *, out: Tensor, batch_first: bool = False
) -> Tensor:
    """See the reference."""
    return _join(dq, dk, dv, cos, sin, out=out, rotary_dim=cos.shape[-1], batch_first=batch_first)


def join_qkv_grads(dq: Tensor, dk: Tensor, dv: Tensor, *, out: Tensor, batch_first: bool = False) -> Tensor:
    """See the reference."""
    return _join(dq, dk, dv, dv, dv, out=out, rotary_dim=0, batch_first=batch_first)


def _join(
    dq: Tensor,
    dk: Tensor,
    dv: Tensor,
    cos: Tensor,
    sin: Tensor,
    *,
    out: Tensor,
    rotary_dim: int,
    batch_first: bool,
) -> Tensor:
    assert out.stride(-1) == 1, "the heads of a token must be adjacent"
    dq, dk, dv = contiguous_rows(dq), contiguous_rows(dk), contiguous_rows(dv)
    order = {"batch_first": dv.stride(1) > dv.stride(0), "rows_batch_first": batch_first}
    _launch(out, dq, dk, dv, cos, sin, rotary_dim=rotary_dim, **order, backward=True)
    return out
