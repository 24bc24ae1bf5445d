"""The objective `distill`: the distribution of a teacher, token by token, instead of labels alone or beside them.

With p and q the distributions of teacher and student at a temperature, and m = b p + (1 - b) q, a token's loss is the generalized
Jensen-Shannon divergence (Agarwal et al., 2024, "On-Policy Distillation of Language Models")

    b KL(p || m) + (1 - b) KL(q || m)        0 < b < 1
    KL(p || q)                               b = 0, forward: the student covers what the teacher may say (Hinton et al., 2015)
    KL(q || p)                               b = 1, reverse: it says what the teacher would say

and with a `label_weight` the cross-entropy of labels is added. `petatron posttrain distill` trains on answers of the student.

With `top_k` the teacher's distribution is that of its k likeliest tokens, whose probabilities sum to one; then KL(q || p) is infinite, so
b is below 1. With T such tokens and q(T) their share under the student, the divergence needs no other logit of the teacher,

    KL(q || m) = sum over T of q log(q / m)  -  (1 - q(T)) log(1 - b),

so that these may be stored (`stored=FOLDER`, which `petatron data teacher` wrote), k ids and log-probabilities a token.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

import torch
import torch.nn.functional as F
from torch import Tensor

from petatron.base.errors import DataError
from petatron.config.parse_name_value import NOT_A_SETTING
from petatron.config.schema.objective_and_dataset_names import DISTILL
from petatron.config.schema.run import RunConfig
from petatron.models.batch import Batch
from petatron.models.objective import ModelRole, Objective, StoredRole, check_settings, register_objective
from petatron.models.stage_inputs_outputs import LossSpec, MetricSpec

DISTILLATION_LOSS, LABEL_LOSS, AGREEMENT = "distillation loss", "label loss", "agreement"
TOP_IDS, TOP_LOG_PROBS = "teacher.top_ids", "teacher.top_log_probs"
"""Arrays [B, S, k] of the teacher's likeliest tokens."""
_TEACHER = "teacher"
_TEACHER_LOGITS = ModelRole("").array(_TEACHER, "logits")
_ONE_TEACHER = "and stored=FOLDER are one too many, or one too few"


