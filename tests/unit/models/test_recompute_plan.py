"""Which modules of which layers are recomputed: as asked, or as a memory budget needs."""

from __future__ import annotations

import itertools
import re
from dataclasses import dataclass
from functools import cache
from typing import Literal

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from petatron.base.errors import ConfigError
from petatron.base.format_text import gigabytes
from petatron.config.pipeline_stages import PipelineStage
from petatron.config.schema.memory import MemoryConfig
from petatron.estimate.activation_bytes import layer_bytes
from petatron.estimate.recompute_plan import (
    RecomputePlan,
    effective_modules,
    plan_recompute,
    recompute_flops,
    recompute_modules,
)
from petatron.layers.spec.activation_shape import ActivationShape
from petatron.layers.spec.branch_spec import FULL
from petatron.layers.transformer_layer import LayerSpec
from petatron.models.model_spec import ModelSpec
from petatron.models.registry import model_spec
from petatron.validate import load_config
from tests.longform import diagonal
from tests.unit.models.test_activations import LLAMA, batch_of, build, measured, recompute, run_of

STAGE = PipelineStage(tuple(range(6)), has_embedding=False, has_loss=False)


@dataclass(frozen=True, slots=True)
class Case:
    """A model, and a rank's share of a micro-batch."""

    spec: ModelSpec
    shape: ActivationShape

    @property
    def dense_layer(self) -> LayerSpec:
        return next(layer for index, layer in enumerate(self.spec.layers) if index not in self.spec.moe_layers)

    @property
    def moe_layer(self) -> LayerSpec:
        return self.spec.layers[self.spec.moe_layers[0]]

    def plan(self, memory: MemoryConfig, **options: int) -> RecomputePlan:
        return plan_recompute(memory, self.spec, self.shape, STAGE, **options)

    def fit(self, budget_bytes: float, **options: int) -> RecomputePlan:
        return self.plan(MemoryConfig(recompute_memory_budget_gb=budget_bytes / 1e9), **options)

    def flops(self, plan: RecomputePlan) -> float:
        return sum(
            recompute_flops(layer, self.shape, modules) for modules, layer in zip(plan.modules, self.spec.layers)
        )


@cache
def case_of(preset: str, flags: str = "") -> Case:
    argv = f"--mock-data --train-iters 1 --lr 1e-3 --micro-batch-size 1 --bf16 {flags}".split()
    run = load_config(argv, preset=preset, world_size=8).config
    return Case(model_spec(run), ActivationShape.from_config(run, device="cuda"))


CASES = {
    "llama": lambda: case_of("llama3-8b", "--tp 2 --sequence-parallel"),
    "gpt": lambda: case_of("gpt3-1.3b"),
    "mixtral": lambda: case_of("mixtral-8x7b", "--ep 8 --moe-token-dispatcher-type alltoall"),
    "every-other": lambda: case_of(
        "mixtral-8x7b", "--ep 8 --moe-layer-freq 2 --moe-shared-expert-intermediate-size 4096"
    ),
}


def test_what_can_be_recomputed():
    """In this order, small parts first."""
    case = CASES["every-other"]()
    assert recompute_modules(case.dense_layer) == ("core_attn", "layernorm", "mlp", "attention")
    assert recompute_modules(case.moe_layer) == ("core_attn", "layernorm", "shared_experts", "moe", "attention")


def test_full_recompute_in_groups():
    case = CASES["llama"]()

    def groups(method: Literal["uniform", "block"], number: int) -> tuple[tuple[int, bool], ...]:
        memory = MemoryConfig(recompute_granularity="full", recompute_method=method, recompute_num_layers=number)
        return case.plan(memory).groups

    assert groups("uniform", 1) == ((1, True),) * 6
    assert groups("uniform", 4) == ((4, True), (2, True))
    assert groups("uniform", 9) == ((6, True),)
    assert groups("block", 2) == ((1, True), (1, True), *((1, False),) * 4)
    assert groups("block", 9) == ((1, True),) * 6


