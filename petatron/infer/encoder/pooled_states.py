"""One vector of each text: its hidden states after the last layer, pooled. Of encoders and decoders, in every layout."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from petatron.infer.encoder.text_batches import batch_of_texts, plan_texts
from petatron.infer.sampling_params import PoolingName
from petatron.parallel.forward_sequences import BATCH_TOKENS, LocalOutputs, forward_sequences
from petatron.parallel.parallel_model import ParallelModel


def pooled_states(
    model: ParallelModel,
    texts: Sequence[Sequence[int]],
    *,
    pooling: PoolingName = "mean",
    batch_tokens: int = BATCH_TOKENS,
) -> list[list[float]]:
    """Returns a vector of each text; every rank calls it with the same ones, and all get the same result.

    >>> import petatron
    >>> flags = ["--model-type", "bert", "--mock-data", "--lr", "1e-3", "--train-iters", "2"]
    >>> run = petatron.load("tiny-llama", flags)
    >>> model = petatron.build_model(run, petatron.launch(run))
    >>> [len(vector) == run.config.model.hidden_size for vector in pooled_states(model, [[5, 6, 7], [8, 9]])]
    [True, True]
    """
    plans = plan_texts(model, texts, batch_tokens=batch_tokens)

    def add(result: Tensor, local: LocalOutputs) -> None:
        states_BSD = local.outputs["hidden_states"]
        rows = [_weights(len(texts[index]), pooling) for index in local.indices]
        for row, weights in enumerate(rows):
            at = torch.arange(len(weights)) if local.positions is None else local.positions.cpu()
            here = at < len(weights)
            weights_S = weights[at[here]].to(result.device)
            result[row] += weights_S @ states_BSD[row, : len(here)][here.to(result.device)].to(result.dtype)

    vectors: list[list[float]] = [[]] * len(texts)
    results = forward_sequences(
        model,
        plans,
        make_batch=lambda plan, indices: batch_of_texts([texts[index] for index in indices], plan, model.mesh.device),
        collect=("hidden_states",),
        width=lambda plan: model.spec.config.hidden_size,
        add=add,
    )
    for pairs in results:
        for index, vector in pairs:
            vectors[index] = vector.tolist()
    return vectors


def _weights(length: int, pooling: PoolingName) -> Tensor:
    if pooling == "mean":
        return torch.full((length,), 1 / length, dtype=torch.float64)
    weights = torch.zeros(length, dtype=torch.float64)
    weights[0 if pooling == "first" else -1] = 1.0
    return weights
