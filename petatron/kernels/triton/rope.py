"""Splits the QKV output into queries, keys and values and applies rope, in one pass; and its backward.

Pair i of a head is (x_i, x_{i + n/2}), i < n/2, where n is the rotary dim; elements from n on are unchanged:

    y_i = x_i cos_i - x_{i+n/2} sin_i,        y_{i+n/2} = x_{i+n/2} cos_i + x_i sin_i

The gradient is rotated by the opposite angle. Cosines and sines are n wide, both halves equal; only the first is read.

Both directions copy three tensors [S, B, heads, E] to three others, of which three are slices of one. So there is one kernel, which
takes the strides of all six and does not care which side the slices are on. Values are only copied: attention kernels read
contiguous heads faster than the slices.

A program handles one token, so that its cosines and sines are read once for all heads.

Device memory traffic in bf16, Llama-1B (R = S B 32768, H 32, K 8, E 64), at 4.0 TB/s:

| kernel                   | tensors of [R, (H + 2K) E] | bytes per element | ms    |
|--------------------------|----------------------------|-------------------|-------|
| split_qkv_rope           | 2                          | 4                 | 0.101 |
| split_qkv_rope_backward  | 2                          | 4                 | 0.101 |

S sequence, B batch, H query heads, K kv heads, E head dim.
"""

# pyright: reportAttributeAccessIssue=false, reportCallIssue=false, reportIndexIssue=false, reportArgumentType=false
# pyright: reportPossiblyUnboundVariable=false, reportReturnType=false, reportGeneralTypeIssues=false
from __future__ import annotations

from collections.abc import Sequence

import triton
import triton.language as tl
from torch import Tensor

from petatron.kernels.rope import split_qkv
from petatron.kernels.strides import align_cos_sin, contiguous_rows, empty_heads
from petatron.kernels.triton.dependent_launch import launch_options, wait_for_inputs
from petatron.kernels.triton.kernel_launch import KernelLauncher


@triton.jit
def _split_qkv_rope(
    q_from,
    k_from,
    v_from,
    q_to,
    k_to,
    v_to,
    cos,
    sin,
    length,
    batch,
    q_from_s,
    q_from_b,
    q_from_h,
    k_from_s,
    k_from_b,
    k_from_h,
    v_from_s,
    v_from_b,
    v_from_h,
    q_to_s,
    q_to_b,
    q_to_h,
    k_to_s,
    k_to_b,
    k_to_h,
    v_to_s,
    v_to_b,
    v_to_h,
    cos_s,
    cos_b,
    NUM_HEADS: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr,
    WIDTH: tl.constexpr,
    ROTARY_DIM: tl.constexpr,
    TILE: tl.constexpr,
    BATCH_FIRST: tl.constexpr,
    BACKWARD: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    wait_for_inputs(DEPENDENT)
    token = tl.program_id(0)  # in memory order of the heads
    s = (token % length if BATCH_FIRST else token // batch).to(tl.int64)
    b = (token // length if BATCH_FIRST else token % batch).to(tl.int64)
    cos += s * cos_s + b * cos_b
    sin += s * cos_s + b * cos_b
    q_from += s * q_from_s + b * q_from_b
    k_from += s * k_from_s + b * k_from_b
    v_from += s * v_from_s + b * v_from_b
    q_to += s * q_to_s + b * q_to_b
    k_to += s * k_to_s + b * k_to_b
    v_to += s * v_to_s + b * v_to_b
    _rope_heads(q_from, q_from_h, q_to, q_to_h, cos, sin, NUM_HEADS, ROTARY_DIM, TILE, BACKWARD)
    _rope_heads(k_from, k_from_h, k_to, k_to_h, cos, sin, NUM_KV_HEADS, ROTARY_DIM, TILE, BACKWARD)
    if ROTARY_DIM < WIDTH:
        _copy_heads(q_from, q_from_h, q_to, q_to_h, NUM_HEADS, ROTARY_DIM, WIDTH, TILE)
        _copy_heads(k_from, k_from_h, k_to, k_to_h, NUM_KV_HEADS, ROTARY_DIM, WIDTH, TILE)
    _copy_heads(v_from, v_from_h, v_to, v_to_h, NUM_KV_HEADS, 0, WIDTH, TILE)


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


_launch_kernel = KernelLauncher(_split_qkv_rope)


def _launch(sources: Sequence[Tensor], targets: Sequence[Tensor], cos: Tensor, sin: Tensor, *, backward: bool) -> None:
    """Launches for q, k and v, each of shape [S, B, heads, E]; programs are in memory order of the heads, not of the slices."""
    length, batch, heads, width = sources[0].shape
    cos, sin, cos_s, cos_b = align_cos_sin(cos, sin)
    heads_tensor = sources[0] if backward else targets[0]
    warps = 4 if heads * width <= 4096 else 8
    strides: list[int] = []
    for tensor in (*sources, *targets):
        strides += tensor.stride()[:3]
    _launch_kernel(
        length * batch,
        (*sources, *targets, cos, sin),
        (length, batch, *strides, cos_s, cos_b),
        NUM_HEADS=heads,
        NUM_KV_HEADS=sources[1].shape[2],
        WIDTH=width,
        ROTARY_DIM=cos.shape[-1],
        TILE=512 * warps,
        BATCH_FIRST=heads_tensor.stride(1) > heads_tensor.stride(0),
        BACKWARD=backward,
        num_warps=warps,
        **launch_options(length * batch, heads_tensor),
    )


def split_qkv_rope(
    qkv: Tensor, cos: Tensor, sin: Tensor, *, num_heads: int, num_kv_heads: int, batch_first: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """Returns rotated q [S, B, H, E] and k [S, B, K, E], and v, from [S, B, (H + 2K) E]; in memory [B, S, ...] if `batch_first`."""
    sources = split_qkv(contiguous_rows(qkv), num_heads=num_heads, num_kv_heads=num_kv_heads)
    targets = [empty_heads(part, part.shape[-1], batch_first=batch_first) for part in sources]
    _launch(sources, targets, cos, sin, backward=False)
    q, k, v = targets
    return q, k, v


def split_qkv_rope_backward(dq: Tensor, dk: Tensor, dv: Tensor, cos: Tensor, sin: Tensor, *, out: Tensor) -> Tensor:
    """Writes the gradient of qkv to `out`, which has qkv's memory layout, and returns it."""
    assert out.stride(-1) == 1, "the heads of a token must be adjacent"
    sources = [contiguous_rows(grad) for grad in (dq, dk, dv)]
    _launch(sources, split_qkv(out, num_heads=dq.shape[2], num_kv_heads=dk.shape[2]), cos, sin, backward=True)
    return out
