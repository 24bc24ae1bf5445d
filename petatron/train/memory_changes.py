"""Settings that would make a run fit, and what each would cost: predicted, not tried.

A candidate is a set of at most three changes. It counts if the validator accepts it and the forecast says that it fits; among
the variants of one kind of change the cheapest is taken. Costs are shares of the step's time, from rules of thumb for
one GPU that are meant to order candidates, not to promise speed (b bytes per second of the link to the host, 50 GB/s; F the
time of the layers' forward pass, without the head, at 600 TFLOP/s, or 60 in fp32):

    smaller micro-batch      products of t rows take 1 + 256 / t of their best time; weights and gradients are passed over
                             once more per micro-batch, 12 bytes per element at 4 TB/s
    recompute                the operations that are repeated
    activation offload       bytes / b beyond F on the way out, and beyond 2 F on the way back
    optimizer offload        12 bytes per element and direction over b
    context parallelism      keys and values of the other ranks, three times, at 150 GB/s
    bf16 in place of fp32    a tenth of the time for operations
    sequence parallelism, distributed optimizer, bf16 moments      nothing
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import combinations, product
from typing import Any

from petatron.base.errors import ConfigError
from petatron.config import RunConfig
from petatron.config.check import check
from petatron.config.layer_pattern import moe_layers
from petatron.config.stages import largest_stage, stages
from petatron.models.activations import ActivationShape
from petatron.models.flops import model_flops_per_token, padded_vocabulary
from petatron.models.offload_plan import offloaded_bytes
from petatron.models.recompute_plan import recompute_flops
from petatron.models.state_bytes import held_elements
from petatron.train.build import steps_micro_batches
from petatron.train.memory import Device, heaviest, memory_plans

_FLOPS, _FLOPS_WIDE, _HOST_LINK, _COPY, _DEVICE_LINK = 600e12, 60e12, 50e9, 4e12, 150e9
_MOST_TOGETHER = 3
_FRACTIONS = (0.25, 0.5, 0.75, 1.0)

Edit = Callable[[RunConfig], RunConfig]


@dataclass(frozen=True, slots=True)
class Variant:
    """One setting: the flags that say it, how it changes a config, and what it means beyond memory and time."""

    flags: str
    edit: Edit
    remark: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Change:
    """Flags that make a run fit, the bytes they free, the run's total then, and the share of time they cost."""

    flags: str
    total_bytes: int
    saved_bytes: int
    cost: float
    remark: str = ""


def candidates(run: RunConfig, capacity_bytes: int, *, device: Device = "cuda") -> list[Change]:
    """Changes under which the heaviest rank needs at most `capacity_bytes`, the cheapest first.

    A kind of change is added to others that do already only if the whole gets cheaper; a third only while fewer than
    three sets do, or to --bf16: it makes any other set cheaper, so those without it would hide the ones with it.
    """
    search = _Search(run, capacity_bytes, device)
    kinds = list(_kinds(run))
    narrower = bool(_narrower(run))  # the first kind, if it is one
    found: dict[frozenset[int], Change] = {}
    for together in range(1, _MOST_TOGETHER + 1):
        enough = together == _MOST_TOGETHER and len(found) >= 3
        for chosen in combinations(range(len(kinds)), together):
            if enough and not (narrower and chosen[0] == 0):
                continue
            fitting = [search.try_out(variants) for variants in product(*(kinds[at] for at in chosen))]
            best = min((change for change in fitting if change is not None), key=_price, default=None)
            inside = [_price(change) for fewer, change in found.items() if fewer < set(chosen)]
            if best is not None and all(_price(best)[0] < cost for cost, _ in inside):
                found[frozenset(chosen)] = best
    return sorted(found.values(), key=_price)


def _price(change: Change) -> tuple[float, int]:
    return round(change.cost, 4), change.total_bytes


