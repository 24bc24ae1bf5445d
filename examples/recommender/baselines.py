"""What a model of sequences has to beat: popularity, a Markov chain of the first order, and item-kNN.

All three see what the model sees: they are fitted to training, which leaves the last two items of each history out, and are asked for the
last item after all items before it. They never recommend what the user has had already, which the model has to find out by itself.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from petatron.data.recommendation.history_file import ItemHistories
from petatron.models.next_item import hits_and_gains

LEFT_OUT = 2
NEIGHBORS = 100

Scorer = Callable[[Tensor], Tensor]
"""Scores of all items after a history."""


def histories_of(histories: ItemHistories) -> Iterator[Tensor]:
    return (torch.from_numpy(histories.user(user)) for user in range(histories.num_users))


def training_of(items: Tensor) -> Tensor:
    return items[:-LEFT_OUT] if len(items) > LEFT_OUT else items


def popularity(histories: ItemHistories) -> Scorer:
    """How often an item is in training."""
    counts = torch.zeros(histories.num_items)
    for items in histories_of(histories):
        counts += torch.bincount(training_of(items), minlength=histories.num_items)
    return lambda history: counts


def markov_chain(histories: ItemHistories) -> Scorer:
    """How often an item followed the last one; of equal ones the more popular."""
    counts = torch.zeros(histories.num_items, histories.num_items)
    for items in histories_of(histories):
        trained = training_of(items)
        counts.index_put_((trained[:-1], trained[1:]), torch.ones(max(0, len(trained) - 1)), accumulate=True)
    popular = popularity(histories)(torch.empty(0))
    return lambda history: counts[history[-1]] + popular / (popular.sum() + 1)


def item_knn(histories: ItemHistories) -> Scorer:
    """The sum of cosines with the items of the history, of the nearest neighbors of each."""
    had = torch.zeros(histories.num_users, histories.num_items)
    for user, items in enumerate(histories_of(histories)):
        had[user, training_of(items)] = 1.0
    norms = had.norm(dim=0).clamp(min=1.0)
    similar = (had.t() @ had / norms / norms.unsqueeze(1)).fill_diagonal_(0.0)
    kept = similar.topk(min(NEIGHBORS, histories.num_items), dim=1).values[:, -1:]
    similar = similar.where(similar >= kept, 0.0)
    return lambda history: similar[history].sum(dim=0)


BASELINES: dict[str, Callable[[ItemHistories], Scorer]] = {
    "popularity": popularity,
    "Markov chain": markov_chain,
    "item-kNN": item_knn,
}


def evaluate(scorer: Scorer, histories: ItemHistories, k: int = 10) -> tuple[float, float]:
    """Returns HR@k and NDCG@k of the last items; of equal scores the lower number comes first, as for the model."""
    ranks = []
    for items in histories_of(histories):
        if len(items) <= LEFT_OUT:
            continue
        history, target = items[:-1], int(items[-1])
        scores = scorer(history).clone()
        target_score = float(scores[target])
        scores[history[history != target]] = float("-inf")
        ranks.append(int((scores > target_score).sum() + (scores[:target] == target_score).sum()))
    hits, gains = hits_and_gains(torch.tensor(ranks), k)
    return float(hits.mean()), float(gains.mean())
