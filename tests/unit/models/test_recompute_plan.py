"""Which modules of which layers are recomputed: as asked, or as a memory budget needs."""

from __future__ import annotations

import itertools
import re
from functools import cache
from typing import Literal

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from petatron.base.errors import ConfigError
from petatron.base.text import gigabytes
from petatron.config import load_config
from petatron.config.pipeline_stages import PipelineStage
from petatron.config.schema.parallel import MemoryConfig
from petatron.estimate.activation_bytes import FULL, ActivationShape, layer_bytes
from petatron.estimate.recompute_plan import (
    DENSE_MODULES,
    MOE_MODULES,
    RecomputePlan,
    effective_modules,
    plan_recompute,
    recompute_flops,
)
from petatron.parallel.recompute import apply_recompute
from tests.unit.models.test_activations import LLAMA, batch_of, build, measured, run_of

STAGE = PipelineStage(tuple(range(6)), has_embedding=False, has_loss=False)


@cache
def shape_of(preset: str, flags: str = "") -> ActivationShape:
    argv = f"--mock-data --train-iters 1 --lr 1e-3 --micro-batch-size 1 --bf16 {flags}".split()
    return ActivationShape.from_config(load_config(argv, preset=preset, world_size=8).config, device="cuda")


SHAPES = {
    "llama": lambda: shape_of("llama3-8b", "--tp 2 --sequence-parallel"),
    "gpt": lambda: shape_of("gpt3-1.3b"),
    "mixtral": lambda: shape_of("mixtral-8x7b", "--ep 8 --moe-token-dispatcher-type alltoall"),
    "every-other": lambda: shape_of(
        "mixtral-8x7b", "--ep 8 --moe-layer-freq 2 --moe-shared-expert-intermediate-size 4096"
    ),
}


def fit(shape: ActivationShape, budget_bytes: float, **options: int) -> RecomputePlan:
    return plan_recompute(MemoryConfig(recompute_memory_budget_gb=budget_bytes / 1e9), shape, STAGE, **options)


def flops(shape: ActivationShape, plan: RecomputePlan) -> float:
    return sum(
        recompute_flops(shape, modules, is_moe=kind) for modules, kind in zip(plan.modules, shape.moe_layer_mask)
    )


def test_full_recompute_in_groups():
    shape = SHAPES["llama"]()

    def groups(method: Literal["uniform", "block"], number: int) -> tuple[tuple[int, bool], ...]:
        memory = MemoryConfig(recompute_granularity="full", recompute_method=method, recompute_num_layers=number)
        return plan_recompute(memory, shape, STAGE).groups

    assert groups("uniform", 1) == ((1, True),) * 6
    assert groups("uniform", 4) == ((4, True), (2, True))
    assert groups("uniform", 9) == ((6, True),)
    assert groups("block", 2) == ((1, True), (1, True), *((1, False),) * 4)
    assert groups("block", 9) == ((1, True),) * 6


def test_modules_that_a_layer_has():
    shape = SHAPES["every-other"]()
    asked = ("core_attn", "mlp", "moe_act", "layernorm")
    plan = plan_recompute(MemoryConfig(recompute_granularity="selective", recompute_modules=asked), shape, STAGE)
    assert plan.modules[:2] == (frozenset({"core_attn", "layernorm"}), frozenset({"core_attn", "mlp"}))
    assert plan.groups == ((1, False),) * 6
    assert effective_modules(shape, ("attention", "core_attn"), is_moe=False) == {"attention"}
    assert effective_modules(shape, ("moe", "moe_act", "shared_experts", "mlp"), is_moe=True) == {"moe"}
    assert effective_modules(shape, ("moe", FULL), is_moe=True) == {FULL}


def test_norms_are_recomputed_only_where_it_frees_something():
    for kind in ("llama", "gpt"):
        assert effective_modules(SHAPES[kind](), ("layernorm", "mlp"), is_moe=False) == {"mlp"}
    experts = SHAPES["mixtral"]()
    assert effective_modules(experts, ("layernorm", "attention"), is_moe=True) == {"layernorm", "attention"}
    assert effective_modules(experts, ("layernorm", "moe"), is_moe=True) == {"moe"}
    wide = shape_of("mixtral-8x7b", "--ep 8 --moe-router-dtype fp32")
    assert effective_modules(wide, ("layernorm",), is_moe=True) == frozenset()


