"""Optimizers defined outside of the package: one that updates each element by itself, and one that needs norms of whole tensors."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

import petatron
from petatron.config.schema.optimizers.update_rule_spec import RuleStateTensor, UpdateRuleSpec
from petatron.optim.update_rules import (
    ParamSlice,
    RuleContext,
    StepScalars,
    TensorElements,
    UncountedRule,
    UpdateFunction,
)
from petatron.sharding.optimizer_group_spec import GroupSpec


@dataclass(frozen=True)
class SignMomentum(UpdateRuleSpec):
    """The sign of the momentum."""

    name: ClassVar[str] = "sign-momentum"
    title: ClassVar[str] = "sign momentum"
    momentum: float = 0.9

    def state(self, shape: tuple[int, ...]) -> tuple[RuleStateTensor, ...]:
        return (RuleStateTensor("momentum_buffer"),)


class SignMomentumRule(UncountedRule):
    def __init__(self, spec: SignMomentum, context: RuleContext) -> None:
        self._momentum = spec.momentum

    def start_step(self, step: StepScalars) -> UpdateFunction:
        def update(elements: ParamSlice, spec: GroupSpec) -> None:
            group, (momentum,), dtype = step.of_group(spec), elements.moments, elements.master.dtype
            kept = step.kept(dtype)
            momentum.lerp_(step.scaled_grad(elements.grad, dtype), (1.0 - self._momentum) * kept)
            elements.master.sub_(group.lr * kept * (momentum.sign() + group.weight_decay * elements.master))
            if elements.model_weight is not None:
                elements.model_weight.copy_(elements.master)

        return update


@dataclass(frozen=True)
class TrustRatio(UpdateRuleSpec):
    """Momentum whose size is a fraction of the size of the weights, tensor by tensor."""

    name: ClassVar[str] = "trust-ratio"
    title: ClassVar[str] = "trust ratio"
    unit = "tensor"
    momentum: float = 0.9

    def state(self, shape: tuple[int, ...]) -> tuple[RuleStateTensor, ...]:
        return (RuleStateTensor("momentum_buffer"),)


class TrustRatioRule(UncountedRule):
    def __init__(self, spec: TrustRatio, context: RuleContext) -> None:
        self._momentum = spec.momentum

    def start_step(self, step: StepScalars) -> None: ...

    def measure(self, grad: Tensor, step: StepScalars) -> Tensor:
        raise AssertionError("nothing is declared for rows and columns")

    def update_means(self, state: Tensor, means: Tensor, step: StepScalars) -> None:
        raise AssertionError("nothing is declared for rows and columns")

    def update_moments(self, elements: TensorElements, step: StepScalars) -> None:
        (momentum,) = elements.moments
        grad = step.scaled_grad(elements.grad, momentum.dtype)
        momentum.lerp_(grad, (1.0 - self._momentum) * step.kept(momentum.dtype))

    def direction(self, elements: TensorElements, step: StepScalars) -> Tensor:
        return elements.moments[0]

    def apply(
        self, elements: TensorElements, direction: Tensor, rms: Tensor, weight_rms: Tensor, step: StepScalars
    ) -> None:
        ratio = (weight_rms + 1e-3) / (rms + 1e-12)
        elements.master.sub_(step.lr * step.kept(direction.dtype) * ratio * direction)


petatron.register_optimizer(SignMomentum, SignMomentumRule)
petatron.register_optimizer(TrustRatio, TrustRatioRule)
