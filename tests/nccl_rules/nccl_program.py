"""Simulates communication programs under NCCL's rules: whether they complete, and when.

A program is, per rank, the list of what its host issues: computations, and calls on communicators. A call is one collective, or a
batch (group call) of sends and receives. The rules:

- A communicator is a stream on each of its ranks: a call on it starts when the rank's previous call on it has completed, and when
  the computations that the rank issued before it are done (torch makes a communicator's stream wait for the compute stream).
- Nothing is buffered. A collective starts when all members have started it, a message when both its ends have. The k-th send from
  a to b on a communicator matches the k-th receive at b from a on it, the k-th collective of a rank the k-th of every other member.
- A batch completes as a whole, when all its messages have arrived.
- A computation starts when the one before it on its rank is done and the calls that it needs have completed.
- The host issues ahead and blocks only in calls marked as `blocking` (gloo, or code that reads a result) and, with
  `lazy_connect`, in the first use of a communicator, which returns when every member has reached its own first use.

With `single_stream` all communicators of a rank share one stream: a device with room for one communication kernel at a time. What
completes there completes in every other order that NCCL could choose, because a queue of all calls only adds waits.

Every time here is a maximum over times of predecessors plus a cost, so a program is a graph, its makespan is the longest path, and
it deadlocks exactly if the graph has a cycle. Costs do not matter to that: one simulation decides for all of them. Traversing the
graph in topological order is linear in the number of operations.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

SEND, RECEIVE = "send", "receive"


@dataclass(frozen=True, slots=True)
class Operation:
    """A send to or a receive from `peer`, or a collective of all members, which has no peer."""

    kind: str
    peer: int = -1

    def __str__(self) -> str:
        return {SEND: f"send to rank {self.peer}", RECEIVE: f"receive from rank {self.peer}"}.get(self.kind, self.kind)


@dataclass(frozen=True, slots=True)
class Call:
    """One collective, or sends and receives that are started together."""

    communicator: Hashable
    operations: tuple[Operation, ...]
    cost: float = 0.0
    blocking: bool = False

    def __str__(self) -> str:
        return f"{' + '.join(map(str, self.operations))} on {self.communicator}"


@dataclass(frozen=True, slots=True)
class Compute:
    """Work on the compute stream; `needs` are positions, in the rank's list, of calls whose results it uses."""

    label: object
    needs: tuple[int, ...] = ()
    cost: float = 1.0


ProgramItem = Call | Compute


@dataclass(frozen=True, slots=True)
class NcclProgram:
    """Each rank's issued items, in order, and the members of each communicator."""

    items: tuple[Sequence[ProgramItem], ...]
    communicators: Mapping[Any, tuple[int, ...]]


@dataclass(frozen=True, slots=True)
class BlockedCall:
    """A call that a rank has started and that never completes: it waits in `operation` (None: connecting) for `missing_ranks`."""

    rank: int
    position: int
    call: Call
    operation: Operation | None
    missing_ranks: tuple[int, ...]

    def __str__(self) -> str:
        missing = f"rank{'s' * (len(self.missing_ranks) > 1)} {', '.join(map(str, self.missing_ranks))}"
        doing = (
            f"to connect {self.call.communicator} with"
            if self.operation is None
            else f"in {self.operation} on {self.call.communicator} for"
        )
        return f"rank {self.rank} waits {doing} {missing}"


@dataclass(frozen=True, slots=True)
class ProgramResult:
    """The makespan, with no `blocked_calls`; or the calls that ranks are blocked in."""

    makespan: float
    blocked_calls: tuple[BlockedCall, ...] = ()

    @property
    def completes(self) -> bool:
        return not self.blocked_calls


def simulate_program(program: NcclProgram, *, lazy_connect: bool = False, single_stream: bool = False) -> ProgramResult:
    """Simulates a program under the rules of this module.

    >>> both = lambda peer: Call("cp", (Operation(SEND, peer), Operation(RECEIVE, peer)))
    >>> simulate_program(NcclProgram(((both(1),), (both(0),)), {"cp": (0, 1)})).completes
    True
    >>> alone = lambda peer: (Call("cp", (Operation(SEND, peer),)), Call("cp", (Operation(RECEIVE, peer),)))
    >>> str(simulate_program(NcclProgram((alone(1), alone(0)), {"cp": (0, 1)})).blocked_calls[0])
    'rank 0 waits in send to rank 1 on cp for rank 1'
    """
    graph = _DependencyGraph(program, lazy_connect=lazy_connect, single_stream=single_stream)
    graph.run()
    if all(count == 0 for count in graph.num_pending):
        return ProgramResult(max(graph.time, default=0.0))
    return ProgramResult(float("inf"), tuple(graph.blocked_calls()))


