"""The best items after histories, in every layout: scores of all items, without those that a history has, if that is asked."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from petatron.config.required_settings import known_vocab_size
from petatron.layers.hstu import TIMESTAMPS
from petatron.layers.vocabulary.row_sharded_table import PADDING_ID
from petatron.models.batch import Batch
from petatron.models.recommender import ITEM_SCORES
from petatron.parallel.forward_sequences import (
    BATCH_TOKENS,
    LocalOutputs,
    MicroBatchPlan,
    forward_sequences,
    plan_micro_batches,
    sequence_multiple,
)
from petatron.parallel.parallel_model import ParallelModel


@dataclass(frozen=True, slots=True)
class History:
    """The items that a user had, the last one last, their times in seconds if there are any, and what is asked: the best `count` items.

    leave_out: whether items of the history are recommended no more.
    """

    items: Sequence[int]
    times: Sequence[int] = ()
    count: int = 10
    leave_out: bool = True


def needs_times(model: ParallelModel) -> bool:
    """Whether its layers read the times of interactions."""
    config = model.spec.config
    return config.recommender_layers == "hstu" and config.hstu_time_buckets > 0


def best_items(
    model: ParallelModel, histories: Sequence[History], *, batch_tokens: int = BATCH_TOKENS
) -> list[list[tuple[int, float]]]:
    """Returns items with their scores, the best first; every rank calls it with the same histories, and all get the same result.

    Of equal scores the item with the lower number comes first.

    >>> import petatron
    >>> flags = "--model-type recommender --vocab-size 20 --mock-data --lr 1e-3 --train-iters 2".split()
    >>> run = petatron.load("tiny-llama", flags)
    >>> model = petatron.build_model(run, petatron.launch(run))
    >>> [best] = best_items(model, [History([3, 5], count=2)])
    >>> len(best), {item for item, _ in best}.isdisjoint({3, 5})
    (2, True)
    """
    num_items = known_vocab_size(model.spec.config)
    most = min(max((history.count for history in histories), default=1), num_items)
    multiple, mesh = sequence_multiple(model), model.mesh
    lengths = [len(history.items) for history in histories]
    plans = plan_micro_batches(
        lengths, dp_size=mesh.dp.size, batch_tokens=batch_tokens, multiple=multiple, max_length=model.spec.max_positions
    )

    def make_batch(plan: MicroBatchPlan, indices: Sequence[int]) -> Batch:
        return _batch([histories[index] for index in indices], plan, needs_times(model)).to(mesh.device)

    def add(result: Tensor, local: LocalOutputs) -> None:
        if mesh.cp.rank:  # every rank with a part of the sequences has the scores
            return
        for row, index in enumerate(local.indices):
            scores = local.outputs[ITEM_SCORES][row].double()
            if histories[index].leave_out:
                scores[torch.tensor(histories[index].items, device=scores.device)] = float("-inf")
            # Of the items with the last score that is good enough, those with the lowest numbers.
            candidates = (scores >= scores.topk(most).values[-1]).nonzero().flatten()
            best = candidates[scores[candidates].argsort(descending=True, stable=True)[:most]]
            result[row] += torch.cat((best.double(), scores[best].clamp(min=torch.finfo(torch.float64).min)))

    recommended: list[list[tuple[int, float]]] = [[]] * len(histories)
    for pairs in forward_sequences(
        model, plans, make_batch=make_batch, collect=(ITEM_SCORES,), width=lambda plan: 2 * most, add=add
    ):
        for index, numbers in pairs:
            items, scores = numbers.view(2, -1).tolist()
            lowest = torch.finfo(torch.float64).min
            kept = [(int(item), score) for item, score in zip(items, scores, strict=True) if score > lowest]
            recommended[index] = kept[: histories[index].count]
    return recommended


def _batch(histories: Sequence[History], plan: MicroBatchPlan, with_times: bool) -> Batch:
    """Returns rows of histories, padded at their end; rows without a history are padding."""
    tokens = torch.full((plan.rows, plan.length), PADDING_ID)
    times = torch.zeros_like(tokens)
    for row, history in enumerate(histories):
        tokens[row, : len(history.items)] = torch.tensor(history.items)
        if with_times:
            times[row] = history.times[-1]
            times[row, : len(history.times)] = torch.tensor(history.times)
    return Batch(arrays={"tokens": tokens, **({TIMESTAMPS: times} if with_times else {})})
