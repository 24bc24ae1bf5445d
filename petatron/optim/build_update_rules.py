"""Builds the update rules of a run: those of this package, and those that user code registers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from petatron.config.optimizer_registry import register_rule_spec, rule_spec
from petatron.config.schema.optimizer import OptimizerConfig
from petatron.config.schema.optimizers.update_rule_spec import UpdateRuleSpec
from petatron.optim.adafactor import AdafactorRule
from petatron.optim.lion import LionRule
from petatron.optim.muon import MuonRule
from petatron.optim.soap import SoapRule
from petatron.optim.update_rules import AdamRule, RuleContext, SgdRule, UpdateRule

RuleBuilder = Callable[[Any, RuleContext], UpdateRule]
"""Builds a rule from its declaration."""

_BUILDERS: dict[str, RuleBuilder] = {
    "adam": AdamRule,
    "sgd": SgdRule,
    "muon": MuonRule,
    "lion": LionRule,
    "adafactor": AdafactorRule,
    "soap": SoapRule,
}


def register_optimizer(spec: type[UpdateRuleSpec], build: RuleBuilder) -> None:
    """Makes `--optimizer NAME` train with a rule of one's own: what it declares, and the class with its step.

    The class is built with the declaration, whose fields are the settings, and a `RuleContext`. It is an `ElementRule`, a `TensorRule`
    or a `MatrixRule`, as `spec.unit` says. The name must be new, or have the same declaration.

    >>> from dataclasses import dataclass
    >>> from petatron.config.schema.optimizers.sgd import SgdSettings
    >>> from petatron.config.schema.optimizers.update_rule_spec import RuleStateTensor
    >>> @dataclass(frozen=True)
    ... class SlowSgd(UpdateRuleSpec):
    ...     name, title = "slow-sgd", "slow SGD"
    ...     momentum: float = 0.99
    ...     def state(self, shape):
    ...         return (RuleStateTensor("momentum_buffer"),)
    ...     @property
    ...     def settings(self):
    ...         return SgdSettings(sgd_momentum=self.momentum)
    >>> register_optimizer(SlowSgd, SgdRule)
    >>> rule_spec(OptimizerConfig(optimizer="slow-sgd", optimizer_settings=("momentum=0.9",))).momentum
    0.9
    """
    register_rule_spec(spec)
    _BUILDERS[spec.name] = build


def build_update_rule(name: str, config: OptimizerConfig, context: RuleContext) -> UpdateRule:
    """Builds the update rule of this name."""
    return _BUILDERS[name](rule_spec(config, name), context)
