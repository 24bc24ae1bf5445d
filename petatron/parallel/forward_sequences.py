"""Runs forward passes over token sequences of any lengths, whose results every rank gets.

Works in every layout. Sequences of similar length share a micro-batch, the longest first, so that a lack of memory shows at once.
Each data-parallel rank has its rows of every micro-batch, and all ranks run the same shapes, since layers communicate. A rank that
has outputs (the last pipeline stage, its part of the sequence) adds what it found to a zeroed tensor of the global micro-batch, and
one all-reduce over all ranks returns the sum to each.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from petatron.base.errors import DataError
from petatron.config.required_settings import known_vocab_size
from petatron.mesh import collectives
from petatron.models.batch import Batch
from petatron.parallel.context import split_batch
from petatron.parallel.parallel_model import ParallelModel

BATCH_TOKENS = 8192
"""Tokens of a micro-batch on one rank, padding included."""
_LENGTH_MULTIPLE, _LONG_MULTIPLE = 16, 64
"""Lengths are padded to these, above `_LONG` to the second: few shapes, and rows that FP8 kernels accept."""
_LONG = 256


@dataclass(frozen=True, slots=True)
class MicroBatchPlan:
    """Which sequences a global micro-batch has: `rows` for each data-parallel rank, padded to `length` inputs."""

    indices: tuple[int, ...]
    rows: int
    length: int


@dataclass(frozen=True, slots=True)
class LocalOutputs:
    """What a rank computed of the rows of a micro-batch: outputs by name, of the positions [S] that it has; None: of all."""

    outputs: Mapping[str, Tensor]
    positions: Tensor | None
    indices: Sequence[int]


MakeBatch = Callable[[MicroBatchPlan, Sequence[int]], Batch]
"""Makes a rank's rows of a micro-batch: of the sequences of these indices, which may be fewer than rows."""
AddOutputs = Callable[[Tensor, LocalOutputs], None]
"""Adds a rank's outputs to the result [rows, width] of its rows."""


def forward_sequences(
    model: ParallelModel,
    plans: Sequence[MicroBatchPlan],
    *,
    make_batch: MakeBatch,
    collect: Collection[str],
    width: Callable[[MicroBatchPlan], int],
    add: AddOutputs,
) -> Iterator[list[tuple[int, Tensor]]]:
    """Yields, of some micro-batches after the other, the index of each sequence and its result [width] in float64, on the host.

    Every rank calls it alike.
    """
    at_once = 1 if model.mesh.pp.size == 1 else 2 * model.mesh.pp.size  # a pipeline needs several to be busy
    for start in range(0, len(plans), at_once):
        yield _run(model, plans[start : start + at_once], make_batch, collect, width, add)


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


def max_inputs(model: ParallelModel) -> int:
    """Returns the longest sequence that this layout can split."""
    multiple = sequence_multiple(model)
    return model.spec.max_positions // multiple * multiple


def sequence_multiple(model: ParallelModel) -> int:
    """Returns what a sequence's length must be a multiple of, so that ranks can split it."""
    cp = model.mesh.cp.size
    chunks = 1 if cp == 1 else cp * (2 if model.io.sequence_order == "zigzag" else 1)
    return chunks * (model.mesh.tp.size if model.sequence_parallel else 1)


def check_vocabulary(model: ParallelModel, sequences: Sequence[Sequence[int]]) -> None:
    """Raises `DataError` for ids that the model does not have."""
    vocab_size = known_vocab_size(model.spec.config)
    highest, lowest = (pick((pick(ids) for ids in sequences if len(ids)), default=0) for pick in (max, min))
    if lowest < 0 or highest >= vocab_size:
        raise DataError(
            f"Sequences have ids {lowest}..{highest}, but the model's vocabulary has {vocab_size:,} ids. Encode them with the "
            "tokenizer the model was trained with."
        )


def _run(
    model: ParallelModel,
    plans: Sequence[MicroBatchPlan],
    make_batch: MakeBatch,
    collect: Collection[str],
    width: Callable[[MicroBatchPlan], int],
    add: AddOutputs,
) -> list[tuple[int, Tensor]]:
    mesh = model.mesh
    indices = [plan.indices[mesh.dp.rank * plan.rows :][: plan.rows] for plan in plans]
    batches = [make_batch(plan, rows) for plan, rows in zip(plans, indices)]
    outputs = model.forward(batches, collect=collect)
    shapes = [(mesh.dp.size, plan.rows, width(plan)) for plan in plans]
    sizes = [math.prod(shape) for shape in shapes]
    flat = torch.zeros(sum(sizes), dtype=torch.float64, device=mesh.device)
    for part, shape, batch, rows, local in zip(flat.split(sizes), shapes, batches, indices, outputs, strict=True):
        if local and mesh.tp.rank == 0:  # ranks of one tensor-parallel group have the same
            positions = split_batch(batch, mesh.cp, order=model.io.sequence_order).positions
            add(part.view(shape)[mesh.dp.rank], LocalOutputs(local, positions, rows))
    collectives.all_reduce(flat, mesh.world)
    host = flat.cpu().split(sizes)
    return [
        pair
        for plan, shape, part in zip(plans, shapes, host, strict=True)
        for pair in zip(plan.indices, part.view(-1, shape[-1]))
    ]
