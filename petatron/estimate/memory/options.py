"""The settings that save memory, as groups of options: their flags, and their edits of a config.

The validator decides whether a run may have them, `advice.py` whether they help.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from petatron.config import RunConfig
from petatron.config.optimizers import rule_spec
from petatron.config.pipeline_stages import max_layers_per_stage
from petatron.config.schema.fields import flag_name
from petatron.estimate.memory.time_cost import computes_in_fp32

_OFFLOAD_FRACTIONS = (0.25, 0.5, 0.75, 1.0)
_OPTIM = "--data-parallel-sharding-strategy optim"  # also where someone wrote no_shard
_SHARDED_OPTIMIZER = {"use_distributed_optimizer": True, "data_parallel_sharding_strategy": "optim"}
_SHARDING_STRATEGIES = ("no_shard", "optim", "optim_grads", "optim_grads_params")

ConfigEdit = Callable[[RunConfig], RunConfig]
AffectedPart = Literal["passes", "state", "both"]


@dataclass(frozen=True, slots=True, eq=False)
class MemoryOption:
    """One setting: its flags, its edit of a config, and a remark on what it changes beyond memory and time.

    affects: forward and backward of a step, or persistent state.
    only_slows: never makes forward and backward faster, whatever it is combined with.
    """

    flags: str
    edit: ConfigEdit
    affects: AffectedPart
    remark: str = ""
    only_slows: bool = False


@dataclass(frozen=True, slots=True)
class OptionGroup:
    """Settings of which a run can have one. `most_saving` are those that may free most, whatever they are combined with."""

    options: Sequence[MemoryOption]
    most_saving: Sequence[MemoryOption]

    @classmethod
    def increasing(cls, variants: Sequence[MemoryOption]) -> OptionGroup:
        """Builds a group in which each option frees more than the one before."""
        return cls(variants, variants[-1:])

    @classmethod
    def empty(cls) -> OptionGroup:
        """Builds the group of a setting that is fixed, or does not apply."""
        return cls((), ())


def option_groups(run: RunConfig) -> Iterator[OptionGroup]:
    """Yields every group of options that this run leaves open."""
    passes = (_micro_batch_options(run), _recompute_options(run), _activation_offload_options(run))
    state = (
        _sharding_options(run),
        _moment_dtype_options(run),
        _gradient_dtype_options(run),
        _optimizer_offload_options(run),
    )
    for group in (*passes, *state, _sequence_parallel_options(run), _context_parallel_options(run)):
        if group.options:
            yield group


def bf16_options(run: RunConfig) -> list[MemoryOption]:
    """Returns bf16 for a run in fp32; a float64 run is meant to be exact."""
    if run.precision.fp64 or not computes_in_fp32(run):
        return []
    remark = "computes in bfloat16, master weights stay in fp32"
    return [MemoryOption("--bf16", _edit_section("precision", bf16=True), "both", remark)]


def _edit_section(name: str, **values: Any) -> ConfigEdit:
    """Returns an edit that sets fields of one section of a config."""

    def edit(run: RunConfig) -> RunConfig:
        return replace(run, **{name: replace(getattr(run, name), **values)})

    return edit


def _micro_batch_options(run: RunConfig) -> OptionGroup:
    """Smaller micro-batches, of which a step has more. The global batch is unchanged, and must be given if it was derived before."""
    size, batch = run.train.micro_batch_size, run.train.global_batch_size
    smaller = [number for number in range(size - 1, 0, -1) if size % number == 0]
    return OptionGroup.increasing(
        [
            MemoryOption(
                f"--micro-batch-size {number} --global-batch-size {batch}",
                _edit_section("train", micro_batch_size=number),
                "both",
                only_slows=True,
            )
            for number in smaller
        ]
    )


def _recompute_options(run: RunConfig) -> OptionGroup:
    memory, layers = run.memory, max_layers_per_stage(run)
    if memory.recompute_granularity == "full" or memory.recompute_memory_budget_gb is not None or layers is None:
        return OptionGroup.empty()
    branches = ("moe", "mlp") if run.moe.num_experts is not None else ("mlp",)
    asked = memory.recompute_modules if memory.recompute_granularity == "selective" else ()
    parts: list[MemoryOption] = []
    for more in (branches, (*branches, "attention")):
        modules = tuple(dict.fromkeys((*asked, *more)))
        edit = _edit_section("memory", recompute_granularity="selective", recompute_modules=modules)
        flags = f"--recompute-granularity selective --recompute-modules {' '.join(modules)}"
        parts.append(MemoryOption(flags, edit, "passes"))
    some = [
        full_recompute_option("block", number)
        for number in sorted({max(1, layers * part // 8) for part in range(1, 8)} - {layers})
    ]
    every = full_recompute_option("uniform", 1)
    return OptionGroup([*parts, *some, every], [*parts, every])  # whole layers save least, but recompute most at a time


def full_recompute_option(method: str, number: int) -> MemoryOption:
    """Returns the recompute of whole layers, in units of `number` or of the first `number`."""
    edit = _edit_section("memory", recompute_granularity="full", recompute_method=method, recompute_num_layers=number)
    flags = f"--recompute-granularity full --recompute-method {method} --recompute-num-layers {number}"
    return MemoryOption(flags, edit, "passes")


def _activation_offload_options(run: RunConfig) -> OptionGroup:
    layers, now = max_layers_per_stage(run) or 0, run.memory.cpu_offloading_num_layers
    numbers = sorted({max(1, layers * part // 8) for part in range(1, 7)})
    return OptionGroup.increasing(
        [
            MemoryOption(
                f"--cpu-offloading-num-layers {number}",
                _edit_section("memory", cpu_offloading_num_layers=number),
                "passes",
                only_slows=True,
            )
            for number in numbers
            if now < number < layers
        ]
    )


def _sharding_options(run: RunConfig) -> OptionGroup:
    """State sharded over data-parallel ranks, more of it than now.

    Which frees most depends on other settings: fully sharded, gradients are in fp32 and master weights stay on the device.
    """
    parallel, now = run.parallel, run.parallel.data_parallel_sharding_strategy
    num_replicas = parallel.data_parallel_size * parallel.context_parallel_size
    if num_replicas == 1:
        return OptionGroup.empty()
    variants: list[MemoryOption] = []
    if (overlapped := sharded_optimizer_option(run)) is not None:
        variants += [overlapped, MemoryOption(_OPTIM, _edit_section("parallel", **_SHARDED_OPTIMIZER), "both")]
    for strategy in _SHARDING_STRATEGIES[max(2, _SHARDING_STRATEGIES.index(now) + 1) :]:
        flags = f"--data-parallel-sharding-strategy {strategy}"
        if run.optim.main_grads_dtype != "fp32":
            flags += " --main-grads-dtype fp32"
        variants.append(MemoryOption(flags, _fully_sharded_edit(strategy), "both"))
    return OptionGroup(variants, variants)


def sharded_optimizer_option(run: RunConfig) -> MemoryOption | None:
    """Returns optimizer state sharded over data-parallel ranks, for a run that shards nothing."""
    if run.parallel.data_parallel_sharding_strategy != "no_shard":
        return None
    overlapped = _edit_section("parallel", **_SHARDED_OPTIMIZER, overlap_param_gather=True)
    return MemoryOption(f"{_OPTIM} --overlap-param-gather", overlapped, "both")


def _fully_sharded_edit(strategy: str) -> ConfigEdit:
    shard = _edit_section("parallel", data_parallel_sharding_strategy=strategy)
    use_fp32_grads = _edit_section("optim", main_grads_dtype="fp32")
    return lambda run: use_fp32_grads(shard(run))


def _moment_dtype_options(run: RunConfig) -> OptionGroup:
    narrow = rule_spec(run.optim).bf16_state_settings
    if not narrow or any(getattr(run.optim, name) == value for name, value in narrow.items()):
        return OptionGroup.empty()
    edit = _edit_section("optim", **narrow)
    flags = " ".join(f"{flag_name(name)} {value}" for name, value in narrow.items())
    return OptionGroup.increasing([MemoryOption(flags, edit, "state", "moments are rounded")])


def _gradient_dtype_options(run: RunConfig) -> OptionGroup:
    if run.optim.main_grads_dtype == "bf16" or not run.precision.bf16:
        return OptionGroup.empty()
    edit = _edit_section("optim", main_grads_dtype="bf16")
    return OptionGroup.increasing(
        [MemoryOption("--main-grads-dtype bf16", edit, "state", "small parts of a gradient's sum are lost")]
    )


def _optimizer_offload_options(run: RunConfig) -> OptionGroup:
    if run.memory.optimizer_cpu_offload or rule_spec(run.optim).offload_problem is not None:
        return OptionGroup.empty()
    return OptionGroup.increasing(
        [
            MemoryOption(
                f"--optimizer-cpu-offload --optimizer-offload-fraction {fraction:g}",
                _edit_section("memory", optimizer_cpu_offload=True, optimizer_offload_fraction=fraction),
                "state",
            )
            for fraction in _OFFLOAD_FRACTIONS
        ]
    )


def smaller_state_options(run: RunConfig) -> list[Sequence[MemoryOption]]:
    """Returns what makes the state of every rank smaller whatever the layout: on the host, rounded, or both, the exact one first."""
    offload = _optimizer_offload_options(run).options[-1:]
    rounded = [*_moment_dtype_options(run).options, *_gradient_dtype_options(run).options]
    sets = [offload, [*offload, *_moment_dtype_options(run).options], [*offload, *rounded], rounded]
    return [options for index, options in enumerate(sets) if options and options not in sets[:index]]


def _sequence_parallel_options(run: RunConfig) -> OptionGroup:
    if run.parallel.tensor_model_parallel_size == 1 or run.parallel.sequence_parallel:
        return OptionGroup.empty()
    edit = _edit_section("parallel", sequence_parallel=True)
    return OptionGroup.increasing([MemoryOption("--sequence-parallel", edit, "passes", only_slows=True)])


def _context_parallel_options(run: RunConfig) -> OptionGroup:
    """Data-parallel ranks become context-parallel ranks, at the same number of ranks."""
    replicas, size = run.parallel.data_parallel_size, run.parallel.context_parallel_size
    variants: list[MemoryOption] = []
    for factor in (2, 4, 8):
        if replicas % factor == 0:
            edit = _edit_section("parallel", context_parallel_size=size * factor, data_parallel_size=replicas // factor)
            flags = f"--data-parallel-size {replicas // factor} --context-parallel-size {size * factor}"
            variants.append(MemoryOption(flags, edit, "both", only_slows=True))
    return OptionGroup.increasing(variants)
