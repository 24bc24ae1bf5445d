"""The actions of pipeline schedules (forward, backward, send, receive), their order and times, and the shape of a schedule.

No torch here: schedules are drawn, simulated and tested without it.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from enum import StrEnum
from typing import NamedTuple

from petatron.config.schema.pipeline_schedules import ONE_STAGE_PER_RANK, OVERLAP_SCHEDULES, SCHEDULES


class ActionKind(StrEnum):
    """The kind of an action. A whole backward is B; a split one is I (input gradient) and, later, W (weight gradient)."""

    FORWARD = "F"
    BACKWARD = "B"
    INPUT_GRAD = "I"
    WEIGHT_GRAD = "W"
    SEND_FORWARD = "SF"
    RECEIVE_FORWARD = "RF"
    SEND_BACKWARD = "SB"
    RECEIVE_BACKWARD = "RB"


COMPUTE_KINDS = frozenset((ActionKind.FORWARD, ActionKind.BACKWARD, ActionKind.INPUT_GRAD, ActionKind.WEIGHT_GRAD))
SEND_KINDS = frozenset((ActionKind.SEND_FORWARD, ActionKind.SEND_BACKWARD))


class Action(NamedTuple):
    """One computation or transfer of one micro-batch.

    `stage` counts all stages of the model from 0. It is the stage that computes or, for a transfer, this rank's stage: SF sends
    the output of `stage` to the next one, RF receives the input of `stage` from the one before it, SB sends the gradient of the
    input of `stage` to the one before it, RB receives the gradient of the output of `stage` from the next one.
    """

    kind: ActionKind
    stage: int
    micro_batch: int

    def __str__(self) -> str:
        return f"{self.kind}(stage {self.stage}, micro-batch {self.micro_batch})"


ActionBatch = tuple[Action, ...]
"""One computation, a forward and a backward that run combined, or transfers that are started together."""


@dataclass(frozen=True, slots=True)
class TimedAction:
    """An action with its start and end, in seconds when measured, in units of cost when simulated."""

    action: Action
    start: float
    end: float


# The result of a computation: (FORWARD, s, m) is the output of stage s, (INPUT_GRAD, s, m) the gradient of its input.
ComputeResult = tuple[ActionKind, int, int]


def produced_by(action: Action) -> ComputeResult | None:
    """Returns the result that another computation may wait for; None for weight gradients, which are local."""
    if action.kind is ActionKind.FORWARD:
        return ActionKind.FORWARD, action.stage, action.micro_batch
    if action.kind in (ActionKind.BACKWARD, ActionKind.INPUT_GRAD):
        return ActionKind.INPUT_GRAD, action.stage, action.micro_batch
    return None


def needed_by(action: Action, *, stages: int) -> tuple[ComputeResult, ...]:
    """Returns the results that a computation needs before it can start."""
    kind, stage, micro_batch = action.kind, action.stage, action.micro_batch
    if kind is ActionKind.FORWARD:
        return () if stage == 0 else ((ActionKind.FORWARD, stage - 1, micro_batch),)
    forward = (ActionKind.FORWARD, stage, micro_batch)
    if kind in (ActionKind.BACKWARD, ActionKind.INPUT_GRAD):
        return (forward,) if stage == stages - 1 else (forward, (ActionKind.INPUT_GRAD, stage + 1, micro_batch))
    return ((ActionKind.INPUT_GRAD, stage, micro_batch),)


def max_held_micro_batches(actions: Iterable[Action]) -> int:
    """Returns the most micro-batches of one stage whose activations are held at a time, over actions of one rank in order.

    Each is held from its forward to the end of its backward, or of its weight gradient where the backward is split; a
    forward without any (evaluation) holds nothing.

    >>> max_held_micro_batches([Action(ActionKind.FORWARD, 0, 0), Action(ActionKind.FORWARD, 0, 1), Action(ActionKind.BACKWARD, 0, 0)])
    1
    """
    actions = list(actions)
    releases = (ActionKind.BACKWARD, ActionKind.WEIGHT_GRAD)
    released = {(action.stage, action.micro_batch) for action in actions if action.kind in releases}
    held = max_held = 0
    for action in actions:
        if action.kind is ActionKind.FORWARD and (action.stage, action.micro_batch) in released:
            held += 1
            max_held = max(max_held, held)
        elif action.kind in releases:
            held -= 1
    return max_held


@dataclass(frozen=True, slots=True)
class ScheduleShape:
    """A schedule's name, its ranks, virtual stages per rank, and micro-batches of one step.

    group_size is for interleaved: how many micro-batches run a rank's first stage before its second starts (default: ranks).
    combined: in the steady state a forward and a backward of different micro-batches are one batch, and run combined.

    >>> ScheduleShape("zb-v", ranks=3, virtual=2, micro_batches=8).stage_ranks
    [0, 1, 2, 2, 1, 0]
    """

    name: str
    ranks: int
    virtual: int
    micro_batches: int
    group_size: int | None = None
    combined: bool = False

    @property
    def stages(self) -> int:
        return self.ranks * self.virtual

    @property
    def stage_ranks(self) -> list[int]:
        """The rank that has each stage."""
        return [stage_rank(self.name, stage, ranks=self.ranks, stages=self.stages) for stage in range(self.stages)]

    def problem(self) -> str | None:
        """Returns why there is no such schedule, as the rule that is broken; None if there is one."""
        name, ranks, virtual = self.name, self.ranks, self.virtual
        if name not in SCHEDULES:
            return f"the schedules are {', '.join(SCHEDULES)}; there is no {name!r}"
        if min(ranks, virtual, self.micro_batches) < 1:
            return "ranks, stages per rank and micro-batches must each be at least 1"
        if name in ONE_STAGE_PER_RANK and virtual > 1:
            return f"{name} has one stage per rank, not {virtual}; interleaved has any number, zb-v two"
        if name == "zb-v" and virtual != 2 and (ranks, virtual) != (1, 1):
            return f"zb-v has exactly two stages per rank, not {virtual}"
        if name == "interleaved" and self.group_size is not None and self.group_size < ranks:
            return f"a group of {self.group_size} micro-batches is smaller than the pipeline's {ranks} ranks"
        if self.combined and ranks > 1 and name not in OVERLAP_SCHEDULES:
            return (
                f"{name} does not run forwards and backwards in turn, so it cannot combine them; "
                f"{' and '.join(OVERLAP_SCHEDULES)} can"
            )
        return None

    def check(self) -> None:
        """Raises ValueError with the reason where there is no such schedule."""
        problem = self.problem()
        if problem:
            raise ValueError(problem)


def stage_rank(name: str, stage: int, *, ranks: int, stages: int) -> int:
    """Returns the rank that has a stage under a schedule."""
    if name == "zb-v" and stage >= ranks:
        return stages - 1 - stage
    return stage % ranks
