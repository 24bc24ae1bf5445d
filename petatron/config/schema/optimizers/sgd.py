"""The settings of SGD (`--sgd-*`), and its `UpdateRuleSpec`: state tensors, learning rate under muP."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from petatron.config.schema.numeric_bounds import DecayRate
from petatron.config.schema.optimizers.update_rule_spec import (
    RuleStateTensor,
    SectionRuleSpec,
    UpdateRuleSpec,
    WidthScaling,
)


class SgdSpec(SectionRuleSpec["SgdSettings"]):
    name: ClassVar[str] = "sgd"
    title: ClassVar[str] = "SGD"
    width_scaling = WidthScaling(lr_fan_in=-1, lr_fan_out=1)

    def state(self, shape: tuple[int, ...]) -> tuple[RuleStateTensor, ...]:
        return (RuleStateTensor("momentum_buffer"),) if self.settings.sgd_momentum else ()


@dataclass(frozen=True, kw_only=True)
class SgdSettings:
    """The settings of SGD."""

    used_by: ClassVar[type[UpdateRuleSpec]] = SgdSpec
    sgd_momentum: DecayRate = 0.9
    """Momentum of sgd."""
