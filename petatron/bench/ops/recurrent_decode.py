"""Decode steps of recurrent layers that `petatron bench kernels` times: one token of each sequence into its state.

Bytes are the minimum: a state or window read and written once, inputs read and outputs written. A step takes other slots than the one
before it, so that no state is in a cache because it was just used.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import cycle
from typing import Any

import torch
from torch import Tensor

from petatron.bench.ops.kernel_case import BenchContext, KernelCase, MicroBatchShape, Outputs
from petatron.kernels.ssm.decode import conv_step, delta_step, scan_step
from petatron.kernels.ssm.decode.delta_step import DeltaGateInputs
from petatron.kernels.ssm.decode.scan_step import ScanParams

_TAPS = 4
_CACHE_BYTES = 2**28
"""States of as many bytes, at least, are taken in turn: more than any GPU's cache."""


@dataclass(frozen=True, slots=True)
class RecurrentDecodeShape:
    """Heads of a Mamba-2 layer with their groups and the width of a state, or of a gated delta net with key heads and their width."""

    name: str
    num_heads: int
    head_dim: int
    num_groups: int
    state_dim: int


MAMBA = RecurrentDecodeShape("Mamba-2 2.7B", 80, 64, 1, 128)
DELTA_NET = RecurrentDecodeShape("Qwen3-Next", 32, 128, 16, 128)
SMALL = RecurrentDecodeShape("small", 4, 8, 2, 16)
NUM_SEQUENCES, FEW_SEQUENCES = (64, 1), (3,)


def recurrent_decode_cases(
    context: BenchContext, decoder_shape: MicroBatchShape, *, first: bool
) -> Iterator[KernelCase]:
    """At shapes of its own, whatever those of the other operations are."""
    if not first:
        return
    large = context.device.type == "cuda"
    for count in NUM_SEQUENCES if large else FEW_SEQUENCES:
        yield _scan(context, MAMBA if large else SMALL, count)
        yield _delta(context, DELTA_NET if large else SMALL, count)
        yield _convolution(context, MAMBA if large else SMALL, count)


def _scan(context: BenchContext, shape: RecurrentDecodeShape, count: int) -> KernelCase:
    heads, width, groups, state_dim = shape.num_heads, shape.head_dim, shape.num_groups, shape.state_dim
    x, dt = context.randn(count, heads, width), context.randn(count, heads)
    B, C = (context.randn(count, groups, state_dim, scale=state_dim**-0.5) for _ in range(2))
    params = ScanParams(context.randn(heads), context.randn(heads) - 4.0, context.randn(heads))
    states = _States(context, (heads, width, state_dim), count, wide=True)
    return KernelCase(
        label=f"scan step, {shape.name}, {count} sequences",
        implementations=context.implementations("selective scan step"),
        call=lambda k: k.scan_step(x, dt, B, C, params, states=states.tensor, slots_B=next(states.slots)),
        checked_call=lambda k: states.check("states", k.scan_step, x, dt, B, C, params),
        reference=lambda: states.exact("states", scan_step.scan_step, x, dt, B, C, params),
        moved_bytes=states.moved_bytes + _bytes(x, x, dt, B, C),
    )


def _delta(context: BenchContext, shape: RecurrentDecodeShape, count: int) -> KernelCase:
    q, k = (context.randn(count, shape.num_groups, shape.state_dim) for _ in range(2))
    v, heads = context.randn(count, shape.num_heads, shape.head_dim), shape.num_heads
    gates = DeltaGateInputs(*(context.randn(*size) for size in ((count, heads), (count, heads), (heads,), (heads,))))
    states = _States(context, (heads, shape.state_dim, shape.head_dim), count, wide=True)
    return KernelCase(
        label=f"delta rule step, {shape.name}, {count} sequences",
        implementations=context.implementations("gated delta rule step"),
        call=lambda way: way.delta_step(q, k, v, gates, states=states.tensor, slots_B=next(states.slots)),
        checked_call=lambda way: states.check("states", way.delta_step, q, k, v, gates),
        reference=lambda: states.exact("states", delta_step.delta_step, q, k, v, gates),
        moved_bytes=states.moved_bytes + _bytes(q, k, v, v, gates.a, gates.b_BH),
    )


def _convolution(context: BenchContext, shape: RecurrentDecodeShape, count: int) -> KernelCase:
    channels = shape.num_heads * shape.head_dim + 2 * shape.num_groups * shape.state_dim
    x, weight, bias = context.randn(count, channels), context.randn(channels, _TAPS), context.randn(channels)
    windows = _States(context, (_TAPS - 1, channels), count, wide=False)
    return KernelCase(
        label=f"convolution step, {shape.name}, {count} sequences",
        implementations=context.implementations("causal convolution step"),
        call=lambda k: k.conv_step(x, weight, bias, windows=windows.tensor, slots_B=next(windows.slots)),
        checked_call=lambda k: windows.check("windows", k.conv_step, x, weight, bias),
        reference=lambda: windows.exact("windows", conv_step.conv_step, x, weight, bias),
        moved_bytes=windows.moved_bytes + _bytes(x, x, weight, bias),
    )


class _States:
    """States of many sequences, of which each step takes others; those of the first step are compared."""

    def __init__(self, context: BenchContext, shape: tuple[int, ...], count: int, *, wide: bool) -> None:
        dtype = context.accumulate_dtype if wide else context.dtype
        once = torch.Size(shape).numel() * dtype.itemsize * count
        rounds = -(-_CACHE_BYTES // once) if context.device.type == "cuda" else 2
        self.tensor = context.randn(rounds * count, *shape, dtype=dtype)
        self._first = self.tensor[:count].clone()
        self._all_of_first = torch.arange(count, device=context.device)
        self.slots = cycle(torch.randperm(rounds * count, device=context.device).split(count))
        self.moved_bytes = 2 * once

    def check(self, name: str, step: Any, *inputs: Any) -> Outputs:
        """Runs a step on a copy of some states; returns its outputs and the states after it."""
        return self._run(name, step, self._first.clone(), inputs)

    def exact(self, name: str, step: Any, *inputs: Any) -> Outputs:
        """Does so in float64."""
        return self._run(name, step, self._first.double(), _wide(inputs))

    def _run(self, name: str, step: Any, states: Tensor, inputs: tuple[Any, ...]) -> Outputs:
        return step(*inputs, **{name: states}, slots_B=self._all_of_first), states


def _wide(inputs: tuple[Any, ...]) -> tuple[Any, ...]:
    """Returns tensors, and those in named tuples, in float64."""
    return tuple(part.double() if isinstance(part, Tensor) else type(part)(*_wide(part)) for part in inputs)


def _bytes(*tensors: Tensor) -> int:
    return sum(tensor.numel() * tensor.itemsize for tensor in tensors)
