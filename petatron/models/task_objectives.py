"""The objectives of models with a task head: a class of each text, numbers of each text, or the place of a text among others.

    classification   cross-entropy of `label_logits` [B, labels] and the label of each text
    regression       squared difference of `label_logits` and the numbers of each text, the mean over the numbers
    contrastive      cross-entropy of which text belongs to a query, by the cosine of their pooled states over a temperature (InfoNCE;
                     Oord et al., "Representation Learning with Contrastive Predictive Coding", 2018)

A contrastive sample has several rows: a query, the text that belongs to it, and texts that do not. The query is compared with the texts of
all samples of its micro-batch on all data-parallel ranks, and gradients reach all of them. So it is the product of `--micro-batch-size` and
the data-parallel size that decides what a loss is, and layouts in which it is equal train the same.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor

from petatron.base.errors import ConfigError, Problem
from petatron.config.schema.objective_and_dataset_names import (
    CLASSIFICATION,
    CONTRASTIVE,
    LABELLED_DATASET,
    REGRESSION,
)
from petatron.models.batch import Batch
from petatron.models.decoder import LABEL_LOGITS, POOLED_STATES
from petatron.models.objective import Objective, register_objective
from petatron.models.stage_inputs_outputs import LossSpec, MetricSpec

LABEL_IDS, LABEL_VALUES = "label_ids", "label_values"
"""Arrays of a batch: the label of each text [B], or its numbers [B, labels]."""
CLASSIFICATION_LOSS, REGRESSION_LOSS, CONTRASTIVE_LOSS = "classification loss", "regression loss", "contrastive loss"
ACCURACY, ABSOLUTE_ERROR, RETRIEVAL_ACCURACY = "accuracy", "mean absolute error", "retrieval accuracy"


class _LabelledText(Objective):
    """Reads texts with labels."""

    @property
    def outputs(self) -> tuple[str, ...]:
        return (LABEL_LOGITS,)

    @property
    def dataset_type(self) -> str | None:
        return LABELLED_DATASET


@dataclass(frozen=True)
class Classification(_LabelledText):
    """Which of the labels a text has.

    >>> outputs = {"label_logits": torch.tensor([[2.0, 0.0], [0.0, 0.0]])}
    >>> batch = Batch(torch.zeros(2, 3), arrays={"label_ids": torch.tensor([1, 0])})
    >>> Classification().metrics(outputs, batch)["accuracy"].tolist()
    [0.0, 1.0]
    """

    @property
    def losses(self) -> tuple[LossSpec, ...]:
        return (LossSpec(CLASSIFICATION_LOSS, per="sample"),)

    @property
    def metric_specs(self) -> tuple[MetricSpec, ...]:
        return (MetricSpec(ACCURACY),)

    def loss(self, outputs: Mapping[str, Tensor], batch: Batch) -> Mapping[str, Tensor]:
        losses = F.cross_entropy(outputs[LABEL_LOGITS], batch[LABEL_IDS], reduction="none")
        return {CLASSIFICATION_LOSS: losses}

    def metrics(self, outputs: Mapping[str, Tensor], batch: Batch) -> Mapping[str, Tensor]:
        return {ACCURACY: (outputs[LABEL_LOGITS].argmax(dim=1) == batch[LABEL_IDS]).double()}


@dataclass(frozen=True)
class Regression(_LabelledText):
    """Which numbers a text has."""

    @property
    def losses(self) -> tuple[LossSpec, ...]:
        return (LossSpec(REGRESSION_LOSS, per="sample"),)

    @property
    def metric_specs(self) -> tuple[MetricSpec, ...]:
        return (MetricSpec(ABSOLUTE_ERROR),)

    def loss(self, outputs: Mapping[str, Tensor], batch: Batch) -> Mapping[str, Tensor]:
        return {REGRESSION_LOSS: self._differences(outputs, batch).square().mean(dim=1)}

    def metrics(self, outputs: Mapping[str, Tensor], batch: Batch) -> Mapping[str, Tensor]:
        return {ABSOLUTE_ERROR: self._differences(outputs, batch).abs().mean(dim=1).double()}

    def _differences(self, outputs: Mapping[str, Tensor], batch: Batch) -> Tensor:
        return outputs[LABEL_LOGITS] - batch[LABEL_VALUES].to(outputs[LABEL_LOGITS].dtype)


@dataclass(frozen=True)
class Contrastive(_LabelledText):
    """Which text belongs to a query.

    >>> states = torch.eye(2).repeat_interleave(2, dim=0)  # two queries, each with the text that belongs to it
    >>> batch = Batch(torch.zeros(4, 3), rows_per_sample=2)
    >>> Contrastive().metrics({"pooled_states": states}, batch)["retrieval accuracy"].tolist()
    [1.0, 1.0]
    """

    reads_all_samples: ClassVar[bool] = True
    temperature: float = 0.05

    def __post_init__(self) -> None:
        if not self.temperature > 0:
            rule = "is not above 0, and cosines are divided by it"
            raise ConfigError([Problem("--objective-settings", f"temperature={self.temperature:g}", rule, "Use 0.05.")])

    @property
    def outputs(self) -> tuple[str, ...]:
        return (POOLED_STATES,)

    @property
    def losses(self) -> tuple[LossSpec, ...]:
        return (LossSpec(CONTRASTIVE_LOSS, per="sample"),)

    @property
    def metric_specs(self) -> tuple[MetricSpec, ...]:
        return (MetricSpec(RETRIEVAL_ACCURACY),)

    def loss(self, outputs: Mapping[str, Tensor], batch: Batch) -> Mapping[str, Tensor]:
        scores, targets = self._scores(outputs[POOLED_STATES], batch)
        return {CONTRASTIVE_LOSS: F.cross_entropy(scores / self.temperature, targets, reduction="none")}

    def metrics(self, outputs: Mapping[str, Tensor], batch: Batch) -> Mapping[str, Tensor]:
        scores, targets = self._scores(outputs[POOLED_STATES], batch)
        return {RETRIEVAL_ACCURACY: (scores.argmax(dim=1) == targets).double()}

    def _scores(self, states: Tensor, batch: Batch) -> tuple[Tensor, Tensor]:
        """Returns the cosines [B, texts] of this rank's queries with the texts of all ranks, and which text belongs to each query [B]."""
        rows = batch.rows_per_sample
        unit = F.normalize(states, dim=1).unflatten(0, (-1, rows))
        queries, texts = unit[:, 0], unit[:, 1:].contiguous()
        of_all, first = batch.all_samples(texts)
        targets = torch.arange(first, first + len(queries), device=states.device) * (rows - 1)
        return queries @ of_all.flatten(0, 1).t(), targets


register_objective(CLASSIFICATION, Classification)
register_objective(REGRESSION, Regression)
register_objective(CONTRASTIVE, Contrastive)
