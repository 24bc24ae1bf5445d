"""Pipeline schedules as data: for each rank, the list of actions of one optimizer step.

A schedule is pure; `pipeline.py` executes it, `plan/simulate.py` predicts how long it takes, `plan/timeline.py` draws it. One
device is a pipeline of one stage, so there is one training path. `orders.py` and `zero_bubble.py` say which computation comes
when, `transfers.py` puts the sends and receives between them.

A model is cut into p x v stages, v on each of p ranks. Rank r holds the stages r, r + p, r + 2p, ...; in zb-v it holds
r and 2p-1-r, so that the model goes down the ranks and comes back up, and the first and the last stage are on one rank.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import chain

from petatron.config.check_overlap import COMBINED
from petatron.parallel.schedule import orders
from petatron.parallel.schedule.actions import Action, Batch, Kind, TimedAction
from petatron.parallel.schedule.transfers import with_transfers
from petatron.parallel.schedule.zero_bubble import drain, zb_h1, zb_v

__all__ = [
    "SCHEDULES",
    "Action",
    "Kind",
    "Schedule",
    "TimedAction",
    "build_schedule",
    "forward_only",
    "schedule_problem",
    "stage_rank",
]

SCHEDULES = ("gpipe", "1f1b", "interleaved", "zb-h1", "zb-v")
_ONE_STAGE_PER_RANK = ("gpipe", "1f1b", "zb-h1")


@dataclass(frozen=True, slots=True)
class Schedule:
    """What every rank does in one step, computations and transfers: in batches as it is executed, and one by one."""

    name: str
    ranks: int
    stages: int
    micro_batches: int
    batches: tuple[tuple[Batch, ...], ...]
    actions: tuple[tuple[Action, ...], ...] = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "actions", tuple(tuple(chain.from_iterable(own)) for own in self.batches))

    def rank_of(self, stage: int) -> int:
        """The rank that holds a stage."""
        return stage_rank(self.name, stage, ranks=self.ranks, stages=self.stages)


def stage_rank(name: str, stage: int, *, ranks: int, stages: int) -> int:
    """The rank that holds a stage under a schedule."""
    if name == "zb-v" and stage >= ranks:
        return stages - 1 - stage
    return stage % ranks


def schedule_problem(
    name: str,
    *,
    ranks: int,
    virtual: int,
    micro_batches: int,
    group_size: int | None = None,
    combined: bool = False,
) -> str | None:
    """Why there is no such schedule, as the rule that is broken; None if there is one."""
    if name not in SCHEDULES:
        return f"the schedules are {', '.join(SCHEDULES)}; there is no {name!r}"
    if min(ranks, virtual, micro_batches) < 1:
        return "ranks, stages per rank and micro-batches must each be at least 1"
    if name in _ONE_STAGE_PER_RANK and virtual > 1:
        return f"{name} has one stage per rank, not {virtual}; interleaved has any number, zb-v two"
    if name == "zb-v" and virtual != 2 and (ranks, virtual) != (1, 1):
        return f"zb-v has exactly two stages per rank, not {virtual}"
    if name == "interleaved" and group_size is not None and group_size < ranks:
        return f"a group of {group_size} micro-batches is smaller than the pipeline's {ranks} ranks"
    if combined and ranks > 1 and name not in COMBINED:
        return f"{name} does not run forwards and backwards in turn, so it cannot combine them; {' and '.join(COMBINED)} can"
    return None


@lru_cache(maxsize=32)
def build_schedule(
    name: str,
    *,
    ranks: int,
    virtual: int,
    micro_batches: int,
    group_size: int | None = None,
    combined: bool = False,
) -> Schedule:
    """The schedule of one training step; ValueError with the reason where there is none.

    group_size is for interleaved: how many micro-batches go through a rank's first stage before its second begins (ranks).
    combined: in the steady state a forward and a backward of different micro-batches are one batch, and run together.

    >>> schedule = build_schedule("1f1b", ranks=2, virtual=1, micro_batches=2)
    >>> " ".join(f"{action.kind}{action.micro_batch}" for action in schedule.actions[0])
    'F0 SF0 F1 SF1 RB0 B0 RB1 B1'
    """
    problem = schedule_problem(
        name, ranks=ranks, virtual=virtual, micro_batches=micro_batches, group_size=group_size, combined=combined
    )
    if problem:
        raise ValueError(problem)
    if ranks == 1:
        computations = orders.one_rank(stages=virtual, micro_batches=micro_batches, combined=combined)
    elif name == "gpipe":
        computations = orders.gpipe(ranks=ranks, micro_batches=micro_batches)
    elif name == "1f1b" or (name == "interleaved" and virtual == 1):
        computations = orders.one_forward_one_backward(ranks=ranks, micro_batches=micro_batches, combined=combined)
    elif name == "interleaved":
        computations = orders.interleaved(
            ranks=ranks,
            virtual=virtual,
            micro_batches=micro_batches,
            group_size=group_size or ranks,
            combined=combined,
        )
    elif name == "zb-h1":
        computations = zb_h1(ranks=ranks, micro_batches=micro_batches)
    else:
        computations = zb_v(ranks=ranks, micro_batches=micro_batches)
    return _finish(name, computations, ranks=ranks, virtual=virtual, micro_batches=micro_batches)


@lru_cache(maxsize=32)
def forward_only(name: str, *, ranks: int, virtual: int, micro_batches: int) -> Schedule:
    """Evaluation: the same stages on the same ranks, no backward."""
    problem = schedule_problem(name, ranks=ranks, virtual=virtual, micro_batches=micro_batches)
    if problem:
        raise ValueError(problem)
    placement = _placement(name, ranks=ranks, stages=ranks * virtual)
    computations = drain(placement, micro_batches=micro_batches)
    return _finish(name, computations, ranks=ranks, virtual=virtual, micro_batches=micro_batches)


def _placement(name: str, *, ranks: int, stages: int) -> list[int]:
    return [stage_rank(name, stage, ranks=ranks, stages=stages) for stage in range(stages)]


def _finish(
    name: str,
    computations: Sequence[Sequence[Action | Batch]],
    *,
    ranks: int,
    virtual: int,
    micro_batches: int,
) -> Schedule:
    stages = ranks * virtual
    batches = with_transfers(computations, _placement(name, ranks=ranks, stages=stages))
    return Schedule(name, ranks, stages, micro_batches, batches)
