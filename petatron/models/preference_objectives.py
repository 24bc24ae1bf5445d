"""Objectives that learn from preferences. A pair is a chosen and a rejected answer to a prompt, which are segments of a micro-batch.

With pi(y) and ref(y) the log-probability of an answer's tokens under the model that is trained and under a frozen reference, n(y) their
number, and c, r the two answers of a pair:

    dpo     -log sigmoid(b (g(c) - g(r))), g(y) = pi(y) - ref(y)            Rafailov et al., 2023
            its other losses: ipo (Azar et al., 2023), hinge (Zhao et al., 2023), robust (Chowdhury et al., 2024)
    orpo    cross-entropy of c - b log sigmoid(log odds(c) - log odds(r)), of the mean over tokens          Hong et al., 2024
    simpo   -log sigmoid(b pi(c) / n(c) - b pi(r) / n(r) - gamma)            Meng et al., 2024
    kto     w (1 - sigmoid(+-b (g(y) - z))) of answers that are desirable (+) or not (-); z estimates the divergence from the reference by
            answers to other prompts                                         Ethayarajh et al., 2024
    reward  -log sigmoid(s(c) - s(r)) of the score s of a task head          Bradley and Terry, 1952
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from petatron.base.errors import DataError
from petatron.config.schema.objective_and_dataset_names import (
    DPO,
    KTO,
    ORPO,
    PREFERENCE_DATASET,
    REWARD,
    SIMPO,
    UNPAIRED_PREFERENCE_DATASET,
)
from petatron.models.batch import Batch
from petatron.models.decoder import LABEL_LOGITS, TOKEN_LOSSES
from petatron.models.objective import START, ModelRole, Objective, StoredRole, check_settings, register_objective
from petatron.models.stage_inputs_outputs import LossSpec, MetricSpec

PAIR_MASK = "pair_mask"
"""Array [pairs] of ones: what is computed of pairs of segments is counted by it."""
CHOSEN_MASK = "chosen_mask"
"""Array [B, S]: the loss mask of chosen answers alone."""
DESIRABLE = "desirable"
"""Array [segments]: 1 for an answer that is desirable."""

PREFERENCE_LOSS, CHOSEN_LOSS = "preference loss", "loss of chosen answers"
MARGIN, ACCURACY = "margin", "accuracy"
CHOSEN_REWARD, REJECTED_REWARD = "chosen reward", "rejected reward"
_REFERENCE = "reference"
_REFERENCE_LOG_PROBS = "reference_log_probs"
"""Array [segments]."""


def segment_log_probs(token_losses: Tensor, batch: Batch) -> Tensor:
    """Returns the log-probability of the learned tokens of each segment."""
    return batch.segment_sum(-token_losses * batch.loss_mask)


def segment_lengths(batch: Batch, dtype: torch.dtype) -> Tensor:
    """Returns how many tokens of each segment are learned, at least 1."""
    return batch.segment_sum(batch.loss_mask.to(dtype)).clamp(min=1.0)


class _PairObjective(Objective):
    """Compares the answers of pairs by the log-probabilities of their tokens."""

    beta: float
    chosen_weight: float

    @property
    def dataset_type(self) -> str | None:
        return PREFERENCE_DATASET

    @property
    def losses(self) -> tuple[LossSpec, ...]:
        chosen = LossSpec(CHOSEN_LOSS, mask=CHOSEN_MASK, weight=self.chosen_weight)
        return (LossSpec(PREFERENCE_LOSS, per="segment", mask=PAIR_MASK), *([chosen] if self.chosen_weight else []))

    @property
    def metric_specs(self) -> tuple[MetricSpec, ...]:
        names = (MARGIN, ACCURACY, CHOSEN_REWARD, REJECTED_REWARD)
        return tuple(MetricSpec(name, per="segment", mask=PAIR_MASK) for name in names)

    def loss(self, outputs: Mapping[str, Tensor], batch: Batch) -> Mapping[str, Tensor]:
        scores = self._scores(outputs[TOKEN_LOSSES], batch)
        losses = {PREFERENCE_LOSS: self._pair_loss(scores[0::2], scores[1::2])}
        return losses | ({CHOSEN_LOSS: outputs[TOKEN_LOSSES]} if self.chosen_weight else {})

    def metrics(self, outputs: Mapping[str, Tensor], batch: Batch) -> Mapping[str, Tensor]:
        rewards = self.beta * self._scores(outputs[TOKEN_LOSSES], batch)
        chosen, rejected = rewards[0::2], rewards[1::2]
        accuracy = (chosen > rejected).to(rewards.dtype)
        return {MARGIN: chosen - rejected, ACCURACY: accuracy, CHOSEN_REWARD: chosen, REJECTED_REWARD: rejected}

    @abstractmethod
    def _scores(self, token_losses: Tensor, batch: Batch) -> Tensor:
        """Returns the score of each segment, by which the answers of a pair are compared."""

    @abstractmethod
    def _pair_loss(self, chosen: Tensor, rejected: Tensor) -> Tensor:
        """Returns the loss of each pair by the scores of its answers."""


class _WithReference(Objective):
    """Reads a frozen reference, by the log-probabilities of whole segments."""

    reference: str
    cache_reference: bool

    @property
    def models(self) -> Mapping[str, ModelRole]:
        return {} if self.cache_reference else {_REFERENCE: self._model}

    @property
    def stored_roles(self) -> Mapping[str, StoredRole]:
        if not self.cache_reference:
            return {}
        return {
            _REFERENCE: StoredRole("segment", (_REFERENCE_LOG_PROBS,), model=self._model, compute=_reference_arrays)
        }

    @property
    def _model(self) -> ModelRole:
        return ModelRole(self.reference, outputs=(TOKEN_LOSSES,))

    def prepare(self, batch: Batch) -> Batch:
        if self.cache_reference:
            if _REFERENCE_LOG_PROBS not in batch:
                raise DataError(
                    "Log-probabilities of the reference (cache_reference=true) are not in the batch. `petatron train` computes them, and "
                    "adds them to batches of files; elsewhere leave the setting out."
                )
            return batch
        array = self._model.array(_REFERENCE, TOKEN_LOSSES)
        return batch.with_arrays(**_reference_arrays({TOKEN_LOSSES: batch[array]}, batch))


def _reference_arrays(outputs: Mapping[str, Tensor], batch: Batch) -> Mapping[str, Tensor]:
    return {_REFERENCE_LOG_PROBS: segment_log_probs(outputs[TOKEN_LOSSES], batch)}


def _gains(token_losses: Tensor, batch: Batch) -> Tensor:
    """Returns how much more likely each segment is than under the reference."""
    log_probs = segment_log_probs(token_losses, batch)
    return log_probs - batch[_REFERENCE_LOG_PROBS].to(log_probs.dtype)


@dataclass(frozen=True)
class DirectPreference(_PairObjective, _WithReference):
    """reference: a folder, or `start`. cache_reference: its log-probabilities are stored beside the data.

    chosen_weight: of the cross-entropy of chosen answers. length_normalized: means over tokens are compared, as ipo does in any case.
    """

    beta: float = 0.1
    loss_type: Literal["sigmoid", "ipo", "hinge", "robust"] = "sigmoid"
    label_smoothing: float = 0.0
    length_normalized: bool = False
    chosen_weight: float = 0.0
    reference: str = START
    cache_reference: bool = False

    def __post_init__(self) -> None:
        used = not self.label_smoothing or self.loss_type in ("sigmoid", "robust")
        check_settings(
            self,
            ("beta", self.beta > 0, "is not above 0", "Use 0.1."),
            ("label_smoothing", 0 <= self.label_smoothing < 0.5, "is not from 0 to below 0.5", "Use 0."),
            ("label_smoothing", used, f"has no effect with loss_type={self.loss_type}", "Leave it out."),
        )

    def _scores(self, token_losses: Tensor, batch: Batch) -> Tensor:
        gains = _gains(token_losses, batch)
        normalized = self.length_normalized or self.loss_type == "ipo"
        return gains / segment_lengths(batch, gains.dtype) if normalized else gains

    def _pair_loss(self, chosen: Tensor, rejected: Tensor) -> Tensor:
        margin = self.beta * (chosen - rejected)
        match self.loss_type:
            case "ipo":
                return (chosen - rejected - 1 / (2 * self.beta)).square()
            case "hinge":
                return torch.relu(1 - margin)
            case "robust":
                smooth = self.label_smoothing
                flipped = smooth * F.logsigmoid(-margin) - (1 - smooth) * F.logsigmoid(margin)
                return flipped / (1 - 2 * smooth)
            case "sigmoid":
                return _smoothed_log_loss(margin, self.label_smoothing)


@dataclass(frozen=True)
class OddsRatioPreference(_PairObjective):
    """chosen_weight: of the cross-entropy of chosen answers."""

    beta: float = 0.1
    chosen_weight: float = 1.0

    def __post_init__(self) -> None:
        check_settings(self, ("beta", self.beta > 0, "is not above 0", "Use 0.1."))

    def _scores(self, token_losses: Tensor, batch: Batch) -> Tensor:
        return _mean_log_probs(token_losses, batch)

    def _pair_loss(self, chosen: Tensor, rejected: Tensor) -> Tensor:
        log_odds = (chosen - rejected) - (_log1mexp(chosen) - _log1mexp(rejected))
        return -self.beta * F.logsigmoid(log_odds)


@dataclass(frozen=True)
class SimplePreference(_PairObjective):
    """gamma: the margin by which the chosen answer is to be better. chosen_weight: of the cross-entropy of chosen answers."""

    beta: float = 2.0
    gamma: float = 1.0
    label_smoothing: float = 0.0
    chosen_weight: float = 0.0

    def __post_init__(self) -> None:
        check_settings(
            self,
            ("beta", self.beta > 0, "is not above 0", "Use 2."),
            ("gamma", self.gamma >= 0, "is below 0", "Use 1."),
            ("label_smoothing", 0 <= self.label_smoothing < 0.5, "is not from 0 to below 0.5", "Use 0."),
        )

    def _scores(self, token_losses: Tensor, batch: Batch) -> Tensor:
        return _mean_log_probs(token_losses, batch)

    def _pair_loss(self, chosen: Tensor, rejected: Tensor) -> Tensor:
        return _smoothed_log_loss(self.beta * (chosen - rejected) - self.gamma, self.label_smoothing)


@dataclass(frozen=True)
class KahnemanTverskyPreference(_WithReference):
    """Segments are in turns an answer and an answer to another prompt after the same prompt, by which the divergence is estimated.

    That is the mean over a micro-batch on all data-parallel ranks, so --micro-batch-size times the data-parallel size is part of the loss.
    reference: a folder, or `start`. cache_reference: its log-probabilities are stored beside the data.
    """

    reads_all_samples: ClassVar[bool] = True
    beta: float = 0.1
    desirable_weight: float = 1.0
    undesirable_weight: float = 1.0
    reference: str = START
    cache_reference: bool = False

    def __post_init__(self) -> None:
        check_settings(
            self,
            ("beta", self.beta > 0, "is not above 0", "Use 0.1."),
            ("desirable_weight", self.desirable_weight >= 0, "is below 0", "Use 1."),
            ("undesirable_weight", self.undesirable_weight >= 0, "is below 0", "Use 1."),
        )

    @property
    def dataset_type(self) -> str | None:
        return UNPAIRED_PREFERENCE_DATASET

    @property
    def losses(self) -> tuple[LossSpec, ...]:
        return (LossSpec(PREFERENCE_LOSS, per="segment", mask=PAIR_MASK),)

    @property
    def metric_specs(self) -> tuple[MetricSpec, ...]:
        return tuple(MetricSpec(name, per="segment", mask=PAIR_MASK) for name in (ACCURACY, "divergence"))

    def loss(self, outputs: Mapping[str, Tensor], batch: Batch) -> Mapping[str, Tensor]:
        gains, divergence = self._gains(outputs[TOKEN_LOSSES], batch)
        desirable = batch[DESIRABLE][0::2].to(gains.dtype)
        weights = desirable * self.desirable_weight + (1 - desirable) * self.undesirable_weight
        return {PREFERENCE_LOSS: weights * torch.sigmoid(-self.beta * (2 * desirable - 1) * (gains - divergence))}

    def metrics(self, outputs: Mapping[str, Tensor], batch: Batch) -> Mapping[str, Tensor]:
        gains, divergence = self._gains(outputs[TOKEN_LOSSES], batch)
        right = (gains > divergence) == batch[DESIRABLE][0::2].bool()
        return {ACCURACY: right.to(gains.dtype), "divergence": divergence.expand_as(gains)}

    def _gains(self, token_losses: Tensor, batch: Batch) -> tuple[Tensor, Tensor]:
        gains = _gains(token_losses, batch)
        of_others = gains[1::2].detach()
        sum_and_count = torch.stack([of_others.sum(), of_others.new_tensor(float(len(of_others)))])
        total, count = batch.all_samples(sum_and_count.unsqueeze(0))[0].sum(dim=0)
        return gains[0::2], (total / count).clamp(min=0)


@dataclass(frozen=True)
class PairwiseReward(Objective):
    """Trains the score of a task head (`--pooling last --num-labels 1`). centered: weight of the square of the sum of both scores."""

    model_flags: ClassVar[str] = "--pooling last --num-labels 1"
    centered: float = 0.0

    @property
    def dataset_type(self) -> str | None:
        return PREFERENCE_DATASET

    @property
    def outputs(self) -> tuple[str, ...]:
        return (LABEL_LOGITS,)

    @property
    def losses(self) -> tuple[LossSpec, ...]:
        return (LossSpec(PREFERENCE_LOSS, per="sample"),)

    @property
    def metric_specs(self) -> tuple[MetricSpec, ...]:
        return tuple(MetricSpec(name) for name in (MARGIN, ACCURACY))

    def loss(self, outputs: Mapping[str, Tensor], batch: Batch) -> Mapping[str, Tensor]:
        scores = outputs[LABEL_LOGITS].squeeze(1)
        chosen, rejected = scores[0::2], scores[1::2]
        return {PREFERENCE_LOSS: -F.logsigmoid(chosen - rejected) + self.centered * (chosen + rejected).square()}

    def metrics(self, outputs: Mapping[str, Tensor], batch: Batch) -> Mapping[str, Tensor]:
        scores = outputs[LABEL_LOGITS].squeeze(1)
        margin = scores[0::2] - scores[1::2]
        return {MARGIN: margin, ACCURACY: (margin > 0).to(margin.dtype)}


def _mean_log_probs(token_losses: Tensor, batch: Batch) -> Tensor:
    return segment_log_probs(token_losses, batch) / segment_lengths(batch, token_losses.dtype)


def _smoothed_log_loss(margin: Tensor, smoothing: float) -> Tensor:
    return -(1 - smoothing) * F.logsigmoid(margin) - smoothing * F.logsigmoid(-margin)


def _log1mexp(x: Tensor) -> Tensor:
    """Returns log(1 - exp(x)) for x below 0, by the form that is exact where exp(x) is near 1, or near 0.

    >>> _log1mexp(torch.tensor([-1e-6, -50.0], dtype=torch.float64)).round(decimals=4).tolist()
    [-13.8155, -0.0]
    """
    x = x.clamp(max=-torch.finfo(x.dtype).tiny)
    near_one = x > -0.6931471805599453
    # The branch that is not taken gets a harmless value: its gradient would be NaN times 0.
    of_near = torch.log(-torch.expm1(torch.where(near_one, x, -1.0)))
    return torch.where(near_one, of_near, torch.log1p(-torch.exp(torch.where(near_one, -1.0, x))))


for _name, _kind in {
    DPO: DirectPreference,
    ORPO: OddsRatioPreference,
    SIMPO: SimplePreference,
    KTO: KahnemanTverskyPreference,
    REWARD: PairwiseReward,
}.items():
    register_objective(_name, _kind)
