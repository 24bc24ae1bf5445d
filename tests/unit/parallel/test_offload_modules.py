"""Offload by module changes no bit, sends what the plan counts, no more and no less, and what it sends is free on the device."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch

from petatron.base.errors import ConfigError
from petatron.config import RunConfig
from petatron.config.schema.memory import MemoryConfig
from petatron.estimate.activation_bytes import region_bytes
from petatron.estimate.offload_plan import OffloadPlan, plan_offload
from petatron.kernels.registry import KernelContext
from petatron.layers.spec.activation_shape import ActivationShape
from petatron.models.decoder import Decoder
from petatron.models.registry import model_spec
from petatron.parallel import activation_offload
from petatron.parallel.activation_offload import HostLink, apply_activation_offload
from petatron.parallel.install_fp8_gemms import apply_fp8
from petatron.validate import load_config
from tests.longform import diagonal, later
from tests.unit.models.test_activations import (
    BASE,
    LLAMA,
    MLA,
    MODELS,
    RECOMPUTE,
    SOME_EXPERTS,
    batch_of,
    build,
    measured,
    recompute,
    run_of,
)
from tests.unit.parallel.test_offload import Bits, differing, train

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


@pytest.mark.parametrize(
    "flags",
    [
        "--position-embedding-type alibi --num-query-groups 2",
        "--no-rope-freq [0,1,0] --attention-temperature-scale 0.3",
    ],
)
def test_sent_bytes_of_attention_that_needs_positions(flags: str):
    run = run_of(f"{LLAMA} {flags}")
    for modules in (("qkv_linear",), ("core_attn",), ("core_attn", "attn_proj")):
        planned, sent, freed = sent_and_freed(run, by_module(modules))
        assert planned == freed and 0 <= sent - planned <= 3 * 8 * 16, modules


@diagonal(3)
@pytest.mark.parametrize(
    "kind", ["", "--add-bias-linear", "--moe-shared-expert-intermediate-size 40", "--moe-latent-size 8"]
)
@pytest.mark.parametrize("recomputed", ["nothing", "layernorm"])
def test_sent_bytes_of_mixtures_are_those_of_the_plan_and_what_routing_keeps(kind: str, recomputed: str):
    run = run_of(f"{SOME_EXPERTS} {kind} --moe-aux-loss-coeff 0.1")
    memory, left_out = RECOMPUTE[recomputed], {}
    for module in EXPERTS:
        planned, sent, freed = sent_and_freed(run, by_module((module,), memory))
        left_out[module] = sent - planned
        assert (sent > 0) == (planned > 0) and (module != "shared_experts" or (sent > 0) == ("shared" in kind))
        assert sent == freed or module == "moe", "routing itself holds what it keeps"
    tokens, choices = 16 * 2, 2
    assert 0 <= left_out.pop("moe") < 2 * (tokens * (2 * 40 + 4 * 24) + 4 * 32 * 8)
    assert 0 <= left_out.pop("moe_act") <= 2 * 4 * tokens * choices + 2 * 4 * 4, "the weight of each row"
    assert left_out.pop("expert_fc1") == (2 * 8 * tokens * choices if "bias" in kind else 0), (
        "the expert of each row, for its bias"
    )
    assert left_out == {"shared_experts": 0}


def test_sent_bytes_of_a_hybrid_are_those_of_the_plan():
    run = run_of(f"{BASE} {MAMBA} --hidden-dropout 0 --position-embedding-type none")
    for modules in (("mamba",), ("mamba", "core_attn"), ("attn_norm", "mlp_norm", "mlp")):
        planned, sent, freed = sent_and_freed(run, by_module(modules))
        assert planned == sent == freed > 0, modules


@pytest.mark.parametrize("recipe", ["tensorwise", later("rowwise"), later("delayed")])
def test_sent_bytes_in_fp8_are_those_of_the_plan(recipe: str):
    run = run_of(f"{LLAMA} --seq-length 64 --bf16 --fp8-format hybrid --fp8-recipe {recipe}")
    for modules in (("core_attn", "attn_proj"), ("mlp",), ("attn_norm", "mlp_norm")):
        planned, sent, freed = sent_and_freed(run, by_module(modules), dtype=torch.bfloat16)
        assert sent == freed and 0 <= sent - planned < 3 * 64, modules


@cache
def _kept(flags: str, recomputed: str = "nothing") -> Bits:
    run = run_of(flags)
    return train(offloading(run, RECOMPUTE[recomputed])[0], run)


BITS = {
    "llama": (f"{LLAMA} --num-query-groups 2 --qk-layernorm", DENSE),
    "gpt": (f"{BASE} --attention-dropout 0.2 --hidden-dropout 0.3", DENSE),
    "mla": (f"{LLAMA} {MLA} --q-lora-rank 12 --qk-layernorm", DENSE),
    "moe": (f"{SOME_EXPERTS} --moe-aux-loss-coeff 0.1 --moe-shared-expert-intermediate-size 40", (*DENSE, *EXPERTS)),
    "hybrid": (f"{BASE} {MAMBA} --position-embedding-type none", ("mamba", "core_attn", "mlp", "attn_norm")),
}


@diagonal(3)
@pytest.mark.parametrize("recomputed", ["nothing", "core_attn", "layernorm", "block-2"])
@pytest.mark.parametrize("kind", BITS)
def test_no_bit_changes(kind: str, recomputed: str):
    flags, modules = BITS[kind]
    run = run_of(flags)
    for asked in (modules, modules[2:4]):
        model, link, _ = offloading(run, by_module(asked, RECOMPUTE[recomputed]))
        assert differing(train(model, run), _kept(flags, recomputed)) == []
        assert link.offloaded_bytes > 0


def test_the_test_sees_a_module_that_comes_back_wrong(monkeypatch: pytest.MonkeyPatch):
    flags = BITS["llama"][0]
    model, link, _ = offloading(run_of(flags), by_module(("core_attn",)))
    monkeypatch.setattr(link.to_device, "copy", lambda target, source: target.zero_())
    assert differing(train(model, run_of(flags)), _kept(flags)) != []


def plan(flags: str, *, in_flight: int = 2, pipeline_rank: int = 0, num_local_stages: int = 1) -> OffloadPlan:
    run = run_of(f"{LLAMA} --fine-grained-activation-offloading --min-offloaded-tensor-size 0 {flags}")
    model, _ = build(run)
    spec, shape = model_spec(run), ActivationShape.from_config(run, device="cpu")
    recomputed = recompute(run, model, run.memory, build(run)[1], in_flight=in_flight)
    ranks = {"pipeline_rank": pipeline_rank, "num_local_stages": num_local_stages}
    return plan_offload(run.memory, shape, spec.stage_layers(model.stage), recomputed, **ranks)


def names(offload: OffloadPlan) -> list[str]:
    return [" ".join(sorted(modules)) for modules in offload.modules]


def test_the_first_share_of_the_modules_is_offloaded():
    modules = "--offload-modules core_attn mlp"
    assert names(plan(modules)) == ["core_attn mlp"] * 3
    assert names(plan(f"{modules} --activation-offload-fraction 0.5")) == ["core_attn mlp", "core_attn", ""]
    assert names(plan(f"{modules} --activation-offload-fraction 0.7")) == [
        "core_attn mlp",
        "core_attn mlp",
        "core_attn",
    ]
    assert (
        plan(f"{modules} --activation-offload-fraction 0").describe()
        == plan(f"{modules} --min-offloaded-tensor-size 9999999").describe()
    )
    assert (plan(f"{modules} --activation-offload-fraction 0").describe() or "").startswith(
        "offload: nothing: no layer has"
    )


def test_the_last_layer_of_one_micro_batch_stays():
    assert names(plan("--offload-modules mlp", in_flight=1)) == ["mlp", "mlp", ""]


def test_later_pipeline_ranks_keep_more():
    modules = "--pp 1 --offload-modules core_attn mlp"
    core = plan("--offload-modules core_attn").sizes[0]
    flags = f"{modules} --delta-offload-bytes-across-pp-ranks {2 * core}"  # of two micro-batches in flight
    assert names(plan(flags)) == ["core_attn mlp"] * 3
    assert names(plan(flags, pipeline_rank=1)) == ["mlp", "core_attn mlp", "core_attn mlp"]
    assert names(plan(flags, pipeline_rank=2)) == ["", "mlp", "core_attn mlp"]
    assert names(plan(flags, pipeline_rank=2, num_local_stages=2)) == ["mlp", "core_attn mlp", "core_attn mlp"]
    assert names(plan(flags, pipeline_rank=99)) == ["", "", ""]


def test_small_tensors_stay():
    run = run_of(LLAMA)
    largest = 2 * 16 * 2 * 48  # the output of gate and up
    model, link, offload = offloading(run, by_module(DENSE, min_offloaded_tensor_size=largest))
    train(model, run)
    assert names(offload) == ["core_attn mlp"] * 3  # a module is counted as a whole
    assert link.offloaded_bytes == 3 * 3 * largest * 4
    assert offloading(run, by_module(("mlp",), min_offloaded_tensor_size=largest + 1))[2].total_bytes == 0


@pytest.mark.parametrize(("number", "most"), [(None, 2), (0, 1), (1, 2), (3, 4)])
def test_copies_under_way_are_bounded(number: int | None, most: int, monkeypatch: pytest.MonkeyPatch):
    run, on_device, events = run_of(f"{LLAMA} --num-layers 6"), set[int](), list[int]()
    start, leave = activation_offload._OffloadGroup.__init__, activation_offload._OffloadGroup.free_device_memory

    def starting(self: Any, *args: Any) -> None:
        start(self, *args)
        on_device.add(id(self))

    def leaving(self: Any) -> None:
        events.append(len(on_device))
        leave(self)
        on_device.discard(id(self))

    monkeypatch.setattr(activation_offload._OffloadGroup, "__init__", starting)
    monkeypatch.setattr(activation_offload._OffloadGroup, "free_device_memory", leaving)
    memory = replace(by_module(("mlp",)), fine_grained_offloading_max_inflight_offloads=number)
    model, _, offload = offloading(run, memory)
    measured(model, batch_of(run))
    assert offload.layers_on_device == most
    assert max(events) <= most + 1 and len(events) == 6


def test_regions_of_a_layer_are_all_it_saves():
    """But the masks of dropout, and the inputs of branches that are no norm's output."""
    for kind in ("llama", "gpt", "mla", "clipped-gated"):
        run = run_of(MODELS[kind])
        shape = ActivationShape.from_config(run, device="cpu")
        (layer,) = {*model_spec(run).layers}
        saved = sum(branch.saved_bytes(shape, ()) for branch in layer.branches)
        norms = 2 * layer.norm.saved_bytes(shape, shape.tokens)
        assert sum(region_bytes(layer, shape).values()) == saved + norms


