"""The objective of reinforcement learning: raises the probability of answers that were better than expected.

With A the advantage of a token, p its log-probability now, p_old before the first update on these answers, and the ratio
r = exp(p - p_old), a token's loss is

    -w min(r A, clip(r, 1 - clip_low, 1 + clip_high) A) + kl_weight r (exp(q - p) - (q - p) - 1) - entropy_weight H

where q is its log-probability under a reference (without the factor r, unbiased_kl=false, the gradient of the second term is not that of
the divergence), H the entropy of the distribution that it is drawn from, over the whole vocabulary, and
w = min(exp(p_old - p_drawn), max_importance_weight) corrects that the sampler's log-probability p_drawn is another than the trainer's
(truncated importance weights; Yao et al., 2025). Tokens or answers for which the two are too far apart may be left out
(mask_tokens_above, as in IcePop; mask_answers_above). The names of papers are settings:

    GRPO (Shao et al., 2024)        ratio=token     average=sequence
    Dr. GRPO (Liu et al., 2025)     ratio=token     average=constant, and advantages that are not divided by their deviation
    DAPO (Yu et al., 2025)          ratio=token     average=token     clip_high=0.28, and groups of equal rewards drawn again
    GSPO (Zheng et al., 2025)       ratio=sequence  average=sequence  clip_low=3e-4 clip_high=4e-4
    RLOO (Ahmadian et al., 2024)    ratio=product   average=sequence, and advantages against the other answers' mean
    PPO (Schulman et al., 2017)     ratio=token     average=token, and advantages of tokens, by a critic (`value_regression.py`)

The divergence from the reference may also be a part of rewards (`kl_in_reward`); then advantages have it, and the loss does not.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Literal

import torch
from torch import Tensor

from petatron.config.parse_name_value import NOT_A_SETTING
from petatron.config.schema.objective_and_dataset_names import POLICY_GRADIENT
from petatron.config.schema.run import RunConfig
from petatron.kernels.fused_linear_cross_entropy import VocabColumns
from petatron.kernels.losses_and_entropies import losses_and_entropies
from petatron.kernels.policy_log_probs import policy_log_probs
from petatron.models.batch import SEGMENT_IDS, Batch
from petatron.models.decoder import ENTROPIES, TOKEN_LOSSES
from petatron.models.objective import START, ModelRole, Objective, check_settings, register_objective
from petatron.models.preference_objectives import segment_lengths
from petatron.models.stage_inputs_outputs import LossSpec, MetricSpec

ADVANTAGES, DRAWN_LOG_PROBS, OLD_LOG_PROBS = "advantages", "drawn_log_probs", "old_log_probs"
"""Arrays [B, S] of the labels. The last one is in batches that are trained on more than once, or by other weights than those that drew."""
REWARDS, TRUNCATED = "rewards", "truncated"
"""Arrays [segments]: the reward of each answer, and 1 if it was cut off."""
POLICY_LOSS = "policy loss"
REFERENCE, REFERENCE_LOG_PROBS = "reference", "reference_log_probs"
"""The role of the reference, and the array [B, S] of its log-probabilities."""
KlEstimator = Literal["k1", "k2", "k3"]


@dataclass(frozen=True)
class PolicyGradient(Objective):
    """average: of the losses of tokens: over each answer and then over answers, over all tokens, or as sums of answers divided by
    `constant_tokens`. dual_clip: the largest ratio of the term that is not clipped, 0: any. max_importance_weight: 0 corrects nothing.
    mask_tokens_above, mask_answers_above: leave out tokens whose importance weight is above that or below its inverse, and answers for
    which the geometric mean of their tokens' weights is; 0: none. exact_entropy: measure entropies over the vocabulary, as an
    entropy_weight does, rather than estimate them by draws. kl_in_reward: weight of the divergence that is subtracted from rewards, of
    each token with a critic, of an answer without; kl_estimator: how it is estimated (`posttrain/token_advantages.py`). reference: a
    folder, or `start`; read with one of the two weights alone.
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
    mask_tokens_above: float = 0.0
    mask_answers_above: float = 0.0
    entropy_weight: float = 0.0
    exact_entropy: bool = False
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
            ("entropy_weight", self.entropy_weight >= 0, "is below 0", "Leave it out."),
            *(
                (name, value == 0 or value > 1, "is not above 1", "Use 5, or leave it out.")
                for name, value in (
                    ("mask_tokens_above", self.mask_tokens_above),
                    ("mask_answers_above", self.mask_answers_above),
                )
            ),
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
        return (*self.log_prob_outputs, *((ENTROPIES,) if self.has_entropies and not self._needs_logits else ()))

    @property
    def log_prob_outputs(self) -> tuple[str, ...]:
        """The outputs that log-probabilities are computed of."""
        return ("logits",) if self._needs_logits else (TOKEN_LOSSES,)

    @property
    def has_entropies(self) -> bool:
        return self.entropy_weight > 0 or self.exact_entropy

    @property
    def _needs_logits(self) -> bool:
        return self.whole_logits or self.temperature != 1.0

    @property
    def models(self) -> Mapping[str, ModelRole]:
        if not self.has_reference:
            return {}
        # Rewards need its log-probabilities before the step, and the batch has them then.
        return {REFERENCE: ModelRole(self.reference, outputs=() if self.kl_in_reward else self.log_prob_outputs)}

    @property
    def has_reference(self) -> bool:
        return self.kl_weight > 0 or self.kl_in_reward > 0

    @property
    def losses(self) -> tuple[LossSpec, ...]:
        return (LossSpec(POLICY_LOSS, per="token" if self.average == "token" else "segment"),)

    @property
    def metric_specs(self) -> tuple[MetricSpec, ...]:
        of_segments = ("reward", "answer tokens", "truncated")
        of_tokens = (
            "entropy",
            "clipped low",
            "clipped high",
            "rollout k3",
            "rollout difference",
            *(["left out"] if self.mask_tokens_above or self.mask_answers_above else []),
            *(["kl"] if self.has_reference else []),
        )
        return (
            *(MetricSpec(name, per="segment") for name in of_segments),
            *(MetricSpec(name, per="token") for name in of_tokens),
            MetricSpec("max rollout difference", per="token", reduction="max"),
        )

    def log_probs(self, outputs: Mapping[str, Tensor], batch: Batch) -> Tensor:
        """Returns the log-probabilities of the labels [B, S] at the temperature they were drawn with."""
        if not self._needs_logits:
            return -outputs[TOKEN_LOSSES]
        return policy_log_probs(outputs["logits"], batch.labels, self.temperature)

    def prepare(self, batch: Batch) -> Batch:
        if not self.has_reference or REFERENCE_LOG_PROBS in batch:
            return batch
        role = self.models[REFERENCE]
        named = {name: batch[role.array(REFERENCE, name)] for name in self.log_prob_outputs}
        return batch.with_arrays(**{REFERENCE_LOG_PROBS: self.log_probs(named, batch)})

    def loss(self, outputs: Mapping[str, Tensor], batch: Batch) -> Mapping[str, Tensor]:
        log_probs = self.log_probs(outputs, batch)
        ratio, old = self._ratio(log_probs, batch), self._old(log_probs, batch)
        advantages = batch[ADVANTAGES].to(log_probs.dtype)
        bounded = ratio if not self.dual_clip else ratio.clamp(max=self.dual_clip)
        losses = -torch.minimum(bounded * advantages, self._clipped(ratio) * advantages)
        gap = self._masked(old - batch[DRAWN_LOG_PROBS].to(old.dtype), batch)
        if self.max_importance_weight:
            losses = losses * torch.exp(gap).clamp(max=self.max_importance_weight)
        if self.kl_weight:
            weight = self.kl_weight * (ratio if self.unbiased_kl else 1.0)
            losses = losses + weight * self._divergence(log_probs, batch)
        if self.mask_tokens_above or self.mask_answers_above:
            losses = losses.masked_fill(self._left_out(gap, batch), 0.0)
        if self.entropy_weight:
            losses = losses - self.entropy_weight * self._entropies(outputs, batch)
        return {POLICY_LOSS: self._averaged(losses, batch)}

    def metrics(self, outputs: Mapping[str, Tensor], batch: Batch) -> Mapping[str, Tensor]:
        log_probs = self.log_probs(outputs, batch)
        ratio, advantages = self._ratio(log_probs, batch), batch[ADVANTAGES].to(log_probs.dtype)
        is_clipped = self._clipped(ratio) * advantages < ratio * advantages
        gap = self._masked(self._old(log_probs, batch) - batch[DRAWN_LOG_PROBS].to(log_probs.dtype), batch)
        divergence = {"kl": self._divergence(log_probs, batch)} if self.has_reference else {}
        if self.mask_tokens_above or self.mask_answers_above:
            divergence["left out"] = self._left_out(gap, batch).to(log_probs.dtype)
        exact = self._entropies(outputs, batch) if self.has_entropies else None
        return {
            "reward": batch[REWARDS].to(log_probs.dtype),
            "answer tokens": segment_lengths(batch, log_probs.dtype),
            "truncated": batch[TRUNCATED].to(log_probs.dtype),
            "entropy": -batch[DRAWN_LOG_PROBS].to(log_probs.dtype) if exact is None else exact,
            "clipped low": (is_clipped & (advantages < 0)).to(log_probs.dtype),
            "clipped high": (is_clipped & (advantages > 0)).to(log_probs.dtype),
            "rollout k3": torch.expm1(gap) - gap,
            "rollout difference": gap.abs(),
            "max rollout difference": gap.abs(),
            **divergence,
        }

    def _entropies(self, outputs: Mapping[str, Tensor], batch: Batch) -> Tensor:
        """Returns the entropies of the distributions that labels are drawn from [B, S]."""
        if not self._needs_logits:
            return outputs[ENTROPIES]
        logits = outputs["logits"] / self.temperature
        columns = VocabColumns(logits.shape[-1])
        return losses_and_entropies(logits.flatten(0, 1), batch.labels.flatten(), columns)[1].view(batch.labels.shape)

    def _left_out(self, gap: Tensor, batch: Batch) -> Tensor:
        """Returns which tokens are left out [B, S]: those for which the sampler and the trainer differ too much, and their answers."""
        result = torch.zeros_like(gap, dtype=torch.bool)
        if self.mask_tokens_above:
            result = gap.abs() > math.log(self.mask_tokens_above)
        if self.mask_answers_above:
            means = batch.segment_sum(gap) / segment_lengths(batch, gap.dtype)
            answers = means.abs() > math.log(self.mask_answers_above)
            result = result | answers[batch[SEGMENT_IDS].clamp(min=0)]
        return result

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
