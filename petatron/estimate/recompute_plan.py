"""What a stage recomputes: as the config says, or the cheapest that fits a memory budget.

A stage that holds m micro-batches at a time needs, at the worst moment of a backward pass,

    m x (kept by all layers and ends)  +  what the largest recomputed group of layers makes again

The budget is met step by step. A step recomputes one more module of one layer, or that layer as a whole; the one that frees
most bytes per operation repeated comes next. So norms, which cost next to nothing, go first where a router keeps what they
make, then the branches, and whole layers last; with fused attention `core_attn` frees almost nothing and is rarely worth its
price. What later steps have made unnecessary is undone at the end. Repeated communication (expert dispatch; gathers of a split
sequence) is not priced.

`moe_act` may be asked for and is always so: no activation function's output is kept. That is why it stands in no plan.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from petatron.base.errors import ConfigError, Problem
from petatron.base.text import gigabytes
from petatron.config.pipeline_stages import Stage
from petatron.config.schema.parallel import MemoryConfig
from petatron.estimate.activation_bytes import (
    FULL,
    ActivationShape,
    ends_bytes,
    gathered_again,
    kept_output,
    layer_bytes,
)

Modules = frozenset[str]
NOTHING: Modules = frozenset()
DENSE = ("core_attn", "layernorm", "mlp", "attention")
MIXED = ("core_attn", "layernorm", "shared_experts", "moe", "attention")
_INSIDE = {"attention": {"core_attn"}, "moe": {"shared_experts"}}
_ELEMENTWISE = 12  # operations per element of a norm or activation: little beside a product, but not nothing


@dataclass(frozen=True, slots=True)
class RecomputePlan:
    """What one stage recomputes, and the bytes it then needs.

    modules: of every layer the modules that are recomputed, {full} for the whole of it.
    group: with full, how many neighbouring layers are recomputed together.
    kept_bytes: of one micro-batch. peak_bytes: of all micro-batches in flight and what is made again at a time.
    """

    modules: tuple[Modules, ...]
    group: int
    kept_bytes: int
    peak_bytes: int
    in_flight: int

    @property
    def groups(self) -> tuple[tuple[int, bool], ...]:
        """Consecutive layers as (how many, recomputed together); layers that are not recomputed stand alone."""
        groups: list[tuple[int, bool]] = []
        for modules in self.modules:
            again = FULL in modules
            if again and groups and groups[-1][1] and groups[-1][0] < self.group:
                groups[-1] = (groups[-1][0] + 1, True)
            else:
                groups.append((1, again))
        return tuple(groups)

    def describe(self) -> str:
        """One line for people."""
        parts: list[str] = []
        whole = sum(FULL in modules for modules in self.modules)
        if whole:
            together = f", {self.group} together" if self.group > 1 else ""
            parts.append(f"{_of(whole, len(self.modules))} whole{together}")
        for name in dict.fromkeys((*DENSE, *MIXED)):
            count = sum(name in modules for modules in self.modules)
            if count:
                parts.append(f"{name} in {_of(count, len(self.modules))}")
        sizes = f"{gigabytes(self.kept_bytes)} GB kept per micro-batch, {gigabytes(self.peak_bytes)} GB for {self.in_flight}"
        return f"recompute: {'; '.join(parts) or 'nothing'} ({sizes} at a time)"


def _of(count: int, layers: int) -> str:
    return f"all {layers} layers" if count == layers else f"{count} of {layers} layers"


def effective(shape: ActivationShape, modules: Sequence[str] | Modules, *, mixed: bool) -> Modules:
    """Of the modules asked for those that a layer of this kind has, without those inside others of them.

    Norms are among them only if they free something beside the others.
    """
    if FULL in modules:
        return frozenset((FULL,))
    present = set(modules).intersection(MIXED if mixed else DENSE)
    inside = {name for outer in present for name in _INSIDE.get(outer, ())}
    if not kept_output(shape, present, mixed=mixed):
        present.discard("layernorm")
    return frozenset(present - inside)


class BudgetError(ConfigError):
    """A budget that a rank cannot keep even when it recomputes everything, and what it needs."""

    def __init__(self, problem: Problem, needed_bytes: float) -> None:
        super().__init__([problem])
        self.needed_bytes = needed_bytes


def plan_recompute(
    memory: MemoryConfig, shape: ActivationShape, stage: Stage, *, in_flight: int = 1, stages_here: int = 1
) -> RecomputePlan:
    """The plan of one stage that holds `in_flight` micro-batches at a time.

    `stages_here` is the number of stages of this rank, which share its budget evenly. ConfigError if a budget cannot be met.
    """
    mixed = [shape.mixed[layer] for layer in stage.layers]
    costs = _Costs(shape, stage, mixed, in_flight)
    if memory.recompute_memory_budget_gb is not None:
        return _fit(costs, memory.recompute_memory_budget_gb, stages_here)
    number = memory.recompute_num_layers or 1
    if memory.recompute_granularity == "full":
        uniform = memory.recompute_method == "uniform"
        chosen = [frozenset((FULL,)) if uniform or at < number else NOTHING for at in range(len(mixed))]
        return costs.plan(chosen, group=number if uniform else 1)
    asked = memory.recompute_modules if memory.recompute_granularity == "selective" else ()
    return costs.plan([effective(shape, asked, mixed=kind) for kind in mixed])


class _Costs:
    """Bytes and operations of a stage's layers under any choice."""

    def __init__(self, shape: ActivationShape, stage: Stage, mixed: Sequence[bool], in_flight: int) -> None:
        self.shape, self.mixed, self.in_flight = shape, mixed, in_flight
        self.ends = ends_bytes(shape, stage)
        self._bytes: dict[tuple[Modules, bool], int] = {}

    def layer(self, modules: Modules, mixed: bool) -> int:
        key = (modules, mixed)
        if key not in self._bytes:
            self._bytes[key] = layer_bytes(self.shape, modules, mixed=mixed)
        return self._bytes[key]

    def flops(self, modules: Modules, mixed: bool) -> float:
        return recompute_flops(self.shape, modules, mixed=mixed)

    def plan(self, chosen: Sequence[Modules], *, group: int = 1) -> RecomputePlan:
        kept = self.ends + sum(self.layer(modules, kind) for modules, kind in zip(chosen, self.mixed))
        stream = self.shape.stream(self.shape.tokens)
        plan = RecomputePlan(tuple(chosen), group, kept, 0, self.in_flight)
        again, start = 0, 0
        for count, whole in plan.groups:
            kept -= (count - 1) * stream  # of a group of whole layers only the first one's input is kept
            layers = range(start, start + count)
            before = sum(self.layer(NOTHING, self.mixed[at]) for at in layers)
            before += sum(gathered_again(self.shape, chosen[at], mixed=self.mixed[at]) for at in layers)
            again = max(again, before - (stream if whole else self.layer(chosen[start], self.mixed[start])))
            start += count
        return replace(plan, kept_bytes=kept, peak_bytes=self.in_flight * kept + again)

    def steps(self, at: int, now: Modules) -> list[Modules]:
        """What one layer may recompute next."""
        if FULL in now:
            return []
        kind = self.mixed[at]
        names = (name for name in (*(MIXED if kind else DENSE), FULL) if name not in now)
        return [following for name in names if (following := effective(self.shape, (*now, name), mixed=kind)) != now]

    def price(self, at: int, now: Modules, following: Modules) -> float:
        """Operations per byte freed by a step; a step that frees nothing is priceless."""
        kind = self.mixed[at]
        freed = self.layer(now, kind) - self.layer(following, kind)
        more = self.flops(following, kind) - self.flops(now, kind)
        return max(more, 0.0) / freed if freed > 0 else float("inf")