ON = "--fine-grained-activation-offloading"
SELECT = "--recompute-granularity selective --recompute-modules"
UNIFORM = "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1"


@pytest.mark.parametrize(
    ("flags", "messages"),
    [
        (f"{ON} --offload-modules attn_proj", ["--offload-modules attn_proj frees nothing by itself"]),
        (
            f"{ON} --offload-modules core_attn mlp --cpu-offloading-num-layers 2 --recompute-memory-budget-gb 1",
            ["offloads all that some layers save", "cannot be combined with --recompute-memory-budget-gb"],
        ),
        (
            f"{ON} --offload-modules core_attn mlp {SELECT} attention mlp --activation-offload-fraction 2",
            [
                "--offload-modules core_attn saves nothing that could be offloaded: --recompute-modules attention",
                "--offload-modules mlp saves nothing that could be offloaded: --recompute-modules mlp",
                "--activation-offload-fraction 2",
            ],
        ),
        (f"{ON} --offload-modules mlp {UNIFORM}", ["no module saves anything"]),
        (f"{ON} --offload-modules gdp_qkv", ["gated delta products"]),
        (f"{ON} --offload-modules weights", ["--offload-modules weights"]),
        (f"{ON} --offload-modules mlp --bf16 --cuda-graphs on", ["--fine-grained-activation-offloading"]),
        (
            f"{ON} --offload-modules mlp --num-experts 4 --ep 2 --moe-token-dispatcher-type alltoall --overlap-moe-expert-parallel-comm",
            ["cannot be combined with --fine-grained-activation-offloading, whose copies follow one pass"],
        ),
        (f"{ON} --offload-modules mlp --fine-grained-offloading-max-inflight-offloads -1", ["-1 is below 0"]),
    ],
)
def test_all_that_contradicts_is_told_at_once(flags: str, messages: Sequence[str]):
    with pytest.raises(ConfigError) as caught:
        run_of(f"{LLAMA} {flags}", world_size=2 if "--ep" in flags else 1)
    for message in messages:
        assert message in str(caught.value)
    assert len(caught.value.problems) == len(messages)


def test_attention_output_alone_may_leave_where_core_attention_is_recomputed():
    run = run_of(f"{LLAMA} {ON} --offload-modules attn_proj {SELECT} core_attn")
    assert run.memory.offload_modules == ("attn_proj",)


def test_core_attention_is_what_leaves_by_default():
    assert run_of(f"{LLAMA} {ON}").memory.offload_modules == ("core_attn",)


def test_experts_are_their_two_parts_and_modules_that_a_model_lacks_are_told():
    loaded = load_config(f"{SOME_EXPERTS} {ON} --offload-modules fused_group_mlp mamba".split())
    run = loaded.config
    assert run.memory.offload_modules == ("experts", "mamba")
    memory = replace(run.memory, min_offloaded_tensor_size=0)
    assert names(offloading(run, memory)[2]) == ["expert_fc1 moe_act", "", "expert_fc1 moe_act"]
    assert any("--offload-modules mamba has no effect" in notice for notice in loaded.notices), loaded.notices
