"""Rules about the optimizer: weight decay, clipping, gradient dtype, offload of its state, and the rules that it declares of itself."""

from __future__ import annotations

from collections.abc import Iterator

from petatron.base.errors import ConfigError, Problem
from petatron.config.optimizer_registry import find_rule_spec, unknown_optimizer, used_rules
from petatron.config.schema.fields import fields_by_name, flag_name
from petatron.config.schema.optimizer import BUILT_IN_RULES
from petatron.config.schema.optimizers.update_rule_spec import (
    OPTIMIZER_FLAG,
    OPTIMIZER_NAME,
    OPTIMIZER_SETTINGS_FLAG,
    UpdateRuleSpec,
)
from petatron.config.schema.parallel import FSDP_STRATEGIES
from petatron.config.schema.run import RawRunConfig
from petatron.config.setting_bounds_and_conflicts import at_least, within


def check_optimizer_offload(config: RawRunConfig) -> Iterator[Problem]:
    memory = config.memory
    yield from within("optimizer_offload_fraction", memory.optimizer_offload_fraction, 0, 1, closed=True)
    if memory.optimizer_cpu_offload and memory.optimizer_nvme_offload is not None:
        rule = "and --optimizer-nvme-offload are two places for the same state"
        yield Problem("--optimizer-cpu-offload", "", rule, "Keep one of them.")


def check_optimizer(config: RawRunConfig) -> Iterator[Problem]:
    optim = config.optim
    start, end, style = optim.start_weight_decay, optim.end_weight_decay, optim.weight_decay_incr_style
    yield from at_least("weight_decay", optim.weight_decay, 0)
    if style == "constant" and (start is not None or end is not None):
        where = "--start-weight-decay" if start is not None else "--end-weight-decay"
        rule = "belongs to a weight-decay schedule, but --weight-decay-incr-style is constant"
        yield Problem(where, "", rule, "Use linear or cosine, or give --weight-decay alone.")
    elif style != "constant" and (start is None or end is None):
        rule = "needs --start-weight-decay and --end-weight-decay"
        yield Problem("--weight-decay-incr-style", style, rule, "Give both, or use constant.")
    elif start is not None and end is not None and not 0 <= start <= end:
        rule = f"is not between 0 and --end-weight-decay {end:g}"
        yield Problem("--start-weight-decay", f"{start:g}", rule, "Weight decay may only grow.")
    yield from at_least("clip_grad", optim.clip_grad, 0)
    yield from _check_update_rule(config)
    strategy = config.parallel.data_parallel_sharding_strategy
    # Low-precision gradients require a model in low precision.
    if optim.main_grads_dtype == "bf16" and not config.precision.bf16:
        yield Problem("--main-grads-dtype", "bf16", "needs --bf16", "Give it, or use fp32.")
    if optim.main_grads_dtype == "bf16" and strategy in FSDP_STRATEGIES:
        rule = f"cannot be had with --data-parallel-sharding-strategy {strategy}, where fully_shard adds gradients up"
        yield Problem("--main-grads-dtype", "bf16", rule, "Use fp32, or the strategy optim.")


def _check_update_rule(config: RawRunConfig) -> Iterator[Problem]:
    """Yields the problems of the chosen optimizer, of its settings, and of the offload of its state."""
    if unknown := list(_unknown_optimizers(config)):
        yield from unknown
        return
    try:
        rule, *others = used_rules(config.optim)
    except ConfigError as error:
        yield from error.problems
        return
    if config.optim.optimizer in BUILT_IN_RULES and config.optim.optimizer_settings:
        given = " ".join(config.optim.optimizer_settings)
        rule_text = f"are settings of an imported optimizer, and {OPTIMIZER_FLAG} {rule.name} has flags"
        yield Problem(OPTIMIZER_SETTINGS_FLAG, given, rule_text, "Leave them out.")
    yield from rule.problems()
    for other in others:  # the rule of the remaining parameters updates each element by itself, and all of them
        if other.unit != "element" or other.hidden_matrices_only:
            text = f"cannot leave other parameters to {other.name}, which does not update each element by itself"
            yield Problem(OPTIMIZER_FLAG, rule.name, text, "Use adam for them.")
    yield from _rule_offload(config, rule)
    yield from _state_dtypes(config)


def _unknown_optimizers(config: RawRunConfig) -> Iterator[Problem]:
    for info in fields_by_name().values():
        name = getattr(getattr(config, info.section), info.name)
        if OPTIMIZER_NAME in info.marks and find_rule_spec(name) is None:
            yield unknown_optimizer(info.flag, name)


def _rule_offload(config: RawRunConfig, rule: UpdateRuleSpec) -> Iterator[Problem]:
    memory, reason = config.memory, rule.offload_problem
    if reason is None:
        return
    for name in ("optimizer_cpu_offload", "optimizer_nvme_offload"):
        value = getattr(memory, name)
        if value is not None and value is not False:
            text = f"cannot be combined with {OPTIMIZER_FLAG} {rule.name}, {reason}"
            shown = "" if value is True else value
            yield Problem(flag_name(name), shown, text, "Leave it out, shard the state over more ranks, or use adam.")


def _state_dtypes(config: RawRunConfig) -> Iterator[Problem]:
    """State in bf16 requires a model in low precision."""
    if config.precision.fp64:
        for rule in used_rules(config.optim):
            for name, narrow in rule.bf16_state_settings.items():
                if getattr(config.optim, name) == narrow:
                    yield Problem(flag_name(name), narrow, "cannot be combined with --fp64", "Leave one of them out.")
