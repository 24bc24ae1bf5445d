"""The gated delta rule that `petatron bench kernels` times, with decays of heads and of channels, each at the shape of one model.

Bytes are the minimum: every input read once, every output written once. FLOPs are those of the chunked form's GEMMs, inside chunks of
64 tokens, in full, and through the states; backward has two for each of them, and recomputes them. On an H200 both take about as long.
What decays of channels need beyond these counts for nothing.
Gradients are compared with float64 on the first tokens by themselves, since those of a whole sequence depend on all that follow.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch.nn.functional as F

from petatron.bench.ops.cases import CHECKED_ROWS, BenchContext, KernelCase, MicroBatchShape
from petatron.bench.ops.peer_kernels import peer_kernels
from petatron.kernels.ssm import chunk_channel_delta_rule, chunk_delta_rule

_CHUNK_SIZE = 64
_TOLERANCE = 2e-2


@dataclass(frozen=True, slots=True)
class DeltaShape:
    """A micro-batch of a gated delta net."""

    name: str
    batch_size: int
    seq_length: int
    num_key_heads: int
    num_value_heads: int
    key_dim: int
    value_dim: int

    @property
    def flops(self) -> float:
        """Intra-chunk k k^T, q k^T, T rhs and A v_new; inter-chunk k S, q S and k^T v_new."""
        intra_chunk = 2 * _CHUNK_SIZE * 2 * (self.num_key_heads * self.key_dim + self.num_value_heads * self.value_dim)
        inter_chunk = 6 * self.num_value_heads * self.key_dim * self.value_dim
        return float(self.batch_size * self.seq_length * (intra_chunk + inter_chunk))


SHAPE = DeltaShape("Qwen3-Next S4096 B8", 8, 4096, 16, 32, 128, 128)
CHANNEL_SHAPE = DeltaShape("Kimi-Linear S4096 B2", 2, 4096, 32, 32, 128, 128)
SMALL_SHAPE = DeltaShape("small", 1, 18, 1, 2, 16, 16)


def delta_cases(context: BenchContext, decoder_shape: MicroBatchShape, *, first: bool) -> Iterator[KernelCase]:
    """At one shape, its own, whatever those of the other operations are."""
    if first:
        yield from _cases(context, SHAPE, "gated delta rule", chunk_delta_rule)


def channel_delta_cases(context: BenchContext, decoder_shape: MicroBatchShape, *, first: bool) -> Iterator[KernelCase]:
    """With a decay of every key channel."""
    if first:
        yield from _cases(context, CHANNEL_SHAPE, "gated delta rule by channel", chunk_channel_delta_rule)


def _cases(context: BenchContext, shape: DeltaShape, operation: str, plain: Any) -> Iterator[KernelCase]:
    shape = shape if context.device.type == "cuda" else SMALL_SHAPE
    tokens, keys = (shape.seq_length, shape.batch_size), shape.num_key_heads * shape.key_dim
    values, wide = shape.num_value_heads * shape.value_dim, context.accumulate_dtype
    channels = () if plain is chunk_delta_rule else (shape.key_dim,)
    q, k, v = context.randn(*tokens, 2 * keys + values).split((keys, keys, values), dim=-1)
    inputs = (
        q.unflatten(-1, (-1, shape.key_dim)),
        k.unflatten(-1, (-1, shape.key_dim)),
        v.unflatten(-1, (-1, shape.value_dim)),
        -F.softplus(context.randn(*tokens, shape.num_value_heads, *channels, dtype=wide) - 3.0),
        context.randn(*tokens, shape.num_value_heads, dtype=wide).sigmoid(),
    )
    grad = context.randn(*tokens, shape.num_value_heads, shape.value_dim)
    ways, peers = context.implementations(operation), peer_kernels(operation, context.peer_paths)
    start, start_grad = [tensor[:CHECKED_ROWS] for tensor in inputs], grad[:CHECKED_ROWS]
    exact = [tensor.double() for tensor in start]
    moved, outer = sum(tensor.numel() * tensor.itemsize for tensor in inputs), grad.numel() * grad.itemsize
    options = {"chunk_size": _CHUNK_SIZE}
    yield KernelCase(
        label=f"{operation}, {shape.name}",
        implementations=ways,
        peers=peers,
        call=lambda k: k.chunk_delta_rule(*inputs, **options),
        checked_call=lambda k: k.chunk_delta_rule(*start, **options),
        reference=lambda: plain.chunk_delta_rule(*exact, **options),
        moved_bytes=moved + outer,
        flops=shape.flops,
        tolerance=_TOLERANCE,
    )
    yield KernelCase(
        label=f"{operation}, backward, {shape.name}",
        implementations=ways,
        peers=peers,
        call=lambda k: k.chunk_delta_rule_backward(grad, None, *inputs, **options),
        checked_call=lambda k: k.chunk_delta_rule_backward(start_grad, None, *start, **options),
        reference=lambda: plain.chunk_delta_rule_backward(start_grad.double(), None, *exact, **options),
        moved_bytes=2 * moved + outer,
        flops=3 * shape.flops,
        tolerance=_TOLERANCE,
    )