def test_modules_that_a_layer_has():
    case = CASES["every-other"]()
    asked = ("core_attn", "mlp", "moe_act", "layernorm")
    plan = case.plan(MemoryConfig(recompute_granularity="selective", recompute_modules=asked))
    assert plan.modules[:2] == (frozenset({"core_attn", "layernorm"}), frozenset({"core_attn", "mlp"}))
    assert plan.groups == ((1, False),) * 6
    assert effective_modules(case.dense_layer, case.shape, ("attention", "core_attn")) == {"attention"}
    assert effective_modules(case.moe_layer, case.shape, ("moe", "moe_act", "shared_experts", "mlp")) == {"moe"}
    assert effective_modules(case.moe_layer, case.shape, ("moe", FULL)) == {FULL}


def test_norms_are_recomputed_only_where_it_frees_something():
    for kind in ("llama", "gpt"):
        dense = CASES[kind]()
        assert effective_modules(dense.dense_layer, dense.shape, ("layernorm", "mlp")) == {"mlp"}
    experts = CASES["mixtral"]()
    layer, shape = experts.moe_layer, experts.shape
    assert effective_modules(layer, shape, ("layernorm", "attention")) == {"layernorm", "attention"}
    assert effective_modules(layer, shape, ("layernorm", "moe")) == {"moe"}
    wide = case_of("mixtral-8x7b", "--ep 8 --moe-router-dtype fp32")
    assert effective_modules(wide.moe_layer, wide.shape, ("layernorm",)) == frozenset()


@diagonal(3)
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
    freed = any(effective_modules(layer, shape, ("layernorm",)) for layer in model_spec(loaded.config).layers)
    assert any("layernorm has no effect" in notice for notice in loaded.notices) != freed


@pytest.mark.parametrize(("modules", "norms"), [((), 0), (("mlp",), 1), (("attention", "mlp"), 2)])
def test_a_norm_costs_what_is_made_again(modules: tuple[str, ...], norms: int):
    """Beside the products: one for a branch that is recomputed."""
    case = case_of("llama3-8b", "--tp 2 --sequence-parallel --seq-length 128")
    price = recompute_flops(case.dense_layer, case.shape, frozenset(modules))
    products = 0.0
    if "mlp" in modules:
        products += 2.0 * 128 * 4096 * 14336 + 12 * 128 * 14336 / 2
    if "attention" in modules:
        products += 2.0 * 128 * 4096 * (4096 + 2 * 1024) / 2 + 2.0 * 128 * 128 * 4096 / 2
    assert price - products == norms * 12 * 64 * 4096


@pytest.mark.parametrize("kind", CASES)
def test_more_recompute_never_keeps_more(kind: str):
    case = CASES[kind]()
    shape = case.shape
    for layer in set(case.spec.layers):
        names = recompute_modules(layer)
        for chosen in itertools.chain.from_iterable(itertools.combinations(names, n) for n in range(len(names) + 1)):
            kept = layer_bytes(layer, shape, effective_modules(layer, shape, chosen))
            for name in (*names, FULL):
                following = effective_modules(layer, shape, (*chosen, name))
                assert layer_bytes(layer, shape, following) <= kept, (chosen, name)
                assert recompute_flops(layer, shape, following) >= 0


@settings(max_examples=60, deadline=None)
@given(
    kind=st.sampled_from(sorted(CASES)),
    share=st.floats(0.0, 1.2),
    in_flight=st.integers(1, 16),
    num_local_stages=st.integers(1, 3),
)
def test_a_budget_is_kept_and_nothing_is_recomputed_in_vain(
    kind: str, share: float, in_flight: int, num_local_stages: int
):
    case = CASES[kind]()
    most = case.plan(MemoryConfig(), in_flight=in_flight)
    least = case.plan(
        MemoryConfig(recompute_granularity="full", recompute_method="uniform", recompute_num_layers=1),
        in_flight=in_flight,
    )
    budget = least.peak_bytes + share * (most.peak_bytes - least.peak_bytes) + 1
    plan = case.fit(budget * num_local_stages, in_flight=in_flight, num_local_stages=num_local_stages)
    assert plan.peak_bytes <= budget
    assert plan.peak_bytes >= in_flight * plan.saved_bytes
    assert case.flops(plan) <= case.flops(least) * 1.001
    if share >= 1.0:
        assert plan == most
    for at, modules in enumerate(plan.modules):
        for name in modules:
            fewer = [set(other) - ({name} if index == at else set()) for index, other in enumerate(plan.modules)]
            assert _peak(case, fewer, in_flight) > budget * 0.999_999, (at, name, plan)


