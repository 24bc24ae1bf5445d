"""Chooses the implementation of each operation, and records why not another.

Every operation has a reference in plain PyTorch, which runs anywhere and is the specification. Faster implementations have the same
functions: `triton` ones are written by hand where they beat the compiler (a backward that recomputes its forward's output, reductions
over rows and columns in one pass, in-place work), `compiled` ones are the reference under torch.compile. Compiled are functions of
tensors, not whole layers: between two of them are GEMMs, communication and weight gradients accumulated into their buffers, where a
compiler has nothing to fuse. So each function is one graph for all layers, without graph breaks, and every kind of parallelism and
recompute composes with it.

A table lists the implementations of each operation, the best first; the first supported one is used.
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
class KernelContext:
    """What the choice of an implementation depends on.

    allow_compile: torch.compile may be used. missing_tools: what just-in-time compilers lack on this machine; None: nothing.
    batch_invariant: the bits of a row must depend on that row alone (`kernels/batch_invariant`).
    """

    device: str
    capability: tuple[int, int]
    dtype: torch.dtype
    allow_compile: bool
    missing_tools: str | None
    batch_invariant: bool = False

    @classmethod
    def of(
        cls, device: torch.device, dtype: torch.dtype, *, allow_compile: bool, batch_invariant: bool = False
    ) -> KernelContext:
        cuda = device.type == "cuda"
        capability = torch.cuda.get_device_capability(device) if cuda else (0, 0)
        return cls(device.type, capability, dtype, allow_compile, _missing_tools(), batch_invariant)


def _missing_tools() -> str | None:
    if importlib.util.find_spec("triton") is None:
        return "triton is not installed"
    if not any(shutil.which(name) for name in ("cc", "gcc", "clang")):
        return "there is no C compiler, which triton needs to start kernels"
    return None


UnsupportedReason = Callable[[KernelContext], str | None]


@dataclass(frozen=True, slots=True)
class KernelImplementation:
    """An implementation: its name, how its functions are loaded, and what it lacks in a context (None: nothing)."""

    name: str
    load: Callable[[], Any]
    unsupported_reason: UnsupportedReason


@dataclass(frozen=True, slots=True)
class KernelChoice:
    """The implementation of an operation, and why each better one was rejected."""

    operation: str
    name: str
    functions: Any
    rejected: tuple[tuple[str, str], ...]

    def __str__(self) -> str:
        why = "".join(f"; not {name}: {reason}" for name, reason in self.rejected)
        return f"{self.operation}: {self.name}{why}"


def _always_supported(context: KernelContext) -> str | None:
    return None


def _on_gpus(unsupported_reason: UnsupportedReason) -> UnsupportedReason:
    """Returns what a just-in-time compiled implementation for GPUs lacks: its own reason comes before missing tools."""

    def reason(context: KernelContext) -> str | None:
        if context.device != "cuda":
            return "the device is no GPU"
        return unsupported_reason(context) or context.missing_tools

    return reason


@_on_gpus
def _triton_unsupported_reason(context: KernelContext) -> str | None:
    return "it computes in float32" if context.dtype == torch.float64 else None


@_on_gpus
def _compile_unsupported_reason(context: KernelContext) -> str | None:
    if context.dtype == torch.float64:
        return "float64 is for proofs, which take the reference"
    if context.batch_invariant:
        return "it compiles kernels by the number of rows"
    return None if context.allow_compile else "--no-compile"


@_on_gpus
def _fp8_unsupported_reason(context: KernelContext) -> str | None:
    if context.capability != (9, 0):
        return "the device is no Hopper GPU"
    return None if context.dtype == torch.bfloat16 else "its GEMMs return bfloat16"


def _bfloat16_unsupported_reason(context: KernelContext) -> str | None:
    if context.device != "cuda":
        return "the device is no GPU"
    return None if context.dtype == torch.bfloat16 else "it multiplies bfloat16"


def _mx_unsupported_reason(context: KernelContext) -> str | None:
    """Blackwell has tensor cores for blocks of 32. The GEMM is cuBLAS's and needs no compiler."""
    if context.device == "cuda" and context.capability < (10, 0):
        return "the device is no Blackwell GPU"
    return _bfloat16_unsupported_reason(context)