class _Search:
    """What is the same for all candidates of a run."""

    def __init__(self, run: RunConfig, capacity_bytes: int, device: Device) -> None:
        self._run, self._capacity = run, capacity_bytes
        self._device: Device = device
        self._known = {str(problem) for problem in check(run, require_training=False)}
        self._total = heaviest(run, device=device).total
        self._time = predicted_time(run, device=device)

    def try_out(self, variants: Sequence[Variant]) -> Change | None:
        """The change that these variants make together, if they may be combined and fit."""
        run = self._run
        for variant in variants:
            run = variant.edit(run)
        if any(str(problem) not in self._known for problem in check(run, require_training=False)):
            return None
        try:
            total = heaviest(run, device=self._device).total
        except ConfigError:  # a memory budget that cannot be kept any more
            return None
        if total > self._capacity:
            return None
        return Change(
            flags=" ".join(variant.flags for variant in variants),
            total_bytes=total,
            saved_bytes=self._total - total,
            cost=predicted_time(run, device=self._device) / self._time - 1.0,
            remark="; ".join(variant.remark for variant in variants if variant.remark),
        )


def predicted_time(run: RunConfig, *, device: Device = "cuda") -> float:
    """Seconds of a step on one rank by the rules of thumb above; to be compared with others of its kind only."""
    parallel, micro_batches = run.parallel, steps_micro_batches(run)
    speed = _FLOPS_WIDE if _is_wide(run) else _FLOPS
    assert run.train.global_batch_size is not None and parallel.world_size is not None
    per_token = model_flops_per_token(
        run.model, run.moe, experts_in=moe_layers(run), tensor_parallel=parallel.tensor_model_parallel_size
    )
    tokens = run.train.global_batch_size * run.model.seq_length
    ideal = per_token * tokens / parallel.world_size / speed
    shape = ActivationShape.of(run, device=device)
    elements = held_elements(run, stages(run)[:1])
    held = elements.dense + elements.experts
    seconds = ideal * (1.0 + 256.0 / shape.gathered) + micro_batches * 12.0 * held / _COPY
    seconds += _again(run, shape, device) * micro_batches / speed
    head = 6 * run.model.hidden_size * padded_vocabulary(run.model, tensor_parallel=parallel.tensor_model_parallel_size)
    forward = (1.0 - head / per_token) * ideal / micro_batches / 3.0
    seconds += _moved(run, shape, device, forward=forward) * micro_batches
    if run.memory.optimizer_cpu_offload:
        shared = parallel.data_parallel_sharding_strategy != "no_shard"
        owned = held / (parallel.data_parallel_size or 1) if shared else held
        seconds += run.memory.optimizer_offload_fraction * 12.0 * owned / _HOST_LINK
    others = parallel.context_parallel_size - 1
    layers = sum(len(stage.layers) for stage in stages(run)) / parallel.pipeline_model_parallel_size
    keys = 2 * shape.keys * shape.gathered * shape.element
    return seconds + 3.0 * others * keys * layers * micro_batches / _DEVICE_LINK


def _is_wide(run: RunConfig) -> bool:
    """Whether the run computes in fp32, or wider."""
    return not (run.precision.bf16 or run.precision.fp16)


def _again(run: RunConfig, shape: ActivationShape, device: Device) -> float:
    """Operations that the busiest stage repeats for one micro-batch."""
    plans = memory_plans(run, device=device)
    return max(
        sum(
            recompute_flops(shape, modules, mixed=shape.mixed[layer])
            for layer, modules in zip(stage.layers, plan.modules, strict=True)
        )
        for stage, plan in zip(stages(run), plans, strict=True)
    )


def _moved(run: RunConfig, shape: ActivationShape, device: Device, *, forward: float) -> float:
    """Seconds for which a micro-batch waits for activations that leave or come back."""
    number = run.memory.cpu_offloading_num_layers
    if number == 0:
        return 0.0
    plan, stage = memory_plans(run, device=device)[0], stages(run)[0]
    mixed = tuple(shape.mixed[layer] for layer in stage.layers)
    seconds = offloaded_bytes(plan, shape, mixed, number) / _HOST_LINK
    return max(0.0, seconds - forward) + max(0.0, seconds - 2.0 * forward)


def _section(name: str, **values: Any) -> Edit:
    """Sets fields of one section of a config."""

    def edit(run: RunConfig) -> RunConfig:
        return replace(run, **{name: replace(getattr(run, name), **values)})

    return edit


