"""Offload by module changes no bit, sends what the plan counts, no more and no less, and what it sends is free on the device."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch

from petatron.config import RunConfig
from petatron.config.schema.parallel import MemoryConfig
from petatron.estimate.offload_plan import OffloadPlan, plan_offload
from petatron.kernels.registry import KernelContext
from petatron.layers.spec.activation_shape import ActivationShape
from petatron.models.decoder import Decoder
from petatron.models.registry import model_spec
from petatron.parallel.activation_offload import HostLink, apply_activation_offload
from petatron.parallel.install_fp8_gemms import apply_fp8
from tests.longform import later
from tests.unit.models.test_activations import (
    MODELS,
    RECOMPUTE,
    batch_of,
    build,
    measured,
    recompute,
    run_of,
)

DENSE = ("attn_norm", "qkv_linear", "core_attn", "attn_proj", "mlp_norm", "mlp")
EXPERTS = ("moe", "expert_fc1", "moe_act", "shared_experts")
MAMBA = "--hybrid-layer-pattern M*- --mamba-head-dim 8 --mamba-state-dim 8 --mamba-num-groups 2"
NOTHING = MemoryConfig()


def by_module(modules: Sequence[str], memory: MemoryConfig = NOTHING, **settings: float) -> MemoryConfig:
    settings = {"min_offloaded_tensor_size": 0} | settings
    return replace(memory, fine_grained_activation_offloading=True, offload_modules=tuple(modules), **settings)


def offloading(
    run: RunConfig, memory: MemoryConfig, *, in_flight: int = 2, dtype: torch.dtype = torch.float32
) -> tuple[Decoder, HostLink, OffloadPlan]:
    model, streams = build(run, dtype=dtype)
    if run.precision.fp8_format is not None:
        kernels = KernelContext.of(torch.device("cpu"), dtype, allow_compile=False)
        apply_fp8([model], run.precision, kernels, num_layers=run.model.num_layers, cache_weights=False)
    link, spec = HostLink(torch.device("cpu")), model_spec(run)
    plan = recompute(run, model, memory, streams, in_flight=in_flight)
    shape = ActivationShape.from_config(run, device="cpu")
    offload = plan_offload(memory, shape, spec.stage_layers(model.stage), plan)
    apply_activation_offload(model, offload, link)
    return model, link, offload


def sent_and_freed(run: RunConfig, memory: MemoryConfig, **options: torch.dtype) -> tuple[int, int, int]:
    """Bytes that the plan counts, that leave in one micro-batch, and by which the device has less."""
    kept: list[int] = []
    for each in (replace(memory, fine_grained_activation_offloading=False), memory):
        model, link, plan = offloading(run, each, **options)
        batch = batch_of(run)
        measured(model, batch)  # afterwards there are buffers for all
        link.offloaded_bytes = 0
        kept.append(measured(model, batch, known=link.buffers.slabs))
    return plan.total_bytes, link.offloaded_bytes, kept[0] - kept[1]


@pytest.mark.parametrize(
    ("kind", "memories"),
    [
        ("llama", ("nothing", "core_attn", "attention", "mlp", "block-2")),
        ("gpt", ("nothing", "core_attn")),
        ("mla", ("nothing", "core_attn")),
        ("qwen3", ("nothing",)),
        *(
            later(kind, ("nothing", "core_attn", "mlp"))
            for kind in MODELS
            if kind not in ("llama", "gpt", "mla", "qwen3")
        ),
    ],
)
def test_sent_bytes_are_those_of_the_plan(kind: str, memories: Sequence[str]):
    run = run_of(MODELS[kind])
    for name in memories:
        recomputed = RECOMPUTE[name]
        single = [(module,) for module in DENSE if module != "attn_proj" or name == "core_attn"]
        for modules in (*single, ("core_attn", "attn_proj"), DENSE):
            planned, sent, freed = sent_and_freed(run, by_module(modules, recomputed))
            assert (planned, planned) == (sent, freed), (name, modules)
