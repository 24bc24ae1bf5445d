"""The heads of latent attention in one pass, forward and backward: the reference is `kernels/attention/latent_heads.py`.

A program handles one token, so that its cosines and sines, and the rotary key that all heads share, are read once.

Device memory traffic in bf16, DeepSeek-V3 (8192 tokens, H 128, N 128, R 64, V 128), at 4.0 TB/s:

| kernel                       | read, MB          | written, MB       | ms    |
|------------------------------|-------------------|-------------------|-------|
| interleaved_rope               | 403               | 403               | 0.20  |
| join_rope_key           | 537               | 403 + 268         | 0.30  |
| their backward               | the same          | the same          | 0.50  |

S sequence, B batch, H heads, E width of a query or key head, N of its part without position, R rotary width, V of a value head.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from petatron.kernels.strides import align_cos_sin, contiguous_rows, empty_heads


@triton.jit
def _token(batch):
    """Returns the positions of this program's token in the sequence and in the batch."""
    return (tl.program_id(0) // batch).to(tl.int64), (tl.program_id(0) % batch).to(tl.int64)


@triton.jit
def _copy_parts(
    source,
    source_h,
    target,
    target_h,
    scale,
    NUM_HEADS: tl.constexpr,
    WIDTH: tl.constexpr,
    TILE: tl.constexpr,
    SCALED: tl.constexpr,
):
    """Copies the first WIDTH elements of all heads of a token, times `scale`."""
    columns: tl.constexpr = triton.next_power_of_2(WIDTH)
    at_once: tl.constexpr = min(triton.next_power_of_2(NUM_HEADS), max(TILE // columns, 1))
    element = tl.arange(0, columns)
    for start in tl.static_range(0, NUM_HEADS, at_once):
        head = start + tl.arange(0, at_once)
        mask = (head < NUM_HEADS)[:, None] & (element < WIDTH)[None, :]
        this = head.to(tl.int64)[:, None]  # gradients may come with their heads outermost
        values = tl.load(source + this * source_h + element[None, :], mask=mask, other=0.0)
        if SCALED:
            values = (values.to(tl.float32) * scale).to(target.dtype.element_ty)
        tl.store(target + this * target_h + element[None, :], values, mask=mask)


@triton.jit
def _cos_sin(cos, sin, pair, HALF: tl.constexpr, BACKWARD: tl.constexpr):
    inside = pair < HALF
    cosine = tl.load(cos + pair, mask=inside, other=0.0).to(tl.float32)
    sine = tl.load(sin + pair, mask=inside, other=0.0).to(tl.float32)
    return cosine, -sine if BACKWARD else sine


@triton.jit
def _load_halves(source, stride, head, NUM_HEADS: tl.constexpr, HALF: tl.constexpr):
    pair = tl.arange(0, triton.next_power_of_2(HALF))
    mask = (head < NUM_HEADS)[:, None] & (pair < HALF)[None, :]
    read = source + head.to(tl.int64)[:, None] * stride + pair[None, :]
    first = tl.load(read, mask=mask, other=0.0).to(tl.float32)
    return first, tl.load(read + HALF, mask=mask, other=0.0).to(tl.float32)


@triton.jit
def _load_interleaved(source, stride, head, NUM_HEADS: tl.constexpr, HALF: tl.constexpr):
    """Loads both of each pair at once: loads of every other element would take twice the instructions."""
    columns: tl.constexpr = triton.next_power_of_2(HALF)
    element = tl.arange(0, 2 * columns)
    mask = (head < NUM_HEADS)[:, None] & (element < 2 * HALF)[None, :]
    both = tl.load(source + head.to(tl.int64)[:, None] * stride + element[None, :], mask=mask, other=0.0)
    return tl.split(both.to(tl.float32).reshape(head.shape[0], columns, 2))


@triton.jit
def _store_halves(target, stride, head, first, second, NUM_HEADS: tl.constexpr, HALF: tl.constexpr):
    pair = tl.arange(0, triton.next_power_of_2(HALF))
    mask = (head < NUM_HEADS)[:, None] & (pair < HALF)[None, :]
    write = target + head.to(tl.int64)[:, None] * stride + pair[None, :]
    tl.store(write, first.to(target.dtype.element_ty), mask=mask)
    tl.store(write + HALF, second.to(target.dtype.element_ty), mask=mask)


@triton.jit
def _store_interleaved(target, stride, head, first, second, NUM_HEADS: tl.constexpr, HALF: tl.constexpr):
    columns: tl.constexpr = triton.next_power_of_2(HALF)
    element = tl.arange(0, 2 * columns)
    mask = (head < NUM_HEADS)[:, None] & (element < 2 * HALF)[None, :]
    both = tl.join(first, second).reshape(head.shape[0], 2 * columns)
    write = target + head.to(tl.int64)[:, None] * stride + element[None, :]
    tl.store(write, both.to(target.dtype.element_ty), mask=mask)


@triton.jit
def _interleaved_rope(
    tensors,
    scale,
    batch,
    strides,
    NUM_HEADS: tl.constexpr,
    NOPE: tl.constexpr,
    ROTARY: tl.constexpr,
    TILE: tl.constexpr,
    SCALED: tl.constexpr,
    BACKWARD: tl.constexpr,
):
    """Forward reads interleaved pairs and writes halves; backward reads halves and writes interleaved pairs."""
    source, target, cos, sin = tensors
    source_s, source_b, source_h, target_s, target_b, target_h, cos_s, cos_b = strides
    s, b = _token(batch)
    source += s * source_s + b * source_b
    target += s * target_s + b * target_b
    if NOPE > 0:
        _copy_parts(source, source_h, target, target_h, scale, NUM_HEADS, NOPE, TILE, SCALED)
    half: tl.constexpr = ROTARY // 2
    columns: tl.constexpr = triton.next_power_of_2(half)
    at_once: tl.constexpr = min(triton.next_power_of_2(NUM_HEADS), max(TILE // (2 * columns), 1))
    pair = tl.arange(0, columns)
    cosine, sine = _cos_sin(cos + s * cos_s + b * cos_b, sin + s * cos_s + b * cos_b, pair, half, BACKWARD)
    cosine, sine = cosine[None, :] * scale, sine[None, :] * scale
    source, target = source + NOPE, target + NOPE
    for start in tl.static_range(0, NUM_HEADS, at_once):
        head = start + tl.arange(0, at_once)
        if BACKWARD:
            first, second = _load_halves(source, source_h, head, NUM_HEADS, half)
        else:
            first, second = _load_interleaved(source, source_h, head, NUM_HEADS, half)
        rotated_first, rotated_second = first * cosine - second * sine, second * cosine + first * sine
        if BACKWARD:
            _store_interleaved(target, target_h, head, rotated_first, rotated_second, NUM_HEADS, half)
        else:
            _store_halves(target, target_h, head, rotated_first, rotated_second, NUM_HEADS, half)


@triton.jit
def _join_rope_key(
    tensors,
    batch,
    strides,
    NUM_HEADS: tl.constexpr,
    NOPE: tl.constexpr,
    ROTARY: tl.constexpr,
    VALUE: tl.constexpr,
    TILE: tl.constexpr,
):
    kv, rotary, cos, sin, k, v = tensors
    kv_s, kv_b, kv_h, rotary_s, rotary_b, k_s, k_b, k_h, v_s, v_b, v_h, cos_s, cos_b = strides
    s, b = _token(batch)
    kv += s * kv_s + b * kv_b
    k += s * k_s + b * k_b
    v += s * v_s + b * v_b
    if NOPE > 0:
        _copy_parts(kv, kv_h, k, k_h, 1.0, NUM_HEADS, NOPE, TILE, False)
    _copy_parts(kv + NOPE, kv_h, v, v_h, 1.0, NUM_HEADS, VALUE, TILE, False)
    half: tl.constexpr = ROTARY // 2
    columns: tl.constexpr = triton.next_power_of_2(half)
    at_once: tl.constexpr = min(triton.next_power_of_2(NUM_HEADS), max(TILE // (2 * columns), 1))
    pair = tl.arange(0, columns)
    cosine, sine = _cos_sin(cos + s * cos_s + b * cos_b, sin + s * cos_s + b * cos_b, pair, half, False)
    rotary += s * rotary_s + b * rotary_b + 2 * pair
    first = tl.load(rotary, mask=pair < half, other=0.0).to(tl.float32)
    second = tl.load(rotary + 1, mask=pair < half, other=0.0).to(tl.float32)
    upper = tl.broadcast_to((first * cosine - second * sine)[None, :], (at_once, columns))
    lower = tl.broadcast_to((second * cosine + first * sine)[None, :], (at_once, columns))
    for start in tl.static_range(0, NUM_HEADS, at_once):
        _store_halves(k + NOPE, k_h, start + tl.arange(0, at_once), upper, lower, NUM_HEADS, half)


@triton.jit
def _join_rope_key_backward(
    tensors,
    batch,
    strides,
    NUM_HEADS: tl.constexpr,
    NOPE: tl.constexpr,
    ROTARY: tl.constexpr,
    VALUE: tl.constexpr,
    TILE: tl.constexpr,
):
    grad_k, grad_v, cos, sin, grad_kv, grad_rotary = tensors
    k_s, k_b, k_h, v_s, v_b, v_h, kv_s, kv_b, kv_h, rotary_s, rotary_b, cos_s, cos_b = strides
    s, b = _token(batch)
    grad_k += s * k_s + b * k_b
    grad_v += s * v_s + b * v_b
    grad_kv += s * kv_s + b * kv_b
    if NOPE > 0:
        _copy_parts(grad_k, k_h, grad_kv, kv_h, 1.0, NUM_HEADS, NOPE, TILE, False)
    _copy_parts(grad_v, v_h, grad_kv + NOPE, kv_h, 1.0, NUM_HEADS, VALUE, TILE, False)
    half: tl.constexpr = ROTARY // 2
    columns: tl.constexpr = triton.next_power_of_2(half)
    at_once: tl.constexpr = min(triton.next_power_of_2(NUM_HEADS), max(TILE // (2 * columns), 1))
    pair = tl.arange(0, columns)
    upper = tl.zeros((at_once, columns), dtype=tl.float32)
    lower = tl.zeros((at_once, columns), dtype=tl.float32)
    for start in tl.static_range(0, NUM_HEADS, at_once):
        first, second = _load_halves(grad_k + NOPE, k_h, start + tl.arange(0, at_once), NUM_HEADS, half)
        upper += first
        lower += second
    first, second = tl.sum(upper, 0), tl.sum(lower, 0)
    cosine, sine = _cos_sin(cos + s * cos_s + b * cos_b, sin + s * cos_s + b * cos_b, pair, half, True)
    write = grad_rotary + s * rotary_s + b * rotary_b + 2 * pair
    dtype: tl.constexpr = grad_rotary.dtype.element_ty
    tl.store(write, (first * cosine - second * sine).to(dtype), mask=pair < half)
    tl.store(write + 1, (second * cosine + first * sine).to(dtype), mask=pair < half)


_WARPS = 8
_TILE = 512 * _WARPS


def _is_batch_first(x_SBHE: Tensor) -> bool:
    return x_SBHE.stride(1) > x_SBHE.stride(0)


def interleaved_rope(x_SBHE: Tensor, cos: Tensor, sin: Tensor, *, scale: float = 1.0) -> Tensor:
    """See the reference."""
    return _rotate(x_SBHE, cos, sin, scale, backward=False)


def interleaved_rope_backward(grad_SBHE: Tensor, cos: Tensor, sin: Tensor, *, scale: float = 1.0) -> Tensor:
    """See the reference."""
    return _rotate(grad_SBHE, cos, sin, scale, backward=True)


def _rotate(x_SBHE: Tensor, cos: Tensor, sin: Tensor, scale: float, *, backward: bool) -> Tensor:
    source = contiguous_rows(x_SBHE)
    target = empty_heads(source, *source.shape, batch_first=_is_batch_first(source))
    length, batch, heads, width = source.shape
    cos, sin, *cos_strides = align_cos_sin(cos, sin)
    _interleaved_rope[(length * batch,)](
        (source, target, cos, sin),
        scale,
        batch,
        (*source.stride()[:3], *target.stride()[:3], *cos_strides),
        NUM_HEADS=heads,
        NOPE=width - cos.shape[-1],
        ROTARY=cos.shape[-1],
        TILE=_TILE,
        SCALED=scale != 1.0,
        BACKWARD=backward,
        num_warps=_WARPS,
    )
    return target


def join_rope_key(
    kv_SBHM: Tensor, rotary_SBR: Tensor, cos: Tensor, sin: Tensor, *, nope_dim: int
) -> tuple[Tensor, Tensor]:
    """See the reference."""
    kv, rotary = contiguous_rows(kv_SBHM), contiguous_rows(rotary_SBR)
    length, batch, heads, width = kv.shape
    cos, sin, *cos_strides = align_cos_sin(cos, sin)
    k, v = (
        empty_heads(kv, *kv.shape[:3], head_dim, batch_first=_is_batch_first(kv))
        for head_dim in (nope_dim + cos.shape[-1], width - nope_dim)
    )
    strides = (*kv.stride()[:3], *rotary.stride()[:2], *k.stride()[:3], *v.stride()[:3], *cos_strides)
    sizes = {"NUM_HEADS": heads, "NOPE": nope_dim, "ROTARY": cos.shape[-1], "VALUE": width - nope_dim}
    tensors = (kv, rotary, cos, sin, k, v)
    _join_rope_key[(length * batch,)](tensors, batch, strides, **sizes, TILE=_TILE, num_warps=_WARPS)
    return k, v


def join_rope_key_backward(grad_k_SBHE: Tensor, grad_v_SBHV: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    """See the reference."""
    grad_k, grad_v = contiguous_rows(grad_k_SBHE), contiguous_rows(grad_v_SBHV)
    length, batch, heads, width = grad_k.shape
    cos, sin, *cos_strides = align_cos_sin(cos, sin)
    nope_dim, v_dim = width - cos.shape[-1], grad_v.shape[-1]
    grad_kv = empty_heads(grad_k, *grad_k.shape[:3], nope_dim + v_dim, batch_first=_is_batch_first(grad_k))
    grad_rotary = grad_k.new_empty((length, batch, cos.shape[-1]))
    heads_strides = (stride for tensor in (grad_k, grad_v, grad_kv) for stride in tensor.stride()[:3])
    strides = (*heads_strides, *grad_rotary.stride()[:2], *cos_strides)
    sizes = {"NUM_HEADS": heads, "NOPE": nope_dim, "ROTARY": cos.shape[-1], "VALUE": v_dim}
    tensors = (grad_k, grad_v, cos, sin, grad_kv, grad_rotary)
    _join_rope_key_backward[(length * batch,)](tensors, batch, strides, **sizes, TILE=_TILE, num_warps=_WARPS)
    return grad_kv, grad_rotary
