"""What a model of masked tokens predicts at the masks of texts, in every layout."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from petatron.base.errors import ConfigError, DataError, Problem
from petatron.config.required_settings import known_vocab_size
from petatron.infer.encoder.text_batches import batch_of_texts, plan_texts
from petatron.parallel.forward_sequences import LocalOutputs, forward_sequences
from petatron.parallel.parallel_model import ParallelModel

_BATCH_TOKENS = 1024
"""Logits of every position are computed, so there are fewer than of hidden states alone."""


class Prediction(NamedTuple):
    """A token at a mask, and its probability."""

    token: int
    probability: float


def fill_masks(
    model: ParallelModel,
    texts: Sequence[Sequence[int]],
    *,
    mask_id: int,
    top_k: int = 5,
    batch_tokens: int = _BATCH_TOKENS,
) -> list[list[list[Prediction]]]:
    """Returns the likeliest tokens of each mask of each text, the best first; every rank calls it with the same texts.

    >>> import petatron
    >>> flags = ["--model-type", "bert", "--mock-data", "--lr", "1e-3", "--train-iters", "2"]
    >>> run = petatron.load("tiny-llama", flags)
    >>> model = petatron.build_model(run, petatron.launch(run))
    >>> [[first, second]] = fill_masks(model, [[5, 9, 7, 9]], mask_id=9, top_k=3)
    >>> len(first), first[0].probability >= first[1].probability
    (3, True)
    """
    vocab_size = known_vocab_size(model.spec.config)
    if not 1 <= top_k <= vocab_size:
        raise ConfigError([Problem("--top-k", str(top_k), f"is not in 1..{vocab_size}", "5 is usual.")])
    masks = [[place for place, token in enumerate(ids) if token == mask_id] for ids in texts]
    without = [number for number, places in enumerate(masks, start=1) if not places]
    if without:
        raise DataError(
            f"Text {without[0]} has no mask (id {mask_id}), so there is nothing to predict. Put one into it."
        )
    plans = plan_texts(model, texts, batch_tokens=batch_tokens)

    def add(result: Tensor, local: LocalOutputs) -> None:
        best = result.unflatten(1, (-1, 2, top_k))  # of each mask: ids, then probabilities
        for row, index in enumerate(local.indices):
            for number, place in enumerate(masks[index]):
                at = _local_place(place, local.positions)
                if at is not None:
                    logits_V = local.outputs["logits"][row, at, :vocab_size].double()
                    probabilities, ids = logits_V.softmax(0).topk(top_k)
                    best[row, number] = torch.stack([ids.to(best.dtype), probabilities])

    predictions: list[list[list[Prediction]]] = [[]] * len(texts)
    results = forward_sequences(
        model,
        plans,
        make_batch=lambda plan, indices: batch_of_texts([texts[index] for index in indices], plan, model.mesh.device),
        collect=("logits",),
        width=lambda plan: 2 * top_k * max(len(masks[index]) for index in plan.indices),
        add=add,
    )
    for pairs in results:
        for index, result in pairs:
            best = result.unflatten(0, (-1, 2, top_k))[: len(masks[index])]
            predictions[index] = [[Prediction(int(token), p) for token, p in zip(*mask.tolist())] for mask in best]
    return predictions


def _local_place(place: int, positions: Tensor | None) -> int | None:
    """Returns where a rank has a position of the sequence; None: another rank has it."""
    if positions is None:
        return place
    places = (positions == place).nonzero()
    return int(places[0]) if len(places) else None
