"""Simulates the time and the activation memory of a pipeline schedule with given action costs.

The model of time: a rank computes one action at a time, in the order of its list. A transfer is posted when the rank reaches it in
its list and takes none of the rank's time. A message starts when both ends have posted it, takes the transfer cost, and
the messages between two ranks start in the order of their lists; those in the same direction are serialized, those in opposite
directions overlap. A computation waits for the messages it needs.

Activations are counted in micro-batches of one stage (`max_held_micro_batches`); how many are held depends on the order alone, not
on the costs.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import product

from petatron.schedule import Schedule
from petatron.schedule.actions import (
    COMPUTE_KINDS,
    SEND_KINDS,
    Action,
    ActionKind,
    ComputeResult,
    TimedAction,
    max_held_micro_batches,
    needed_by,
    produced_by,
)

Cost = float | Callable[[int], float]


@dataclass(frozen=True, slots=True)
class ActionCosts:
    """Time of each kind of action, the same for all stages or a function of the stage.

    A full backward costs the sum of its two halves unless it is given.
    """

    forward: Cost = 1.0
    backward: Cost | None = None
    input_grad: Cost = 1.0
    weight_grad: Cost = 1.0
    transfer: Cost = 0.0

    def time_of(self, kind: ActionKind, stage: int) -> float:
        """Returns the time of a computation, or of a message sent by `stage`."""
        if kind is ActionKind.BACKWARD and self.backward is None:
            return self.time_of(ActionKind.INPUT_GRAD, stage) + self.time_of(ActionKind.WEIGHT_GRAD, stage)
        by_kind: dict[ActionKind, Cost | None] = {
            ActionKind.FORWARD: self.forward,
            ActionKind.BACKWARD: self.backward,
            ActionKind.INPUT_GRAD: self.input_grad,
            ActionKind.WEIGHT_GRAD: self.weight_grad,
        }
        cost = by_kind.get(kind, self.transfer)
        assert cost is not None
        return cost(stage) if callable(cost) else cost


@dataclass(frozen=True, slots=True)
class Simulation:
    """The result of a simulation. `events` are each rank's computations in order."""

    makespan: float
    peak_activations: tuple[int, ...]
    events: tuple[tuple[TimedAction, ...], ...]

    @property
    def bubble(self) -> float:
        """The fraction of all ranks' time in which they do not compute."""
        return bubble_fraction(self.events)


def bubble_fraction(events: tuple[tuple[TimedAction, ...], ...]) -> float:
    """1 - (time spent computing) / (ranks x time from the first start to the last end)."""
    timed = [event for rank in events for event in rank if event.action.kind in COMPUTE_KINDS]
    if not timed:
        return 0.0
    span = max(event.end for event in timed) - min(event.start for event in timed)
    busy = sum(event.end - event.start for event in timed)
    return 1.0 - busy / (len(events) * span) if span > 0 else 0.0


