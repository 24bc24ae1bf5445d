"""Scores token sequences, in every layout: the log-probability of every token after the first, and whether it is the model's most
likely one.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from petatron.base.errors import ConfigError, DataError, Problem
from petatron.kernels.attention.document_layout import Documents
from petatron.models.batch import Batch
from petatron.models.decoder import GREEDY_TARGETS, TOKEN_LOSSES
from petatron.models.mtp_and_longrope_arrays import mark_long_rows
from petatron.parallel.forward_sequences import (
    BATCH_TOKENS,
    LocalOutputs,
    MicroBatchPlan,
    check_vocabulary,
    forward_sequences,
    max_inputs,
    plan_micro_batches,
    sequence_multiple,
)
from petatron.parallel.parallel_model import ParallelModel
from petatron.validate.layer_capabilities import why_reading_only

OnProgress = Callable[[int, int], None]
"""(scored tokens, all tokens)"""


@dataclass(frozen=True, slots=True, eq=False)
class SequenceScore:
    """Of each token after the first: its natural log-probability, and whether it is the most likely one."""

    logprobs: NDArray[np.float64]
    greedy: NDArray[np.bool_]


def max_scored_tokens(model: ParallelModel) -> int:
    """Returns the longest sequence that can be scored: every position is an input once, and the last token is none."""
    return max_inputs(model) + 1


def score_sequences(
    model: ParallelModel,
    sequences: Sequence[Sequence[int]],
    *,
    batch_tokens: int = BATCH_TOKENS,
    on_progress: OnProgress | None = None,
) -> list[SequenceScore]:
    """Scores each sequence; every rank calls it with the same ones, and all get the same result.

    >>> import petatron
    >>> run = petatron.load("tiny-llama", ["--mock-data", "--lr", "1e-3", "--train-iters", "2"])
    >>> model = petatron.build_model(run, petatron.launch(run))
    >>> [score.logprobs.shape for score in score_sequences(model, [[5, 6, 7], [8, 9]])]
    [(2,), (1,)]
    """
    if batch_tokens < 1:
        raise ConfigError([Problem("batch_tokens", str(batch_tokens), "is below 1", f"Use {BATCH_TOKENS}, say.")])
    _check_sequences(model, sequences)
    pairs = [(ids[:-1], ids[1:]) for ids in sequences]
    return score_targets(model, pairs, batch_tokens=batch_tokens, on_progress=on_progress)


def score_targets(
    model: ParallelModel,
    pairs: Sequence[tuple[Sequence[int], Sequence[int]]],
    *,
    batch_tokens: int,
    on_progress: OnProgress | None = None,
) -> list[SequenceScore]:
    """Scores the target of each input, of sequences that the model can read; every rank calls it with the same ones.

    Padding is after each sequence, and unseen: by causal attention as it is, by any other as a document of its own.
    """
    plans = plan_micro_batches(
        [len(inputs) for inputs, _ in pairs],
        dp_size=model.mesh.dp.size,
        batch_tokens=batch_tokens,
        multiple=sequence_multiple(model),
        max_length=max_inputs(model),
    )
    nothing = np.zeros(0)
    scores = [SequenceScore(nothing, nothing.astype(bool))] * len(pairs)
    scored, total = 0, sum(len(inputs) for inputs, _ in pairs)
    padding_is_seen = why_reading_only(model.spec) is not None

    def make_batch(plan: MicroBatchPlan, indices: Sequence[int]) -> Batch:
        batch = _make_batch([pairs[index] for index in indices], plan, model.mesh.device)
        lengths = [len(pairs[index][0]) for index in indices] + [0] * (plan.rows - len(indices))
        if model.spec.original_context is not None:
            batch = mark_long_rows(batch, model.spec.original_context, lengths)
        if padding_is_seen and min(lengths) < plan.length:
            documents = Documents.of_lengths(np.maximum(lengths, 1), plan.length)
            batch = replace(batch, documents=documents.to(model.mesh.device))
        return batch

    results = forward_sequences(
        model,
        plans,
        make_batch=make_batch,
        collect=(TOKEN_LOSSES, GREEDY_TARGETS),
        width=lambda plan: 2 * plan.length,
        add=_add_scores,
    )
    for results_at_once in results:
        for index, result in results_at_once:
            losses, greedy = result.view(2, -1)[:, : len(pairs[index][0])].numpy()
            scores[index] = SequenceScore(-losses, greedy > 0.5)
            scored += len(losses)
        if on_progress is not None:
            on_progress(scored, total)
    return scores


def _check_sequences(model: ParallelModel, sequences: Sequence[Sequence[int]]) -> None:
    longest, most = max(map(len, sequences), default=0), max_scored_tokens(model)
    if longest > most:
        raise DataError(
            f"A sequence has {longest:,} tokens, but the model has {model.spec.max_positions:,} positions and "
            f"scores at most {most:,} in this layout. Cut it, or score it in windows."
        )
    check_vocabulary(model, sequences)


def _add_scores(result: Tensor, local: LocalOutputs) -> None:
    """Writes the losses [B, S] and whether targets are the likeliest tokens, one after the other, at a rank's positions."""
    where = slice(None) if local.positions is None else local.positions
    both = result.unflatten(1, (2, -1))
    for kind, name in enumerate((TOKEN_LOSSES, GREEDY_TARGETS)):
        both[:, kind, where] = local.outputs[name].to(result.dtype)


def _make_batch(
    pairs: Sequence[tuple[Sequence[int], Sequence[int]]], plan: MicroBatchPlan, device: torch.device
) -> Batch:
    """Pads sequences on the right. Missing rows are padding alone."""
    arrays = np.zeros((3, plan.rows, plan.length), dtype=np.int64)
    for row, (inputs, targets) in enumerate(pairs):
        count = len(inputs)
        arrays[0, row, :count], arrays[1, row, :count], arrays[2, row, :count] = inputs, targets, 1
    tokens, labels, counted = torch.from_numpy(arrays).to(device).unbind(0)
    return Batch(tokens, labels, counted.float())
