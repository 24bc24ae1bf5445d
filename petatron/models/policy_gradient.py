"""The objective of reinforcement learning: raises the probability of answers that were better than expected.

With A the advantage of a token, p its log-probability now, p_old before the first update on these answers, and the ratio
r = exp(p - p_old), a token's loss is

    -w min(r A, clip(r, 1 - clip_low, 1 + clip_high) A) + kl_weight r (exp(q - p) - (q - p) - 1)

where q is its log-probability under a reference (without the factor r, unbiased_kl=false, the gradient of the last term is not that of the
divergence), and w = min(exp(p_old - p_drawn), max_importance_weight) corrects that the sampler's
log-probability p_drawn is another than the trainer's (truncated importance weights; Yao et al., 2025). The names of papers are settings:

    GRPO (Shao et al., 2024)        ratio=token     average=sequence
    Dr. GRPO (Liu et al., 2025)     ratio=token     average=constant, and advantages that are not divided by their deviation
    DAPO (Yu et al., 2025)          ratio=token     average=token     clip_high=0.28, and groups of equal rewards drawn again
    GSPO (Zheng et al., 2025)       ratio=sequence  average=sequence  clip_low=3e-4 clip_high=4e-4
    RLOO (Ahmadian et al., 2024)    ratio=product   average=sequence, and advantages against the other answers' mean
    PPO (Schulman et al., 2017)     ratio=token     average=token, and advantages of tokens, by a critic (`value_regression.py`)

The divergence from the reference may also be a part of rewards (`kl_in_reward`); then advantages have it, and the loss does not.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Literal

import torch
from torch import Tensor

from petatron.config.parse_name_value import NOT_A_SETTING
from petatron.config.schema.objective_and_dataset_names import POLICY_GRADIENT
from petatron.config.schema.run import RunConfig
from petatron.kernels.policy_log_probs import policy_log_probs
from petatron.models.batch import SEGMENT_IDS, Batch
from petatron.models.decoder import TOKEN_LOSSES
from petatron.models.objective import START, ModelRole, Objective, check_settings, register_objective
from petatron.models.preference_objectives import segment_lengths
from petatron.models.stage_inputs_outputs import LossSpec, MetricSpec

ADVANTAGES, DRAWN_LOG_PROBS, OLD_LOG_PROBS = "advantages", "drawn_log_probs", "old_log_probs"
"""Arrays [B, S] of the labels. The last one is in batches that are trained on more than once, or by other weights than those that drew."""
REWARDS = "rewards"
"""Array [segments]."""
POLICY_LOSS = "policy loss"
REFERENCE, REFERENCE_LOG_PROBS = "reference", "reference_log_probs"
"""The role of the reference, and the array [B, S] of its log-probabilities."""
KlEstimator = Literal["k1", "k2", "k3"]


@dataclass(frozen=True)
class PolicyGradient(Objective):
    """average: of the losses of tokens: over each answer and then over answers, over all tokens, or as sums of answers divided by
    `constant_tokens`. dual_clip: the largest ratio of the term that is not clipped, 0: any. max_importance_weight: 0 corrects nothing.
    kl_in_reward: weight of the divergence that is subtracted from rewards, of each token with a critic, of an answer without; kl_estimator:
    how it is estimated (`posttrain/token_advantages.py`). reference: a folder, or `start`; read with one of the two weights alone.
    temperature: the one that answers are drawn with. whole_logits: computes log-probabilities as the engine does, of logits that are whole
    on every rank.
    """

    ratio: Literal["token", "sequence", "product"] = "token"
    average: Literal["sequence", "token", "constant"] = "sequence"
    clip_low: float = 0.2
    clip_high: float = 0.2
    dual_clip: float = 0.0
    constant_tokens: int = 0
    kl_weight: float = 0.0
    unbiased_kl: bool = True
    kl_in_reward: float = 0.0
    kl_estimator: KlEstimator = "k1"
    max_importance_weight: float = 2.0
    reference: str = START
    temperature: float = field(default=1.0, metadata=NOT_A_SETTING)
    whole_logits: bool = field(default=False, metadata=NOT_A_SETTING)

    def __post_init__(self) -> None:
        check_settings(
            self,
            ("clip_low", 0 <= self.clip_low <= 1, "is not from 0 to 1", "Use 0.2."),
            ("clip_high", self.clip_high >= 0, "is below 0", "Use 0.2."),
            ("dual_clip", self.dual_clip == 0 or self.dual_clip > 1, "is not above 1", "Leave it out."),
            ("kl_weight", self.kl_weight >= 0, "is below 0", "Leave it out."),
            ("kl_in_reward", self.kl_in_reward >= 0, "is below 0", "Leave it out."),
            ("max_importance_weight", self.max_importance_weight >= 0, "is below 0", "Use 2, or 0 for no correction."),
            (
                "constant_tokens",
                (self.average == "constant") == (self.constant_tokens > 0),
                "is the divisor of average=constant, and of no other",
                "Give both, the longest answer for instance, or leave both out.",
            ),
        )

    def of_run(self, run: RunConfig) -> PolicyGradient:
        return replace(self, temperature=run.rollout.rollout_temperature, whole_logits=run.train.exact_rollouts)

    @property
    def outputs(self) -> tuple[str, ...]:
        return ("logits",) if self.whole_logits or self.temperature != 1.0 else (TOKEN_LOSSES,)

    @property
    def models(self) -> Mapping[str, ModelRole]:
        if not self.has_reference:
            return {}
        # Rewards need its log-probabilities before the step, and the batch has them then.
        return {REFERENCE: ModelRole(self.reference, outputs=() if self.kl_in_reward else self.outputs)}

    @property
    def has_reference(self) -> bool:
        return self.kl_weight > 0 or self.kl_in_reward > 0

    @property
    def losses(self) -> tuple[LossSpec, ...]:
        return (LossSpec(POLICY_LOSS, per="token" if self.average == "token" else "segment"),)

    @property
    def metric_specs(self) -> tuple[MetricSpec, ...]:
        of_segments = ("reward", "answer tokens")
        of_tokens = ("entropy", "clipped", "rollout k3", "rollout difference", *(["kl"] if self.has_reference else []))
        return (
            *(MetricSpec(name, per="segment") for name in of_segments),
            *(MetricSpec(name, per="token") for name in of_tokens),
        )

    def log_probs(self, outputs: Mapping[str, Tensor], batch: Batch) -> Tensor:
        """Returns the log-probabilities of the labels [B, S] at the temperature they were drawn with."""
        if TOKEN_LOSSES in self.outputs:
            return -outputs[TOKEN_LOSSES]
        return policy_log_probs(outputs["logits"], batch.labels, self.temperature)

    def prepare(self, batch: Batch) -> Batch:
        if not self.has_reference or REFERENCE_LOG_PROBS in batch:
            return batch
        role = self.models[REFERENCE]
        named = {name: batch[role.array(REFERENCE, name)] for name in self.outputs}
        return batch.with_arrays(**{REFERENCE_LOG_PROBS: self.log_probs(named, batch)})

    def loss(self, outputs: Mapping[str, Tensor], batch: Batch) -> Mapping[str, Tensor]:
        log_probs = self.log_probs(outputs, batch)
        ratio, old = self._ratio(log_probs, batch), self._old(log_probs, batch)
        advantages = batch[ADVANTAGES].to(log_probs.dtype)
        bounded = ratio if not self.dual_clip else ratio.clamp(max=self.dual_clip)
        losses = -torch.minimum(bounded * advantages, self._clipped(ratio) * advantages)
        if self.max_importance_weight:
            drawn = batch[DRAWN_LOG_PROBS].to(old.dtype)
            losses = losses * torch.exp(self._masked(old - drawn, batch)).clamp(max=self.max_importance_weight)
        if self.kl_weight:
            weight = self.kl_weight * (ratio if self.unbiased_kl else 1.0)
            losses = losses + weight * self._divergence(log_probs, batch)
        return {POLICY_LOSS: self._averaged(losses, batch)}

    def metrics(self, outputs: Mapping[str, Tensor], batch: Batch) -> Mapping[str, Tensor]:
        log_probs = self.log_probs(outputs, batch)
        ratio, advantages = self._ratio(log_probs, batch), batch[ADVANTAGES].to(log_probs.dtype)
        clipped = self._clipped(ratio) * advantages < ratio * advantages
        gap = self._masked(self._old(log_probs, batch) - batch[DRAWN_LOG_PROBS].to(log_probs.dtype), batch)
        divergence = {"kl": self._divergence(log_probs, batch)} if self.has_reference else {}
        return {
            "reward": batch[REWARDS].to(log_probs.dtype),
            "answer tokens": segment_lengths(batch, log_probs.dtype),
            "entropy": -batch[DRAWN_LOG_PROBS].to(log_probs.dtype),
            "clipped": clipped.to(log_probs.dtype),
            "rollout k3": torch.expm1(gap) - gap,
            "rollout difference": gap.abs(),
            **divergence,
        }

    def _old(self, log_probs: Tensor, batch: Batch) -> Tensor:
        return batch[OLD_LOG_PROBS].to(log_probs.dtype) if OLD_LOG_PROBS in batch else log_probs.detach()

    def _ratio(self, log_probs: Tensor, batch: Batch) -> Tensor:
        """Returns the ratio [B, S] of each token, or that of its answer."""
        change = self._masked(log_probs - self._old(log_probs, batch), batch)
        if self.ratio == "token":
            return torch.exp(change)
        of_segments = batch.segment_sum(change)
        if self.ratio == "sequence":
            of_segments = of_segments / segment_lengths(batch, change.dtype)
        return torch.exp(of_segments)[batch[SEGMENT_IDS].clamp(min=0)]

    def _clipped(self, ratio: Tensor) -> Tensor:
        return ratio.clamp(1 - self.clip_low, 1 + self.clip_high)

    def _divergence(self, log_probs: Tensor, batch: Batch) -> Tensor:
        gap = self._masked(batch[REFERENCE_LOG_PROBS].to(log_probs.dtype) - log_probs, batch)
        return torch.expm1(gap) - gap

    def _averaged(self, losses: Tensor, batch: Batch) -> Tensor:
        """Returns the losses of tokens, or those of answers."""
        if self.average == "token":
            return losses
        total = batch.segment_sum(losses * batch.loss_mask)
        if self.average == "constant":
            return total / self.constant_tokens
        return total / segment_lengths(batch, total.dtype)

    def _masked(self, x_BS: Tensor, batch: Batch) -> Tensor:
        """Sets to zero what is not learned, of which log-probabilities of several sources have nothing in common."""
        return torch.where(batch.loss_mask > 0, x_BS, x_BS.new_zeros(()))


register_objective(POLICY_GRADIENT, PolicyGradient)