class _DependencyGraph:
    """Events and their dependencies: `num_pending` counts an event's predecessors that have not happened yet."""

    def __init__(self, program: NcclProgram, *, lazy_connect: bool, single_stream: bool) -> None:
        self.num_pending: list[int] = []
        self.time: list[float] = []
        self._successors: list[list[int]] = []
        self._cost: list[float] = []
        self._program = program
        self._lazy_connect, self._single_stream = lazy_connect, single_stream
        self._rendezvous_nodes: dict[
            tuple[Hashable, ...], int
        ] = {}  # of a message's ends, of the members of a collective or of a first use
        self._arrivals: dict[
            int, list[tuple[int, int]]
        ] = {}  # for a rendezvous the ranks that join it, and their events
        # For each item its events: a computation's end; a call's issue, connection, start and end.
        self._item_nodes: list[list[tuple[int, ...]]] = []
        self._item_rendezvous: list[list[tuple[int, ...]]] = []  # for each item the rendezvous of its operations
        for rank, items in enumerate(program.items):
            self._item_nodes.append([])
            self._item_rendezvous.append([])
            self._add_rank(rank, items)

    def _add_node(self, cost: float = 0.0, *predecessors: int, awaits: int = 0) -> int:
        """Adds an event `cost` after the last of its predecessors, and of `awaits` that are yet to be added."""
        node = len(self.num_pending)
        self.num_pending.append(awaits)
        self.time.append(0.0)
        self._successors.append([])
        self._cost.append(cost)
        for other in predecessors:
            if other >= 0:
                self._successors[other].append(node)
                self.num_pending[node] += 1
        return node

    def _add_rank(self, rank: int, items: Sequence[ProgramItem]) -> None:
        computed = host = -1
        streams: dict[Hashable, int] = {}
        counts: dict[tuple[Hashable, ...], int] = {}
        nodes, rendezvous = self._item_nodes[rank], self._item_rendezvous[rank]
        for item in items:
            if isinstance(item, Compute):
                computed = self._add_node(item.cost, computed, host, *(nodes[need][-1] for need in item.needs))
                nodes.append((computed,))
                rendezvous.append(())
                continue
            communicator = item.communicator
            issued = connected = host
            if self._lazy_connect and ("connect", communicator) not in counts:
                counts["connect", communicator] = 1
                issued = self._add_node(0.0, host)
                connected = self._join_rendezvous(
                    issued, ("connect", communicator), rank, self._program.communicators[communicator]
                )
            stream = None if self._single_stream else communicator
            start = self._add_node(0.0, connected, computed, streams.get(stream, -1))
            operation_nodes = tuple(
                self._join_operation(start, item, operation, rank, counts) for operation in item.operations
            )
            end = self._add_node(0.0, start, *operation_nodes)
            streams[stream] = end
            host = end if item.blocking else connected
            nodes.append((issued, connected, start, end))
            rendezvous.append(operation_nodes)

    def _join_operation(
        self, start: int, call: Call, operation: Operation, rank: int, counts: dict[tuple[Hashable, ...], int]
    ) -> int:
        """Joins the rendezvous of an operation with its peers, and returns it."""
        communicator, kind, peer = call.communicator, operation.kind, operation.peer
        if kind == SEND:
            key, members = (communicator, rank, peer), (rank, peer)
        elif kind == RECEIVE:
            key, members = (communicator, peer, rank), (rank, peer)
        else:
            key, members = (communicator,), self._program.communicators[communicator]
        number = counts[key] = counts.get(key, 0) + 1
        # A collective matches only others of its kind.
        return self._join_rendezvous(
            start, (*key, number, kind) if len(key) == 1 else (*key, number), rank, members, call.cost
        )

    def _join_rendezvous(
        self, node: int, key: tuple[Hashable, ...], rank: int, members: tuple[int, ...], cost: float = 0.0
    ) -> int:
        rendezvous = self._rendezvous_nodes.get(key)
        if rendezvous is None:
            rendezvous = self._rendezvous_nodes[key] = self._add_node(cost, awaits=len(members))
            self._arrivals[rendezvous] = []
        self._successors[node].append(rendezvous)
        self._arrivals[rendezvous].append((rank, node))
        return rendezvous

    def run(self) -> None:
        """Processes all events that can happen."""
        num_pending, time, cost = self.num_pending, self.time, self._cost
        ready = [node for node, count in enumerate(num_pending) if count == 0]
        for node in ready:  # grows during the loop
            now = time[node] = time[node] + cost[node]
            for other in self._successors[node]:
                if now > time[other]:
                    time[other] = now
                num_pending[other] -= 1
                if num_pending[other] == 0:
                    ready.append(other)

    def blocked_calls(self) -> Iterator[BlockedCall]:
        """Yields the calls that ranks have started and that do not complete. An unfinished rank has one: it does not wait for itself."""
        for rank, items in enumerate(self._program.items):
            for position, item in enumerate(items):
                if isinstance(item, Call):
                    yield from self._blocked_in_call(rank, position, item)

    def _is_pending(self, node: int) -> bool:
        return node >= 0 and self.num_pending[node] > 0

    def _blocked_in_call(self, rank: int, position: int, call: Call) -> Iterator[BlockedCall]:
        issued, connected, start, end = self._item_nodes[rank][position]
        members = self._program.communicators[call.communicator]
        if connected != issued and self._is_pending(connected) and not self._is_pending(issued):
            yield BlockedCall(rank, position, call, None, self._missing_members(connected, members))
        elif self._is_pending(end) and not self._is_pending(start):
            for operation, rendezvous in zip(call.operations, self._item_rendezvous[rank][position]):
                if self._is_pending(rendezvous):
                    others = members if operation.peer < 0 else (operation.peer,)
                    yield BlockedCall(rank, position, call, operation, self._missing_members(rendezvous, others))

    def _missing_members(self, rendezvous: int, members: tuple[int, ...]) -> tuple[int, ...]:
        """Returns the members that have not joined a rendezvous."""
        present = {other for other, node in self._arrivals[rendezvous] if not self._is_pending(node)}
        return tuple(member for member in members if member not in present)
