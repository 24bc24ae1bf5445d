"""Simulates pipeline schedules under NCCL's rules (`tests/nccl_rules/nccl_program.py`): deadlocks, and what communicators cost.

Which communicator a transfer uses is a policy. A schedule lists the transfers a rank starts at one moment; a policy turns them into
calls on communicators:

lone_unbatched   A single transfer at its moment uses a communicator of the two ranks, several go as one batch over the pipeline's.
                 Deadlocks: where one end is alone and the other is not, they are on different communicators.
group_batch      One batch over the pipeline's communicator. Never deadlocks, as long as both ends of all transfers of a moment
                 are in one batch each: a schedule's lists are parts of one common order of moments. But a rank's transfers wait for each
                 other, also those with different peers.
pair             A batch over a communicator per pair of ranks.
pair_direction   Each transfer alone over a communicator per ordered pair of ranks. Only transfers between the same two ranks in
                 the same direction wait for each other.
alone            Each transfer alone over a communicator per pair of ranks.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from functools import cache
from typing import NamedTuple

from petatron.plan.pipeline_simulator import ActionCosts, message_of
from petatron.schedule import Schedule
from petatron.schedule.actions import (
    COMPUTE_KINDS,
    SEND_KINDS,
    Action,
    ActionKind,
    ComputeResult,
    needed_by,
    produced_by,
)
from tests.nccl_rules.nccl_program import RECEIVE, SEND, Call, Compute, NcclProgram, Operation, ProgramItem


class PipelineTransfer(NamedTuple):
    """A message between two ranks, seen from one of them."""

    source: int
    destination: int
    message: ComputeResult


class SimulatedCommunicator(NamedTuple):
    """The ranks of a communicator, and the direction if it has only one."""

    members: tuple[int, ...]
    separator: str = "-"

    def __str__(self) -> str:
        return f"communicator {self.separator.join(map(str, self.members))}"


CommunicatorPolicy = Callable[
    [int, Sequence[PipelineTransfer]], list[tuple[SimulatedCommunicator, Sequence[PipelineTransfer]]]
]
"""(ranks of the pipeline, transfers of one moment) -> calls, in the order in which they are issued."""


@cache
def _pipeline_communicator(ranks: int) -> SimulatedCommunicator:
    return SimulatedCommunicator(tuple(range(ranks)))


@cache
def _pair_communicator(one: int, two: int) -> SimulatedCommunicator:
    return SimulatedCommunicator((min(one, two), max(one, two)))


@cache
def _direction_communicator(source: int, destination: int) -> SimulatedCommunicator:
    return SimulatedCommunicator((source, destination), "->")


def lone_unbatched(
    ranks: int, transfers: Sequence[PipelineTransfer]
) -> list[tuple[SimulatedCommunicator, Sequence[PipelineTransfer]]]:
    return alone(ranks, transfers) if len(transfers) == 1 else group_batch(ranks, transfers)


def group_batch(
    ranks: int, transfers: Sequence[PipelineTransfer]
) -> list[tuple[SimulatedCommunicator, Sequence[PipelineTransfer]]]:
    return [(_pipeline_communicator(ranks), transfers)]


def pair(
    ranks: int, transfers: Sequence[PipelineTransfer]
) -> list[tuple[SimulatedCommunicator, Sequence[PipelineTransfer]]]:
    calls: dict[SimulatedCommunicator, list[PipelineTransfer]] = {}
    for transfer in transfers:
        calls.setdefault(_pair_communicator(transfer.source, transfer.destination), []).append(transfer)
    return list(calls.items())


def pair_direction(
    ranks: int, transfers: Sequence[PipelineTransfer]
) -> list[tuple[SimulatedCommunicator, Sequence[PipelineTransfer]]]:
    return [(_direction_communicator(transfer.source, transfer.destination), (transfer,)) for transfer in transfers]


def alone(
    ranks: int, transfers: Sequence[PipelineTransfer]
) -> list[tuple[SimulatedCommunicator, Sequence[PipelineTransfer]]]:
    return [(_pair_communicator(transfer.source, transfer.destination), (transfer,)) for transfer in transfers]


POLICIES: dict[str, CommunicatorPolicy] = {
    "lone_unbatched": lone_unbatched,
    "group_batch": group_batch,
    "pair": pair,
    "pair_direction": pair_direction,
    "alone": alone,
}


@cache
def _operation(kind: str, peer: int) -> Operation:
    return Operation(kind, peer)


def pipeline_program(
    schedule: Schedule, policy: CommunicatorPolicy, costs: ActionCosts, *, noise: float = 0.0, seed: int = 0
) -> NcclProgram:
    """Builds the program of a schedule; each action's cost is multiplied by a random factor between 1 - noise and 1 + noise."""
    times = _ComputeTimes(schedule, costs, noise=noise, seed=seed)
    communicators: dict[SimulatedCommunicator, tuple[int, ...]] = {}
    transfer_cost = costs.time_of(ActionKind.SEND_FORWARD, 0)
    lists: list[list[ProgramItem]] = []
    for rank, batches in enumerate(schedule.action_batches):
        items: list[ProgramItem] = []
        received: dict[ComputeResult, int] = {}
        for batch in batches:
            if batch[0].kind in COMPUTE_KINDS:
                needed = needed_by(batch[0], stages=schedule.stages)
                needs = tuple(received[product] for product in needed if product in received)
                items.append(Compute(batch[0], needs, times.time_of(batch[0])))
                continue
            transfers = [_transfer(schedule, rank, action) for action in batch]
            for communicator, together in policy(schedule.ranks, transfers):
                communicators[communicator] = communicator.members
                received |= {transfer.message: len(items) for transfer in together if transfer.destination == rank}
                operations = tuple(
                    _operation(SEND, to) if source == rank else _operation(RECEIVE, source)
                    for source, to, _ in together
                )
                items.append(Call(communicator, operations, transfer_cost))
        lists.append(items)
    return NcclProgram(tuple(lists), communicators)


