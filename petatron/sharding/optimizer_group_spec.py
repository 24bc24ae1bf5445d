"""The settings that all parameters of an optimizer group share: update rule, multipliers, and the unit that the rule needs whole."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Unit = Literal["element", "tensor", "matrix", "fused_matrix"]


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupSpec:
    """The key of an optimizer group.

    rule: the name of an update rule. weight_decay, lr_scale and eps_scale: multipliers of the run's weight decay, its learning rate and
    what the rule adds to the root of the second moment.
    decoupled_lr: its learning rate follows the schedule of `--decoupled-lr`. unit: what the rule updates by itself: every element, every
    logical tensor, of which it needs sums, or every logical matrix, which it must have whole. Of a `fused_matrix`, all logical
    matrices of a parameter are one. element_state: the kinds of state with a value for each element; None: those of the rule, which
    has the same for every shape. trainable: whether its parameters are updated at all; else they have neither gradients nor optimizer
    state, and no rank reduces or gathers them.

    >>> GroupSpec(rule="adam", weight_decay=0.0) == GroupSpec(rule="adam", weight_decay=1.0)
    False
    """

    rule: str
    weight_decay: float = 1.0
    lr_scale: float = 1.0
    eps_scale: float = 1.0
    decoupled_lr: bool = False
    unit: Unit = "element"
    element_state: tuple[str, ...] | None = None
    trainable: bool = True

    @property
    def needs_whole_matrices(self) -> bool:
        return self.unit in ("matrix", "fused_matrix")


FROZEN_GROUP = GroupSpec(rule="none", weight_decay=0.0, trainable=False)
"""The group of all frozen parameters."""