def _fit(costs: _Costs, budget_gb: float, stages_here: int) -> RecomputePlan:
    budget = budget_gb * 1e9 / stages_here
    chosen: list[Modules] = [NOTHING] * len(costs.mixed)
    plan = costs.plan(chosen)
    while plan.peak_bytes > budget:
        steps = [(at, step) for at, now in enumerate(chosen) for step in costs.steps(at, now)]
        prices = [costs.price(at, chosen[at], step) for at, step in steps]
        if not steps or min(prices) == float("inf"):
            raise _too_small(plan, budget_gb, stages_here)
        at, chosen[at] = steps[prices.index(min(prices))]
        plan = costs.plan(chosen)
    return _undo(costs, chosen, plan, budget)


def _undo(costs: _Costs, chosen: list[Modules], plan: RecomputePlan, budget: float) -> RecomputePlan:
    """Leave out what the budget no longer needs, the dearest first."""

    def saved(at: int, name: str) -> float:
        fewer = chosen[at] - {name}
        return costs.flops(chosen[at], costs.mixed[at]) - costs.flops(fewer, costs.mixed[at])

    singles = [(at, name) for at, now in enumerate(chosen) for name in sorted(now)]
    for at, name in sorted(singles, key=lambda single: -saved(*single)):
        fewer = [*chosen[:at], chosen[at] - {name}, *chosen[at + 1 :]]
        slimmer = costs.plan(fewer)
        if slimmer.peak_bytes <= budget:
            chosen, plan = fewer, slimmer
    return plan


