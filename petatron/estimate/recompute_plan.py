"""Plans activation recompute of a stage: as the config says, or the cheapest plan that fits a memory budget.

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
from petatron.base.format_text import count_with_noun, gigabytes
from petatron.config.pipeline_stages import PipelineStage
from petatron.config.schema.memory import MemoryConfig
from petatron.estimate.activation_bytes import layer_bytes, layer_input_bytes, regathered_bytes
from petatron.layers.spec.activation_shape import ActivationShape
from petatron.layers.spec.branch_spec import FULL
from petatron.layers.transformer_layer import LayerSpec
from petatron.models.frozen_params import NOTHING_FROZEN, FrozenParams
from petatron.models.model_spec import ModelSpec

ModuleSet = frozenset[str]
NO_MODULES: ModuleSet = frozenset()


@dataclass(frozen=True, slots=True)
class RecomputePlan:
    """What one stage recomputes, and the bytes it then needs.

    modules: the recomputed modules of every layer, {full} for the whole of it.
    group_size: with full, how many adjacent layers are recomputed as one region.
    saved_bytes: of one micro-batch. peak_bytes: of all micro-batches in flight and of the largest recomputed group.
    num_without_backward: how many of its first layers are below every trainable parameter; they save nothing.
    """

    modules: tuple[ModuleSet, ...]
    group_size: int
    saved_bytes: int
    peak_bytes: int
    in_flight: int
    num_without_backward: int = 0

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
        """Describes the plan in one line with its bytes, for the log."""
        sizes = f"{gigabytes(self.saved_bytes)} GB kept per micro-batch, {gigabytes(self.peak_bytes)} GB for {self.in_flight}"
        return f"recompute: {self.describe_modules()} ({sizes} at a time)"

    def describe_modules(self) -> str:
        """Describes what is recomputed, for people."""
        parts: list[str] = []
        full = sum(FULL in modules for modules in self.modules)
        if full:
            together = f", {self.group_size} together" if self.group_size > 1 else ""
            parts.append(f"{_layer_fraction(full, len(self.modules))} whole{together}")
        for name in sorted(set().union(*self.modules) - {FULL}):
            count = sum(name in modules for modules in self.modules)
            if count:
                parts.append(f"{name} in {_layer_fraction(count, len(self.modules))}")
        return "; ".join(parts) or "nothing"


def _layer_fraction(count: int, layers: int) -> str:
    return f"all {layers} layers" if count == layers else f"{count} of {layers} layers"


def recompute_modules(layer: LayerSpec) -> tuple[str, ...]:
    """Returns what can be recomputed of a layer: small parts first, whole branches last."""
    mixers = [branch for branch in layer.branches if branch is not layer.channel_mixer]
    mixer_parts = [name for branch in mixers for name in branch.inner_regions]
    channel_parts = () if layer.channel_mixer is None else layer.channel_mixer.inner_regions
    wholes = [branch.region for branch in reversed(layer.branches)]
    return tuple(dict.fromkeys((*mixer_parts, "layernorm", *channel_parts, *wholes)))


def effective_modules(layer: LayerSpec, shape: ActivationShape, modules: Sequence[str] | ModuleSet) -> ModuleSet:
    """Returns the given modules that the layer has, without those contained in others of them.

    `layernorm` is among them only if it frees something besides the others.
    """
    if FULL in modules:
        return frozenset((FULL,))
    present = set(modules).intersection(recompute_modules(layer))
    contained = {name for branch in layer.branches if branch.region in present for name in branch.inner_regions}
    if not any(branch.saved_input_bytes(shape, present) for branch in layer.branches):
        present.discard("layernorm")
    return frozenset(present - contained)


class BudgetError(ConfigError):
    """A budget that is too small even when everything is recomputed, and the bytes needed."""

    def __init__(self, problem: Problem, needed_bytes: float) -> None:
        super().__init__([problem])
        self.needed_bytes = needed_bytes


def plan_recompute(
    memory: MemoryConfig,
    spec: ModelSpec,
    shape: ActivationShape,
    stage: PipelineStage,
    *,
    in_flight: int = 1,
    num_local_stages: int = 1,
    frozen: FrozenParams = NOTHING_FROZEN,
) -> RecomputePlan:
    """Returns the plan of one stage that holds `in_flight` micro-batches at a time.

    `num_local_stages` is the number of stages of this rank, which share its budget evenly. Raises ConfigError if it cannot be met.
    Layers without a backward, below all that is not `frozen`, are not recomputed.
    """
    layers, without_backward = spec.stage_layers(stage), frozen.num_without_backward(stage)
    saves_nothing = without_backward == len(layers) and not stage.has_loss and bool(frozen)
    outer_bytes = 0 if saves_nothing else spec.outer_saved_bytes(shape, stage)
    if frozen and not saves_nothing:
        outer_bytes -= spec.frozen_outer_bytes(shape, stage, frozen.names)
    costs = _StageCosts(shape, layers, outer_bytes, in_flight, without_backward)
    if memory.recompute_memory_budget_gb is not None:
        return _fit_budget(costs, memory.recompute_memory_budget_gb, num_local_stages)
    number = memory.recompute_num_layers or 1
    if memory.recompute_granularity == "full":
        uniform = memory.recompute_method == "uniform"
        full = len(layers) - without_backward if uniform else number
        saving = [frozenset((FULL,)) if index < full else NO_MODULES for index in range(len(layers) - without_backward)]
        return costs.plan([NO_MODULES] * without_backward + saving, group_size=number if uniform else 1)
    modules = memory.recompute_modules if memory.recompute_granularity == "selective" else ()
    saving = [effective_modules(layer, shape, modules) for layer in layers[without_backward:]]
    return costs.plan([NO_MODULES] * without_backward + saving)


class _StageCosts:
    """Bytes and FLOPs of a stage's layers for any choice of modules."""

    def __init__(
        self,
        shape: ActivationShape,
        layers: Sequence[LayerSpec],
        outer_bytes: int,
        in_flight: int,
        num_without_backward: int = 0,
    ) -> None:
        self.shape, self.layers, self.outer_bytes, self.in_flight = shape, layers, outer_bytes, in_flight
        self.num_without_backward = num_without_backward
        kinds = {layer: number for number, layer in enumerate(dict.fromkeys(layers))}
        self._kinds = [kinds[layer] for layer in layers]  # equal layers cost the same, and numbers are quick to compare
        self._bytes: dict[tuple[ModuleSet, int], int] = {}

    def layer_bytes(self, at: int, modules: ModuleSet) -> int:
        if at < self.num_without_backward:
            return 0
        key = (modules, self._kinds[at])
        if key not in self._bytes:
            self._bytes[key] = layer_bytes(self.layers[at], self.shape, modules)
        return self._bytes[key]

    def flops(self, at: int, modules: ModuleSet) -> float:
        return self.layers[at].runs * recompute_flops(self.layers[at], self.shape, modules)

    def plan(self, chosen: Sequence[ModuleSet], *, group_size: int = 1) -> RecomputePlan:
        saved = self.outer_bytes + sum(self.layer_bytes(at, modules) for at, modules in enumerate(chosen))
        plan = RecomputePlan(tuple(chosen), group_size, saved, 0, self.in_flight, self.num_without_backward)
        extra, start = 0, 0
        for count, is_full in plan.groups:
            layer_input = layer_input_bytes(self.layers[start], self.shape)
            saved -= (count - 1) * layer_input  # of a group of whole layers only the first one's input is saved
            unsaved = sum(
                self.layer_bytes(at, NO_MODULES) + regathered_bytes(self.layers[at], self.shape, chosen[at])
                for at in range(max(start, self.num_without_backward), start + count)
            )
            extra = max(extra, unsaved - (layer_input if is_full else self.layer_bytes(start, chosen[start])))
            start += count
        return replace(plan, saved_bytes=saved, peak_bytes=self.in_flight * saved + extra)

    def next_steps(self, at: int, now: ModuleSet) -> list[ModuleSet]:
        """Returns the module sets that one layer may recompute next."""
        if FULL in now:
            return []
        layer = self.layers[at]
        names = (name for name in (*recompute_modules(layer), FULL) if name not in now)
        return [following for name in names if (following := effective_modules(layer, self.shape, (*now, name))) != now]

    def flops_per_freed_byte(self, at: int, now: ModuleSet, following: ModuleSet) -> float:
        """Returns the repeated operations per byte freed by a step; infinite if it frees nothing."""
        freed = self.layer_bytes(at, now) - self.layer_bytes(at, following)
        more = self.flops(at, following) - self.flops(at, now)
        return max(more, 0.0) / freed if freed > 0 else float("inf")