@pytest.mark.parametrize("precision", ["", "--bf16", "--fp64"])
@pytest.mark.parametrize(
    "flags",
    [
        "",
        "--tp 2",
        "--tp 2 --sequence-parallel",
        "--num-experts 4",
        "--num-experts 4 --moe-router-dtype fp32",
        "--num-experts 4 --moe-router-dtype fp64",
        "--num-experts 4 --moe-input-jitter-eps 0.1",
        "--num-experts 4 --tp 2 --sequence-parallel --moe-router-dtype fp64",
        "--fp8-format hybrid --fp8-recipe tensorwise --tp 2 --sequence-parallel",
    ],
)
def test_people_are_told_of_norms_that_free_nothing(flags: str, precision: str):
    if "fp8" in flags and precision == "--fp64":
        pytest.skip("eight bits are not for fp64")
    asked = f"{LLAMA} --recompute-granularity selective --recompute-modules layernorm {flags} {precision}"
    loaded = load_config(asked.split(), world_size=2)
    shape = ActivationShape.from_config(loaded.config, device="cpu")
    freed = any(effective_modules(shape, ("layernorm",), is_moe=kind) for kind in shape.moe_layer_mask)
    assert any("layernorm has no effect" in notice for notice in loaded.notices) != freed


@pytest.mark.parametrize(("modules", "norms"), [((), 0), (("mlp",), 1), (("attention", "mlp"), 2)])
def test_a_norm_costs_what_is_made_again(modules: tuple[str, ...], norms: int):
    """Beside the products: one for a branch that is recomputed."""
    shape = shape_of("llama3-8b", "--tp 2 --sequence-parallel --seq-length 128")
    price = recompute_flops(shape, frozenset(modules))
    products = 0.0
    if "mlp" in modules:
        products += 2.0 * 128 * 4096 * 14336 + 12 * 128 * 14336 / 2
    if "attention" in modules:
        products += 2.0 * 128 * 4096 * (4096 + 2 * 1024) / 2 + 2.0 * 128 * 128 * 4096 / 2
    assert price - products == norms * 12 * 64 * 4096


@pytest.mark.parametrize("kind", SHAPES)
def test_more_recompute_never_keeps_more(kind: str):
    shape = SHAPES[kind]()
    for mixed in set(shape.moe_layer_mask):
        names = MOE_MODULES if mixed else DENSE_MODULES
        for chosen in itertools.chain.from_iterable(itertools.combinations(names, n) for n in range(len(names) + 1)):
            kept = layer_bytes(shape, effective_modules(shape, chosen, is_moe=mixed), is_moe=mixed)
            for name in (*names, FULL):
                following = effective_modules(shape, (*chosen, name), is_moe=mixed)
                assert layer_bytes(shape, following, is_moe=mixed) <= kept, (chosen, name)
                assert recompute_flops(shape, following, is_moe=mixed) >= 0


@settings(max_examples=60, deadline=None)
@given(
    kind=st.sampled_from(sorted(SHAPES)),
    share=st.floats(0.0, 1.2),
    in_flight=st.integers(1, 16),
    num_local_stages=st.integers(1, 3),
)
def test_a_budget_is_kept_and_nothing_is_recomputed_in_vain(
    kind: str, share: float, in_flight: int, num_local_stages: int
):
    shape = SHAPES[kind]()
    most = plan_recompute(MemoryConfig(), shape, STAGE, in_flight=in_flight)
    least = plan_recompute(
        MemoryConfig(recompute_granularity="full", recompute_method="uniform", recompute_num_layers=1),
        shape,
        STAGE,
        in_flight=in_flight,
    )
    budget = least.peak_bytes + share * (most.peak_bytes - least.peak_bytes) + 1
    plan = fit(shape, budget * num_local_stages, in_flight=in_flight, num_local_stages=num_local_stages)
    assert plan.peak_bytes <= budget
    assert plan.peak_bytes >= in_flight * plan.saved_bytes
    assert flops(shape, plan) <= flops(shape, least) * 1.001
    if share >= 1.0:
        assert plan == most
    for at, modules in enumerate(plan.modules):
        for name in modules:
            fewer = [set(other) - ({name} if index == at else set()) for index, other in enumerate(plan.modules)]
            assert _peak(shape, fewer, in_flight) > budget * 0.999_999, (at, name, plan)


