"""GPipe, 1F1B and interleaved 1F1B: the order of computations on each rank, for the schedules with a whole backward.

GPipe: all forwards, then all backwards. The bubble is (p-1)/(m+p-1) of the time, activations of all m micro-batches are held.

1F1B (Narayanan et al. 2019, 2021): rank r runs p-1-r warm-up forwards, then alternates one forward and one backward. The bubble of
GPipe, but no more than p-r micro-batches held.

Interleaved (Narayanan et al. 2021): each rank has v stages, p apart, so that filling and draining the pipeline takes v times
less: the bubble is (p-1)/(vm+p-1). Micro-batches go in groups; a group runs a rank's first stage, then its second, and so on.
Rank r runs (v-1)g + 2(p-1-r) warm-up forwards, g the size of a group.

A group must be no smaller than p, or its first micro-batch returns to rank 0 after its last has left, and the pipeline waits;
and no group may be larger than the first, because the last stage's first backward of a group comes (v-1)g forwards after the
group started, and the number of warm-up forwards is fixed by the first. So when p does not divide m, we make m // p groups as equal
as possible, the larger ones first.

Combined 1F1B: in the steady state a rank runs each forward together with the backward that follows it, so that one computes
while the other communicates (`parallel/pipeline/combined_forward_backward.py`). Both start when both have their inputs and end together,
so every rank needs more warm-up: one forward more, because on the last stage the two must be of different micro-batches, and in 1F1B
two for every rank after it instead of one, because a pair's forward is available to the next rank only after the pair, and so is its
backward to the rank before. In 1F1B up to 2(p-r) micro-batches are then held; interleaved has that much warm-up anyway.

Orders are generated rank by rank, so that those of all ranks need not be held at once.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import accumulate

from petatron.schedule.actions import Action, ActionBatch, ActionKind, ScheduleShape

ComputeOrder = list[Action | ActionBatch]


def gpipe(shape: ScheduleShape) -> Iterator[ComputeOrder]:
    forwards = [(ActionKind.FORWARD, m) for m in range(shape.micro_batches)]
    backwards = [(ActionKind.BACKWARD, m) for m in range(shape.micro_batches)]
    for rank in range(shape.ranks):
        yield [Action(kind, rank, m) for kind, m in forwards + backwards]


def one_forward_one_backward(shape: ScheduleShape) -> Iterator[ComputeOrder]:
    for rank in range(shape.ranks):
        forwards = [Action(ActionKind.FORWARD, rank, m) for m in range(shape.micro_batches)]
        backwards = [Action(ActionKind.BACKWARD, rank, m) for m in range(shape.micro_batches)]
        ranks_after = shape.ranks - 1 - rank
        num_warmup = 2 * ranks_after + 1 if shape.combined else ranks_after
        yield _alternate_1f1b(forwards, backwards, num_warmup=num_warmup, combined=shape.combined)


def interleaved(shape: ScheduleShape) -> Iterator[ComputeOrder]:
    ranks, combined = shape.ranks, shape.combined
    groups = micro_batch_groups(shape.micro_batches, ranks=ranks, group_size=shape.group_size or ranks)
    num_warmup = (shape.virtual - 1) * len(groups[0]) + combined
    for rank in range(ranks):
        stages = range(rank, shape.stages, ranks)
        forwards = [Action(ActionKind.FORWARD, stage, m) for group in groups for stage in stages for m in group]
        backwards = [
            Action(ActionKind.BACKWARD, stage, m) for group in groups for stage in reversed(stages) for m in group
        ]
        yield _alternate_1f1b(forwards, backwards, num_warmup=num_warmup + 2 * (ranks - 1 - rank), combined=combined)


def one_rank(shape: ScheduleShape) -> list[ComputeOrder]:
    """Orders each micro-batch's forward right before its backward, so that one is held at a time; two where they are combined."""
    stages, micro_batches = shape.virtual, shape.micro_batches
    if shape.combined:
        forwards = [Action(ActionKind.FORWARD, stage, m) for m in range(micro_batches) for stage in range(stages)]
        backwards = [
            Action(ActionKind.BACKWARD, stage, m) for m in range(micro_batches) for stage in reversed(range(stages))
        ]
        return [_alternate_1f1b(forwards, backwards, num_warmup=stages, combined=True)]
    order: ComputeOrder = []
    for m in range(micro_batches):
        order += [Action(ActionKind.FORWARD, stage, m) for stage in range(stages)]
        order += [Action(ActionKind.BACKWARD, stage, m) for stage in reversed(range(stages))]
    return [order]


def micro_batch_groups(micro_batches: int, *, ranks: int, group_size: int) -> list[range]:
    """Returns the groups of consecutive micro-batches; see the module docstring for the sizes."""
    count, remainder = divmod(micro_batches, group_size)
    if count == 0:
        sizes = [micro_batches]
    elif remainder == 0 or remainder >= ranks:
        sizes = [group_size] * count + [remainder] * (remainder > 0)
    else:
        even, larger = divmod(micro_batches, count)
        sizes = [even + 1] * larger + [even] * (count - larger)
    return [range(end - size, end) for end, size in zip(accumulate(sizes), sizes)]


def _alternate_1f1b(
    forwards: list[Action], backwards: list[Action], *, num_warmup: int, combined: bool
) -> ComputeOrder:
    """Orders `num_warmup` forwards, then one forward and one backward in turn or combined, then the remaining backwards."""
    num_warmup = min(num_warmup, len(forwards))
    order: ComputeOrder = [*forwards[:num_warmup]]
    for forward, backward in zip(forwards[num_warmup:], backwards):
        order += [(forward, backward)] if combined else [forward, backward]
    return order + backwards[len(forwards) - num_warmup :]