def theoretical_bubble(name: str, *, ranks: int, virtual: int, micro_batches: int) -> float | None:
    """Returns the theoretical bubble for stages of equal cost, F = I = W (B = 2F) and no transfer time.

    It is (p-1) / (k m + p-1), where k is the ratio of a micro-batch's work on a rank to the idle time that each rank of the pipeline
    adds: that work itself in gpipe and 1f1b, one stage's part of it in interleaved, one forward of one stage where the backward is
    split. gpipe and 1f1b always reach it, zb-v from (3p-1)/2 micro-batches, the others from p; None where theory gives no value.
    """
    shorter, fewest = {
        "gpipe": (1, 1),
        "1f1b": (1, 1),
        "interleaved": (virtual, ranks if virtual > 1 else 1),
        "zb-h1": (3, ranks),
        "zb-v": (6, 3 * ranks // 2),
    }[name]
    if micro_batches < fewest:
        return None
    return (ranks - 1) / (shorter * micro_batches + ranks - 1)


def peak_activations(schedule: Schedule) -> tuple[int, ...]:
    """Returns the most micro-batches of one stage that each rank holds at a time."""
    return tuple(max_held_micro_batches(actions) for actions in schedule.actions)


def simulate(schedule: Schedule, costs: ActionCosts) -> Simulation:
    """Simulates a schedule; ValueError, with what each rank waits for, if it deadlocks."""
    clock = _Simulator(schedule, costs)
    clock.run()
    events = tuple(tuple(events) for events in clock.events)
    timed = [event for rank in events for event in rank]
    return Simulation(
        makespan=max(event.end for event in timed),
        peak_activations=peak_activations(schedule),
        events=events,
    )


def messages_by_peer(schedule: Schedule, rank: int) -> dict[int, list[ComputeResult]]:
    """Returns for each other rank the messages between the two in the order of this rank's list, in both directions."""
    messages: dict[int, list[ComputeResult]] = {}
    for action in schedule.actions[rank]:
        if action.kind not in COMPUTE_KINDS:
            peer, product = message_of(schedule, action)
            messages.setdefault(peer, []).append(product)
    return messages


def message_of(schedule: Schedule, transfer: Action) -> tuple[int, ComputeResult]:
    """Returns the rank at the other end of a transfer, and its message."""
    forward = transfer.kind in (ActionKind.SEND_FORWARD, ActionKind.RECEIVE_FORWARD)
    onward = transfer.kind in (ActionKind.SEND_FORWARD, ActionKind.RECEIVE_BACKWARD)
    other = transfer.stage + (1 if onward else -1)
    source = transfer.stage if transfer.kind in SEND_KINDS else other
    kind = ActionKind.FORWARD if forward else ActionKind.INPUT_GRAD
    return schedule.rank_of(other), (kind, source, transfer.micro_batch)


class _Channel:
    """The messages between two ranks: the next one, when each end posted, when each arrived."""

    def __init__(self, messages: list[ComputeResult]) -> None:
        self.messages = messages
        self.posted: dict[tuple[ComputeResult, int], float] = {}
        self._next = 0
        self._last_start = 0.0
        self._link_free_at: dict[ActionKind | int, float] = {}

    def start_ready_messages(
        self, ranks: tuple[int, int], source_of: Callable[[ComputeResult], int], costs: ActionCosts
    ) -> list[tuple[ComputeResult, float]]:
        """Starts every message that is next and posted at both ends; returns them with their arrival times."""
        arrived: list[tuple[ComputeResult, float]] = []
        while self._next < len(self.messages):
            product = self.messages[self._next]
            ends = [self.posted.get((product, rank)) for rank in ranks]
            if ends[0] is None or ends[1] is None:
                break
            source = source_of(product)
            start = max(ends[0], ends[1], self._last_start, self._link_free_at.get(source, 0.0))
            end = start + costs.time_of(ActionKind.SEND_FORWARD, product[1])
            self._last_start, self._link_free_at[source] = start, end
            self._next += 1
            arrived.append((product, end))
        return arrived


class _Simulator:
    """Computes all times of a schedule by advancing each rank's list as far as possible, repeatedly."""

    def __init__(self, schedule: Schedule, costs: ActionCosts) -> None:
        self._schedule = schedule
        self._costs = costs
        self._rank_of = [schedule.rank_of(stage) for stage in range(schedule.stages)]
        pairs = product(COMPUTE_KINDS, range(schedule.stages))
        self._durations = {(kind, stage): costs.time_of(kind, stage) for kind, stage in pairs}
        self.events: list[list[TimedAction]] = [[] for _ in schedule.actions]
        self._next = [0] * schedule.ranks
        self._rank_free_at = [0.0] * schedule.ranks
        self._available: list[dict[ComputeResult, float]] = [{} for _ in schedule.actions]
        self._channels: dict[tuple[int, int], _Channel] = {}
        lists = [messages_by_peer(schedule, rank) for rank in range(schedule.ranks)]
        for rank, peers in enumerate(lists):
            for peer, messages in peers.items():
                other = lists[peer].get(rank, [])
                if any(here != there for here, there in zip(messages, other)):
                    first, second = sorted((rank, peer))
                    raise ValueError(f"ranks {first} and {second} list their messages in different orders")
                self._channels[min(rank, peer), max(rank, peer)] = _Channel(max(messages, other, key=len))

    def run(self) -> None:
        ready = list(range(self._schedule.ranks))
        while ready:
            ready = [woken for rank in dict.fromkeys(ready) for woken in self._advance(rank)]
        stuck = [
            f"rank {rank} waits for {actions[at]}"
            for rank, (actions, at) in enumerate(zip(self._schedule.actions, self._next))
            if at < len(actions)
        ]
        if stuck:
            raise ValueError(f"this schedule never ends: {'; '.join(stuck)}")

    def _advance(self, rank: int) -> list[int]:
        """Advances a rank through its list until it must wait; returns the ranks that received something meanwhile."""
        actions, woken = self._schedule.actions[rank], []
        while self._next[rank] < len(actions):
            action = actions[self._next[rank]]
            if action.kind not in COMPUTE_KINDS:
                woken += self._post(rank, action)
            elif not self._compute(rank, action):
                break
            self._next[rank] += 1
        return woken

    def _compute(self, rank: int, action: Action) -> bool:
        here = self._available[rank]
        needs = needed_by(action, stages=self._schedule.stages)
        if any(product not in here for product in needs):
            return False
        start = max([self._rank_free_at[rank], *(here[product] for product in needs)])
        end = start + self._durations[action.kind, action.stage]
        self._rank_free_at[rank] = end
        self.events[rank].append(TimedAction(action, start, end))
        product = produced_by(action)
        if product is not None:
            here[product] = end
        return True

    def _post(self, rank: int, transfer: Action) -> list[int]:
        peer, product = message_of(self._schedule, transfer)
        if transfer.kind in SEND_KINDS and product not in self._available[rank]:
            raise ValueError(f"rank {rank} sends before it has anything to send: {transfer}")
        pair = (min(rank, peer), max(rank, peer))
        channel = self._channels[pair]
        channel.posted[product, rank] = self._rank_free_at[rank]
        woken: list[int] = []
        for moved, end in channel.start_ready_messages(pair, lambda product: self._rank_of[product[1]], self._costs):
            source = self._rank_of[moved[1]]
            receiver = pair[0] if source == pair[1] else pair[1]
            self._available[receiver][moved] = end
            woken.append(receiver)
        return woken