def _peak(shape: ActivationShape, chosen: list[set[str]], in_flight: int) -> int:
    """Written down once more: all that is kept, and the most that one layer makes again."""
    from_none = [layer_bytes(shape, (), is_moe=kind) for kind in shape.moe_layer_mask]
    if shape.sequence_parallel:
        gathered = shape.batch * shape.sequence * shape.model.hidden_size * shape.element_bytes
        made = [gathered * sum(name in modules for name in ("attention", "mlp", FULL, FULL)) for modules in chosen]
    else:
        made = [0] * len(chosen)
    kept = [layer_bytes(shape, modules, is_moe=kind) for modules, kind in zip(chosen, shape.moe_layer_mask)]
    ends = plan_recompute(MemoryConfig(), shape, STAGE).saved_bytes - sum(from_none[: len(chosen)])
    return in_flight * (sum(kept) + ends) + max(none - now + more for none, now, more in zip(from_none, kept, made))


@pytest.mark.parametrize("kind", ["llama", "gpt", "mixtral"])
def test_cheap_ones_come_first(kind: str):
    shape = SHAPES[kind]()
    top = plan_recompute(MemoryConfig(), shape, STAGE, in_flight=4).peak_bytes
    plans = [fit(shape, top * share, in_flight=4) for share in (0.98, 0.7, 0.4, 0.15)]
    counts = [
        {name: sum(name in modules for modules in plan.modules) for name in (*MOE_MODULES, "mlp", FULL)}
        for plan in plans
    ]
    branches = ("attention", "moe" if kind == "mixtral" else "mlp")
    cheapest = ("layernorm",) if kind == "mixtral" else branches
    assert 0 < sum(counts[0].values()) == sum(counts[0][name] for name in cheapest), "what a norm makes is next to free"
    assert not any(count["core_attn"] for count in counts), "fused attention keeps nothing worth it"
    assert any(counts[1][name] for name in (*branches, FULL)) and counts[1][FULL] < 3 < counts[3][FULL]
    assert kind == "mixtral" or not counts[1][FULL], "a whole layer comes late, unless its experts' outputs are kept"
    prices = [flops(shape, plan) for plan in plans]
    assert prices == sorted(prices)


def test_a_budget_that_nothing_can_keep():
    shape = SHAPES["llama"]()
    with pytest.raises(ConfigError) as caught:
        fit(shape, 1e9, in_flight=8, num_local_stages=2)
    text = str(caught.value)
    found = re.search(r"budget-gb 1 is too small: 8 micro-batches at a time in each of 2 stages need ([\d.]+) GB", text)
    assert found and f"Give at least {found.group(1)}" in text
    plan = fit(shape, float(found.group(1)) * 1e9, in_flight=8, num_local_stages=2)
    assert all(modules == {FULL} for modules in plan.modules)


def test_the_line_for_people():
    shape = SHAPES["llama"]()
    memory = MemoryConfig(recompute_granularity="full", recompute_method="block", recompute_num_layers=2)
    assert plan_recompute(MemoryConfig(), shape, STAGE).describe().startswith("recompute: nothing (")
    line = plan_recompute(memory, shape, STAGE, in_flight=3).describe()
    assert re.fullmatch(
        r"recompute: 2 of 6 layers whole \([\d.]+ GB kept per micro-batch, [\d.]+ GB for 3 at a time\)", line
    )
    memory = MemoryConfig(recompute_granularity="full", recompute_method="uniform", recompute_num_layers=3)
    assert "all 6 layers whole, 3 together" in plan_recompute(memory, shape, STAGE).describe()
    memory = MemoryConfig(recompute_granularity="selective", recompute_modules=("mlp", "core_attn"))
    assert "core_attn in all 6 layers; mlp in all 6 layers" in plan_recompute(memory, shape, STAGE).describe()


@given(count=st.integers(0, 10**13))
def test_gigabytes_are_never_rounded_down(count: int):
    shown = gigabytes(count)
    assert "e" not in shown
    assert count <= round(float(shown) * 1e9) <= max(count * 1.01, count + 1)


def test_a_stage_keeps_to_its_budget():
    run = run_of(LLAMA)
    shape, batch = ActivationShape.from_config(run, device="cpu"), batch_of(run)
    plain, _ = build(run)
    before = measured(plain, batch)
    for share in (0.9, 0.7, 0.5):
        model, streams = build(run)
        memory = MemoryConfig(recompute_memory_budget_gb=2 * before * share / 1e9)
        line = apply_recompute(model, memory, streams, shape=shape, in_flight=2)
        plan = plan_recompute(memory, shape, model.stage, in_flight=2)
        assert line == plan.describe()
        assert measured(model, batch) == plan.saved_bytes <= before * share