@dataclass(frozen=True)
class Distill(Objective):
    """teacher: the folder of a run, of one of its steps, or of a Hugging Face model, with the same tokenizer; stored: in its place what
    `petatron data teacher` wrote of it. mix: b above. top_k: how many of its likeliest tokens are read, 0: all.

    with_rewards: whether answers are drawn, and their rewards are logged.
    """

    teacher: str = ""
    stored: str = ""
    top_k: int = 0
    mix: float = 0.0
    temperature: float = 1.0
    label_weight: float = 0.0
    with_rewards: bool = field(default=False, metadata=NOT_A_SETTING)

    def __post_init__(self) -> None:
        check_settings(
            self,
            ("teacher", bool(self.teacher) != bool(self.stored), _ONE_TEACHER, "Give teacher=FOLDER or stored=FOLDER."),
            ("top_k", self.top_k >= 0, "is below 0", "Use 64, or 0 for whole distributions."),
            ("top_k", not (self.stored and self.top_k), "is that of what is stored", "Leave it out."),
            ("mix", self.mix < 1 or not self.is_truncated, "is infinite beside the likeliest tokens alone", "Use 0.9."),
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
    def is_truncated(self) -> bool:
        return bool(self.top_k or self.stored)

    @property
    def models(self) -> Mapping[str, ModelRole]:
        return {} if self.stored else {_TEACHER: ModelRole(self.teacher)}

    @property
    def stored_roles(self) -> Mapping[str, StoredRole]:
        return {_TEACHER: StoredRole("row", (TOP_IDS, TOP_LOG_PROBS), self.stored)} if self.stored else {}

    @property
    def losses(self) -> tuple[LossSpec, ...]:
        labels = [LossSpec(LABEL_LOSS, weight=self.label_weight)] if self.label_weight else []
        return (LossSpec(DISTILLATION_LOSS), *labels)

    @property
    def metric_specs(self) -> tuple[MetricSpec, ...]:
        rewards = [MetricSpec("reward", per="segment")] if self.with_rewards else []
        return (MetricSpec(AGREEMENT, per="token"), *rewards)

    def prepare(self, batch: Batch) -> Batch:
        if self.stored and TOP_IDS not in batch:
            raise DataError(
                "What is stored of the teacher (stored=FOLDER) is not in the batch. `petatron train` reads it for rows of files; "
                "elsewhere, and for answers of one's own, give teacher=FOLDER."
            )
        if not self.top_k:
            return batch
        top = top_log_probs(self._teacher_logits(batch), self.top_k)
        arrays = {name: x for name, x in batch.arrays.items() if name != _TEACHER_LOGITS}
        return replace(batch, arrays=arrays | top)

    def loss(self, outputs: Mapping[str, Tensor], batch: Batch) -> Mapping[str, Tensor]:
        logits = outputs["logits"]
        if self.is_truncated:
            top = batch[TOP_IDS], batch[TOP_LOG_PROBS]
            losses = {DISTILLATION_LOSS: truncated_divergence(logits, *top, self.mix, self.temperature)}
        else:
            losses = {DISTILLATION_LOSS: divergence(logits, self._teacher_logits(batch), self.mix, self.temperature)}
        if self.label_weight:
            losses[LABEL_LOSS] = F.cross_entropy(logits.transpose(1, 2), batch.labels, reduction="none")
        return losses

    def metrics(self, outputs: Mapping[str, Tensor], batch: Batch) -> Mapping[str, Tensor]:
        logits = outputs["logits"]
        best = batch[TOP_IDS][..., 0] if self.is_truncated else self._teacher_logits(batch).argmax(dim=-1)
        agree = logits.argmax(dim=-1) == best
        rewards = {"reward": batch["rewards"].to(logits.dtype)} if self.with_rewards else {}
        return {AGREEMENT: agree.to(logits.dtype), **rewards}

    def _teacher_logits(self, batch: Batch) -> Tensor:
        return batch[_TEACHER_LOGITS]


def top_log_probs(logits: Tensor, count: int) -> dict[str, Tensor]:
    """Returns the likeliest tokens [B, S, count] of logits, the best first, and their log-probabilities.

    >>> {name: x.tolist() for name, x in top_log_probs(torch.tensor([[[0.0, 0.0, 30.0]]]), 1).items()}
    {'teacher.top_ids': [[[2]]], 'teacher.top_log_probs': [[[0.0]]]}
    """
    top = logits.topk(min(count, logits.shape[-1]), dim=-1)
    log_probs = top.values - logits.logsumexp(dim=-1, keepdim=True)
    return {TOP_IDS: top.indices.to(torch.int32), TOP_LOG_PROBS: log_probs}


@dataclass(frozen=True, slots=True)
class TopLogProbs:
    """Makes what is stored of the logits of a teacher: `count` tokens a position, their log-probabilities in a precision."""

    count: int
    dtype: torch.dtype

    def __call__(self, outputs: Mapping[str, Tensor], batch: Batch) -> Mapping[str, Tensor]:
        top = top_log_probs(outputs["logits"], self.count)
        return {**top, TOP_LOG_PROBS: top[TOP_LOG_PROBS].to(self.dtype)}


def truncated_divergence(student: Tensor, ids: Tensor, log_probs: Tensor, mix: float, temperature: float) -> Tensor:
    """Returns the divergence of each token [B, S] from the teacher's likeliest tokens [B, S, k]; `mix` is below 1.

    >>> logits, best = torch.tensor([[[0.0, 1.0]]]), torch.tensor([[[1, 0]]])
    >>> truncated_divergence(logits, best, logits.log_softmax(-1).gather(-1, best), 0.5, 1.0).abs().item() < 1e-7
    True
    """
    log_p = torch.log_softmax(log_probs.to(student.dtype) / temperature, dim=-1)
    log_q = torch.log_softmax(student / temperature, dim=-1).gather(-1, ids.long())
    if mix == 0.0:
        return _kl(log_p, log_q)
    log_m = torch.logaddexp(log_q + math.log(1 - mix), log_p + math.log(mix))
    q = log_q.exp()
    of_others = -(1 - q.sum(dim=-1)).clamp(min=0.0) * math.log(1 - mix)
    return mix * _kl(log_p, log_m) + (1 - mix) * ((q * (log_q - log_m)).sum(dim=-1) + of_others)


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
