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

from petatron.schedule import gpipe_and_1f1b
from petatron.schedule.actions import Action, ActionBatch, ScheduleShape, max_held_micro_batches, stage_rank
from petatron.schedule.send_recv import RankActions, UnitCostSimulation, insert_send_recv
from petatron.schedule.zero_bubble import forward_only_orders, zb_h1, zb_v


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
        object.__setattr__(self, "actions", tuple(tuple(chain.from_iterable(rank)) for rank in self.action_batches))

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


def build_schedule(shape: ScheduleShape) -> Schedule:
    """Builds the schedule of one training step; raises ValueError with the reason where there is none.

    >>> schedule = build_schedule(ScheduleShape("1f1b", ranks=2, virtual=1, micro_batches=2))
    >>> " ".join(f"{action.kind}{action.micro_batch}" for action in schedule.actions[0])
    'F0 SF0 F1 SF1 RB0 B0 RB1 B1'
    """
    return _build_all_ranks(shape, computations(shape))


def forward_only(shape: ScheduleShape) -> Schedule:
    """Builds the schedule of an evaluation: the same stages on the same ranks, no backward."""
    return _build_all_ranks(shape, _forward_only_orders(shape))


@lru_cache(maxsize=8)
def rank_schedule(shape: ScheduleShape, *, rank: int, training: bool = True) -> RankSchedule:
    """Returns one rank's part of `build_schedule`, or of `forward_only`; cached, since every step needs it.

    >>> schedule = rank_schedule(ScheduleShape("1f1b", ranks=2, virtual=1, micro_batches=2), rank=0)
    >>> " ".join(f"{action.kind}{action.micro_batch}" for batch in schedule.action_batches() for action in batch)
    'F0 SF0 F1 SF1 RB0 B0 RB1 B1'
    """
    computed = computations(shape) if training else _forward_only_orders(shape)
    simulation = UnitCostSimulation(computed, shape.stage_ranks)
    return RankSchedule(shape.name, shape.ranks, shape.stages, shape.micro_batches, rank, simulation.actions(rank))


@lru_cache(maxsize=64)
def in_flight(shape: ScheduleShape) -> tuple[int, ...]:
    """Returns the most micro-batches whose activations each stage holds; transfers do not matter for it.

    >>> in_flight(ScheduleShape("1f1b", ranks=4, virtual=1, micro_batches=8))
    (4, 3, 2, 1)
    """
    held = [0] * shape.stages
    for order in computations(shape):
        by_stage: dict[int, list[Action]] = {}
        for action in chain.from_iterable((step,) if isinstance(step, Action) else step for step in order):
            by_stage.setdefault(action.stage, []).append(action)
        for stage, actions in by_stage.items():
            held[stage] = max_held_micro_batches(actions)
    return tuple(held)


def computations(shape: ScheduleShape) -> Iterable[Sequence[Action | ActionBatch]]:
    """Returns every rank's computations in one training step, in order; raises ValueError where there is no such schedule."""
    shape.check()
    if shape.ranks == 1:
        return gpipe_and_1f1b.one_rank(shape)
    if shape.name == "gpipe":
        return gpipe_and_1f1b.gpipe(shape)
    if shape.name == "1f1b" or (shape.name == "interleaved" and shape.virtual == 1):
        return gpipe_and_1f1b.one_forward_one_backward(shape)
    if shape.name == "interleaved":
        return gpipe_and_1f1b.interleaved(shape)
    if shape.name == "zb-h1":
        return zb_h1(ranks=shape.ranks, micro_batches=shape.micro_batches)
    return zb_v(ranks=shape.ranks, micro_batches=shape.micro_batches)


def _forward_only_orders(shape: ScheduleShape) -> list[list[Action]]:
    shape.check()
    return forward_only_orders(shape.stage_ranks, micro_batches=shape.micro_batches)


def _build_all_ranks(shape: ScheduleShape, computed: Iterable[Sequence[Action | ActionBatch]]) -> Schedule:
    batches = insert_send_recv(computed, shape.stage_ranks)
    return Schedule(shape.name, shape.ranks, shape.stages, shape.micro_batches, batches)
