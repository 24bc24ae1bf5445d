"""The recompute plan of a stage: as the config says, or the cheapest that fits a memory budget.

A stage that holds m micro-batches at a time needs, at the peak of a backward pass,

    m x (saved by all layers, embedding and head)  +  what the largest recomputed group of layers recomputes

The budget is met step by step. A step recomputes one more module of one layer, or that layer as a whole; the one that frees
most bytes per operation repeated comes next. So norms, which cost next to nothing, go first where a router saves their output,
then attention and MLP, and whole layers last; with fused attention `core_attn` frees almost nothing and is rarely worth its cost.
Steps that later ones have made unnecessary are dropped at the end. Repeated communication (expert dispatch; all-gathers of
sequence parallelism) has no cost here.

`moe_act` may be given and is always in effect: no activation function's output is saved. So no plan contains it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from petatron.base.errors import ConfigError, Problem
from petatron.base.text import gigabytes
from petatron.config.pipeline_stages import PipelineStage
from petatron.config.schema.parallel import MemoryConfig
from petatron.estimate.activation_bytes import (
    FULL,
    ActivationShape,
    embedding_and_head_bytes,
    layer_bytes,
    regathered_bytes,
    saved_norm_output_bytes,
)

ModuleSet = frozenset[str]
NO_MODULES: ModuleSet = frozenset()
DENSE_MODULES = ("core_attn", "layernorm", "mlp", "attention")
MOE_MODULES = ("core_attn", "layernorm", "shared_experts", "moe", "attention")
_CONTAINED_MODULES = {"attention": {"core_attn"}, "moe": {"shared_experts"}}
_ELEMENTWISE_FLOPS = 12  # operations per element of a norm or activation: few beside a GEMM's, but not zero


@dataclass(frozen=True, slots=True)
class RecomputePlan:
    """What one stage recomputes, and the bytes it then needs.

    modules: the recomputed modules of every layer, {full} for the whole of it.
    group_size: with full, how many adjacent layers are recomputed as one region.
    saved_bytes: of one micro-batch. peak_bytes: of all micro-batches in flight and of the largest recomputed group.
    """

    modules: tuple[ModuleSet, ...]
    group_size: int
    saved_bytes: int
    peak_bytes: int
    in_flight: int

    @property
    def groups(self) -> tuple[tuple[int, bool], ...]:
        """Consecutive layers as (count, recomputed); layers that are not recomputed are groups of one."""
        groups: list[tuple[int, bool]] = []
        for modules in self.modules:
            recompute = FULL in modules
            if recompute and groups and groups[-1][1] and groups[-1][0] < self.group_size:
                groups[-1] = (groups[-1][0] + 1, True)
            else:
                groups.append((1, recompute))
        return tuple(groups)

    def describe(self) -> str:
        """Describes the plan in one line, for people."""
        parts: list[str] = []
        whole = sum(FULL in modules for modules in self.modules)
        if whole:
            together = f", {self.group_size} together" if self.group_size > 1 else ""
            parts.append(f"{_layer_fraction(whole, len(self.modules))} whole{together}")
        for name in dict.fromkeys((*DENSE_MODULES, *MOE_MODULES)):
            count = sum(name in modules for modules in self.modules)
            if count:
                parts.append(f"{name} in {_layer_fraction(count, len(self.modules))}")
        sizes = f"{gigabytes(self.saved_bytes)} GB kept per micro-batch, {gigabytes(self.peak_bytes)} GB for {self.in_flight}"
        return f"recompute: {'; '.join(parts) or 'nothing'} ({sizes} at a time)"


def _layer_fraction(count: int, layers: int) -> str:
    return f"all {layers} layers" if count == layers else f"{count} of {layers} layers"


def effective_modules(shape: ActivationShape, modules: Sequence[str] | ModuleSet, *, is_moe: bool) -> ModuleSet:
    """Returns the given modules that a layer of this kind has, without those contained in others of them.

    `layernorm` is among them only if it frees something besides the others.
    """
    if FULL in modules:
        return frozenset((FULL,))
    present = set(modules).intersection(MOE_MODULES if is_moe else DENSE_MODULES)
    contained = {name for outer in present for name in _CONTAINED_MODULES.get(outer, ())}
    if not saved_norm_output_bytes(shape, present, is_moe=is_moe):
        present.discard("layernorm")
    return frozenset(present - contained)


class BudgetError(ConfigError):
    """A budget that is too small even when everything is recomputed, and the bytes needed."""

    def __init__(self, problem: Problem, needed_bytes: float) -> None:
        super().__init__([problem])
        self.needed_bytes = needed_bytes


def plan_recompute(
    memory: MemoryConfig, shape: ActivationShape, stage: PipelineStage, *, in_flight: int = 1, num_local_stages: int = 1
) -> RecomputePlan:
    """Returns the plan of one stage that holds `in_flight` micro-batches at a time.

    `num_local_stages` is the number of stages of this rank, which share its budget evenly. Raises ConfigError if it cannot be met.
    """
    moe_layer_mask = [shape.moe_layer_mask[layer] for layer in stage.layer_indices]
    costs = _StageCosts(shape, stage, moe_layer_mask, in_flight)
    if memory.recompute_memory_budget_gb is not None:
        return _fit_budget(costs, memory.recompute_memory_budget_gb, num_local_stages)
    number = memory.recompute_num_layers or 1
    if memory.recompute_granularity == "full":
        uniform = memory.recompute_method == "uniform"
        chosen = [
            frozenset((FULL,)) if uniform or index < number else NO_MODULES for index in range(len(moe_layer_mask))
        ]
        return costs.plan(chosen, group_size=number if uniform else 1)
    modules = memory.recompute_modules if memory.recompute_granularity == "selective" else ()
    return costs.plan([effective_modules(shape, modules, is_moe=is_moe) for is_moe in moe_layer_mask])


class _StageCosts:
    """Bytes and FLOPs of a stage's layers for any choice of modules."""

    def __init__(
        self, shape: ActivationShape, stage: PipelineStage, moe_layer_mask: Sequence[bool], in_flight: int
    ) -> None:
        self.shape, self.moe_layer_mask, self.in_flight = shape, moe_layer_mask, in_flight
        self.embedding_and_head = embedding_and_head_bytes(shape, stage)
        self._bytes: dict[tuple[ModuleSet, bool], int] = {}

    def layer_bytes(self, modules: ModuleSet, is_moe: bool) -> int:
        key = (modules, is_moe)
        if key not in self._bytes:
            self._bytes[key] = layer_bytes(self.shape, modules, is_moe=is_moe)
        return self._bytes[key]

    def flops(self, modules: ModuleSet, is_moe: bool) -> float:
        return recompute_flops(self.shape, modules, is_moe=is_moe)

    def plan(self, chosen: Sequence[ModuleSet], *, group_size: int = 1) -> RecomputePlan:
        saved = self.embedding_and_head + sum(
            self.layer_bytes(modules, is_moe) for modules, is_moe in zip(chosen, self.moe_layer_mask)
        )
        layer_input = self.shape.hidden_bytes(self.shape.tokens)
        plan = RecomputePlan(tuple(chosen), group_size, saved, 0, self.in_flight)
        extra, start = 0, 0
        for count, whole in plan.groups:
            saved -= (count - 1) * layer_input  # of a group of whole layers only the first one's input is saved
            layers = range(start, start + count)
            unsaved = sum(self.layer_bytes(NO_MODULES, self.moe_layer_mask[at]) for at in layers)
            unsaved += sum(regathered_bytes(self.shape, chosen[at], is_moe=self.moe_layer_mask[at]) for at in layers)
            extra = max(
                extra, unsaved - (layer_input if whole else self.layer_bytes(chosen[start], self.moe_layer_mask[start]))
            )
            start += count
        return replace(plan, saved_bytes=saved, peak_bytes=self.in_flight * saved + extra)

    def next_steps(self, at: int, now: ModuleSet) -> list[ModuleSet]:
        """Returns the module sets that one layer may recompute next."""
        if FULL in now:
            return []
        is_moe = self.moe_layer_mask[at]
        names = (name for name in (*(MOE_MODULES if is_moe else DENSE_MODULES), FULL) if name not in now)
        return [
            following
            for name in names
            if (following := effective_modules(self.shape, (*now, name), is_moe=is_moe)) != now
        ]

    def flops_per_freed_byte(self, at: int, now: ModuleSet, following: ModuleSet) -> float:
        """Returns the repeated operations per byte freed by a step; infinite if it frees nothing."""
        is_moe = self.moe_layer_mask[at]
        freed = self.layer_bytes(now, is_moe) - self.layer_bytes(following, is_moe)
        more = self.flops(following, is_moe) - self.flops(now, is_moe)
        return max(more, 0.0) / freed if freed > 0 else float("inf")


