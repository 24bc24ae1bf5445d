"""The recurrences that `petatron bench kernels` times, each at the shape of one model: the selective scan of Mamba-2 with its
convolution, and the gated delta rule with decays of heads and of channels.

Bytes are the minimum: every input read once, every output written once; states between chunks are the implementation's own. FLOPs of the
delta rule are those of the chunked form's GEMMs, inside chunks of 64 tokens, in full, and through the states; backward has two for each
of them, and recomputes them. On an H200 both take about as long. What decays of channels need beyond these counts for nothing.
Gradients are compared with float64 on the first tokens by themselves, since those of a whole sequence depend on all that follow.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch.nn.functional as F
from torch import Tensor

from petatron.bench.ops.kernel_case import CHECKED_ROWS, BenchContext, KernelCase, MicroBatchShape
from petatron.bench.ops.peer_recurrences import peer_recurrences
from petatron.kernels.ssm import causal_conv, chunk_channel_delta_rule, chunk_delta_rule, chunk_scan

_TAPS = 4
_SCAN_CHUNK, _DELTA_CHUNK = 256, 64
_TOLERANCE = 2e-2


@dataclass(frozen=True, slots=True)
class RecurrenceShape:
    """A micro-batch of a Mamba-2 layer, with its heads, their groups and the width of a state, or of a gated delta net, with its value
    heads, key heads and their width."""

    name: str
    batch_size: int
    seq_length: int
    num_heads: int
    head_dim: int
    num_groups: int
    state_dim: int

    @property
    def delta_flops(self) -> float:
        """Intra-chunk k k^T, q k^T, T rhs and A v_new; inter-chunk k S, q S and k^T v_new."""
        widths = self.num_groups * self.state_dim + self.num_heads * self.head_dim
        inter_chunk = 6 * self.num_heads * self.state_dim * self.head_dim
        return float(self.batch_size * self.seq_length * (2 * _DELTA_CHUNK * 2 * widths + inter_chunk))


SCAN_SHAPE = RecurrenceShape("Mamba-2 2.7B S4096 B8", 8, 4096, 80, 64, 1, 128)
DELTA_SHAPE = RecurrenceShape("Qwen3-Next S4096 B8", 8, 4096, 32, 128, 16, 128)
CHANNEL_SHAPE = RecurrenceShape("Kimi-Linear S4096 B2", 2, 4096, 32, 128, 32, 128)
SMALL_SCAN, SMALL_DELTA = RecurrenceShape("small", 2, 16, 4, 8, 2, 8), RecurrenceShape("small", 1, 18, 2, 16, 1, 16)


def scan_cases(context: BenchContext, decoder_shape: MicroBatchShape, *, first: bool) -> Iterator[KernelCase]:
    """At one shape, its own, whatever those of the other operations are."""
    if not first:
        return
    shape = SCAN_SHAPE if context.device.type == "cuda" else SMALL_SCAN
    heads, wide = shape.num_heads, context.accumulate_dtype
    inner, states = heads * shape.head_dim, shape.num_groups * shape.state_dim
    tokens = (shape.seq_length, shape.batch_size)
    channels = context.randn(*tokens, inner + 2 * states)
    x, B, C = channels.split((inner, states, states), dim=-1)
    inputs = (
        x.unflatten(-1, (heads, shape.head_dim)),
        F.softplus(context.randn(*tokens, heads, dtype=wide) - 3.0),
        -context.randn(heads, dtype=wide).abs() - 1.0,
        B.unflatten(-1, (shape.num_groups, shape.state_dim)) / shape.state_dim**0.5,
        C.unflatten(-1, (shape.num_groups, shape.state_dim)),
        context.randn(heads, dtype=wide),
    )
    ways = context.implementations("selective scan", "chunk_scan", "chunk_scan_backward")
    operation = ("selective scan", "chunk_scan", chunk_scan)
    forward, backward = _forward_and_backward(context, operation, ways, shape, inputs, chunk_size=_SCAN_CHUNK)
    yield KernelCase(**forward)
    yield KernelCase(**backward, tolerance=_TOLERANCE)
    yield from _convolution(context, shape, channels)


def delta_cases(context: BenchContext, decoder_shape: MicroBatchShape, *, first: bool) -> Iterator[KernelCase]:
    """At one shape, its own, whatever those of the other operations are."""
    if first:
        yield from _delta_cases(context, DELTA_SHAPE, "gated delta rule", chunk_delta_rule)


def channel_delta_cases(context: BenchContext, decoder_shape: MicroBatchShape, *, first: bool) -> Iterator[KernelCase]:
    """With a decay of every key channel."""
    if first:
        yield from _delta_cases(context, CHANNEL_SHAPE, "gated delta rule by channel", chunk_channel_delta_rule)


def _delta_cases(context: BenchContext, shape: RecurrenceShape, name: str, plain: Any) -> Iterator[KernelCase]:
    shape = shape if context.device.type == "cuda" else SMALL_DELTA
    tokens, heads, wide = (shape.seq_length, shape.batch_size), shape.num_heads, context.accumulate_dtype
    keys, values = shape.num_groups * shape.state_dim, heads * shape.head_dim
    channels = () if plain is chunk_delta_rule else (shape.state_dim,)
    q, k, v = context.randn(*tokens, 2 * keys + values).split((keys, keys, values), dim=-1)
    inputs = (
        q.unflatten(-1, (-1, shape.state_dim)),
        k.unflatten(-1, (-1, shape.state_dim)),
        v.unflatten(-1, (-1, shape.head_dim)),
        -F.softplus(context.randn(*tokens, heads, *channels, dtype=wide) - 3.0),
        context.randn(*tokens, heads, dtype=wide).sigmoid(),
    )
    operation, ways = (name, "chunk_delta_rule", plain), context.implementations(name)
    forward, backward = _forward_and_backward(context, operation, ways, shape, inputs, chunk_size=_DELTA_CHUNK)
    yield KernelCase(**forward, flops=shape.delta_flops, tolerance=_TOLERANCE)
    yield KernelCase(**backward, flops=3 * shape.delta_flops, tolerance=_TOLERANCE)


def _forward_and_backward(
    context: BenchContext,
    operation: tuple[str, str, Any],
    ways: dict[str, Any],
    shape: RecurrenceShape,
    inputs: Sequence[Tensor],
    **options: Any,
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Returns what the two cases of a recurrence consist of. operation: its name, that of its function, and the reference."""
    name, function, plain = operation
    grad = context.randn(shape.seq_length, shape.batch_size, shape.num_heads, shape.head_dim)
    start = [tensor[:CHECKED_ROWS] if tensor.dim() > 1 else tensor for tensor in inputs]
    exact, start_grad = [tensor.double() for tensor in start], grad[:CHECKED_ROWS]
    moved, outer = sum(tensor.numel() * tensor.itemsize for tensor in inputs), grad.numel() * grad.itemsize
    shared = {"implementations": ways, "peers": peer_recurrences(name, context.peer_paths)}

    def forward(kernels: Any, inputs: Sequence[Tensor]) -> Any:
        return getattr(kernels, function)(*inputs, **options)

    def backward(kernels: Any, grad: Tensor, inputs: Sequence[Tensor]) -> Any:
        return getattr(kernels, f"{function}_backward")(grad, None, *inputs, **options)

    return {
        "label": f"{name}, {shape.name}",
        **shared,
        "call": lambda k: forward(k, inputs),
        "checked_call": lambda k: forward(k, start),
        "reference": lambda: forward(plain, exact),
        "moved_bytes": moved + outer,
    }, {
        "label": f"{name}, backward, {shape.name}",
        **shared,
        "call": lambda k: backward(k, grad, inputs),
        "checked_call": lambda k: backward(k, start_grad, start),
        "reference": lambda: backward(plain, start_grad.double(), exact),
        "moved_bytes": 2 * moved + outer,
    }


def _convolution(context: BenchContext, shape: RecurrenceShape, x: Tensor) -> Iterator[KernelCase]:
    weight, bias, grad = context.randn(x.shape[-1], _TAPS), context.randn(x.shape[-1]), context.randn(*x.shape)
    ways = context.implementations("causal convolution", "causal_conv", "causal_conv_backward")
    start, start_grad = (x[:CHECKED_ROWS], weight, bias), grad[:CHECKED_ROWS]
    exact = [tensor.double() for tensor in start]
    yield KernelCase(
        label=f"causal convolution, {shape.name}",
        implementations=ways,
        call=lambda k: k.causal_conv(x, weight, bias),
        checked_call=lambda k: [k.causal_conv(*start)],
        reference=lambda: [causal_conv.causal_conv(*exact)],
        moved_bytes=2 * x.numel() * x.itemsize,
    )
    yield KernelCase(
        label=f"causal convolution, backward, {shape.name}",
        implementations=ways,
        call=lambda k: k.causal_conv_backward(grad, x, weight, bias),
        checked_call=lambda k: k.causal_conv_backward(start_grad, *start),
        reference=lambda: causal_conv.causal_conv_backward(start_grad.double(), *exact),
        moved_bytes=3 * x.numel() * x.itemsize,
    )
