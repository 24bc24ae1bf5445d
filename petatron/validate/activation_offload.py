"""Rules about offload of activations, by layer and by module, and its interaction with recompute."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping

from petatron.base.errors import Problem
from petatron.config.pipeline_stages import max_layers_per_stage
from petatron.config.schema.fields import all_fields
from petatron.config.schema.memory import MemoryConfig
from petatron.config.schema.run import RawRunConfig
from petatron.config.setting_bounds_and_conflicts import within

BY_LAYER, BY_MODULE, MODULES = (
    "--cpu-offloading-num-layers",
    "--fine-grained-activation-offloading",
    "--offload-modules",
)
_RECOMPUTED: Mapping[str, Collection[str]] = {
    "attention": ("qkv_linear", "core_attn", "attn_proj"),
    "mlp": ("mlp",),
    "moe": ("moe", "experts", "expert_fc1", "moe_act", "shared_experts"),
    "shared_experts": ("shared_experts",),
    "mamba": ("mamba",),
    "delta": ("delta",),
}
"""For each of `--recompute-modules`, the `--offload-modules` that then save nothing."""


def check_activation_offload(config: RawRunConfig) -> Iterator[Problem]:
    memory = config.memory
    yield from within("activation_offload_fraction", memory.activation_offload_fraction, 0, 1, closed=True)
    yield from _layers(config)
    if memory.fine_grained_activation_offloading:
        yield from _modules(memory)
    if memory.offloads_activations and memory.recompute_memory_budget_gb is not None:
        rule = "cannot be combined with --recompute-memory-budget-gb, which counts on nothing leaving the device"
        fix = "Say what to recompute with --recompute-granularity, or keep one of them."
        where, value = offload_flag(memory)
        yield Problem(where, value, rule, fix)


def offload_flag(memory: MemoryConfig) -> tuple[str, str]:
    """Returns the flag that offloads activations, and its value."""
    number = memory.cpu_offloading_num_layers
    return (BY_LAYER, str(number)) if number > 0 else (BY_MODULE, "")


def _layers(config: RawRunConfig) -> Iterator[Problem]:
    number, largest = config.memory.cpu_offloading_num_layers, max_layers_per_stage(config)
    if largest is not None and number > largest:
        rule = f"is more than the {largest} layers of a pipeline stage"
        yield Problem(BY_LAYER, str(number), rule, f"Use {largest} or less; a quarter of them is a good start.")
    if number > 0 and config.memory.fine_grained_activation_offloading:
        rule = f"offloads all that some layers save, and {BY_MODULE} what modules of all layers do"
        yield Problem(BY_LAYER, str(number), rule, "Keep one of them.")


def _modules(memory: MemoryConfig) -> Iterator[Problem]:
    asked = memory.offload_modules
    selective = memory.recompute_granularity == "selective"
    recomputed = memory.recompute_modules if selective else ()
    if memory.recompute_granularity == "full" and memory.recompute_method == "uniform":
        rule = (
            "finds nothing with --recompute-granularity full and --recompute-method uniform: no module saves anything"
        )
        yield Problem(
            MODULES, " ".join(asked), rule, "Use --recompute-method block or selective recompute, or keep one of them."
        )
    for region in recomputed:
        for name in asked:
            if name in _RECOMPUTED.get(region, ()):
                rule = f"saves nothing that could be offloaded: --recompute-modules {region} has it recomputed"
                yield Problem(MODULES, name, rule, "Name it in one of the two.")
    if "attn_proj" in asked and "core_attn" not in asked and "core_attn" not in recomputed:
        rule = "frees nothing by itself: core_attn saves its output, which is the input of attn_proj, too"
        yield Problem(MODULES, "attn_proj", rule, "Add core_attn, or recompute that.")


def unused_offload_modules(config: RawRunConfig) -> Iterator[str]:
    """Yields the modules to offload that the model does not have."""
    if not config.memory.fine_grained_activation_offloading:
        return
    lacking: dict[str, str] = {}
    for feature in dict.fromkeys(info.feature for info in all_fields()):
        if feature.offload_modules and (reason := feature.unused_reason(config)):
            lacking |= dict.fromkeys(feature.offload_modules, reason)
    if config.moe.num_experts is None or config.moe.moe_shared_expert_intermediate_size is None:
        lacking["shared_experts"] = "there is no shared expert"
    for module in config.memory.offload_modules:
        if module in lacking:
            yield f"{MODULES} {module} has no effect: {lacking[module]}"
