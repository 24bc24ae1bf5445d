"""The objective of a critic: the value of each state, what an answer is expected to return from a token on (PPO; Schulman et al., 2017).

With V the value now, V_old that before the first update on these answers, and R the return, a token's loss is

    max((V - R)^2, (clip(V, V_old - c, V_old + c) - R)^2) / 2

so that a value that has already moved by c towards its return is not moved further. The model is one with a head on texts and a single
label (`--pooling last --num-labels 1`), such as a reward model: the head reads the states before each token of an answer.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from petatron.config.parse_name_value import NOT_A_SETTING
from petatron.config.schema.objective_and_dataset_names import VALUE
from petatron.config.schema.run import RunConfig
from petatron.models.batch import Batch
from petatron.models.decoder import TOKEN_LABEL_LOGITS
from petatron.models.objective import Objective, register_objective
from petatron.models.stage_inputs_outputs import LossSpec

RETURNS, OLD_VALUES = "returns", "old_values"
"""Arrays [B, S] of the labels."""
VALUE_LOSS = "value loss"


@dataclass(frozen=True)
class ValueRegression(Objective):
    """clip: how far a value may be from the one before the first update; 0: any."""

    clip: float = field(default=0.2, metadata=NOT_A_SETTING)

    def of_run(self, run: RunConfig) -> ValueRegression:
        return replace(self, clip=run.rollout.value_clip)

    @property
    def outputs(self) -> tuple[str, ...]:
        return (TOKEN_LABEL_LOGITS,)

    @property
    def losses(self) -> tuple[LossSpec, ...]:
        return (LossSpec(VALUE_LOSS),)

    def loss(self, outputs: Mapping[str, Tensor], batch: Batch) -> Mapping[str, Tensor]:
        values = outputs[TOKEN_LABEL_LOGITS].squeeze(-1)
        return {VALUE_LOSS: value_losses(values, batch[OLD_VALUES], batch[RETURNS], clip=self.clip)}


def value_losses(values: Tensor, old: Tensor, returns: Tensor, *, clip: float) -> Tensor:
    """Returns the loss of each value.

    >>> value_losses(torch.tensor([1.0, 1.0]), torch.zeros(2), torch.tensor([2.0, 0.0]), clip=0.5).tolist()
    [1.125, 0.5]
    """
    returns, old = returns.to(values.dtype), old.to(values.dtype)
    squares = (values - returns).square()
    if clip:
        bounded = torch.maximum(torch.minimum(values, old + clip), old - clip)
        squares = torch.maximum(squares, (bounded - returns).square())
    return squares / 2


register_objective(VALUE, ValueRegression)
