"""Inserts sends and receives between the computations of a schedule.

Point-to-point calls between two ranks may run in the order in which they were issued (NCCL), so two ranks that list the messages
between them in different orders can deadlock. Here the computations are simulated once, with unit costs, and each message is
inserted into the lists of both its ranks at the time it is produced. Every rank's list is then a part of one common order of events,
so no set of ranks can wait in a cycle, even if every send waited for its receive.

A receive is placed where its message is produced, not where it is needed: before the computation its rank is busy with at that time,
so it is posted first and overlaps. In the simulation messages take a little time for the same reason: with no latency, a rank's next
message would be produced just when it ends a computation, and posted too late to overlap it.

Only transfers of one time are one batch. A backend may complete a batch as a whole, so a larger one would delay messages that are
there for those that another rank has yet to compute.

The simulation needs the computations of all ranks, and gives two numbers for each: when its output and its input gradient are
produced. A rank's list follows from those of its own stages and their neighbors alone (`RankActions`), so a rank that executes a
schedule holds one list, as arrays, and nothing of the others.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from petatron.schedule.actions import Action, ActionBatch, ActionKind

_KINDS = tuple(ActionKind)
_CODES = {kind: code for code, kind in enumerate(_KINDS)}
_FORWARD, _WEIGHT_GRAD = _CODES[ActionKind.FORWARD], _CODES[ActionKind.WEIGHT_GRAD]
_COSTS = [20 if kind is ActionKind.BACKWARD else 10 for kind in _KINDS]  # by code
_LATENCY = 1
_NEVER = -1


def insert_send_recv(
    orders: Iterable[Sequence[Action | ActionBatch]], rank_of: Sequence[int]
) -> tuple[tuple[ActionBatch, ...], ...]:
    """Returns the computations of each rank, with transfers; `rank_of[stage]` is the rank that has a stage.

    A computation is a batch alone, or with the one it is combined with: both start when both have their inputs, and end together.
    Transfers of one time are one batch. Raises ValueError, with what each rank waits for, if the orders wait for each other in a
    cycle.
    """
    simulation = UnitCostSimulation(orders, rank_of)
    return tuple(tuple(simulation.actions(rank).action_batches()) for rank in range(simulation.ranks))


@dataclass(frozen=True, slots=True, eq=False)
class RankActions:
    """One rank's actions in order, a few bytes each; `starts_batch` marks the first of a batch."""

    kinds: NDArray[np.uint8]
    stages: NDArray[np.int32]
    micro_batches: NDArray[np.int32]
    starts_batch: NDArray[np.bool_]

    @property
    def num_bytes(self) -> int:
        return sum(array.nbytes for array in (self.kinds, self.stages, self.micro_batches, self.starts_batch))

    def action_batches(self) -> Iterator[ActionBatch]:
        """Yields batches: one computation, two that are combined, or transfers that are started together."""
        batch: list[Action] = []
        columns = (self.kinds, self.stages, self.micro_batches, self.starts_batch)
        for kind, stage, micro_batch, first in zip(*(column.tolist() for column in columns)):
            if first and batch:
                yield tuple(batch)
                batch = []
            batch.append(Action(_KINDS[kind], stage, micro_batch))
        if batch:
            yield tuple(batch)


@dataclass(frozen=True, slots=True)
class _EncodedOrder:
    """The computations of one rank: the code of each one's kind, its stage and its micro-batch.

    `combined_with_previous` are the positions of those that are combined with the one before them.
    """

    kinds: list[int]
    stages: list[int]
    micro_batches: list[int]
    combined_with_previous: frozenset[int]

    @classmethod
    def of(cls, order: Sequence[Action | ActionBatch]) -> _EncodedOrder:
        actions: list[Action] = []
        follows: list[int] = []
        for step in order:
            batch = (step,) if isinstance(step, Action) else step
            follows += range(len(actions) + 1, len(actions) + len(batch))
            actions += batch
        return cls(
            [_CODES[action.kind] for action in actions],
            [action.stage for action in actions],
            [action.micro_batch for action in actions],
            frozenset(follows),
        )

    def action(self, at: int) -> Action:
        return Action(_KINDS[self.kinds[at]], self.stages[at], self.micro_batches[at])