def _fit_budget(costs: _StageCosts, budget_gb: float, num_local_stages: int) -> RecomputePlan:
    budget = budget_gb * 1e9 / num_local_stages
    chosen: list[ModuleSet] = [NO_MODULES] * len(costs.moe_layer_mask)
    plan = costs.plan(chosen)
    while plan.peak_bytes > budget:
        steps = [(at, step) for at, now in enumerate(chosen) for step in costs.next_steps(at, now)]
        prices = [costs.flops_per_freed_byte(at, chosen[at], step) for at, step in steps]
        if not steps or min(prices) == float("inf"):
            raise _budget_error(plan, budget_gb, num_local_stages)
        at, chosen[at] = steps[prices.index(min(prices))]
        plan = costs.plan(chosen)
    return _drop_unneeded(costs, chosen, plan, budget)


def _drop_unneeded(costs: _StageCosts, chosen: list[ModuleSet], plan: RecomputePlan, budget: float) -> RecomputePlan:
    """Drops what the budget no longer needs, the most expensive first."""

    def saved(at: int, name: str) -> float:
        fewer = chosen[at] - {name}
        return costs.flops(chosen[at], costs.moe_layer_mask[at]) - costs.flops(fewer, costs.moe_layer_mask[at])

    singles = [(at, name) for at, now in enumerate(chosen) for name in sorted(now)]
    for at, name in sorted(singles, key=lambda single: -saved(*single)):
        fewer = [*chosen[:at], chosen[at] - {name}, *chosen[at + 1 :]]
        smaller_plan = costs.plan(fewer)
        if smaller_plan.peak_bytes <= budget:
            chosen, plan = fewer, smaller_plan
    return plan


