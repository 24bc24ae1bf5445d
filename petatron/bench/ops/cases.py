"""What `petatron bench kernels` measures an operation with: shapes of two models, a place, and a case to be checked and timed."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from petatron.kernels.compute_dtype import wide_dtype
from petatron.kernels.registry import OPERATIONS, Situation, choose

Outputs = Sequence[Tensor | None]
EPSILON = 1e-5
CHECKED_ROWS = 256


@dataclass(frozen=True, slots=True)
class Shape:
    """A micro-batch of a model."""

    name: str
    batch: int
    sequence: int
    hidden: int
    inner: int
    heads: int
    groups: int
    vocabulary: int

    @property
    def rows(self) -> int:
        return self.batch * self.sequence


SHAPES = (
    Shape("Llama-1B S4096 B8", 8, 4096, 2048, 8192, 32, 8, 128256),
    Shape("Llama-8B S8192 B2", 2, 8192, 4096, 14336, 32, 8, 128256),
)
SMALL_SHAPES = (Shape("small", 2, 16, 64, 96, 4, 2, 300), Shape("smaller", 1, 32, 64, 64, 2, 1, 257))


@dataclass(frozen=True, slots=True)
class Place:
    """Where it is measured and in which precision. `compiles`: references under torch.compile are measured too."""

    device: torch.device
    dtype: torch.dtype
    situation: Situation
    compiles: bool

    @classmethod
    def of(cls, device: torch.device, *, compiles: bool) -> Place:
        dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
        situation = Situation.of(device, dtype, compiles=compiles)
        return cls(device, dtype, situation, compiles and device.type == "cuda" and situation.tools is None)

    @property
    def wide(self) -> torch.dtype:
        """What sums and gradients of weights are kept in."""
        return wide_dtype(self.dtype)

    def random(self, *size: int, dtype: torch.dtype | None = None, scale: float = 1.0) -> Tensor:
        made = torch.randn(size, device=self.device, dtype=dtype or self.dtype)
        return made if scale == 1.0 else made.mul_(scale)

    def ways(self, operation: str, *compiled: str) -> dict[str, Any]:
        """Implementations by name, the chosen one first; functions to be compiled are those of the reference."""
        choice, plain = choose(operation, self.situation), OPERATIONS[operation][-1]
        ways = {choice.name: choice.functions}
        reference = ways.setdefault(plain.name, choice.functions if choice.name == plain.name else plain.load())
        if self.compiles and compiled and "compiled" not in ways:
            each = {name: torch.compile(getattr(reference, name), fullgraph=True, dynamic=False) for name in compiled}
            ways["compiled"] = SimpleNamespace(**each)
        return ways


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One operation at one shape.

    ways: what to time, the first being ours. call: run one of them. true: outputs in float64, or leading rows of them; what
    is None is not compared. once: what to compare with it, where that is not what `call` returns.
    """

    label: str
    ways: Mapping[str, Any]
    call: Callable[[Any], Any]
    true: Callable[[], Outputs]
    once: Callable[[Any], Outputs] | None = None
    bytes: float = 0.0
    flops: float = 0.0
    bound: float | None = None
    """Largest relative error; None: that of the precision."""
