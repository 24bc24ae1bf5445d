"""Pipeline schedules as data: for each rank, the list of actions of one optimizer step.

A schedule is pure; `parallel/pipeline/executor.py` executes one rank's part of it (`RankSchedule`), `plan/pipeline_simulator.py`
predicts the time of the whole (`Schedule`), `plan/timeline_drawing.py` draws it. One device is a pipeline of one stage, so there is
one training path. `gpipe_and_1f1b.py` and `zero_bubble.py` order the computations, `send_recv.py` inserts the sends and receives.

A model is split into p x v stages, v virtual stages on each of p ranks. Rank r has the stages r, r + p, r + 2p, ...; in zb-v it has
r and 2p-1-r, so that the model goes down the ranks and comes back up, and the first and the last stage are on one rank.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import chain

from petatron.config.checks.moe_overlap import OVERLAP_SCHEDULES
from petatron.schedule import gpipe_and_1f1b
from petatron.schedule.actions import Action, ActionBatch, ActionKind, TimedAction, max_held_micro_batches
from petatron.schedule.send_recv import RankActions, UnitCostSimulation, insert_send_recv
from petatron.schedule.zero_bubble import forward_only_orders, zb_h1, zb_v

__all__ = [
    "SCHEDULES",
    "Action",
    "ActionKind",
    "RankSchedule",
    "Schedule",
    "TimedAction",
    "build_schedule",
    "computations",
    "forward_only",
    "in_flight",
    "rank_schedule",
    "schedule_problem",
    "stage_rank",
]

SCHEDULES = ("gpipe", "1f1b", "interleaved", "zb-h1", "zb-v")
_ONE_STAGE_PER_RANK = ("gpipe", "1f1b", "zb-h1")


@dataclass(frozen=True, slots=True)
class Schedule:
    """All ranks' actions of one step, computations and transfers: in batches as they are executed, and one by one."""

    name: str
    ranks: int
    stages: int
    micro_batches: int
    action_batches: tuple[tuple[ActionBatch, ...], ...]
    actions: tuple[tuple[Action, ...], ...] = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "actions", tuple(tuple(chain.from_iterable(own)) for own in self.action_batches))

    def rank_of(self, stage: int) -> int:
        """Returns the rank that has a stage."""
        return stage_rank(self.name, stage, ranks=self.ranks, stages=self.stages)


@dataclass(frozen=True, slots=True, eq=False)
class RankSchedule:
    """One rank's actions of one step: all it needs to execute a schedule, in a few bytes per action."""

    name: str
    ranks: int
    stages: int
    micro_batches: int
    rank: int
    actions: RankActions

    def rank_of(self, stage: int) -> int:
        """Returns the rank that has a stage."""
        return stage_rank(self.name, stage, ranks=self.ranks, stages=self.stages)

    def action_batches(self) -> Iterator[ActionBatch]:
        """Yields batches in order of execution: one computation, two that are combined, or transfers started together."""
        return self.actions.action_batches()


def stage_rank(name: str, stage: int, *, ranks: int, stages: int) -> int:
    """Returns the rank that has a stage under a schedule."""
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
    """Returns why there is no such schedule, as the rule that is broken; None if there is one."""
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
    if combined and ranks > 1 and name not in OVERLAP_SCHEDULES:
        return f"{name} does not run forwards and backwards in turn, so it cannot combine them; {' and '.join(OVERLAP_SCHEDULES)} can"
    return None


def build_schedule(
    name: str,
    *,
    ranks: int,
    virtual: int,
    micro_batches: int,
    group_size: int | None = None,
    combined: bool = False,
) -> Schedule:
    """Builds the schedule of one training step; raises ValueError with the reason where there is none.

    group_size is for interleaved: how many micro-batches run a rank's first stage before its second starts (default: ranks).
    combined: in the steady state a forward and a backward of different micro-batches are one batch, and run combined.

    >>> schedule = build_schedule("1f1b", ranks=2, virtual=1, micro_batches=2)
    >>> " ".join(f"{action.kind}{action.micro_batch}" for action in schedule.actions[0])
    'F0 SF0 F1 SF1 RB0 B0 RB1 B1'
    """
    computed = computations(
        name, ranks=ranks, virtual=virtual, micro_batches=micro_batches, group_size=group_size, combined=combined
    )
    return _build_all_ranks(name, computed, ranks=ranks, virtual=virtual, micro_batches=micro_batches)


def forward_only(name: str, *, ranks: int, virtual: int, micro_batches: int) -> Schedule:
    """Builds the schedule of an evaluation: the same stages on the same ranks, no backward."""
    computed = _forward_only_orders(name, ranks=ranks, virtual=virtual, micro_batches=micro_batches)
    return _build_all_ranks(name, computed, ranks=ranks, virtual=virtual, micro_batches=micro_batches)