def _module(name: str, attribute: str | None = None) -> Callable[[], Any]:
    def load() -> Any:
        module = importlib.import_module(f"petatron.kernels.{name}")
        return module if attribute is None else getattr(module, attribute)

    return load


def _compiled_and_reference(module_name: str, *functions: str) -> tuple[KernelImplementation, KernelImplementation]:
    """Returns some functions of a module under torch.compile, and the module itself."""

    def load() -> Any:
        module = importlib.import_module(f"petatron.kernels.{module_name}")
        return SimpleNamespace(**{name: compiled(getattr(module, name)) for name in functions})

    return (
        KernelImplementation("compiled", load, _compile_unsupported_reason),
        KernelImplementation("reference", _module(module_name), _always_supported),
    )


def compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    """Wraps a function in torch.compile; falls back to the function itself at the compiler's recompile limit.

    The compiler logs it.
    """
    optimized = torch.compile(function, fullgraph=True)
    # Importing it takes a second: only when compiling.
    too_many = importlib.import_module("torch._dynamo.exc").FailOnRecompileLimitHit

    @wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        try:
            return optimized(*args, **kwargs)
        except too_many:
            return function(*args, **kwargs)

    return call


def _load_torch_fused_adam() -> Any:
    module = importlib.import_module("petatron.kernels.optimizer.adam")
    return SimpleNamespace(adamw=module.adamw_fused, sum_of_squares=module.sum_of_squares)


def _triton_and_reference(
    name: str,
    *,
    as_record: bool = False,
    unsupported_reason: UnsupportedReason = _triton_unsupported_reason,
    reference_name: str = "reference",
) -> tuple[KernelImplementation, KernelImplementation]:
    """Returns the Triton and the reference implementation: the modules of a name, or the records of their functions."""
    return (
        KernelImplementation("triton", _module(f"triton.{name}", "TRITON" if as_record else None), unsupported_reason),
        KernelImplementation(reference_name, _module(name, "REFERENCE" if as_record else None), _always_supported),
    )


def _triton(name: str, attribute: str | None = None) -> KernelImplementation:
    return KernelImplementation("triton", _module(f"triton.{name}", attribute), _triton_unsupported_reason)


def _invariant(name: str, attribute: str | None = None) -> KernelImplementation:
    return KernelImplementation("fixed order", _module(f"batch_invariant.{name}", attribute), _always_supported)


