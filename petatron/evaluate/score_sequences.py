"""Scores token sequences: the log-probability of every token after the first, and whether it is the model's most likely one.

Works in every layout. Sequences of similar length share a micro-batch, the longest first, so that a lack of memory shows at once.
Each data-parallel rank has its rows of every micro-batch, and all ranks run the same shapes, since layers communicate. A rank that
computes losses (the last pipeline stage, its part of the sequence) writes them into a zeroed tensor of the global micro-batch, and
one all-reduce over all ranks returns the whole to each.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from petatron.base.errors import ConfigError, DataError, Problem
from petatron.config.required_settings import known_vocab_size
from petatron.mesh import collectives
from petatron.models.batch import Batch
from petatron.models.decoder import GREEDY_TARGETS, TOKEN_LOSSES
from petatron.models.mtp_and_longrope_arrays import mark_long_rows
from petatron.parallel.context import split_batch
from petatron.parallel.parallel_model import ParallelModel

BATCH_TOKENS = 8192
"""Tokens of a micro-batch on one rank, padding included."""
_LENGTH_MULTIPLE, _LONG_MULTIPLE = 16, 64
"""Lengths are padded to these, above `_LONG` to the second: few shapes, and rows that FP8 kernels accept."""
_LONG = 256

OnProgress = Callable[[int, int], None]
"""(scored tokens, all tokens)"""


@dataclass(frozen=True, slots=True, eq=False)
class SequenceScore:
    """Of each token after the first: its natural log-probability, and whether it is the most likely one."""

    logprobs: NDArray[np.float64]
    greedy: NDArray[np.bool_]


@dataclass(frozen=True, slots=True)
class MicroBatchPlan:
    """Which sequences a global micro-batch has: `rows` for each data-parallel rank, padded to `length` inputs."""

    indices: tuple[int, ...]
    rows: int
    length: int


def max_scored_tokens(model: ParallelModel) -> int:
    """Returns the longest sequence that can be scored: every position is an input once, and the last token is none."""
    multiple = _sequence_multiple(model)
    return model.spec.max_positions // multiple * multiple + 1


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
    plans = plan_micro_batches(
        [len(ids) - 1 for ids in sequences],
        dp_size=model.mesh.dp.size,
        batch_tokens=batch_tokens,
        multiple=_sequence_multiple(model),
        max_length=max_scored_tokens(model) - 1,
    )
    nothing = np.zeros(0)
    scores = [SequenceScore(nothing, nothing.astype(bool))] * len(sequences)
    scored, total = 0, sum(max(len(ids) - 1, 0) for ids in sequences)
    # A pipeline needs several micro-batches at once to be busy.
    at_once = 1 if model.mesh.pp.size == 1 else 2 * model.mesh.pp.size
    for start in range(0, len(plans), at_once):
        for index, score in _score_micro_batches(model, sequences, plans[start : start + at_once]):
            scores[index] = score
            scored += len(score.logprobs)
        if on_progress is not None:
            on_progress(scored, total)
    return scores


def plan_micro_batches(
    lengths: Sequence[int], *, dp_size: int, batch_tokens: int, multiple: int, max_length: int
) -> list[MicroBatchPlan]:
    """Batches sequences by their numbers of inputs, the longest first; those without inputs are left out.

    >>> plan_micro_batches([3, 40, 0, 5], dp_size=1, batch_tokens=64, multiple=1, max_length=50)
    [MicroBatchPlan(indices=(1,), rows=1, length=48), MicroBatchPlan(indices=(3, 0), rows=2, length=16)]
    """
    order = sorted((index for index, length in enumerate(lengths) if length > 0), key=lambda index: -lengths[index])
    plans: list[MicroBatchPlan] = []
    start = 0
    while start < len(order):
        longest = lengths[order[start]]
        padding = math.lcm(multiple, _LONG_MULTIPLE if longest > _LONG else _LENGTH_MULTIPLE)
        length = min(-(-longest // padding) * padding, max_length)
        rows = min(max(batch_tokens // length, 1), -(-(len(order) - start) // dp_size))
        plans.append(MicroBatchPlan(tuple(order[start : start + rows * dp_size]), rows, length))
        start += rows * dp_size
    return plans


def _sequence_multiple(model: ParallelModel) -> int:
    """Returns what a sequence's length must be a multiple of, so that ranks can split it."""
    cp = model.mesh.cp.size
    chunks = 1 if cp == 1 else cp * (2 if model.io.sequence_order == "zigzag" else 1)
    return chunks * (model.mesh.tp.size if model.sequence_parallel else 1)


