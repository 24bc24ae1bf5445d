"""The settings that save memory, as groups of options: their flags, and their edits of a config.

The validator decides whether a run may have them, `advice.py` whether they help.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Literal

from petatron.config import RunConfig
from petatron.config.optimizer_registry import rule_spec
from petatron.config.pipeline_stages import max_layers_per_stage
from petatron.config.schema.fields import flag_name
from petatron.estimate.memory.relative_step_time import computes_in_fp32
from petatron.validate import check_config

_OFFLOAD_FRACTIONS = (0.25, 0.5, 0.75, 1.0)
_OPTIM = "--data-parallel-sharding-strategy optim"  # also where someone wrote no_shard
_SHARDED_OPTIMIZER: Mapping[str, Any] = {"use_distributed_optimizer": True, "data_parallel_sharding_strategy": "optim"}
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
    """Settings of which a run can have one; none where the setting is fixed, or does not apply.

    `may_save_most` are those that may free most, whatever they are combined with; None: each option frees more than the one before.
    """

    options: Sequence[MemoryOption] = ()
    may_save_most: Sequence[MemoryOption] | None = None

    @property
    def most_saving(self) -> Sequence[MemoryOption]:
        return self.options[-1:] if self.may_save_most is None else self.may_save_most


def option_groups(run: RunConfig) -> Iterator[OptionGroup]:
    """Yields every group of options that this run leaves open."""
    passes = (_micro_batch_options, _recompute_options, _activation_offload_options)
    state = (_sharding_options, _moment_dtype_options, _gradient_dtype_options, _optimizer_offload_options)
    for options in (*passes, *state, _sequence_parallel_options, _context_parallel_options):
        if (group := options(run)).options:
            yield group


def _option(
    section: str, affects: AffectedPart, remark: str = "", *, flags: str = "", only_slows: bool = False, **values: Any
) -> MemoryOption:
    """Returns the option that sets fields of one section of a config; its flags are theirs, unless others are given."""

    def edit(run: RunConfig) -> RunConfig:
        return replace(run, **{section: replace(getattr(run, section), **values)})

    typed = " ".join(f"{flag_name(name)} {_as_typed(value)}".strip() for name, value in values.items())
    return MemoryOption(flags or typed, edit, affects, remark, only_slows)


def _as_typed(value: Any) -> str:
    if isinstance(value, bool):
        return ""
    return " ".join(value) if isinstance(value, tuple) else f"{value:g}" if isinstance(value, float) else str(value)


def apply_options(run: RunConfig, options: Sequence[MemoryOption]) -> RunConfig:
    """Returns the run with these options."""
    for option in options:
        run = option.edit(run)
    return run


def problems_of(run: RunConfig) -> set[str]:
    """Returns what the validator says of a run."""
    return {str(problem) for problem in check_config(run, require_training=False)}


def is_allowed(run: RunConfig, existing_problems: set[str]) -> bool:
    """Whether the validator reports no problem besides those that the run had before."""
    return problems_of(run) <= existing_problems


def bf16_options(run: RunConfig) -> list[MemoryOption]:
    """Returns bf16 for a run in fp32; a float64 run is meant to be exact."""
    if run.precision.fp64 or not computes_in_fp32(run):
        return []
    return [_option("precision", "both", "computes in bfloat16, master weights stay in fp32", bf16=True)]


def _micro_batch_options(run: RunConfig) -> OptionGroup:
    """Smaller micro-batches, of which a step has more. The global batch is unchanged, and must be given if it was derived before."""
    size, batch = run.train.micro_batch_size, run.train.global_batch_size
    option, smaller = partial(_option, "train", "both", only_slows=True), range(size - 1, 0, -1)
    return OptionGroup([option(micro_batch_size=n, global_batch_size=batch) for n in smaller if size % n == 0])


def _recompute_options(run: RunConfig) -> OptionGroup:
    memory, layers = run.memory, max_layers_per_stage(run)
    if memory.recompute_granularity == "full" or memory.recompute_memory_budget_gb is not None or layers is None:
        return OptionGroup()
    branches = ("moe", "mlp") if run.moe.num_experts is not None else ("mlp",)
    asked = memory.recompute_modules if memory.recompute_granularity == "selective" else ()
    parts = [
        _option("memory", "passes", recompute_granularity="selective", recompute_modules=modules)
        for further in (branches, (*branches, "attention"))
        for modules in [tuple(dict.fromkeys((*asked, *further)))]
    ]
    numbers = sorted({max(1, layers * part // 8) for part in range(1, 8)} - {layers})
    some = [full_recompute_option("block", number) for number in numbers]
    every = full_recompute_option("uniform", 1)
    return OptionGroup([*parts, *some, every], [*parts, every])  # whole layers save least, but recompute most at a time


def full_recompute_option(method: str, number: int) -> MemoryOption:
    """Returns the recompute of whole layers, in units of `number` or of the first `number`."""
    values = {"recompute_granularity": "full", "recompute_method": method, "recompute_num_layers": number}
    return _option("memory", "passes", **values)


def _activation_offload_options(run: RunConfig) -> OptionGroup:
    layers, now = max_layers_per_stage(run) or 0, run.memory.cpu_offloading_num_layers
    if run.memory.fine_grained_activation_offloading:
        return OptionGroup()
    numbers = sorted({max(1, layers * part // 8) for part in range(1, 7)})
    option = partial(_option, "memory", "passes", only_slows=True)
    return OptionGroup([option(cpu_offloading_num_layers=number) for number in numbers if now < number < layers])


def _sharding_options(run: RunConfig) -> OptionGroup:
    """State sharded over data-parallel ranks, more of it than now.

    Which frees most depends on other settings: fully sharded, gradients are in fp32 and master weights stay on the device.
    """
    parallel, now = run.parallel, run.parallel.data_parallel_sharding_strategy
    if parallel.data_parallel_size * parallel.context_parallel_size == 1:
        return OptionGroup()
    variants: list[MemoryOption] = []
    if (overlapped := sharded_optimizer_option(run)) is not None:
        variants += [overlapped, _option("parallel", "both", flags=_OPTIM, **_SHARDED_OPTIMIZER)]
    use_fp32_grads = _option("optim", "both", main_grads_dtype="fp32")
    for strategy in _SHARDING_STRATEGIES[max(2, _SHARDING_STRATEGIES.index(now) + 1) :]:
        shard = _option("parallel", "both", data_parallel_sharding_strategy=strategy)
        flags = f"{shard.flags} {use_fp32_grads.flags}" if run.optim.main_grads_dtype != "fp32" else shard.flags
        variants.append(replace(shard, flags=flags, edit=lambda run, shard=shard: use_fp32_grads.edit(shard.edit(run))))
    return OptionGroup(variants, variants)


def sharded_optimizer_option(run: RunConfig) -> MemoryOption | None:
    """Returns optimizer state sharded over data-parallel ranks, for a run that shards nothing."""
    if run.parallel.data_parallel_sharding_strategy != "no_shard":
        return None
    flags = f"{_OPTIM} --overlap-param-gather"
    return _option("parallel", "both", flags=flags, **_SHARDED_OPTIMIZER, overlap_param_gather=True)


def _moment_dtype_options(run: RunConfig) -> OptionGroup:
    narrow = rule_spec(run.optim).bf16_state_settings
    if not narrow or any(getattr(run.optim, name) == value for name, value in narrow.items()):
        return OptionGroup()
    settings: dict[str, Any] = dict(narrow)
    return OptionGroup([_option("optim", "state", "moments are rounded", **settings)])


def _gradient_dtype_options(run: RunConfig) -> OptionGroup:
    if run.optim.main_grads_dtype == "bf16" or not run.precision.bf16:
        return OptionGroup()
    return OptionGroup([_option("optim", "state", "small parts of a gradient's sum are lost", main_grads_dtype="bf16")])


def _optimizer_offload_options(run: RunConfig) -> OptionGroup:
    if run.memory.optimizer_cpu_offload or rule_spec(run.optim).offload_problem is not None:
        return OptionGroup()
    option = partial(_option, "memory", "state", optimizer_cpu_offload=True)
    return OptionGroup([option(optimizer_offload_fraction=fraction) for fraction in _OFFLOAD_FRACTIONS])


def smaller_state_options(run: RunConfig) -> list[Sequence[MemoryOption]]:
    """Returns what makes the state of every rank smaller whatever the layout: on the host, rounded, or both, the exact one first."""
    offload = _optimizer_offload_options(run).options[-1:]
    rounded = [*_moment_dtype_options(run).options, *_gradient_dtype_options(run).options]
    sets = [offload, [*offload, *_moment_dtype_options(run).options], [*offload, *rounded], rounded]
    return [options for index, options in enumerate(sets) if options and options not in sets[:index]]


def _sequence_parallel_options(run: RunConfig) -> OptionGroup:
    if run.parallel.tensor_model_parallel_size == 1 or run.parallel.sequence_parallel:
        return OptionGroup()
    return OptionGroup([_option("parallel", "passes", only_slows=True, sequence_parallel=True)])


def _context_parallel_options(run: RunConfig) -> OptionGroup:
    """Data-parallel ranks become context-parallel ranks, at the same number of ranks."""
    dp, cp = run.parallel.data_parallel_size, run.parallel.context_parallel_size
    sizes: list[dict[str, Any]] = [
        {"data_parallel_size": dp // k, "context_parallel_size": cp * k} for k in (2, 4, 8) if dp % k == 0
    ]
    return OptionGroup([_option("parallel", "both", only_slows=True, **values) for values in sizes])