def _peak(case: Case, chosen: list[set[str]], in_flight: int) -> int:
    """Written down once more: all that is kept, and the most that one layer makes again."""
    shape, layers = case.shape, case.spec.layers
    from_none = [layer_bytes(layer, shape, ()) for layer in layers]
    if shape.sequence_parallel:
        gathered = shape.batch * shape.sequence * case.spec.config.hidden_size * shape.element_bytes
        made = [gathered * sum(name in modules for name in ("attention", "mlp", FULL, FULL)) for modules in chosen]
    else:
        made = [0] * len(chosen)
    kept = [layer_bytes(layer, shape, modules) for modules, layer in zip(chosen, layers)]
    ends = case.plan(MemoryConfig()).saved_bytes - sum(from_none[: len(chosen)])
    return in_flight * (sum(kept) + ends) + max(none - now + more for none, now, more in zip(from_none, kept, made))


@pytest.mark.parametrize("kind", ["llama", "gpt", "mixtral"])
def test_cheap_ones_come_first(kind: str):
    case = CASES[kind]()
    top = case.plan(MemoryConfig(), in_flight=4).peak_bytes
    plans = [case.fit(top * share, in_flight=4) for share in (0.98, 0.7, 0.4, 0.15)]
    every_other = CASES["every-other"]()
    modules_of_any = {name for layer in every_other.spec.layers for name in recompute_modules(layer)}
    counts = [
        {name: sum(name in modules for modules in plan.modules) for name in (*modules_of_any, FULL)} for plan in plans
    ]
    branches = ("attention", "moe" if kind == "mixtral" else "mlp")
    cheapest = ("layernorm",) if kind == "mixtral" else branches
    assert 0 < sum(counts[0].values()) == sum(counts[0][name] for name in cheapest), "what a norm makes is next to free"
    assert not any(count["core_attn"] for count in counts), "fused attention keeps nothing worth it"
    assert any(counts[1][name] for name in (*branches, FULL)) and counts[1][FULL] < 3 < counts[3][FULL]
    assert kind == "mixtral" or not counts[1][FULL], "a whole layer comes late, unless its experts' outputs are kept"
    prices = [case.flops(plan) for plan in plans]
    assert prices == sorted(prices)


def test_a_budget_that_nothing_can_keep():
    case = CASES["llama"]()
    with pytest.raises(ConfigError) as caught:
        case.fit(1e9, in_flight=8, num_local_stages=2)
    text = str(caught.value)
    found = re.search(r"budget-gb 1 is too small: 8 micro-batches at a time in each of 2 stages need ([\d.]+) GB", text)
    assert found and f"Give at least {found.group(1)}" in text
    plan = case.fit(float(found.group(1)) * 1e9, in_flight=8, num_local_stages=2)
    assert all(modules == {FULL} for modules in plan.modules)


def test_the_line_for_people():
    case = CASES["llama"]()
    memory = MemoryConfig(recompute_granularity="full", recompute_method="block", recompute_num_layers=2)
    assert case.plan(MemoryConfig()).describe().startswith("recompute: nothing (")
    line = case.plan(memory, in_flight=3).describe()
    assert re.fullmatch(
        r"recompute: 2 of 6 layers whole \([\d.]+ GB kept per micro-batch, [\d.]+ GB for 3 at a time\)", line
    )
    memory = MemoryConfig(recompute_granularity="full", recompute_method="uniform", recompute_num_layers=3)
    assert "all 6 layers whole, 3 together" in case.plan(memory).describe()
    memory = MemoryConfig(recompute_granularity="selective", recompute_modules=("mlp", "core_attn"))
    assert "core_attn in all 6 layers; mlp in all 6 layers" in case.plan(memory).describe()


@given(count=st.integers(0, 10**13))
def test_gigabytes_are_never_rounded_down(count: int):
    shown = gigabytes(count)
    assert "e" not in shown
    assert count <= round(float(shown) * 1e9) <= max(count * 1.01, count + 1)


def test_a_stage_keeps_to_its_budget():
    run = run_of(LLAMA)
    batch = batch_of(run)
    plain, _ = build(run)
    before = measured(plain, batch)
    for share in (0.9, 0.7, 0.5):
        model, streams = build(run)
        memory = MemoryConfig(recompute_memory_budget_gb=2 * before * share / 1e9)
        plan = recompute(run, model, memory, streams, in_flight=2)
        assert measured(model, batch) == plan.saved_bytes <= before * share
