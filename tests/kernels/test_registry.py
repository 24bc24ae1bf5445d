"""Which implementation is taken where and why, and that all implementations of an operation can be called alike."""

from __future__ import annotations

import dataclasses
import importlib
import importlib.util
import inspect
import pkgutil
from collections.abc import Callable
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from torch._dynamo.exc import FailOnRecompileLimitHit

import petatron.kernels.triton
from petatron.kernels import registry
from petatron.kernels.fp8.cast_and_gemm import Fp8Kernels
from petatron.kernels.fp8.mxfp8 import MxKernels
from petatron.kernels.fp8.param_gather import Fp8ParamGatherKernels
from petatron.kernels.moe import permute
from petatron.kernels.registry import (
    BATCH_INVARIANT,
    OPERATIONS,
    KernelContext,
    choose_all_kernels,
    choose_kernel,
    compiled,
)
from petatron.layers.ssm.gated_delta_net import GatedDeltaNetSpec
from petatron.layers.ssm.kimi_delta_attention import KimiDeltaSpec
from petatron.mesh.mesh import ParallelMesh
from petatron.parallel.context.contiguous_part_exchange import AxisParts

CPU = KernelContext("cpu", (0, 0), torch.bfloat16, True, None)
HOPPER = KernelContext("cuda", (9, 0), torch.bfloat16, True, None)
AMPERE = dataclasses.replace(HOPPER, capability=(8, 0))
NO_GPU, NO_COMPILE, NO_TRITON = "the device is no GPU", "--no-compile", "triton is not installed"
COMPILED = (
    "layer_norm",
    "gated activation variant",
    "plain activation",
    "gate, then norm",
    "norm, then gate",
    "silu gate",
)
MX, IN_BFLOAT16, NO_BLACKWELL = "MXFP8 casts and GEMMs", "emulation in bfloat16", "the device is no Blackwell GPU"
PLAIN_NAMES = {"adamw": "torch fused", "FP8 casts and GEMMs": "emulation", MX: "emulation"}
"""What runs everywhere is called reference but for these."""
needs_triton = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="Triton is not installed")


def chosen(
    situation: KernelContext, monkeypatch: pytest.MonkeyPatch
) -> dict[str, tuple[str, tuple[tuple[str, str], ...]]]:
    """Names and reasons, without loading anything."""
    bare = {
        operation: tuple(dataclasses.replace(kernel, load=lambda: None) for kernel in kernels)
        for operation, kernels in OPERATIONS.items()
    }
    monkeypatch.setattr(registry, "OPERATIONS", bare)
    return {choice.operation: (choice.name, choice.rejected) for choice in choose_all_kernels(situation)}


def test_a_hopper_gpu_gets_the_best_of_everything(monkeypatch: pytest.MonkeyPatch):
    found = chosen(HOPPER, monkeypatch)
    assert found.pop(MX) == (IN_BFLOAT16, (("hardware", NO_BLACKWELL),))
    for operation, (name, passed_over) in found.items():
        assert name == ("compiled" if operation in COMPILED else "triton") == OPERATIONS[operation][0].name
        assert passed_over == ()


@pytest.mark.parametrize(
    ("situation", "reasons"),
    [
        (CPU, {}),
        (dataclasses.replace(HOPPER, missing_tools=NO_TRITON), dict.fromkeys(OPERATIONS, NO_TRITON)),
    ],
    ids=["cpu", "no triton"],
)
def test_what_runs_everywhere(situation: KernelContext, reasons: dict[str, str], monkeypatch: pytest.MonkeyPatch):
    found = chosen(situation, monkeypatch)
    found.pop(MX)
    for operation, (name, passed_over) in found.items():
        assert name == PLAIN_NAMES.get(operation, "reference") == OPERATIONS[operation][-1].name
        [better] = OPERATIONS[operation][:-1]
        assert passed_over == ((better.name, reasons.get(operation, NO_GPU)),)


def test_no_compile_leaves_the_handwritten_ones(monkeypatch: pytest.MonkeyPatch):
    found = chosen(dataclasses.replace(HOPPER, allow_compile=False), monkeypatch)
    assert found.pop(MX)[0] == IN_BFLOAT16
    for operation, (name, passed_over) in found.items():
        wanted = ("reference", (("compiled", NO_COMPILE),)) if operation in COMPILED else ("triton", ())
        assert (name, passed_over) == wanted


def test_float64_is_computed_in_float64(monkeypatch: pytest.MonkeyPatch):
    """Proofs run in it: everything is left to the references."""
    found = chosen(dataclasses.replace(HOPPER, dtype=torch.float64), monkeypatch)
    assert {operation for operation, (name, _) in found.items() if name in ("triton", "compiled")} == set()
    assert found["rms_norm"] == ("reference", (("triton", "it computes in float32"),))
    assert found["FP8 casts and GEMMs"] == ("emulation", (("triton", "its GEMMs return bfloat16"),))


