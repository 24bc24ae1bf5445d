"""Puts sends and receives between the computations of a schedule.

Point-to-point calls between two ranks may run in the order in which they were made (NCCL), so two ranks that list the messages
between them in different orders can wait for each other for ever. Here the computations are played through once, on unit
costs, and each message is written into both its ends' lists at the moment it is made. Every rank's list is then a part of one
common order of events, so no set of ranks can wait in a circle, even if every send waited for its receive.

A receive stands where its message is made, not where it is needed: before the computation its rank is busy with at that moment,
so it is posted first and the message travels meanwhile. In the play messages take a little time for the same reason: were
they there at once, a rank's next message would be made just when it ends a computation, and posted too late to overlap it.

Only transfers of one moment are made as one batch. A backend may complete a batch as a whole, so a larger one would hold back
what is there for what another rank has yet to compute.
"""

from __future__ import annotations

from collections.abc import Sequence
from heapq import heappop, heappush

from petatron.parallel.schedule.actions import Action, Batch, Kind, Product, needed_by, produced_by

_COSTS = {Kind.FORWARD: 10, Kind.BACKWARD: 20, Kind.INPUT_GRAD: 10, Kind.WEIGHT_GRAD: 10}
_LATENCY = 1


def with_transfers(orders: Sequence[Sequence[Action | Batch]], rank_of: Sequence[int]) -> tuple[tuple[Batch, ...], ...]:
    """The computations of each rank, with transfers; `rank_of[stage]` is the rank that holds a stage.

    A computation stands alone, or as a batch with the one it is combined with: both begin when both have their inputs, and
    end together. Transfers of one moment stand together. Raises ValueError, with what each rank waits for,
    if the orders wait for each other in a circle.
    """
    play = _Play([[step if isinstance(step, tuple) else (step,) for step in order] for order in orders], rank_of)
    while play.events:
        play.advance()
    waiting = [f"rank {rank} waits for {action}" for rank, action in play.waiting()]
    if waiting:
        raise ValueError(f"this order of computations never ends: {'; '.join(waiting)}")
    return tuple(tuple(tuple(batch) for batch in batches) for batches in play.lists)


class _Play:
    """Plays computations through and writes down each rank's list: a computation when it ends, a message when it is made."""

    def __init__(self, orders: Sequence[Sequence[Batch]], rank_of: Sequence[int]) -> None:
        self.lists: list[list[list[Action]]] = [[] for _ in orders]
        self._last_transfer = [-1] * len(orders)  # when each rank's last batch of transfers was made
        self.events: list[
            tuple[int, int, Product | tuple[()]]
        ] = []  # when, rank, what arrives (nothing: a computation ends)
        self._orders = orders
        self._rank_of = rank_of
        self._next = [0] * len(orders)
        self._busy = [False] * len(orders)
        self._here: list[set[Product]] = [set() for _ in orders]
        for rank in range(len(orders)):
            self._start(rank, 0)

    def waiting(self) -> list[tuple[int, Action]]:
        return [(rank, self._orders[rank][at][0]) for rank, at in enumerate(self._next) if at < len(self._orders[rank])]

    def advance(self) -> None:
        """Go on to the next moment at which something ends or arrives."""
        now = self.events[0][0]
        ended: list[Action] = []
        ranks: list[int] = []
        while self.events and self.events[0][0] == now:
            _, rank, arrived = heappop(self.events)
            ranks.append(rank)
            if arrived:
                self._here[rank].add(arrived)
            else:
                ended += self._end(rank)
        for action in sorted(ended, key=_sends_first):
            self._send(action, now)
        for rank in dict.fromkeys(ranks):
            self._start(rank, now)

    def _end(self, rank: int) -> Batch:
        batch = self._orders[rank][self._next[rank]]
        self._next[rank] += 1
        self._busy[rank] = False
        self.lists[rank].append([*batch])
        self._last_transfer[rank] = -1
        self._here[rank].update(product for action in batch if (product := produced_by(action)) is not None)
        return batch

    def _send(self, action: Action, now: int) -> None:
        """Write the message a computation makes, if it makes one for another rank, into both lists."""
        product = produced_by(action)
        forward = action.kind is Kind.FORWARD
        to_stage = action.stage + (1 if forward else -1)
        if product is None or not 0 <= to_stage < len(self._rank_of):
            return
        sender, receiver = self._rank_of[action.stage], self._rank_of[to_stage]
        if sender == receiver:
            return
        send, receive = (
            (Kind.SEND_FORWARD, Kind.RECEIVE_FORWARD) if forward else (Kind.SEND_BACKWARD, Kind.RECEIVE_BACKWARD)
        )
        self._transfer(sender, Action(send, action.stage, action.micro_batch), now)
        self._transfer(receiver, Action(receive, to_stage, action.micro_batch), now)
        heappush(self.events, (now + _LATENCY, receiver, product))

    def _transfer(self, rank: int, action: Action, now: int) -> None:
        """Write a transfer down, beside those of the same moment."""
        if self._last_transfer[rank] == now:
            self.lists[rank][-1].append(action)
        else:
            self.lists[rank].append([action])
        self._last_transfer[rank] = now

    def _start(self, rank: int, now: int) -> None:
        order, at = self._orders[rank], self._next[rank]
        if self._busy[rank] or at == len(order):
            return
        needs = (product for action in order[at] for product in needed_by(action, stages=len(self._rank_of)))
        if all(product in self._here[rank] for product in needs):
            self._busy[rank] = True
            heappush(self.events, (now + sum(_COSTS[action.kind] for action in order[at]), rank, ()))


def _sends_first(action: Action) -> tuple[bool, int]:
    """Order of messages made at one moment: as far as it can be, a rank sends its own before it receives another's."""
    forward = action.kind is Kind.FORWARD
    return not forward, -action.stage if forward else action.stage
