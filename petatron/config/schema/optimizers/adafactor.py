"""The settings of Adafactor (`--adafactor-*`), and its `UpdateRuleSpec`: state tensors, learning rate under muP."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

from petatron.base.errors import Problem
from petatron.config.schema.numeric_bounds import DecayRate, Factor, PositiveFactor
from petatron.config.schema.optimizers.update_rule_spec import (
    RuleStateTensor,
    SectionRuleSpec,
    UpdateRuleSpec,
    WidthScaling,
)


class AdafactorSpec(SectionRuleSpec["AdafactorSettings"]):
    name: ClassVar[str] = "adafactor"
    title: ClassVar[str] = "Adafactor"
    unit = "tensor"
    width_scaling = WidthScaling(lr_fan_in=-1)

    def state(self, shape: tuple[int, ...]) -> tuple[RuleStateTensor, ...]:
        factored = (RuleStateTensor("exp_avg_sq_row", "row"), RuleStateTensor("exp_avg_sq_col", "column"))
        second = factored if len(shape) > 1 else (RuleStateTensor("adafactor_exp_avg_sq"),)
        return (RuleStateTensor("adafactor_exp_avg"), *second) if self.settings.adafactor_beta1 else second

    def mup_problems(self) -> Iterator[Problem]:
        settings = self.settings
        for flag, is_set in (
            ("--adafactor-scale-parameter", settings.adafactor_scale_parameter),
            ("--adafactor-relative-step", settings.adafactor_relative_step),
        ):
            if is_set:
                rule = "makes steps that --use-mup cannot scale: they do not follow the learning rate"
                yield Problem(flag, "", rule, f"Use --no-{flag.removeprefix('--')}.")

    def problems(self) -> Iterator[Problem]:
        if not 0.0 < self.settings.adafactor_decay_rate <= 1.0:
            given = f"{self.settings.adafactor_decay_rate:g}"
            yield Problem("--adafactor-decay-rate", given, "is out of range", "Use a number above 0, 1 at most.")


@dataclass(frozen=True, kw_only=True)
class AdafactorSettings:
    """The settings of Adafactor."""

    used_by: ClassVar[type[UpdateRuleSpec]] = AdafactorSpec
    adafactor_beta1: DecayRate = 0.0
    """Decay of the first moment of adafactor; 0 means that it has none."""
    adafactor_decay_rate: Factor = 0.8
    """Exponent c of the decay 1 - t^-c of adafactor's second moment at update t."""
    adafactor_clip_threshold: PositiveFactor = 1.0
    """Largest root mean square of adafactor's update of a tensor, before the learning rate."""
    adafactor_scale_parameter: bool = False
    """Multiply the learning rate of adafactor by the root mean square of each tensor's weights, at least 1e-3."""
    adafactor_relative_step: bool = False
    """Bound the learning rate of adafactor by 1 / sqrt(t) at update t."""
