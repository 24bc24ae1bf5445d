"""The words a pipeline schedule is written in: what one rank does, in which order, and when it was done.

No torch here: schedules are drawn, simulated and tested without it.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from enum import StrEnum
from typing import NamedTuple


class Kind(StrEnum):
    """What an action does. A whole backward is B; a split one is I (gradient of the input) and, later, W (of the weights)."""

    FORWARD = "F"
    BACKWARD = "B"
    INPUT_GRAD = "I"
    WEIGHT_GRAD = "W"
    SEND_FORWARD = "SF"
    RECEIVE_FORWARD = "RF"
    SEND_BACKWARD = "SB"
    RECEIVE_BACKWARD = "RB"


COMPUTE = frozenset((Kind.FORWARD, Kind.BACKWARD, Kind.INPUT_GRAD, Kind.WEIGHT_GRAD))
SENDS = frozenset((Kind.SEND_FORWARD, Kind.SEND_BACKWARD))


class Action(NamedTuple):
    """One thing to do for one micro-batch.

    `stage` counts all stages of the model from 0. It is the stage that computes or, for a transfer, the one at this rank's
    end: SF sends the output of `stage` to the next one, RF receives the input of `stage` from the one before it, SB sends the
    gradient of the input of `stage` to the one before it, RB receives the gradient of the output of `stage` from the next one.
    """

    kind: Kind
    stage: int
    micro_batch: int

    def __str__(self) -> str:
        return f"{self.kind}(stage {self.stage}, micro-batch {self.micro_batch})"


Batch = tuple[Action, ...]
"""One computation, a forward and a backward that run combined, or transfers that are started together."""


@dataclass(frozen=True, slots=True)
class TimedAction:
    """An action with when it began and ended, in seconds when measured, in units of cost when simulated."""

    action: Action
    start: float
    end: float


# What a computation leaves for others: (FORWARD, s, m) is the output of stage s, (INPUT_GRAD, s, m) the gradient of its input.
Product = tuple[Kind, int, int]


def produced_by(action: Action) -> Product | None:
    """What a computation makes that another may wait for; None for weight gradients, which stay where they are."""
    if action.kind is Kind.FORWARD:
        return Kind.FORWARD, action.stage, action.micro_batch
    if action.kind in (Kind.BACKWARD, Kind.INPUT_GRAD):
        return Kind.INPUT_GRAD, action.stage, action.micro_batch
    return None


def needed_by(action: Action, *, stages: int) -> tuple[Product, ...]:
    """What must have been made before a computation can begin."""
    kind, stage, micro_batch = action.kind, action.stage, action.micro_batch
    if kind is Kind.FORWARD:
        return () if stage == 0 else ((Kind.FORWARD, stage - 1, micro_batch),)
    own = (Kind.FORWARD, stage, micro_batch)
    if kind in (Kind.BACKWARD, Kind.INPUT_GRAD):
        return (own,) if stage == stages - 1 else (own, (Kind.INPUT_GRAD, stage + 1, micro_batch))
    return ((Kind.INPUT_GRAD, stage, micro_batch),)


def most_held(actions: Iterable[Action]) -> int:
    """The most micro-batches of one stage whose activations are kept at a time, going through actions of one rank in order.

    Each is held from its forward to the end of its backward, or of its weight gradient where the backward is split; a
    forward without any (evaluation) holds nothing.

    >>> most_held([Action(Kind.FORWARD, 0, 0), Action(Kind.FORWARD, 0, 1), Action(Kind.BACKWARD, 0, 0)])
    1
    """
    actions = list(actions)
    releases = (Kind.BACKWARD, Kind.WEIGHT_GRAD)
    released = {(action.stage, action.micro_batch) for action in actions if action.kind in releases}
    held = most = 0
    for action in actions:
        if action.kind is Kind.FORWARD and (action.stage, action.micro_batch) in released:
            held += 1
            most = max(most, held)
        elif action.kind in releases:
            held -= 1
    return most
