"""Checks the global order of communication: the ranks' records against NCCL's requirements, which are stricter than gloo's.

gloo buffers and runs every operation on threads of its own. NCCL does neither. A communication kernel waits on the device until its
peers run theirs, so it occupies the device; connecting a communicator blocks the host; and a device runs only so many kernels
concurrently. So two ranks that issue operations on two communicators in opposite orders can deadlock, where gloo goes on. NCCL's own
rule is that operations on different communicators be issued in an order that all ranks agree on.

Two rules are checked, on the record of every rank:

1. On each communicator all members issue the same collectives in the same order: operation, dtype and number of elements (of an
   all-to-all each rank may send any number). The sends from one rank to another and the receives of the other are equal in number,
   and in order of the same size.
2. There is one order of all operations of which every rank's is a part, where the sends and receives of a batch have one position.
   That is: everything would complete if every rank ran one operation at a time, in the order of issue, each until its peers have
   reached it (`tests/nccl_rules/nccl_program.py` with `single_stream`). Whatever runs concurrently in fact, then nothing can deadlock.

Rule 2 does not order two operations that no chain of other ones connects: stages of a pipeline reduce their gradients at different
positions between their transfers, which is no problem, since no rank takes part in two stages' reductions. It does forbid that
replicas of one stage reduce at different positions between transfers with the same pipelines, and cycles through three and more
ranks, no two of which share two communicators.

The one exception is by design: the thread of an async save uses a communicator of its own, gloo's, in no order with training. Rule 1
holds there too. An asynchronous operation counts where it is started.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import groupby, zip_longest

from petatron.mesh.comm_record import CommEvent, Communicator
from tests.nccl_rules.nccl_program import (
    RECEIVE,
    SEND,
    BlockedCall,
    Call,
    NcclProgram,
    Operation,
    simulate_program,
)

CONCURRENT_AXES = ("background_control",)
"""Axes of a thread that runs during training."""
_VARIABLE_SIZE_OPS = ("all_to_all",)


def order_problems(records: Sequence[Sequence[CommEvent]]) -> list[str]:
    """Returns what NCCL could deadlock at, from the events of all ranks in the order of issue; empty if it cannot.

    Unmatched operations come first: while there are any, orders are not checked.
    """
    return list(_mismatches(records)) or list(_deadlock_cycles(records))


def _mismatches(records: Sequence[Sequence[CommEvent]]) -> Iterator[str]:
    collectives: dict[Communicator, dict[int, list[CommEvent]]] = {}
    messages: dict[tuple[Communicator, int, int], tuple[list[CommEvent], list[CommEvent]]] = {}
    for rank, events in enumerate(records):
        for event in events:
            if event.peer is None:
                members = collectives.setdefault(event.communicator, {one: [] for one in event.communicator.ranks})
                members[rank].append(event)
            else:
                ends = (rank, event.peer) if event.op == SEND else (event.peer, rank)
                messages.setdefault((event.communicator, *ends), ([], []))[event.op == RECEIVE].append(event)
    for members in collectives.values():
        first, *others = members
        for other in others:
            yield from _first_difference(first, members[first], other, members[other], "operation")
    for (_, source, destination), (sent, received) in messages.items():
        yield from _first_difference(source, sent, destination, received, "message")


def _first_difference(
    one: int, events: Sequence[CommEvent], two: int, others: Sequence[CommEvent], noun: str
) -> Iterator[str]:
    for number, (ours, theirs) in enumerate(zip_longest(events, others), start=1):
        if ours is None or theirs is None or _signature(ours) != _signature(theirs):
            there = (f"on rank {rank} {_quoted(event)}" for rank, event in ((one, ours), (two, theirs)))
            yield f"ranks {one} and {two}: {noun} {number} of a communicator is {' and '.join(there)}"
            return


def _signature(event: CommEvent) -> tuple[object, ...]:
    op = "message" if event.peer is not None else event.op
    return op, event.dtype, -1 if event.op in _VARIABLE_SIZE_OPS else event.elements


def _quoted(event: CommEvent | None) -> str:
    return "missing" if event is None else f'"{event}"'


def _deadlock_cycles(records: Sequence[Sequence[CommEvent]]) -> Iterator[str]:
    batches = [_batches(events) for events in records]
    calls = tuple([_as_call(batch) for batch in own] for own in batches)
    communicators = {event.communicator: event.communicator.ranks for own in records for event in own}
    heads: dict[int, BlockedCall] = {}  # the call each blocked rank is in; in one queue that is one
    for wait in simulate_program(NcclProgram(calls, communicators), single_stream=True).blocked_calls:
        heads.setdefault(wait.rank, wait)
    seen: set[int] = set()
    for start in heads:
        path: list[int] = []
        rank = start
        while rank not in seen:
            seen.add(rank)
            path.append(rank)
            rank = heads[rank].missing_ranks[0]
        if rank in path:
            cycle = path[path.index(rank) :]
            yield _describe_cycle([(rank, _waiting_event(batches[rank], heads[rank])) for rank in cycle])


def _describe_cycle(cycle: list[tuple[int, CommEvent]]) -> str:
    """Describes a cycle: each of its ranks is at an operation that the next one reaches after its own."""
    (one, first), (two, second), *others = cycle
    if not others:
        return f'ranks {one} and {two}: "{first}" before "{second}" on rank {one}, after it on rank {two}'
    waits = (f'rank {rank} is at "{event}"' for rank, event in cycle)
    ranks = ", ".join(str(rank) for rank, _ in cycle)
    return f"ranks {ranks} wait in a circle, each for the next: {'; '.join(waits)}"


def _waiting_event(batches: list[list[CommEvent]], wait: BlockedCall) -> CommEvent:
    """Returns the operation that a rank waits in."""
    assert wait.operation is not None
    index = wait.call.operations.index(wait.operation)
    return batches[wait.position][index]


def _batches(events: Sequence[CommEvent]) -> list[list[CommEvent]]:
    """Groups events: collectives alone, and sends and receives started together on one communicator; not those of other threads."""
    ordered = (event for event in events if event.axis not in CONCURRENT_AXES)
    groups = groupby(
        ordered,
        key=lambda event: (event.communicator, event.sequence_number if event.batch is None else -1 - event.batch),
    )
    return [list(batch) for _, batch in groups]


def _as_call(batch: list[CommEvent]) -> Call:
    operations = tuple(Operation(event.op, -1 if event.peer is None else event.peer) for event in batch)
    return Call(batch[0].communicator, operations)
