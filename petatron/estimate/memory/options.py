"""What can be set to hold less, as variants of some kinds: their flags, and what they do to a config.

Whether a run may have them is the validator's business, and whether they help that of `advice.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from petatron.config import RunConfig
from petatron.config.pipeline_stages import largest_stage
from petatron.estimate.memory.time_cost import computes_wide

_FRACTIONS = (0.25, 0.5, 0.75, 1.0)
_STRATEGIES = ("no_shard", "optim", "optim_grads", "optim_grads_params")

Edit = Callable[[RunConfig], RunConfig]
Side = Literal["passes", "state", "both"]


@dataclass(frozen=True, slots=True, eq=False)
class Variant:
    """One setting: the flags that say it, how it changes a config, and what it means beyond memory and time.

    side: what it touches, the passes of a step or what is held from step to step.
    only_slows: no passes get faster by it, whatever it goes with.
    """

    flags: str
    edit: Edit
    side: Side
    remark: str = ""
    only_slows: bool = False


@dataclass(frozen=True, slots=True)
class Kind:
    """Settings of which a run can have one. `strongest` are those of them that may free most, whatever they go with."""

    variants: Sequence[Variant]
    strongest: Sequence[Variant]

    @classmethod
    def rising(cls, variants: Sequence[Variant]) -> Kind:
        """Each frees more than the one before."""
        return cls(variants, variants[-1:])

    @classmethod
    def closed(cls) -> Kind:
        """The run has made its choice, or has none."""
        return cls((), ())


def kinds_of(run: RunConfig) -> Iterator[Kind]:
    """Every kind of change that this run leaves open."""
    passes = (_micro_batches(run), _recompute(run), _offloaded_activations(run))
    state = (_sharing(run), _moments(run), _gradients(run), _offloaded_optimizer(run))
    for kind in (*passes, *state, _sequence(run), _context(run)):
        if kind.variants:
            yield kind


def narrower(run: RunConfig) -> list[Variant]:
    """bf16 for a run in fp32; one in float64 wants to be exact."""
    if run.precision.fp64 or not computes_wide(run):
        return []
    remark = "computes in bfloat16, master weights stay in fp32"
    return [Variant("--bf16", _section("precision", bf16=True), "both", remark)]


def _section(name: str, **values: Any) -> Edit:
    """Sets fields of one section of a config."""

    def edit(run: RunConfig) -> RunConfig:
        return replace(run, **{name: replace(getattr(run, name), **values)})

    return edit


def _micro_batches(run: RunConfig) -> Kind:
    """Smaller ones, of which a step has more. The global batch stays, which must be said if it was derived before."""
    size, batch = run.train.micro_batch_size, run.train.global_batch_size
    smaller = [number for number in range(size - 1, 0, -1) if size % number == 0]
    return Kind.rising(
        [
            Variant(
                f"--micro-batch-size {number} --global-batch-size {batch}",
                _section("train", micro_batch_size=number),
                "passes",
                only_slows=True,
            )
            for number in smaller
        ]
    )


def _recompute(run: RunConfig) -> Kind:
    memory, layers = run.memory, largest_stage(run)
    if memory.recompute_granularity == "full" or memory.recompute_memory_budget_gb is not None or layers is None:
        return Kind.closed()
    branches = ("moe", "mlp") if run.moe.num_experts is not None else ("mlp",)
    asked = memory.recompute_modules if memory.recompute_granularity == "selective" else ()
    parts: list[Variant] = []
    for more in (branches, (*branches, "attention")):
        modules = tuple(dict.fromkeys((*asked, *more)))
        edit = _section("memory", recompute_granularity="selective", recompute_modules=modules)
        flags = f"--recompute-granularity selective --recompute-modules {' '.join(modules)}"
        parts.append(Variant(flags, edit, "passes"))
    some = [
        _whole_layers("block", number)
        for number in sorted({max(1, layers * part // 8) for part in range(1, 8)} - {layers})
    ]
    every = _whole_layers("uniform", 1)
    return Kind([*parts, *some, every], [*parts, every])  # whole layers keep least, but make most again at a time


def _whole_layers(method: str, number: int) -> Variant:
    edit = _section("memory", recompute_granularity="full", recompute_method=method, recompute_num_layers=number)
    flags = f"--recompute-granularity full --recompute-method {method} --recompute-num-layers {number}"
    return Variant(flags, edit, "passes")


def _offloaded_activations(run: RunConfig) -> Kind:
    layers, now = largest_stage(run) or 0, run.memory.cpu_offloading_num_layers
    numbers = sorted({max(1, layers * part // 8) for part in range(1, 7)})
    return Kind.rising(
        [
            Variant(
                f"--cpu-offloading-num-layers {number}",
                _section("memory", cpu_offloading_num_layers=number),
                "passes",
                only_slows=True,
            )
            for number in numbers
            if now < number < layers
        ]
    )


def _sharing(run: RunConfig) -> Kind:
    """State spread over the ranks that hold the same weights, more of it than now.

    Which frees most depends on the rest: fully sharded, gradients are in fp32 and master weights stay on the device.
    """
    parallel, now = run.parallel, run.parallel.data_parallel_sharding_strategy
    copies = (parallel.data_parallel_size or 1) * parallel.context_parallel_size
    if copies == 1 or now is None:
        return Kind.closed()
    variants: list[Variant] = []
    if now == "no_shard":
        flags = "--data-parallel-sharding-strategy optim"  # also where someone wrote no_shard
        shared = {"use_distributed_optimizer": True, "data_parallel_sharding_strategy": "optim"}
        overlapped = _section("parallel", **shared, overlap_param_gather=True)
        variants.append(Variant(f"{flags} --overlap-param-gather", overlapped, "both"))
        variants.append(Variant(flags, _section("parallel", **shared), "both"))
    for strategy in _STRATEGIES[max(2, _STRATEGIES.index(now) + 1) :]:
        flags = f"--data-parallel-sharding-strategy {strategy}"
        if run.optim.main_grads_dtype != "fp32":
            flags += " --main-grads-dtype fp32"
        variants.append(Variant(flags, _fully_sharded(strategy), "both"))
    return Kind(variants, variants)


def _fully_sharded(strategy: str) -> Edit:
    share = _section("parallel", data_parallel_sharding_strategy=strategy)
    widen = _section("optim", main_grads_dtype="fp32")
    return lambda run: widen(share(run))


def _moments(run: RunConfig) -> Kind:
    optim = run.optim
    if optim.optimizer != "adam" or (optim.exp_avg_dtype, optim.exp_avg_sq_dtype) != ("fp32", "fp32"):
        return Kind.closed()
    edit = _section("optim", exp_avg_dtype="bf16", exp_avg_sq_dtype="bf16")
    flags = "--exp-avg-dtype bf16 --exp-avg-sq-dtype bf16"
    return Kind.rising([Variant(flags, edit, "state", "moments are rounded")])


def _gradients(run: RunConfig) -> Kind:
    if run.optim.main_grads_dtype == "bf16" or not run.precision.bf16:
        return Kind.closed()
    edit = _section("optim", main_grads_dtype="bf16")
    return Kind.rising([Variant("--main-grads-dtype bf16", edit, "state", "small parts of a gradient's sum are lost")])


def _offloaded_optimizer(run: RunConfig) -> Kind:
    if run.memory.optimizer_cpu_offload:
        return Kind.closed()
    return Kind.rising(
        [
            Variant(
                f"--optimizer-cpu-offload --optimizer-offload-fraction {fraction:g}",
                _section("memory", optimizer_cpu_offload=True, optimizer_offload_fraction=fraction),
                "state",
            )
            for fraction in _FRACTIONS
        ]
    )


def _sequence(run: RunConfig) -> Kind:
    if run.parallel.tensor_model_parallel_size == 1 or run.parallel.sequence_parallel:
        return Kind.closed()
    edit = _section("parallel", sequence_parallel=True)
    return Kind.rising([Variant("--sequence-parallel", edit, "passes", only_slows=True)])


def _context(run: RunConfig) -> Kind:
    """Data-parallel ranks that share each sequence instead, at the same number of ranks."""
    replicas, size = run.parallel.data_parallel_size or 1, run.parallel.context_parallel_size
    variants: list[Variant] = []
    for factor in (2, 4, 8):
        if replicas % factor == 0:
            edit = _section("parallel", context_parallel_size=size * factor, data_parallel_size=replicas // factor)
            flags = f"--data-parallel-size {replicas // factor} --context-parallel-size {size * factor}"
            variants.append(Variant(flags, edit, "both", only_slows=True))
    return Kind.rising(variants)
