"""Valid settings whose effect depends on what layers and hardware do: reported, so that nobody expects another one.

Settings without any effect are known from their declaration (`config/declared_rules.py`).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from petatron.config.schema.fields import all_fields, fields_by_name
from petatron.config.schema.run import RawRunConfig
from petatron.config.value_origins import ValueOrigin
from petatron.validate.moe import router_cannot_learn


def effect_notices(config: RawRunConfig, origins: Mapping[str, ValueOrigin]) -> Iterator[str]:
    """Yields one line for each setting that has another effect than its name suggests, and each module that is not recomputed."""
    yield from _different_effects(config, origins)
    if origins["memory.recompute_modules"].kind in ("flag", "file"):
        yield from _unused_recompute_modules(config)


def _different_effects(config: RawRunConfig, origins: Mapping[str, ValueOrigin]) -> Iterator[str]:
    precision = config.precision
    if router_cannot_learn(config.moe):
        yield (
            "--moe-router-topk 1 with a softmax over the chosen expert alone: the loss has no gradient for the router, which stays "
            "as it is but for load balancing"
        )
    # On by default, so that only an explicit flag shows that someone expects an effect.
    asked = config.moe.moe_shared_expert_overlap and origins["moe.moe_shared_expert_overlap"].kind == "flag"
    reason = fields_by_name()["moe_shared_expert_overlap"].unused_reason(config)
    if asked and config.moe.num_experts is not None and reason:
        yield f"--moe-shared-expert-overlap has no effect: {reason}"
    if precision.fp8_format == "hybrid" and precision.fp8_recipe == "blockwise":
        yield "--fp8-format hybrid is e4m3 with --fp8-recipe blockwise: hardware multiplies no blocks of e5m2"
    if precision.fp8_format is not None and not (precision.bf16 or precision.fp16 or precision.fp64):
        refused = origins["precision.bf16"].kind == "flag"  # --no-bf16, as in every run of `petatron verify`
        yield (
            f"--fp8-format {precision.fp8_format} is emulated, and slower than no FP8, in a run in fp32: hardware multiplies "
            f"eight-bit numbers for bfloat16 ones{'' if refused else '. Add --bf16'}"
        )


def _unused_recompute_modules(config: RawRunConfig) -> Iterator[str]:
    """Yields modules to recompute that the model does not have, or of which nothing is saved anyway."""
    if config.memory.recompute_granularity != "selective":
        return
    lacking = {"moe_act": "what an activation function makes is never kept"}
    if not _saves_norm_outputs(config):
        lacking["layernorm"] = "what a norm makes is not kept here"
    for feature in dict.fromkeys(info.feature for info in all_fields()):
        if feature.recompute_modules and (reason := feature.unused_reason(config)):
            lacking |= dict.fromkeys(feature.recompute_modules, reason)
    if config.moe.num_experts is None or config.moe.moe_shared_expert_intermediate_size is None:
        lacking["shared_experts"] = "there is no shared expert"
    for module in config.memory.recompute_modules:
        if module in lacking:
            yield f"--recompute-modules {module} has no effect: {lacking[module]}"


def _saves_norm_outputs(config: RawRunConfig) -> bool:
    """Whether norm outputs are saved for backward: by a router whose GEMM uses them directly."""
    precision, moe = config.precision, config.moe
    if moe.num_experts is None or moe.moe_input_jitter_eps:
        return False
    short = precision.bf16 or precision.fp16
    return moe.moe_router_dtype is None or precision.fp64 or (moe.moe_router_dtype == "fp32" and not short)