def _too_small(plan: RecomputePlan, budget_gb: float, stages_here: int) -> BudgetError:
    needed = plan.peak_bytes * stages_here
    one = plan.in_flight == 1
    held, verb = ("1 micro-batch at a time", "needs") if one else (f"{plan.in_flight} micro-batches at a time", "need")
    stages = f" in each of {stages_here} stages" if stages_here > 1 else ""
    problem = Problem(
        where="--recompute-memory-budget-gb",
        found=f"{budget_gb:g}",
        rule=f"is too small: {held}{stages} {verb} {gigabytes(needed)} GB even with every layer recomputed",
        fix=f"Give at least {gigabytes(needed)}, a smaller --micro-batch-size, or more tensor- or context-parallel ranks.",
    )
    return BudgetError(problem, needed)


def recompute_flops(shape: ActivationShape, modules: Modules, *, mixed: bool = False) -> float:
    """Operations that one layer repeats for one micro-batch.

    The last product of a branch is not repeated, unless something behind it is kept too; in eight bits, that is its operand.
    """
    model, rows, hidden = shape.model, shape.gathered, shape.model.hidden_size
    seen = min(model.window_size or model.seq_length, model.seq_length)
    core = 2.0 * rows * shape.queries * seen
    norm = float(_ELEMENTWISE * shape.tokens * hidden)
    attention = norm + 2.0 * rows * hidden * (shape.queries + 2 * shape.keys) + core
    norms = norm if kept_output(shape, modules, mixed=mixed) else 0.0
    assert model.ffn_hidden_size is not None
    first, between, last = _products(shape, rows, hidden, model.ffn_hidden_size // shape.tp)
    out = 2.0 * rows * shape.queries * hidden
    prices = {"core_attn": core, "attention": attention, "layernorm": norms, "mlp": norm + first + between}
    if shape.eight_bits is not None:
        prices["attention"], prices["mlp"], last = attention + out, prices["mlp"] + last, 0.0
    if mixed:
        prices["shared_experts"] = norm + sum(_shared(shape)[: 2 if shape.eight_bits is None else 3])
        prices["moe"], last = _mixture(shape)
        prices["moe"] += norm
    if FULL in modules:
        last = 0.0 if model.hidden_dropout == 0.0 else last  # repeated for the dropout behind it
        return attention + out + prices["moe" if mixed else "mlp"] + last
    return sum(prices.get(name, 0.0) for name in modules)


def _mixture(shape: ActivationShape) -> tuple[float, float]:
    """Operations of a mixture of experts, up to the last tensor that it keeps; and those of a product beyond that."""
    moe, hidden = shape.moe, shape.model.hidden_size
    assert moe.moe_ffn_hidden_size is not None and moe.num_experts is not None
    width = moe.moe_latent_size or hidden
    routed = shape.tokens * moe.moe_router_topk * shape.etp
    first, between, last = _products(shape, routed, width, moe.moe_ffn_hidden_size // shape.etp)
    again = 2.0 * shape.tokens * hidden * moe.num_experts + first + between
    if shape.weighs_inside and not moe.moe_latent_size and not moe.moe_shared_expert_intermediate_size:
        return again, last
    again += last
    if moe.moe_latent_size:
        way_out = (
            1 if moe.moe_shared_expert_intermediate_size else 0
        )  # the last product, unless a shared expert follows
        again += (1 + way_out) * 2.0 * shape.tokens * hidden * moe.moe_latent_size
    first, between, last = _shared(shape)
    keeps_last = moe.moe_shared_expert_gate or shape.eight_bits is not None
    return again + first + between + (last if keeps_last else 0.0), 0.0


def _shared(shape: ActivationShape) -> tuple[float, float, float]:
    width = (shape.moe.moe_shared_expert_intermediate_size or 0) // shape.tp
    return _products(shape, shape.gathered, shape.model.hidden_size, width)


def _products(shape: ActivationShape, rows: int, width: int, inner: int) -> tuple[float, float, float]:
    """Operations of an MLP's first product, of its activation and of its second product."""
    fused = 2 if shape.gated else 1
    return 2.0 * rows * width * inner * fused, float(_ELEMENTWISE * rows * inner), 2.0 * rows * inner * width