def unordered_makespan(schedule: Schedule, costs: ActionCosts, *, noise: float = 0.0, seed: int = 0) -> float:
    """Returns the makespan if every message is sent as soon as it is computed, independent of other transfers and of its receiver."""
    times = _ComputeTimes(schedule, costs, noise=noise, seed=seed)
    transfer_cost = costs.time_of(ActionKind.SEND_FORWARD, 0)
    computations = [[action for action in actions if action.kind in COMPUTE_KINDS] for actions in schedule.actions]
    made: dict[ComputeResult, tuple[int, float]] = {}
    free, at = [0.0] * schedule.ranks, [0] * schedule.ranks
    awaited: dict[ComputeResult, int] = {}
    ready = list(range(schedule.ranks))
    while ready:
        rank = ready.pop()
        while at[rank] < len(computations[rank]):
            action = computations[rank][at[rank]]
            needed = needed_by(action, stages=schedule.stages)
            missing = next((product for product in needed if product not in made), None)
            if missing is not None:
                awaited[missing] = rank
                break
            arrivals = (end + (transfer_cost if maker != rank else 0.0) for maker, end in map(made.__getitem__, needed))
            free[rank] = max(free[rank], *arrivals, 0.0) + times.time_of(action)
            at[rank] += 1
            product = produced_by(action)
            if product is not None:
                made[product] = (rank, free[rank])
                if product in awaited:
                    ready.append(awaited.pop(product))
    assert all(done == len(own) for done, own in zip(at, computations)), "this schedule never ends"
    return max(free)


class _ComputeTimes:
    """The times of computations: a function of computation, seed and noise."""

    def __init__(self, schedule: Schedule, costs: ActionCosts, *, noise: float, seed: int) -> None:
        self._times = {
            (kind, stage): costs.time_of(kind, stage) for kind in COMPUTE_KINDS for stage in range(schedule.stages)
        }
        self._factors: dict[Action, float] = {}
        if noise:
            draw = random.Random(seed)
            computations = (
                action for actions in schedule.actions for action in actions if action.kind in COMPUTE_KINDS
            )
            self._factors = {action: draw.uniform(1.0 - noise, 1.0 + noise) for action in computations}

    def time_of(self, action: Action) -> float:
        return self._times[action.kind, action.stage] * self._factors.get(action, 1.0)


def _transfer(schedule: Schedule, rank: int, action: Action) -> PipelineTransfer:
    peer, product = message_of(schedule, action)
    return PipelineTransfer(rank, peer, product) if action.kind in SEND_KINDS else PipelineTransfer(peer, rank, product)
