"""The objective `distill`: the distribution of a teacher, token by token, instead of labels alone or beside them.

With p and q the distributions of teacher and student at a temperature, and m = b p + (1 - b) q, a token's loss is the generalized
Jensen-Shannon divergence (Agarwal et al., 2024, "On-Policy Distillation of Language Models")

    b KL(p || m) + (1 - b) KL(q || m)        0 < b < 1
    KL(p || q)                               b = 0, forward: the student covers what the teacher may say (Hinton et al., 2015)
    KL(q || p)                               b = 1, reverse: it says what the teacher would say

and with a `label_weight` the cross-entropy of labels is added. `petatron posttrain distill` trains on answers of the student.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

import torch
import torch.nn.functional as F
from torch import Tensor

from petatron.config.parse_name_value import NOT_A_SETTING
from petatron.config.schema.objective_and_dataset_names import DISTILL
from petatron.config.schema.run import RunConfig
from petatron.models.batch import Batch
from petatron.models.objective import ModelRole, Objective, check_settings, register_objective
from petatron.models.stage_inputs_outputs import LossSpec, MetricSpec

DISTILLATION_LOSS, LABEL_LOSS, AGREEMENT = "distillation loss", "label loss", "agreement"
_TEACHER = "teacher"


@dataclass(frozen=True)
class Distill(Objective):
    """teacher: the folder of a run, of one of its steps, or of a Hugging Face model, with the same tokenizer. mix: b above.

    with_rewards: whether answers are drawn, and their rewards are logged.
    """

    teacher: str
    mix: float = 0.0
    temperature: float = 1.0
    label_weight: float = 0.0
    with_rewards: bool = field(default=False, metadata=NOT_A_SETTING)

    def __post_init__(self) -> None:
        check_settings(
            self,
            ("mix", 0 <= self.mix <= 1, "is not from 0 to 1", "Use 0 for forward, 1 for reverse divergence."),
            ("temperature", self.temperature > 0, "is not above 0", "Use 1."),
            ("label_weight", self.label_weight >= 0, "is below 0", "Leave it out."),
        )

    def of_run(self, run: RunConfig) -> Distill:
        return replace(self, with_rewards=bool(run.rollout.rewards))

    @property
    def outputs(self) -> tuple[str, ...]:
        return ("logits",)

    @property
    def models(self) -> Mapping[str, ModelRole]:
        return {_TEACHER: ModelRole(self.teacher)}

    @property
    def losses(self) -> tuple[LossSpec, ...]:
        labels = [LossSpec(LABEL_LOSS, weight=self.label_weight)] if self.label_weight else []
        return (LossSpec(DISTILLATION_LOSS), *labels)

    @property
    def metric_specs(self) -> tuple[MetricSpec, ...]:
        rewards = [MetricSpec("reward", per="segment")] if self.with_rewards else []
        return (MetricSpec(AGREEMENT, per="token"), *rewards)

    def loss(self, outputs: Mapping[str, Tensor], batch: Batch) -> Mapping[str, Tensor]:
        logits = outputs["logits"]
        losses = {DISTILLATION_LOSS: divergence(logits, self._teacher_logits(batch), self.mix, self.temperature)}
        if self.label_weight:
            losses[LABEL_LOSS] = F.cross_entropy(logits.transpose(1, 2), batch.labels, reduction="none")
        return losses

    def metrics(self, outputs: Mapping[str, Tensor], batch: Batch) -> Mapping[str, Tensor]:
        logits = outputs["logits"]
        agree = logits.argmax(dim=-1) == self._teacher_logits(batch).argmax(dim=-1)
        rewards = {"reward": batch["rewards"].to(logits.dtype)} if self.with_rewards else {}
        return {AGREEMENT: agree.to(logits.dtype), **rewards}

    def _teacher_logits(self, batch: Batch) -> Tensor:
        return batch[self.models[_TEACHER].array(_TEACHER, "logits")]


def divergence(student: Tensor, teacher: Tensor, mix: float, temperature: float) -> Tensor:
    """Returns the divergence of each token [B, S] from logits [B, S, vocabulary].

    >>> logits = torch.tensor([[[0.0, 1.0]]])
    >>> [divergence(logits, logits, mix, 1.0).abs().item() for mix in (0.0, 1.0)]
    [0.0, 0.0]
    """
    log_q = torch.log_softmax(student / temperature, dim=-1)
    log_p = torch.log_softmax(teacher.to(student.dtype) / temperature, dim=-1)
    if mix == 0.0:
        return _kl(log_p, log_q)
    if mix == 1.0:
        return _kl(log_q, log_p)
    weights = torch.tensor([1 - mix, mix], dtype=log_q.dtype, device=log_q.device).log()
    log_m = torch.logaddexp(log_q + weights[0], log_p + weights[1])
    return mix * _kl(log_p, log_m) + (1 - mix) * _kl(log_q, log_m)


def _kl(log_p: Tensor, log_q: Tensor) -> Tensor:
    return F.kl_div(log_q, log_p, reduction="none", log_target=True).sum(dim=-1)


register_objective(DISTILL, Distill)
