"""`KernelCase`, one operation that `petatron bench kernels` checks and times, and the shapes that the cases share."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from petatron.kernels.compute_dtype import compute_dtype
from petatron.kernels.registry import OPERATIONS, KernelContext, choose_kernel

Outputs = Sequence[Tensor | None]
EPSILON = 1e-5
CHECKED_ROWS = 256


@dataclass(frozen=True, slots=True)
class MicroBatchShape:
    """A micro-batch of a model."""

    name: str
    batch_size: int
    seq_length: int
    hidden_size: int
    ffn_hidden_size: int
    num_heads: int
    num_kv_heads: int
    vocab_size: int

    @property
    def num_tokens(self) -> int:
        return self.batch_size * self.seq_length


SHAPES = (
    MicroBatchShape("Llama-1B S4096 B8", 8, 4096, 2048, 8192, 32, 8, 128256),
    MicroBatchShape("Llama-8B S8192 B2", 2, 8192, 4096, 14336, 32, 8, 128256),
)
SMALL_SHAPES = (
    MicroBatchShape("small", 2, 16, 64, 96, 4, 2, 300),
    MicroBatchShape("smaller", 1, 32, 64, 64, 2, 1, 257),
)


@dataclass(frozen=True, slots=True)
class BenchContext:
    """Device and precision. `compile_references`: references under torch.compile are measured too."""

    device: torch.device
    dtype: torch.dtype
    kernel_context: KernelContext
    compile_references: bool
    peer_paths: Sequence[Path] = ()
    """Folders with the source of libraries whose kernels are measured too."""

    @classmethod
    def from_device(cls, device: torch.device, *, allow_compile: bool, peer_paths: Sequence[Path] = ()) -> BenchContext:
        dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
        situation = KernelContext.of(device, dtype, allow_compile=allow_compile)
        compile_references = allow_compile and device.type == "cuda" and situation.missing_tools is None
        return cls(device, dtype, situation, compile_references, peer_paths)

    @property
    def accumulate_dtype(self) -> torch.dtype:
        """The dtype of sums and weight gradients."""
        return compute_dtype(self.dtype)

    def randn(self, *size: int, dtype: torch.dtype | None = None, scale: float = 1.0) -> Tensor:
        made = torch.randn(size, device=self.device, dtype=dtype or self.dtype)
        return made if scale == 1.0 else made.mul_(scale)

    def implementations(self, operation: str, *compiled: str) -> dict[str, Any]:
        """Returns implementations by name, the selected one first; `compiled` names reference functions to compile."""
        choice, plain = choose_kernel(operation, self.kernel_context), OPERATIONS[operation][-1]
        ways = {choice.name: choice.functions}
        reference = ways.setdefault(plain.name, choice.functions if choice.name == plain.name else plain.load())
        if self.compile_references and compiled and "compiled" not in ways:
            options = {"fullgraph": True, "dynamic": False}
            functions = {name: torch.compile(getattr(reference, name), **options) for name in compiled}
            ways["compiled"] = SimpleNamespace(**functions)
        return ways


@dataclass(frozen=True, slots=True, kw_only=True)
class KernelCase:
    """One operation at one shape.

    implementations: what to time, the first being ours. call: runs one of them. reference: outputs in float64, or leading rows of them;
    None is not compared. checked_call: what to compare with it, where that is not what `call` returns.
    peers: implementations of other libraries, which are compared with the reference too.
    """

    label: str
    implementations: Mapping[str, Any]
    call: Callable[[Any], Any]
    reference: Callable[[], Outputs]
    checked_call: Callable[[Any], Outputs] | None = None
    peers: Mapping[str, Any] = field(default_factory=dict)
    moved_bytes: float = 0.0
    flops: float = 0.0
    tolerance: float | None = None
    """Largest relative error; None: that of the precision."""
