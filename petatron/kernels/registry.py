"""Which implementation of an operation is used where, and why not another.

Every operation has a reference in plain PyTorch, which runs anywhere and says what is meant. Faster twins have the same
functions: `triton` ones are written by hand where they beat the compiler (a backward pass that makes its forward's output
again, reductions over rows and columns in one pass, in-place work), `compiled` ones are the reference under torch.compile.
Compiled are functions of tensors, not whole layers: between two of them stand matrix products, communication and weight
gradients that go straight to their buffers, where a compiler has nothing to fuse. So each function is one graph for all
layers, without graph breaks, and every kind of parallelism and recompute composes with it.

A table lists the implementations of each operation, the best first; the first that lacks nothing is taken.
"""

from __future__ import annotations

import importlib
import importlib.util
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import wraps
from types import SimpleNamespace
from typing import Any

import torch


@dataclass(frozen=True, slots=True)
class Situation:
    """What the choice of an implementation depends on.

    compiles: torch.compile may be used. tools: what just-in-time compilers need and this machine lacks; None: nothing.
    """

    device: str
    capability: tuple[int, int]
    dtype: torch.dtype
    compiles: bool
    tools: str | None

    @classmethod
    def of(cls, device: torch.device, dtype: torch.dtype, *, compiles: bool) -> Situation:
        cuda = device.type == "cuda"
        capability = torch.cuda.get_device_capability(device) if cuda else (0, 0)
        return cls(device.type, capability, dtype, compiles, _missing_tools())


def _missing_tools() -> str | None:
    if importlib.util.find_spec("triton") is None:
        return "triton is not installed"
    if not any(shutil.which(name) for name in ("cc", "gcc", "clang")):
        return "there is no C compiler, which triton needs to start kernels"
    return None


Lacks = Callable[[Situation], str | None]


@dataclass(frozen=True, slots=True)
class Kernel:
    """An implementation: its name, where its functions are, and what a situation lacks for it (None: nothing)."""

    name: str
    load: Callable[[], Any]
    lacks: Lacks


@dataclass(frozen=True, slots=True)
class Choice:
    """What is used for an operation, and why each better one is not."""

    operation: str
    name: str
    functions: Any
    passed_over: tuple[tuple[str, str], ...]

    def __str__(self) -> str:
        why = "".join(f"; not {name}: {reason}" for name, reason in self.passed_over)
        return f"{self.operation}: {self.name}{why}"


def _anywhere(situation: Situation) -> str | None:
    return None


def _triton(situation: Situation) -> str | None:
    if situation.device != "cuda":
        return "the device is no GPU"
    if situation.dtype == torch.float64:
        return "it computes in float32"
    return situation.tools


def _compiles(situation: Situation) -> str | None:
    if situation.device != "cuda":
        return "the device is no GPU"
    if situation.dtype == torch.float64:
        return "float64 is for proofs, which take the reference"
    return situation.tools if situation.compiles else "--no-compile"


def _eight_bits(situation: Situation) -> str | None:
    if situation.device != "cuda":
        return "the device is no GPU"
    if situation.capability != (9, 0):
        return "the device is no Hopper GPU"
    if situation.dtype != torch.bfloat16:
        return "its products give bfloat16"
    return situation.tools


def _module(name: str, attribute: str | None = None) -> Callable[[], Any]:
    def load() -> Any:
        module = importlib.import_module(f"petatron.kernels.{name}")
        return module if attribute is None else getattr(module, attribute)

    return load


def _compiled(name: str, *functions: str) -> Kernel:
    def load() -> Any:
        module = importlib.import_module(f"petatron.kernels.{name}")
        return SimpleNamespace(**{each: compiled(getattr(module, each)) for each in functions})

    return Kernel("compiled", load, _compiles)


def compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    """A function under torch.compile; itself, once it has been called in more ways than the compiler makes versions of.

    The compiler says so in the log.
    """
    fast = torch.compile(function, fullgraph=True)
    too_many = importlib.import_module(
        "torch._dynamo.exc"
    ).FailOnRecompileLimitHit  # a second's import, for those who compile

    @wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        try:
            return fast(*args, **kwargs)
        except too_many:
            return function(*args, **kwargs)

    return call


def _adam_of_torch() -> Any:
    module = importlib.import_module("petatron.kernels.optimizer.adam")
    return SimpleNamespace(adamw=module.adamw_fused, sum_of_squares=module.sum_of_squares)


def _twins(
    name: str, *, records: bool = False, lacks: Lacks = _triton, plain: str = "reference"
) -> tuple[Kernel, Kernel]:
    """The modules of a name, or the records that they have of their functions."""
    return (
        Kernel("triton", _module(f"triton.{name}", "TRITON" if records else None), lacks),
        Kernel(plain, _module(name, "REFERENCE" if records else None), _anywhere),
    )


OPERATIONS: Mapping[str, tuple[Kernel, ...]] = {
    "rms_norm": _twins("norm"),
    "layer_norm": (
        _compiled("norm", "layer_norm", "layer_norm_backward"),
        Kernel("reference", _module("norm"), _anywhere),
    ),
    "gated activation": _twins("activation"),
    "plain activation": (
        _compiled("activation", "plain", "plain_backward"),
        Kernel("reference", _module("activation"), _anywhere),
    ),
    "rotary embedding": _twins("rope"),
    "normed rotary embedding": _twins("qk_norm_rope"),
    "softmax and loss": _twins("linear_cross_entropy", records=True),
    "embedding gradient": _twins("embedding_grad"),
    "adamw": (
        Kernel("triton", _module("triton.optimizer.adam"), _triton),
        Kernel("torch fused", _adam_of_torch, _anywhere),
    ),
    "expert rows": _twins("moe.permute", records=True),
    "packed rows": _twins("attention.rows"),
    "fp8": _twins("fp8.cast_and_gemm", records=True, lacks=_eight_bits, plain="emulation"),
    "weights to eight bits": _twins("fp8.gather_cast", records=True, lacks=_eight_bits),
}


def choose(operation: str, situation: Situation) -> Choice:
    """The first implementation that lacks nothing."""
    passed_over: list[tuple[str, str]] = []
    for kernel in OPERATIONS[operation]:
        reason = kernel.lacks(situation)
        if reason is None:
            return Choice(operation, kernel.name, kernel.load(), tuple(passed_over))
        passed_over.append((kernel.name, reason))
    raise AssertionError(f"{operation} has no implementation that runs everywhere")


def survey(situation: Situation) -> list[Choice]:
    """What would be used for every operation."""
    return [choose(operation, situation) for operation in OPERATIONS]