def _fit_budget(costs: _StageCosts, budget_gb: float, num_local_stages: int) -> RecomputePlan:
    budget = budget_gb * 1e9 / num_local_stages
    chosen: list[ModuleSet] = [NO_MODULES] * len(costs.layers)
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
        return costs.flops(at, chosen[at]) - costs.flops(at, chosen[at] - {name})

    singles = [(at, name) for at, now in enumerate(chosen) for name in sorted(now)]
    for at, name in sorted(singles, key=lambda single: -saved(*single)):
        fewer = [*chosen[:at], chosen[at] - {name}, *chosen[at + 1 :]]
        smaller_plan = costs.plan(fewer)
        if smaller_plan.peak_bytes <= budget:
            chosen, plan = fewer, smaller_plan
    return plan


def _budget_error(plan: RecomputePlan, budget_gb: float, num_local_stages: int) -> BudgetError:
    needed = plan.peak_bytes * num_local_stages
    stages = f" in each of {num_local_stages} stages" if num_local_stages > 1 else ""
    held = f"{count_with_noun(plan.in_flight, 'micro-batch', 'es')} at a time{stages} need{'s' if plan.in_flight == 1 else ''}"
    problem = Problem(
        where="--recompute-memory-budget-gb",
        value=f"{budget_gb:g}",
        rule=f"is too small: {held} {gigabytes(needed)} GB even with every layer recomputed",
        fix=f"Give at least {gigabytes(needed)}, a smaller --micro-batch-size, or more tensor- or context-parallel ranks.",
    )
    return BudgetError(problem, needed)


def recompute_flops(layer: LayerSpec, shape: ActivationShape, modules: ModuleSet) -> float:
    """Returns the operations that one layer repeats for one micro-batch.

    The last GEMM of a layer is not repeated, unless something after it is saved too (dropout's mask).
    """
    shape = layer.shape_of(shape)
    if FULL in modules:
        *before, last = layer.branches
        after_last = last.recompute_flops(shape, last.region) if layer.dropout == 0.0 else last.forward_flops(shape)
        return sum(branch.forward_flops(shape) for branch in before) + after_last
    flops = 0.0
    for branch in layer.branches:
        if "layernorm" in modules and branch.saved_input_bytes(shape, modules):
            flops += branch.norm_flops(shape)
        regions = (branch.region, *branch.inner_regions)
        flops += sum(branch.recompute_flops(shape, region) for region in regions if region in modules)
    return flops