def _kinds(run: RunConfig) -> Iterator[list[Variant]]:
    """Every kind of change that this run leaves open, as its variants."""
    common = (_narrower(run), _micro_batches(run), _recompute(run), _offloaded_activations(run), _sharing(run))
    yield from filter(None, common)
    optim, memory, parallel = run.optim, run.memory, run.parallel
    if optim.optimizer == "adam" and optim.exp_avg_dtype == optim.exp_avg_sq_dtype == "fp32":
        edit = _section("optim", exp_avg_dtype="bf16", exp_avg_sq_dtype="bf16")
        yield [Variant("--exp-avg-dtype bf16 --exp-avg-sq-dtype bf16", edit, "moments are rounded")]
    if not memory.optimizer_cpu_offload:
        yield [
            Variant(
                f"--optimizer-cpu-offload --optimizer-offload-fraction {fraction:g}",
                _section("memory", optimizer_cpu_offload=True, optimizer_offload_fraction=fraction),
            )
            for fraction in _FRACTIONS
        ]
    if parallel.tensor_model_parallel_size > 1 and not parallel.sequence_parallel:
        yield [Variant("--sequence-parallel", _section("parallel", sequence_parallel=True))]
    yield from filter(None, [_context(run)])


def _narrower(run: RunConfig) -> list[Variant]:
    """bf16 for a run in fp32; one in float64 wants to be exact."""
    if run.precision.fp64 or not _is_wide(run):
        return []
    return [Variant("--bf16", _section("precision", bf16=True), "computes in bfloat16, master weights stay in fp32")]


def _micro_batches(run: RunConfig) -> list[Variant]:
    """Smaller ones, of which a step has more. The global batch stays, which must be said if it was derived before."""
    size, batch = run.train.micro_batch_size, run.train.global_batch_size
    return [
        Variant(
            f"--micro-batch-size {smaller} --global-batch-size {batch}", _section("train", micro_batch_size=smaller)
        )
        for smaller in range(1, size)
        if size % smaller == 0
    ]


def _recompute(run: RunConfig) -> list[Variant]:
    memory, layers = run.memory, largest_stage(run)
    if memory.recompute_granularity == "full" or memory.recompute_memory_budget_gb is not None or layers is None:
        return []
    branches = ("moe", "mlp") if run.moe.num_experts is not None else ("mlp",)
    asked = memory.recompute_modules if memory.recompute_granularity == "selective" else ()
    variants: list[Variant] = []
    for more in (branches, (*branches, "attention")):
        modules = tuple(dict.fromkeys((*asked, *more)))
        edit = _section("memory", recompute_granularity="selective", recompute_modules=modules)
        variants.append(Variant(f"--recompute-granularity selective --recompute-modules {' '.join(modules)}", edit))
    whole = {"recompute_granularity": "full"}
    for number in sorted({max(1, layers * part // 8) for part in range(1, 8)} - {layers}):
        edit = _section("memory", **whole, recompute_method="block", recompute_num_layers=number)
        flags = f"--recompute-granularity full --recompute-method block --recompute-num-layers {number}"
        variants.append(Variant(flags, edit))
    edit = _section("memory", **whole, recompute_method="uniform", recompute_num_layers=1)
    flags = "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1"
    return [*variants, Variant(flags, edit)]


def _offloaded_activations(run: RunConfig) -> list[Variant]:
    layers, now = largest_stage(run) or 0, run.memory.cpu_offloading_num_layers
    numbers = sorted({max(1, layers * part // 8) for part in range(1, 7)})
    return [
        Variant(f"--cpu-offloading-num-layers {number}", _section("memory", cpu_offloading_num_layers=number))
        for number in numbers
        if now < number < layers
    ]


def _sharing(run: RunConfig) -> list[Variant]:
    """State spread over the ranks that hold the same weights."""
    parallel = run.parallel
    copies = (parallel.data_parallel_size or 1) * parallel.context_parallel_size
    if copies == 1 or parallel.data_parallel_sharding_strategy != "no_shard":
        return []
    edit = _section("parallel", use_distributed_optimizer=True, data_parallel_sharding_strategy="optim")
    return [Variant("--use-distributed-optimizer", edit)]


def _context(run: RunConfig) -> list[Variant]:
    """Data-parallel ranks that share each sequence instead, at the same number of ranks."""
    replicas, size = run.parallel.data_parallel_size or 1, run.parallel.context_parallel_size
    variants: list[Variant] = []
    for factor in (2, 4, 8):
        if replicas % factor == 0:
            edit = _section("parallel", context_parallel_size=size * factor, data_parallel_size=replicas // factor)
            variants.append(Variant(f"--context-parallel-size {size * factor}", edit))
    return variants
