"""Splits the QKV GEMM's output into heads, for `petatron bench kernels`: with rope, and with qk-norm before it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from petatron.bench.ops.kernel_case import CHECKED_ROWS, EPSILON, BenchContext, KernelCase, MicroBatchShape, Outputs
from petatron.kernels import qk_norm_rope, rope
from petatron.kernels.qk_norm_rope import QKNormSpec


def qkv_split_cases(context: BenchContext, shape: MicroBatchShape, *, first: bool) -> Iterator[KernelCase]:
    yield from _rope_cases(context, shape, first=first)
    yield from _qk_norm_rope_cases(context, shape)


def _rope_cases(context: BenchContext, shape: MicroBatchShape, *, first: bool) -> Iterator[KernelCase]:
    width, heads, groups = shape.hidden_size // shape.num_heads, shape.num_heads, shape.num_kv_heads
    qkv = context.randn(shape.batch_size, shape.seq_length, (heads + 2 * groups) * width).transpose(0, 1)
    cos, sin = _cos_sin(context, shape.seq_length, width)
    few = slice(min(CHECKED_ROWS, shape.seq_length))
    options: dict[str, Any] = {"num_heads": heads, "num_kv_heads": groups, "batch_first": True}
    grads = rope.split_qkv_rope(qkv, cos, sin, **options)
    out = torch.empty_like(qkv)
    ways = context.implementations("rotary embedding", *(("split_qkv_rope",) if first else ()))
    moved = 2 * qkv.numel() * qkv.itemsize

    def true_backward() -> Outputs:
        exact = [t[few].double() for t in (*grads, cos, sin)]
        return (rope.split_qkv_rope_backward(*exact, out=torch.empty_like(out[few], dtype=torch.float64)),)

    yield KernelCase(
        label=f"rotary embedding, {shape.name}",
        implementations=ways,
        call=lambda k: k.split_qkv_rope(qkv, cos, sin, **options),
        reference=lambda: rope.split_qkv_rope(*(t[few].double() for t in (qkv, cos, sin)), **options),
        moved_bytes=moved,
    )
    yield KernelCase(
        label=f"rotary embedding backward, {shape.name}",
        implementations={name: functions for name, functions in ways.items() if name != "compiled"},
        call=lambda k: (k.split_qkv_rope_backward(*grads, cos, sin, out=out),),
        reference=true_backward,
        moved_bytes=moved,
    )


def _qk_norm_rope_cases(context: BenchContext, shape: MicroBatchShape) -> Iterator[KernelCase]:
    """Values are not copied; their gradient is copied to its place next to the others."""
    width = shape.hidden_size // shape.num_heads
    norm = QKNormSpec(shape.num_heads, shape.num_kv_heads, EPSILON, zero_centered_gamma=False)
    size = (shape.batch_size, shape.seq_length, (norm.num_heads + 2 * norm.num_kv_heads) * width)
    qkv, given = (context.randn(*size).transpose(0, 1) for _ in range(2))
    rotation = _cos_sin(context, shape.seq_length, width)
    weights, grads, out = (context.randn(width), context.randn(width)), norm.split(given), torch.empty_like(qkv)
    few = min(CHECKED_ROWS, shape.seq_length)

    def true() -> Outputs:
        exact = (qkv[:few].double(), _to_float64(weights), _to_float64(rotation, few))
        return qk_norm_rope.split_qkv_norm_rope(*exact, norm, batch_first=True)

    def backward(kernels: Any) -> Outputs:
        return out, *kernels.split_qkv_norm_rope_backward(grads, qkv, weights, rotation, norm, out=out)

    def true_backward() -> Outputs:
        made = torch.empty_like(qkv, dtype=torch.float64)
        exact = (_to_float64(grads), qkv.double(), _to_float64(weights), _to_float64(rotation))
        return made, *qk_norm_rope.split_qkv_norm_rope_backward(*exact, norm, out=made)

    ways, head_bytes = context.implementations("qk-norm and rotary embedding"), shape.num_tokens * width * qkv.itemsize
    yield KernelCase(
        label=f"qk-norm and rotary embedding, {shape.name}",
        implementations=ways,
        call=lambda k: k.split_qkv_norm_rope(qkv, weights, rotation, norm, batch_first=True),
        reference=true,
        moved_bytes=2 * (norm.num_heads + norm.num_kv_heads) * head_bytes,
    )
    yield KernelCase(
        label=f"qk-norm and rotary embedding backward, {shape.name}",
        implementations=ways,
        call=backward,
        reference=true_backward,
        moved_bytes=(3 * (norm.num_heads + norm.num_kv_heads) + 2 * norm.num_kv_heads) * head_bytes,
    )


def _cos_sin(context: BenchContext, sequence: int, width: int) -> tuple[Tensor, Tensor]:
    """Returns cosines and sines of random angles, the same for both halves of a head."""
    angles = torch.randn(sequence, 1, 1, width // 2, device=context.device).repeat(1, 1, 1, 2)
    return angles.cos().to(context.dtype), angles.sin().to(context.dtype)


def _to_float64(tensors: Sequence[Tensor], rows: int | None = None) -> Any:
    return tuple(tensor[:rows].double() for tensor in tensors)