def _budget_error(plan: RecomputePlan, budget_gb: float, num_local_stages: int) -> BudgetError:
    needed = plan.peak_bytes * num_local_stages
    one = plan.in_flight == 1
    held, verb = ("1 micro-batch at a time", "needs") if one else (f"{plan.in_flight} micro-batches at a time", "need")
    stages = f" in each of {num_local_stages} stages" if num_local_stages > 1 else ""
    problem = Problem(
        where="--recompute-memory-budget-gb",
        found=f"{budget_gb:g}",
        rule=f"is too small: {held}{stages} {verb} {gigabytes(needed)} GB even with every layer recomputed",
        fix=f"Give at least {gigabytes(needed)}, a smaller --micro-batch-size, or more tensor- or context-parallel ranks.",
    )
    return BudgetError(problem, needed)


def recompute_flops(shape: ActivationShape, modules: ModuleSet, *, is_moe: bool = False) -> float:
    """Returns the operations that one layer repeats for one micro-batch.

    The last GEMM of a branch is not repeated, unless something after it is saved too; with FP8, that is its quantised input.
    """
    model, rows, hidden = shape.model, shape.gathered_tokens, shape.model.hidden_size
    visible = min(model.window_size or model.seq_length, model.seq_length)
    core = 2.0 * rows * shape.q_dim * visible
    norm = float(_ELEMENTWISE_FLOPS * shape.tokens * hidden)
    attention = norm + 2.0 * rows * hidden * (shape.q_dim + 2 * shape.kv_dim) + core
    norms = norm if saved_norm_output_bytes(shape, modules, is_moe=is_moe) else 0.0
    assert model.ffn_hidden_size is not None
    first, between, last = _mlp_flops(shape, rows, hidden, model.ffn_hidden_size // shape.tp)
    out = 2.0 * rows * shape.q_dim * hidden
    prices = {"core_attn": core, "attention": attention, "layernorm": norms, "mlp": norm + first + between}
    if shape.fp8_recipe is not None:
        prices["attention"], prices["mlp"], last = attention + out, prices["mlp"] + last, 0.0
    if is_moe:
        prices["shared_experts"] = norm + sum(_shared_expert_flops(shape)[: 2 if shape.fp8_recipe is None else 3])
        prices["moe"], last = _moe_flops(shape)
        prices["moe"] += norm
    if FULL in modules:
        last = 0.0 if model.hidden_dropout == 0.0 else last  # repeated for the dropout after it
        return attention + out + prices["moe" if is_moe else "mlp"] + last
    return sum(prices.get(name, 0.0) for name in modules)


def _moe_flops(shape: ActivationShape) -> tuple[float, float]:
    """Returns the operations of an MoE layer, up to the last tensor that it saves; and those of a GEMM after that."""
    moe, hidden = shape.moe, shape.model.hidden_size
    assert moe.moe_ffn_hidden_size is not None and moe.num_experts is not None
    width = moe.moe_latent_size or hidden
    routed = shape.tokens * moe.moe_router_topk * shape.etp
    first, between, last = _mlp_flops(shape, routed, width, moe.moe_ffn_hidden_size // shape.etp)
    repeated = 2.0 * shape.tokens * hidden * moe.num_experts + first + between
    if shape.applies_router_weights and not moe.moe_latent_size and not moe.moe_shared_expert_intermediate_size:
        return repeated, last
    repeated += last
    if moe.moe_latent_size:
        way_out = 1 if moe.moe_shared_expert_intermediate_size else 0  # the last GEMM, unless a shared expert follows
        repeated += (1 + way_out) * 2.0 * shape.tokens * hidden * moe.moe_latent_size
    first, between, last = _shared_expert_flops(shape)
    repeats_last = moe.moe_shared_expert_gate or shape.fp8_recipe is not None
    return repeated + first + between + (last if repeats_last else 0.0), 0.0


def _shared_expert_flops(shape: ActivationShape) -> tuple[float, float, float]:
    width = (shape.moe.moe_shared_expert_intermediate_size or 0) // shape.tp
    return _mlp_flops(shape, shape.gathered_tokens, shape.model.hidden_size, width)


def _mlp_flops(shape: ActivationShape, rows: int, width: int, inner: int) -> tuple[float, float, float]:
    """Returns the operations of an MLP's first GEMM, of its activation and of its second GEMM."""
    fused = 2 if shape.gated else 1
    return 2.0 * rows * width * inner * fused, float(_ELEMENTWISE_FLOPS * rows * inner), 2.0 * rows * inner * width