@pytest.mark.parametrize(
    ("situation", "reason"),
    [
        (AMPERE, "the device is no Hopper GPU"),
        (dataclasses.replace(HOPPER, dtype=torch.float32), "its GEMMs return bfloat16"),
        (CPU, NO_GPU),
    ],
)
def test_eight_bits_need_a_device_that_has_them(situation: KernelContext, reason: str):
    choice = choose_kernel("FP8 casts and GEMMs", situation)
    assert str(choice) == f"FP8 casts and GEMMs: emulation; not triton: {reason}"


@pytest.mark.parametrize(
    ("situation", "name", "rejected"),
    [
        (dataclasses.replace(HOPPER, capability=(10, 0), missing_tools=NO_TRITON), "hardware", ()),
        (dataclasses.replace(HOPPER, capability=(12, 0)), "hardware", ()),
        (AMPERE, "emulation in bfloat16", (("hardware", "the device is no Blackwell GPU"),)),
        (CPU, "emulation", (("hardware", NO_GPU), ("emulation in bfloat16", NO_GPU))),
        (
            dataclasses.replace(HOPPER, capability=(10, 0), dtype=torch.float32),
            "emulation",
            (("hardware", "it multiplies bfloat16"), ("emulation in bfloat16", "it multiplies bfloat16")),
        ),
    ],
)
def test_blocks_of_32_need_blackwell_and_are_emulated_elsewhere(
    situation: KernelContext, name: str, rejected: tuple[tuple[str, str], ...]
):
    choice = choose_kernel(MX, situation)
    assert (choice.name, choice.rejected) == (name, rejected)


def test_a_choice_says_why():
    choice = choose_kernel("layer_norm", dataclasses.replace(HOPPER, allow_compile=False))
    assert str(choice) == "layer_norm: reference; not compiled: --no-compile"
    assert choice.functions is importlib.import_module("petatron.kernels.norm")


