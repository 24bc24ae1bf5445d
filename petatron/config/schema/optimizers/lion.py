"""The settings of Lion (`--lion-*`), and its `UpdateRuleSpec`: state tensors, learning rate under muP."""

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


class LionSpec(SectionRuleSpec["LionSettings"]):
    name: ClassVar[str] = "lion"
    title: ClassVar[str] = "Lion"
    width_scaling = WidthScaling(lr_fan_in=-1)

    def state(self, shape: tuple[int, ...]) -> tuple[RuleStateTensor, ...]:
        return (RuleStateTensor("lion_momentum"),)


@dataclass(frozen=True, kw_only=True)
class LionSettings:
    """The settings of Lion."""

    used_by: ClassVar[type[UpdateRuleSpec]] = LionSpec
    lion_beta1: DecayRate = 0.95
    """Weight of the momentum, against the gradient, in the direction whose sign is lion's update."""
    lion_beta2: DecayRate = 0.98
    """Decay of the momentum of lion."""
