"""Checks of the optimizer, which asks the update rules themselves and names none."""

from __future__ import annotations

from collections.abc import Iterator

from petatron.base.errors import ConfigError, Problem
from petatron.config.optimizers import find_rule_spec, unknown_optimizer, used_rules
from petatron.config.schema.fields import fields_by_name, flag_name
from petatron.config.schema.optimizers.update_rule_spec import (
    OPTIMIZER_FLAG,
    OPTIMIZER_NAME,
    OPTIMIZER_SETTINGS_FLAG,
    UpdateRuleSpec,
)
from petatron.config.schema.run import RawRunConfig
from petatron.config.schema.training import BUILT_IN_RULES


def check_update_rule(config: RawRunConfig) -> Iterator[Problem]:
    """Yields the problems of the chosen optimizer, of its settings, and of where its state is to be."""
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
    yield from (problem for other in others for problem in _scalar_optimizer(rule, other))
    yield from _offload(config, rule)
    yield from _state_dtypes(config)


def _unknown_optimizers(config: RawRunConfig) -> Iterator[Problem]:
    for info in fields_by_name().values():
        name = getattr(getattr(config, info.section), info.name)
        if OPTIMIZER_NAME in info.marks and find_rule_spec(name) is None:
            yield unknown_optimizer(info.flag, name)


def _scalar_optimizer(rule: UpdateRuleSpec, other: UpdateRuleSpec) -> Iterator[Problem]:
    """The rule of the remaining parameters updates each element by itself, and all of them."""
    if other.unit != "element" or other.hidden_matrices_only:
        text = f"cannot leave other parameters to {other.name}, which does not update each element by itself"
        yield Problem(OPTIMIZER_FLAG, rule.name, text, "Use adam for them.")


def _offload(config: RawRunConfig, rule: UpdateRuleSpec) -> Iterator[Problem]:
    memory, reason = config.memory, rule.offload_problem
    if reason is None:
        return
    for name, chosen in (
        ("optimizer_cpu_offload", memory.optimizer_cpu_offload),
        ("optimizer_nvme_offload", memory.optimizer_nvme_offload is not None),
    ):
        if chosen:
            value = "" if name == "optimizer_cpu_offload" else str(memory.optimizer_nvme_offload)
            text = f"cannot be combined with {OPTIMIZER_FLAG} {rule.name}, {reason}"
            yield Problem(flag_name(name), value, text, "Leave it out, shard the state over more ranks, or use adam.")


def _state_dtypes(config: RawRunConfig) -> Iterator[Problem]:
    """State in bf16 requires a model in low precision."""
    if config.precision.fp64:
        for rule in used_rules(config.optim):
            for name, narrow in rule.bf16_state_settings.items():
                if getattr(config.optim, name) == narrow:
                    yield Problem(flag_name(name), narrow, "cannot be combined with --fp64", "Leave one of them out.")