class UnitCostSimulation:
    """Simulates the computations of all ranks: when each ends, and when its result is produced."""

    def __init__(self, orders: Iterable[Sequence[Action | ActionBatch]], rank_of: Sequence[int]) -> None:
        # Millions of objects would be slow to create and to collect; three plain lists per rank are not.
        self._orders = [_EncodedOrder.of(order) for order in orders]
        self._rank_of = rank_of
        self.ranks = len(self._orders)
        micro_batches = 1 + max((max(order.micro_batches, default=-1) for order in self._orders), default=-1)
        self._outputs = [[_NEVER] * micro_batches for _ in rank_of]  # when a stage's output is produced
        self._input_grads = [[_NEVER] * micro_batches for _ in rank_of]  # when its input gradient is
        self._ends: list[list[int]] = [[] for _ in self._orders]
        self._awaited: list[tuple[list[int], int] | None] = [None] * self.ranks  # the result each rank waits for
        self._ready = deque(range(self.ranks))
        while self._ready:
            self._advance_rank(self._ready.popleft())
        waiting = [
            f"rank {rank} waits for {order.action(len(ends))}"
            for rank, (order, ends) in enumerate(zip(self._orders, self._ends))
            if len(ends) < len(order.kinds)
        ]
        if waiting:
            raise ValueError(f"this order of computations never ends: {'; '.join(waiting)}")

    def _advance_rank(self, rank: int) -> None:
        """Advances a rank through its order until it must wait for another."""
        order, ends = self._orders[rank], self._ends[rank]
        now = ends[-1] if ends else 0
        while (at := len(ends)) < len(order.kinds):
            # Two that are combined start and end together.
            step = (at, at + 1) if at + 1 in order.combined_with_previous else (at,)
            for index in step:
                ready = self._ready_at(rank, order.kinds[index], order.stages[index], order.micro_batches[index])
                if ready is None:
                    return
                now = max(now, ready)
            now += sum(_COSTS[order.kinds[index]] for index in step)
            for index in step:
                ends.append(now)
                self._record_output(order.kinds[index], order.stages[index], order.micro_batches[index], now)

    def _ready_at(self, rank: int, kind: int, stage: int, micro_batch: int) -> int | None:
        """Returns when a computation's input is on its rank; None, and the rank waits, if it has not been produced yet."""
        if kind == _FORWARD:
            needed, source = self._outputs, stage - 1
        elif kind == _WEIGHT_GRAD:
            needed, source = self._input_grads, stage
        else:
            if self._outputs[stage][micro_batch] == _NEVER:
                return None  # its own forward comes later in the order: a deadlock
            needed, source = self._input_grads, stage + 1
        if not 0 <= source < len(self._rank_of):
            return 0
        produced_at = needed[source][micro_batch]
        if produced_at == _NEVER:
            self._awaited[rank] = (needed[source], micro_batch)
            return None
        return produced_at if self._rank_of[source] == rank else produced_at + _LATENCY

    def _record_output(self, kind: int, stage: int, micro_batch: int, now: int) -> None:
        """Records when a computation's result is produced, and wakes the rank that waits for it."""
        if kind == _WEIGHT_GRAD:
            return
        results, consumer = (
            (self._outputs[stage], stage + 1) if kind == _FORWARD else (self._input_grads[stage], stage - 1)
        )
        results[micro_batch] = now
        if 0 <= consumer < len(self._rank_of):
            rank = self._rank_of[consumer]
            awaited = self._awaited[rank]
            if awaited is not None and awaited[0] is results and awaited[1] == micro_batch:
                self._awaited[rank] = None
                self._ready.append(rank)

    def actions(self, rank: int) -> RankActions:
        """Returns a rank's computations and, at the times at which messages are produced, its transfers."""
        order = self._orders[rank]
        parts = [
            _ActionArrays(
                np.array(self._ends[rank], np.int64),
                np.array(order.kinds, np.uint8),
                np.array(order.stages, np.int32),
                np.array(order.micro_batches, np.int32),
                priority=_COMPUTE_PRIORITY,
            ),
            *self._send_recv(rank),
        ]
        times, kinds, stages, micro_batches = (
            np.concatenate([getattr(part, name) for part in parts])
            for name in ("times", "kinds", "stages", "micro_batches")
        )
        priorities = np.concatenate([np.full(len(part.times), part.priority, np.int64) for part in parts])
        by_time = np.lexsort((priorities, times))
        times, priorities = times[by_time], priorities[by_time]
        first = np.ones(len(times), bool)
        # Two computations that end together are combined, since each takes time.
        is_compute = priorities == _COMPUTE_PRIORITY
        first[1:] = (times[1:] != times[:-1]) | (is_compute[1:] != is_compute[:-1])
        return RankActions(kinds[by_time], stages[by_time], micro_batches[by_time], first)

    def _send_recv(self, rank: int) -> Iterator[_ActionArrays]:
        """Yields the messages from and to a rank's stages, one part for each stage, neighbor and direction."""
        before = ActionKind.RECEIVE_FORWARD, ActionKind.SEND_BACKWARD
        after = ActionKind.SEND_FORWARD, ActionKind.RECEIVE_BACKWARD
        for stage in (stage for stage, owner in enumerate(self._rank_of) if owner == rank):
            for source, (forward, backward) in ((stage - 1, before), (stage, after)):
                target = source + 1
                if source < 0 or target == len(self._rank_of) or self._rank_of[source] == self._rank_of[target]:
                    continue
                first, second = _SEND_RECV_PRIORITY - source, _SEND_RECV_PRIORITY + 1 + target
                yield _ActionArrays.send_recv(forward, stage, self._outputs[source], priority=first)
                yield _ActionArrays.send_recv(backward, stage, self._input_grads[target], priority=second)


@dataclass(frozen=True, slots=True, eq=False)
class _ActionArrays:
    """Actions with their times; `priority` orders those of one time."""

    times: NDArray[np.int64]
    kinds: NDArray[np.uint8]
    stages: NDArray[np.int32]
    micro_batches: NDArray[np.int32]
    priority: int

    @classmethod
    def send_recv(cls, kind: ActionKind, stage: int, times_made: Sequence[int], *, priority: int) -> _ActionArrays:
        """Builds one kind of transfer of a stage; a forward-only schedule has no gradients to send."""
        times = np.array(times_made, np.int64)
        micro_batches = np.flatnonzero(times != _NEVER).astype(np.int32)
        count = len(micro_batches)
        codes, stages = np.full(count, _CODES[kind], np.uint8), np.full(count, stage, np.int32)
        return cls(times[micro_batches], codes, stages, micro_batches, priority)


# At one time: computations that end, then messages, in an order in which a rank sends its own before it receives another's where
# possible: forward ones from the last stage to the first, then backward ones from the first stage to the last.
_SEND_RECV_PRIORITY = 1 << 32
_COMPUTE_PRIORITY = 0
