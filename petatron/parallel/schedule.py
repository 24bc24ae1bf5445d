"""Pipeline schedules as data: for each rank, the list of actions of one optimizer step.

A schedule is pure; `pipeline.py` executes it. One device is a pipeline of one stage, so there is one training path.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, slots=True)
class Action:
    """Forward or backward of one micro-batch through this rank's stage."""

    kind: Literal["forward", "backward"]
    micro_batch: int


def one_stage(num_micro_batches: int) -> list[Action]:
    """Each micro-batch forward and at once backward, so that one micro-batch's activations are alive at a time."""
    return [Action(kind, micro_batch) for micro_batch in range(num_micro_batches) for kind in ("forward", "backward")]


def forward_only(num_micro_batches: int) -> list[Action]:
    """Evaluation: no backward."""
    return [Action("forward", micro_batch) for micro_batch in range(num_micro_batches)]