def _check_sequences(model: ParallelModel, sequences: Sequence[Sequence[int]]) -> None:
    longest, most = max(map(len, sequences), default=0), max_scored_tokens(model)
    if longest > most:
        raise DataError(
            f"A sequence has {longest:,} tokens, but the model has {model.spec.max_positions:,} positions and "
            f"scores at most {most:,} in this layout. Cut it, or score it in windows."
        )
    vocab_size = known_vocab_size(model.spec.config)
    highest, lowest = (pick((pick(ids) for ids in sequences if len(ids)), default=0) for pick in (max, min))
    if lowest < 0 or highest >= vocab_size:
        raise DataError(
            f"Sequences have ids {lowest}..{highest}, but the model's vocabulary has {vocab_size:,} ids. Encode them with the "
            "tokenizer the model was trained with."
        )


def _score_micro_batches(
    model: ParallelModel, sequences: Sequence[Sequence[int]], plans: Sequence[MicroBatchPlan]
) -> Iterator[tuple[int, SequenceScore]]:
    """Runs some micro-batches, and yields each of their sequences' index and score."""
    mesh = model.mesh
    local = [plan.indices[mesh.dp.rank * plan.rows :][: plan.rows] for plan in plans]
    batches = [_make_batch([sequences[i] for i in mine], plan, mesh.device) for mine, plan in zip(local, plans)]
    if model.spec.original_context is not None:
        for at, (mine, plan) in enumerate(zip(local, plans)):
            lengths = [len(sequences[i]) - 1 for i in mine] + [0] * (plan.rows - len(mine))
            batches[at] = mark_long_rows(batches[at], model.spec.original_context, lengths)
    outputs = model.forward(batches, collect=(TOKEN_LOSSES, GREEDY_TARGETS))
    sizes = [2 * mesh.dp.size * plan.rows * plan.length for plan in plans]
    flat = torch.zeros(sum(sizes), dtype=torch.float64, device=mesh.device)
    parts = zip(flat.split(sizes), plans, strict=True)
    views = [part.view(2, mesh.dp.size, plan.rows, plan.length) for part, plan in parts]
    for view, batch, outputs_of_batch in zip(views, batches, outputs, strict=True):
        if outputs_of_batch and mesh.tp.rank == 0:  # ranks of one tensor-parallel group have the same
            positions = split_batch(batch, mesh.cp, order=model.io.sequence_order).positions
            where = slice(None) if positions is None else positions
            for kind, name in enumerate((TOKEN_LOSSES, GREEDY_TARGETS)):  # [B, S of this rank]
                view[kind, mesh.dp.rank][:, where] = outputs_of_batch[name].to(view.dtype)
    collectives.all_reduce(flat, mesh.world)
    host = flat.cpu().split(sizes)
    for plan, part in zip(plans, host, strict=True):
        losses, greedy = part.view(2, -1, plan.length).numpy()
        for row, index in enumerate(plan.indices):
            count = len(sequences[index]) - 1
            yield index, SequenceScore(-losses[row, :count], greedy[row, :count] > 0.5)


def _make_batch(sequences: Sequence[Sequence[int]], plan: MicroBatchPlan, device: torch.device) -> Batch:
    """Pads sequences on the right; attention is causal, so padding changes no score. Missing rows are padding alone."""
    arrays = np.zeros((3, plan.rows, plan.length), dtype=np.int64)
    for row, ids in enumerate(sequences):
        count = len(ids) - 1
        arrays[0, row, :count], arrays[1, row, :count], arrays[2, row, :count] = ids[:-1], ids[1:], 1
    tokens, labels, counted = torch.from_numpy(arrays).to(device).unbind(0)
    return Batch(tokens, labels, counted.float())