@lru_cache(maxsize=8)
def rank_schedule(
    name: str,
    *,
    ranks: int,
    virtual: int,
    micro_batches: int,
    rank: int,
    group_size: int | None = None,
    combined: bool = False,
    training: bool = True,
) -> RankSchedule:
    """Returns one rank's part of `build_schedule`, or of `forward_only`; cached, since every step needs it.

    >>> schedule = rank_schedule("1f1b", ranks=2, virtual=1, micro_batches=2, rank=0)
    >>> " ".join(f"{action.kind}{action.micro_batch}" for batch in schedule.action_batches() for action in batch)
    'F0 SF0 F1 SF1 RB0 B0 RB1 B1'
    """
    shape = {"ranks": ranks, "virtual": virtual, "micro_batches": micro_batches}
    options = {"group_size": group_size, "combined": combined}
    computed = computations(name, **shape, **options) if training else _forward_only_orders(name, **shape)
    stages = ranks * virtual
    simulation = UnitCostSimulation(computed, _stage_ranks(name, ranks=ranks, stages=stages))
    return RankSchedule(name, ranks, stages, micro_batches, rank, simulation.actions(rank))


@lru_cache(maxsize=64)
def in_flight(
    name: str,
    *,
    ranks: int,
    virtual: int,
    micro_batches: int,
    group_size: int | None = None,
    combined: bool = False,
) -> tuple[int, ...]:
    """Returns the most micro-batches whose activations each stage holds; transfers do not matter for it.

    >>> in_flight("1f1b", ranks=4, virtual=1, micro_batches=8)
    (4, 3, 2, 1)
    """
    held = [0] * (ranks * virtual)
    for order in computations(
        name, ranks=ranks, virtual=virtual, micro_batches=micro_batches, group_size=group_size, combined=combined
    ):
        by_stage: dict[int, list[Action]] = {}
        for action in chain.from_iterable((step,) if isinstance(step, Action) else step for step in order):
            by_stage.setdefault(action.stage, []).append(action)
        for stage, actions in by_stage.items():
            held[stage] = max_held_micro_batches(actions)
    return tuple(held)


def computations(
    name: str,
    *,
    ranks: int,
    virtual: int,
    micro_batches: int,
    group_size: int | None = None,
    combined: bool = False,
) -> Iterable[Sequence[Action | ActionBatch]]:
    """Returns every rank's computations in one training step, in order; raises ValueError where there is no such schedule."""
    problem = schedule_problem(
        name, ranks=ranks, virtual=virtual, micro_batches=micro_batches, group_size=group_size, combined=combined
    )
    if problem:
        raise ValueError(problem)
    if ranks == 1:
        return gpipe_and_1f1b.one_rank(stages=virtual, micro_batches=micro_batches, combined=combined)
    if name == "gpipe":
        return gpipe_and_1f1b.gpipe(ranks=ranks, micro_batches=micro_batches)
    if name == "1f1b" or (name == "interleaved" and virtual == 1):
        return gpipe_and_1f1b.one_forward_one_backward(ranks=ranks, micro_batches=micro_batches, combined=combined)
    if name == "interleaved":
        group_size = group_size or ranks
        return gpipe_and_1f1b.interleaved(
            ranks=ranks, virtual=virtual, micro_batches=micro_batches, group_size=group_size, combined=combined
        )
    if name == "zb-h1":
        return zb_h1(ranks=ranks, micro_batches=micro_batches)
    return zb_v(ranks=ranks, micro_batches=micro_batches)


def _forward_only_orders(name: str, *, ranks: int, virtual: int, micro_batches: int) -> list[list[Action]]:
    problem = schedule_problem(name, ranks=ranks, virtual=virtual, micro_batches=micro_batches)
    if problem:
        raise ValueError(problem)
    return forward_only_orders(_stage_ranks(name, ranks=ranks, stages=ranks * virtual), micro_batches=micro_batches)


def _stage_ranks(name: str, *, ranks: int, stages: int) -> list[int]:
    return [stage_rank(name, stage, ranks=ranks, stages=stages) for stage in range(stages)]


def _build_all_ranks(
    name: str, computed: Iterable[Sequence[Action | ActionBatch]], *, ranks: int, virtual: int, micro_batches: int
) -> Schedule:
    stages = ranks * virtual
    batches = insert_send_recv(computed, _stage_ranks(name, ranks=ranks, stages=stages))
    return Schedule(name, ranks, stages, micro_batches, batches)
