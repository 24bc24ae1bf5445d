"""The registry of optimizers: their `UpdateRuleSpec` by name, those of `OptimizerConfig` and those that user code registers."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import fields, is_dataclass

from petatron.base.errors import ConfigError, Problem
from petatron.config.import_user_modules import IMPORT_FLAG, import_installed_plugins
from petatron.config.schema.fields import closest_matches, join_with_or
from petatron.config.schema.optimizer import BUILT_IN_RULES, OptimizerConfig
from petatron.config.schema.optimizers.update_rule_spec import OPTIMIZER_FLAG, UpdateRuleSpec

_REGISTERED: dict[str, type[UpdateRuleSpec]] = {}


def register_rule_spec(spec: type[UpdateRuleSpec]) -> None:
    """Makes `--optimizer NAME` known; the name must be new, or have the same class."""
    if spec.name in BUILT_IN_RULES or _REGISTERED.setdefault(spec.name, spec) is not spec:
        raise ConfigError([Problem(OPTIMIZER_FLAG, spec.name, "is registered already", "Register another name.")])


def find_rule_spec(name: str) -> type[UpdateRuleSpec] | None:
    """Returns the declaration of an optimizer by name; None if there is none, in installed plug-ins either."""
    if name in BUILT_IN_RULES:
        return BUILT_IN_RULES[name].used_by
    if name not in _REGISTERED:
        import_installed_plugins()
    return _REGISTERED.get(name)


def rule_spec(optim: OptimizerConfig, name: str | None = None) -> UpdateRuleSpec:
    """Returns the rule of this name with its settings; without a name that of `--optimizer`.

    >>> rule_spec(OptimizerConfig(optimizer="muon")).scalar_optimizer
    'adam'
    """
    spec = find_rule_spec(optim.optimizer if name is None else name)
    if spec is None:
        raise ConfigError([unknown_optimizer(OPTIMIZER_FLAG, optim.optimizer if name is None else name)])
    return spec.from_config(optim)


def used_rules(optim: OptimizerConfig) -> tuple[UpdateRuleSpec, ...]:
    """Returns the rules of a run: that of `--optimizer`, and the one it leaves other parameters to."""
    rule = rule_spec(optim)
    return (rule,) if rule.scalar_optimizer is None else (rule, rule_spec(optim, rule.scalar_optimizer))


def unknown_optimizer(flag: str, name: str) -> Problem:
    """The problem of a name that no optimizer has."""
    known = (*BUILT_IN_RULES, *sorted(_REGISTERED))
    close = closest_matches(name, known, count=1, cutoff=0.6)
    hint = f"Did you mean {close[0]}?" if close else f"Add {IMPORT_FLAG} MODULE, the file or package that registers it."
    return Problem(flag, name, f"is not one of {join_with_or(known)}", hint)


def unused_optimizer_settings(optim: OptimizerConfig) -> Iterator[str]:
    """Yields the names of settings of optimizers that this run does not use."""
    if find_rule_spec(optim.optimizer) is None:
        return
    used = {optim.optimizer, find_scalar_optimizer(optim)}
    for name, settings in BUILT_IN_RULES.items():
        assert is_dataclass(settings)
        if name not in used:
            yield from (field.name for field in fields(settings))
    if optim.optimizer in BUILT_IN_RULES:
        yield "optimizer_settings"


def find_scalar_optimizer(optim: OptimizerConfig) -> str | None:
    """Returns the name of the rule to which the chosen one leaves parameters, if its settings can be read."""
    try:
        return rule_spec(optim).scalar_optimizer
    except ConfigError:
        return None
