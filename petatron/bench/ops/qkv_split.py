"""From the product that makes queries, keys and values to heads, for `petatron bench kernels`: rotated, and normalised before."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from petatron.bench.ops.cases import CHECKED_ROWS, EPSILON, Case, Outputs, Place, Shape
from petatron.kernels import qk_norm_rope, rope
from petatron.kernels.qk_norm_rope import HeadNorm


def heads(place: Place, shape: Shape, *, first: bool) -> Iterator[Case]:
    yield from _rotations(place, shape, first=first)
    yield from _normed_rotations(place, shape)


def _rotations(place: Place, shape: Shape, *, first: bool) -> Iterator[Case]:
    width, heads, groups = shape.hidden // shape.heads, shape.heads, shape.groups
    qkv = place.random(shape.batch, shape.sequence, (heads + 2 * groups) * width).transpose(0, 1)
    cos, sin = _rotation(place, shape.sequence, width)
    few = slice(min(CHECKED_ROWS, shape.sequence))
    grads = rope.split_rotate(qkv, cos, sin, heads=heads, groups=groups, batch_major=True)
    out = torch.empty_like(qkv)
    ways = place.ways("rotary embedding", *(("split_rotate",) if first else ()))
    moved = 2 * qkv.numel() * qkv.itemsize

    def true_backward() -> Outputs:
        exact = [t[few].double() for t in (*grads, cos, sin)]
        return (rope.split_rotate_backward(*exact, out=torch.empty_like(out[few], dtype=torch.float64)),)

    yield Case(
        label=f"rotary embedding, {shape.name}",
        ways=ways,
        call=lambda k: k.split_rotate(qkv, cos, sin, heads=heads, groups=groups, batch_major=True),
        true=lambda: rope.split_rotate(
            *(t[few].double() for t in (qkv, cos, sin)), heads=heads, groups=groups, batch_major=True
        ),
        bytes=moved,
    )
    yield Case(
        label=f"rotary embedding backward, {shape.name}",
        ways={name: functions for name, functions in ways.items() if name != "compiled"},
        call=lambda k: (k.split_rotate_backward(*grads, cos, sin, out=out),),
        true=true_backward,
        bytes=moved,
    )


def _normed_rotations(place: Place, shape: Shape) -> Iterator[Case]:
    """Values stay where they are; their gradient is copied to its place beside the others."""
    width, norm = shape.hidden // shape.heads, HeadNorm(shape.heads, shape.groups, EPSILON, from_one=False)
    qkv, given = (
        place.random(shape.batch, shape.sequence, (norm.heads + 2 * norm.groups) * width).transpose(0, 1)
        for _ in range(2)
    )
    rotation = _rotation(place, shape.sequence, width)
    weights, grads, out = (place.random(width), place.random(width)), norm.split(given), torch.empty_like(qkv)
    few = min(CHECKED_ROWS, shape.sequence)

    def true() -> Outputs:
        turns = _exact(rotation, few)
        return qk_norm_rope.split_norm_rotate(qkv[:few].double(), _exact(weights), turns, norm, batch_major=True)

    def backward(kernels: Any) -> Outputs:
        return out, *kernels.split_norm_rotate_backward(grads, qkv, weights, rotation, norm, out=out)

    def true_backward() -> Outputs:
        made = torch.empty_like(qkv, dtype=torch.float64)
        exact = (_exact(grads), qkv.double(), _exact(weights), _exact(rotation))
        return made, *qk_norm_rope.split_norm_rotate_backward(*exact, norm, out=made)

    ways, head_bytes = place.ways("normed rotary embedding"), shape.rows * width * qkv.itemsize
    yield Case(
        label=f"normed rotary embedding, {shape.name}",
        ways=ways,
        call=lambda k: k.split_norm_rotate(qkv, weights, rotation, norm, batch_major=True),
        true=true,
        bytes=2 * (norm.heads + norm.groups) * head_bytes,
    )
    yield Case(
        label=f"normed rotary embedding backward, {shape.name}",
        ways=ways,
        call=backward,
        true=true_backward,
        bytes=(3 * (norm.heads + norm.groups) + 2 * norm.groups) * head_bytes,
    )


def _rotation(place: Place, sequence: int, width: int) -> tuple[Tensor, Tensor]:
    """Cosines and sines of random angles, those of a head's halves the same."""
    angles = torch.randn(sequence, 1, 1, width // 2, device=place.device).repeat(1, 1, 1, 2)
    return angles.cos().to(place.dtype), angles.sin().to(place.dtype)


def _exact(tensors: Sequence[Tensor], rows: int | None = None) -> Any:
    return tuple(tensor[:rows].double() for tensor in tensors)
