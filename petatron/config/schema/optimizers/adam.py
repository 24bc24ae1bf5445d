"""The settings of AdamW (`--adam-*`), and its `UpdateRuleSpec`: state tensors, learning rate under muP."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar, Literal

from petatron.config.schema.numeric_bounds import DecayRate, PositiveFactor
from petatron.config.schema.optimizers.update_rule_spec import (
    RuleStateTensor,
    SectionRuleSpec,
    UpdateRuleSpec,
    WidthScaling,
)


class AdamSpec(SectionRuleSpec["AdamSettings"]):
    name: ClassVar[str] = "adam"
    title: ClassVar[str] = "AdamW"
    width_scaling = WidthScaling(lr_fan_in=-1, eps_fan_in=-1)

    def state(self, shape: tuple[int, ...]) -> tuple[RuleStateTensor, ...]:
        first, second = self.settings.exp_avg_dtype, self.settings.exp_avg_sq_dtype
        return (
            RuleStateTensor("exp_avg", dtype="main" if first == "fp32" else "bf16"),
            RuleStateTensor("exp_avg_sq", dtype="main" if second == "fp32" else "bf16"),
        )

    @property
    def bf16_state_settings(self) -> Mapping[str, str]:
        return {"exp_avg_dtype": "bf16", "exp_avg_sq_dtype": "bf16"}


@dataclass(frozen=True, kw_only=True)
class AdamSettings:
    """The settings of AdamW."""

    used_by: ClassVar[type[UpdateRuleSpec]] = AdamSpec
    adam_beta1: DecayRate = 0.9
    """Decay of the first moment."""
    adam_beta2: DecayRate = 0.999
    """Decay of the second moment."""
    adam_eps: PositiveFactor = 1e-8
    """Added to the square root of the second moment."""
    exp_avg_dtype: Literal["fp32", "bf16"] = "fp32"
    """Format of the first moment of adam; bf16 is rounded up or down at random, which is right on average."""
    exp_avg_sq_dtype: Literal["fp32", "bf16"] = "fp32"
    """Format of the second moment of adam; bf16 is rounded like the first."""