OPERATIONS: Mapping[str, tuple[KernelImplementation, ...]] = {
    "rms_norm": _triton_and_reference("norm"),
    "layer_norm": _compiled_and_reference("norm", "layer_norm", "layer_norm_backward"),
    "gated activation": _triton_and_reference("activation"),
    "gated activation variant": _compiled_and_reference("activation", "gated_activation", "gated_activation_backward"),
    "plain activation": _compiled_and_reference("activation", "activation", "activation_backward"),
    "rotary embedding": _triton_and_reference("rope"),
    "qk-norm and rotary embedding": _triton_and_reference("qk_norm_rope"),
    "softmax and loss": _triton_and_reference("fused_linear_cross_entropy", as_record=True),
    "sums of rows": _triton_and_reference("row_sums"),
    "embedding gradient": _triton_and_reference("embedding_grad"),
    "selective scan": _triton_and_reference("ssm.chunk_scan"),
    "gated delta rule": _triton_and_reference("ssm.chunk_delta_rule"),
    "gated delta rule by channel": _triton_and_reference("ssm.chunk_channel_delta_rule"),
    "norm, then gate": _compiled_and_reference("ssm.output_gate", "norm_then_gate", "norm_then_gate_backward"),
    "causal convolution": _triton_and_reference("ssm.causal_conv"),
    "selective scan step": _triton_and_reference("ssm.decode.scan_step"),
    "gated delta rule step": _triton_and_reference("ssm.decode.delta_step"),
    "causal convolution step": _triton_and_reference("ssm.decode.conv_step"),
    "gate, then norm": _compiled_and_reference(
        "ssm.output_gate",
        "gated_square_sums",
        "gate_then_norm",
        "gate_then_norm_backward_sums",
        "gate_then_norm_backward",
    ),
    "silu gate": _compiled_and_reference("ssm.output_gate", "silu_gate", "silu_gate_backward"),
    "adamw": (
        KernelImplementation("triton", _module("triton.optimizer.adam"), _triton_unsupported_reason),
        KernelImplementation("torch fused", _load_torch_fused_adam, _always_supported),
    ),
    "expert permutation": _triton_and_reference("moe.permute", as_record=True),
    "attention of key intervals": _triton_and_reference("attention.key_interval_attention"),
    "packed documents": _triton_and_reference("attention.gather_scatter_rows"),
    "heads of latent attention": _triton_and_reference("attention.latent_heads"),
    "paged attention": _triton_and_reference("attention.paged_attention"),
    "paged latent attention": _triton_and_reference("attention.paged_latent_attention"),
    "GEMM of few rows": _triton_and_reference("few_rows_gemm"),
    "most likely id": _triton_and_reference("logits_argmax"),
    "drawn id": _triton_and_reference("random_ids"),
    "FP8 casts and GEMMs": _triton_and_reference(
        "fp8.cast_and_gemm", as_record=True, unsupported_reason=_fp8_unsupported_reason, reference_name="emulation"
    ),
    "MXFP8 casts and GEMMs": (
        KernelImplementation("hardware", _module("fp8.mxfp8", "BLACKWELL"), _mx_unsupported_reason),
        KernelImplementation("emulation in bfloat16", _module("fp8.mxfp8", "BFLOAT16"), _bfloat16_unsupported_reason),
        KernelImplementation("emulation", _module("fp8.mxfp8", "REFERENCE"), _always_supported),
    ),
    "FP8 param gather": _triton_and_reference(
        "fp8.param_gather", as_record=True, unsupported_reason=_fp8_unsupported_reason
    ),
}


BATCH_INVARIANT: Mapping[str, tuple[KernelImplementation, ...]] = {
    "GEMM of rows": _triton_and_reference("batch_invariant.gemm"),
    "attention of rows": _triton_and_reference("batch_invariant.attention"),
    "rms_norm": (_triton("norm"), _invariant("norm")),
    "layer_norm": (_invariant("norm"),),
    "gated activation": (_triton("activation"), _invariant("activation")),
    "gated activation variant": (_invariant("activation"),),
    "plain activation": (_invariant("activation"),),
    "qk-norm and rotary embedding": (_triton("qk_norm_rope"), _invariant("qk_norm_rope")),
    "softmax and loss": _triton_and_reference("batch_invariant.cross_entropy", as_record=True),
    "expert permutation": (_triton("moe.permute", "TRITON"), _invariant("moe", "REFERENCE")),
}
"""What takes the place of `OPERATIONS` where the bits of a row must depend on that row alone, and two operations of its own. The others are
copies, elementwise, no function of rows, or of models that have no such functions (`parallel/install_batch_invariance.py`)."""


def choose_kernel(operation: str, context: KernelContext) -> KernelChoice:
    """Returns the first supported implementation."""
    rejected: list[tuple[str, str]] = []
    invariant = BATCH_INVARIANT.get(operation) if context.batch_invariant else None
    for kernel in invariant or OPERATIONS[operation]:
        reason = kernel.unsupported_reason(context)
        if reason is None:
            return KernelChoice(operation, kernel.name, kernel.load(), tuple(rejected))
        rejected.append((kernel.name, reason))
    raise AssertionError(f"{operation} has no implementation that runs everywhere")


def choose_all_kernels(context: KernelContext) -> list[KernelChoice]:
    """Returns the choice for every operation."""
    return [choose_kernel(operation, context) for operation in OPERATIONS]
