"""The objective of recommenders: the losses that the model computes, and how far up the held-out item of each history is.

HR@k (hit rate) is the share of histories whose item is among the first k of all items by score; NDCG@k weights a hit at rank r, counted
from 0, by 1 / log2(r + 2). Both look at the last item of a sample that the loss counts: in validation and test that is the item that was
left out, and no items are sampled for the comparison.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from petatron.config.schema.objective_and_dataset_names import ITEM_DATASET, NEXT_ITEM
from petatron.models.batch import Batch
from petatron.models.objective import NextToken, register_objective
from petatron.models.stage_inputs_outputs import MetricSpec

TARGET_RANKS = "target_ranks"
"""The output [B] of a model in evaluation: how many items come before the last target of each sample."""
HAS_TARGET = "has_target"
"""The mask [B] of samples that have one."""


@dataclass(frozen=True)
class NextItem(NextToken):
    """The losses of the model, and in evaluation HR@k and NDCG@k.

    >>> [metric.name for metric in NextItem(k=5).metric_specs]
    ['HR@5', 'NDCG@5']
    """

    measures_training: ClassVar[bool] = False
    k: int = 10

    @property
    def metric_specs(self) -> tuple[MetricSpec, ...]:
        return tuple(MetricSpec(f"{name}@{self.k}", mask=HAS_TARGET) for name in ("HR", "NDCG"))

    @property
    def measured_outputs(self) -> tuple[str, ...]:
        return (TARGET_RANKS,)

    @property
    def dataset_type(self) -> str | None:
        return ITEM_DATASET

    def metrics(self, outputs: Mapping[str, Tensor], batch: Batch) -> Mapping[str, Tensor]:
        values = hits_and_gains(outputs[TARGET_RANKS], self.k)
        return {spec.name: x for spec, x in zip(self.metric_specs, values, strict=True)}


def hits_and_gains(ranks: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """Returns for each rank, counted from 0, whether it is below k, and its discounted gain.

    >>> import torch
    >>> hits_and_gains(torch.tensor([0, 2, 10]), 10)[1].tolist()
    [1.0, 0.5, 0.0]
    """
    hits = (ranks < k).double()
    return hits, hits / (ranks.double() + 2).log2()


register_objective(NEXT_ITEM, NextItem)
