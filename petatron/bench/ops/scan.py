"""The operations of a Mamba-2 layer that `petatron bench kernels` times: the selective scan and its convolution, at the shape of one model.

Bytes are the minimum: every input read once, every output written once; states between chunks are the implementation's own.
Gradients are compared with float64 on the first tokens by themselves, since those of a whole sequence depend on all that follow.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch.nn.functional as F
from torch import Tensor

from petatron.bench.ops.cases import CHECKED_ROWS, BenchContext, KernelCase, MicroBatchShape
from petatron.bench.ops.peer_kernels import peer_kernels
from petatron.kernels.ssm import causal_conv, chunk_scan

_TAPS = 4
_GRADIENT_TOLERANCE = 2e-2


@dataclass(frozen=True, slots=True)
class ScanShape:
    """A micro-batch of a Mamba-2 layer."""

    name: str
    batch_size: int
    seq_length: int
    num_heads: int
    head_dim: int
    num_groups: int
    state_dim: int


SHAPE = ScanShape("Mamba-2 2.7B S4096 B8", 8, 4096, 80, 64, 1, 128)
SMALL_SHAPE = ScanShape("small", 2, 16, 4, 8, 2, 8)
_CHUNK_SIZE = 256


def scan_cases(context: BenchContext, decoder_shape: MicroBatchShape, *, first: bool) -> Iterator[KernelCase]:
    """At one shape, its own, whatever those of the other operations are."""
    if not first:
        return
    shape = SHAPE if context.device.type == "cuda" else SMALL_SHAPE
    inner, states = shape.num_heads * shape.head_dim, shape.num_groups * shape.state_dim
    channels = context.randn(shape.seq_length, shape.batch_size, inner + 2 * states)
    yield from _scan(context, shape, channels.split((inner, states, states), dim=-1))
    yield from _convolution(context, shape, channels)


def _scan(context: BenchContext, shape: ScanShape, parts: tuple[Tensor, ...]) -> Iterator[KernelCase]:
    x, B, C = parts
    by_head = (shape.seq_length, shape.batch_size, shape.num_heads)
    wide = context.accumulate_dtype
    inputs = (
        x.unflatten(-1, (shape.num_heads, shape.head_dim)),
        F.softplus(context.randn(*by_head, dtype=wide) - 3.0),
        -context.randn(shape.num_heads, dtype=wide).abs() - 1.0,
        B.unflatten(-1, (shape.num_groups, shape.state_dim)) / shape.state_dim**0.5,
        C.unflatten(-1, (shape.num_groups, shape.state_dim)),
        context.randn(shape.num_heads, dtype=wide),
    )
    grad = context.randn(*by_head, shape.head_dim)
    ways = context.implementations("selective scan", "chunk_scan", "chunk_scan_backward")
    peers = peer_kernels("selective scan", context.peer_paths)
    first, exact = _first_tokens(inputs), [tensor.double() for tensor in _first_tokens(inputs)]
    first_grad = grad[:CHECKED_ROWS]
    moved = sum(tensor.numel() * tensor.itemsize for tensor in inputs)
    outer = grad.numel() * grad.itemsize
    yield KernelCase(
        label=f"selective scan, {shape.name}",
        implementations=ways,
        peers=peers,
        call=lambda k: k.chunk_scan(*inputs, chunk_size=_CHUNK_SIZE),
        checked_call=lambda k: k.chunk_scan(*first, chunk_size=_CHUNK_SIZE),
        reference=lambda: chunk_scan.chunk_scan(*exact, chunk_size=_CHUNK_SIZE),
        moved_bytes=moved + outer,
    )
    yield KernelCase(
        label=f"selective scan, backward, {shape.name}",
        implementations=ways,
        peers=peers,
        call=lambda k: k.chunk_scan_backward(grad, None, *inputs, chunk_size=_CHUNK_SIZE),
        checked_call=lambda k: k.chunk_scan_backward(first_grad, None, *first, chunk_size=_CHUNK_SIZE),
        reference=lambda: chunk_scan.chunk_scan_backward(first_grad.double(), None, *exact, chunk_size=_CHUNK_SIZE),
        moved_bytes=2 * moved + outer,
        tolerance=_GRADIENT_TOLERANCE,
    )


def _convolution(context: BenchContext, shape: ScanShape, x: Tensor) -> Iterator[KernelCase]:
    weight, bias, grad = context.randn(x.shape[-1], _TAPS), context.randn(x.shape[-1]), context.randn(*x.shape)
    ways = context.implementations("causal convolution", "causal_conv", "causal_conv_backward")
    first, first_grad = (x[:CHECKED_ROWS], weight, bias), grad[:CHECKED_ROWS]
    exact = [tensor.double() for tensor in first]
    yield KernelCase(
        label=f"causal convolution, {shape.name}",
        implementations=ways,
        call=lambda k: k.causal_conv(x, weight, bias),
        checked_call=lambda k: [k.causal_conv(*first)],
        reference=lambda: [causal_conv.causal_conv(*exact)],
        moved_bytes=2 * x.numel() * x.itemsize,
    )
    yield KernelCase(
        label=f"causal convolution, backward, {shape.name}",
        implementations=ways,
        call=lambda k: k.causal_conv_backward(grad, x, weight, bias),
        checked_call=lambda k: k.causal_conv_backward(first_grad, *first),
        reference=lambda: causal_conv.causal_conv_backward(first_grad.double(), *exact),
        moved_bytes=3 * x.numel() * x.itemsize,
    )


def _first_tokens(inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    return tuple(tensor[:CHECKED_ROWS] if tensor.dim() > 1 else tensor for tensor in inputs)