@pytest.mark.parametrize(
    ("programs", "there", "found"),
    [
        ((), False, NO_TRITON),
        ((), True, "there is no C compiler, which triton needs to start kernels"),
        (("clang",), True, None),
        (("gcc",), True, None),
    ],
)
def test_what_a_machine_lacks(
    programs: tuple[str, ...], there: bool, found: str | None, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(registry.importlib.util, "find_spec", lambda name: object() if there else None)
    monkeypatch.setattr(registry.shutil, "which", lambda name: f"/bin/{name}" if name in programs else None)
    situation = KernelContext.of(torch.device("cpu"), torch.float32, allow_compile=True)
    assert situation == KernelContext("cpu", (0, 0), torch.float32, True, found)


def parameters(function: Callable[..., Any]) -> list[tuple[str, Any, Any]]:
    """Names, kinds and defaults; a function under torch.compile has those of the one inside."""
    return [(p.name, p.kind, p.default) for p in inspect.signature(function).parameters.values()]


def functions(implementation: Any) -> dict[str, Callable[..., Any]]:
    """Of a module those it defines, of a record those it holds."""
    if isinstance(implementation, ModuleType):
        own = {name: getattr(implementation, name) for name in dir(implementation) if not name.startswith("_")}
        return {
            name: one
            for name, one in own.items()
            if inspect.isfunction(one) and one.__module__ == implementation.__name__
        }
    if isinstance(implementation, SimpleNamespace):
        return vars(implementation)
    return {field.name: getattr(implementation, field.name) for field in dataclasses.fields(implementation)}


CALLED: dict[str, set[str]] = {
    "rms_norm": {"rms_norm", "rms_norm_backward"},
    "layer_norm": {"layer_norm", "layer_norm_backward"},
    "gated activation": {"gated_activation", "gated_activation_backward"},
    "gated activation variant": {"gated_activation", "gated_activation_backward"},
    "plain activation": {"activation", "activation_backward"},
    "rotary embedding": {"split_qkv_rope", "split_qkv_rope_backward", "join_qkv_grads"},
    "qk-norm and rotary embedding": {"split_qkv_norm_rope", "split_qkv_norm_rope_backward"},
    "softmax and loss": {"statistics", "gradient_", "losses_and_gradient_"},
    "sums of rows": {"sum_rows"},
    "embedding gradient": {"embedding_grad"},
    "selective scan": {"chunk_scan", "chunk_scan_backward"},
    "causal convolution": {"causal_conv", "causal_conv_backward"},
    "gate, then norm": {
        "gated_square_sums",
        "gate_then_norm",
        "gate_then_norm_backward_sums",
        "gate_then_norm_backward",
    },
    "selective scan step": {"scan_step"},
    "gated delta rule step": {"delta_step"},
    "causal convolution step": {"conv_step"},
    "gated delta rule": {"chunk_delta_rule", "chunk_delta_rule_backward"},
    "gated delta rule by channel": {"chunk_delta_rule", "chunk_delta_rule_backward"},
    "silu gate": {"silu_gate", "silu_gate_backward"},
    "norm, then gate": {"norm_then_gate", "norm_then_gate_backward"},
    "adamw": {"adamw", "sum_of_squares"},
    "expert permutation": {field.name for field in dataclasses.fields(permute.MoEKernels)},
    "attention of key intervals": {"unsupported_tensors_reason", "forward", "backward"},
    "packed documents": {"gather_rows", "scatter_rows"},
    "heads of latent attention": {
        "interleaved_rope",
        "interleaved_rope_backward",
        "join_rope_key",
        "join_rope_key_backward",
    },
    "paged attention": {"store_key_value", "decode_attention", "store_and_decode"},
    "paged latent attention": {"store_latents", "decode_latents"},
    "GEMM of few rows": {"few_rows_gemm", "pack_fp8", "dequantize_weight"},
    "most likely id": {"most_likely"},
    "drawn id": {"draw_ids"},
    "FP8 casts and GEMMs": {field.name for field in dataclasses.fields(Fp8Kernels)},
    MX: {field.name for field in dataclasses.fields(MxKernels)},
    "FP8 param gather": {field.name for field in dataclasses.fields(Fp8ParamGatherKernels)},
}


@needs_triton
@pytest.mark.parametrize("operation", OPERATIONS)
def test_twins_are_called_alike(operation: str):
    """Every implementation has what layers call, and a twin nothing that its reference has not, in name and parameters."""
    *fast, plain = (kernel.load() for kernel in OPERATIONS[operation])
    assert functions(plain).keys() >= CALLED[operation]
    for twin in fast:
        made = functions(twin)
        assert made.keys() >= CALLED[operation]
        for name, function in made.items():
            assert parameters(function) == parameters(getattr(plain, name)), name


@needs_triton
@pytest.mark.parametrize("context_parallel", [False, True])
@pytest.mark.parametrize(
    ("kind", "expected"),
    [(GatedDeltaNetSpec, "triton.ssm.chunk_delta_rule"), (KimiDeltaSpec, "triton.ssm.chunk_channel_delta_rule")],
)
def test_decays_of_channels_never_reach_kernels_for_decays_of_heads(
    kind: type[GatedDeltaNetSpec], expected: str, context_parallel: bool
):
    sizes = {"num_key_heads": 2, "num_value_heads": 2, "key_head_dim": 4, "value_head_dim": 4, "conv_width": 4}
    spec = kind(hidden_size=8, **sizes, chunk_size=64, norm_eps=1e-6, std=0.02, out_std=0.02)
    rule = spec.build(0).delta
    if context_parallel:
        rule.parts = AxisParts(ParallelMesh.single(torch.device("cpu")).cp)
    [operation] = rule.kernel_slots().values()
    assert module_of(choose_kernel(operation, HOPPER).functions) == expected


def module_of(implementation: Any) -> str:
    """Where its functions are, within kernels/."""
    name = next(iter(functions(implementation).values())).__module__
    return name.removeprefix("petatron.kernels.")


@needs_triton
def test_every_module_with_kernels_is_in_use_and_named_as_its_plain_twin():
    folder = petatron.kernels.triton
    written = {m.name for m in pkgutil.walk_packages(folder.__path__, f"{folder.__name__}.") if not m.ispkg}
    used: set[str] = set()
    twins = [kernels for kernels in BATCH_INVARIANT.values() if kernels[-1].name == "reference"]
    for kernels in (*OPERATIONS.values(), *twins):
        *fast, plain = ((kernel.name, module_of(kernel.load())) for kernel in kernels)
        for module in (module for name, module in fast if name == "triton"):
            assert module == f"triton.{plain[1]}"
            used.add(f"petatron.kernels.{module}")
    steps = ["sequential_scan", "sequential_scan_coefficient_grads", "chunk_scan_grads"]
    steps += [f"scan_{part}" for part in ("tiles", "states", "outputs")]
    steps += [f"delta_rule.{part}" for part in ("tiles", "ut_transform", "states", "outputs")]
    steps += ["delta_rule.intra_chunk_grads", "delta_rule.input_grads"]
    steps += [f"delta_rule.channel_{part}" for part in ("decays", "intra_chunk", "grads")]
    steps += ["decode.step_tiles"]
    parts = {f"{folder.__name__}.ssm.{step}" for step in steps}
    parts |= {
        f"{folder.__name__}.{part}"
        for part in (
            "attention.split_kv",
            "attention.paged_prompt_chunks",
            "attention.key_interval_tiles",
            "attention.distance_bias_grad",
            "attention.key_interval_attention_grads",
            "fp8.cast_tiles",
        )
    }
    helpers = {f"{folder.__name__}.{each}" for each in ("amax", "pdl", "kernel_launch", "program_sums")}
    shared = helpers | parts  # what kernels of all operations use, and the steps of operations
    assert used == written - shared and shared < written


def test_what_the_compiler_gives_up_is_computed_all_the_same(monkeypatch: pytest.MonkeyPatch):
    def give_up(function: object, **options: object):
        assert options == {"fullgraph": True}

        def fail(*args: object):
            raise FailOnRecompileLimitHit("too many versions")

        return fail

    monkeypatch.setattr(torch, "compile", give_up)
    assert compiled(lambda x: x + 1)(2) == 3
