"""Lion (Chen et al. 2023): the sign of an interpolation between momentum and gradient.

With g the gradient times the factor that unscales and clips,

    c = beta1 m + (1 - beta1) g
    w = w - lr (sign(c) + decay w)
    m = beta2 m + (1 - beta2) g

Every element moves by the learning rate, so the rate is a third to a tenth of AdamW's, and weight decay three to ten times larger. Whether
the update is skipped is a device scalar: then g counts as zero, and momentum and weights stay as they are, bit for bit.
"""

from __future__ import annotations

from petatron.config.schema.optimizers.lion import LionSpec
from petatron.optim.update_rules import ParamSlice, RuleContext, StepScalars, UncountedRule, UpdateFunction
from petatron.sharding.optimizer_group_spec import GroupSpec

_CHUNK = 1 << 24  # elements whose scaled gradient and direction exist at a time


class LionRule(UncountedRule):
    """Updates elements by themselves; its one moment is the momentum."""

    def __init__(self, spec: LionSpec, context: RuleContext) -> None:
        self._beta1, self._beta2 = spec.settings.lion_beta1, spec.settings.lion_beta2

    def start_step(self, step: StepScalars) -> UpdateFunction:
        def update(elements: ParamSlice, spec: GroupSpec) -> None:
            group = step.of_group(spec)
            for begin in range(0, elements.grad.numel(), _CHUNK):
                part = elements.slice_range((begin, begin + _CHUNK))
                master, momentum, kept = part.master, part.moments[0], step.kept(part.master.dtype)
                grad = step.scaled_grad(part.grad, master.dtype)
                sign = grad.lerp(momentum, self._beta1).sign_()
                master.mul_(1.0 - group.lr * group.weight_decay * kept)
                master.sub_(sign.mul_(group.lr * kept))
                momentum.lerp_(grad, (1.0 - self._beta2) * kept)
                if part.model_weight is not None:
                    part.model_weight.copy_(part.master)

        return update
