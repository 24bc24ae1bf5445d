"""Programs of communication under NCCL's rules: what meets, what waits for what, and the layouts that we train in, in the abstract."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from petatron.plan.pipeline_simulator import ActionCosts
from petatron.schedule import Schedule, ScheduleShape, build_schedule
from petatron.schedule.actions import ActionKind
from tests.nccl_rules.nccl_program import (
    RECEIVE,
    SEND,
    Call,
    Compute,
    NcclProgram,
    Operation,
    ProgramItem,
    ProgramResult,
    simulate_program,
)
from tests.nccl_rules.pipeline_program import POLICIES, pipeline_program

STRICTEST = {"lazy_connect": True, "single_stream": True}


def _batch(communicator: str, *operations: tuple[str, int], cost: float = 0.0) -> Call:
    return Call(communicator, tuple(Operation(kind, peer) for kind, peer in operations), cost)


def _collective(communicator: str, kind: str = "all_reduce", *, cost: float = 0.0, blocking: bool = False) -> Call:
    return Call(communicator, (Operation(kind),), cost, blocking)


def _play(*items: list[ProgramItem], members: dict[str, tuple[int, ...]] | None = None, **rules: bool) -> ProgramResult:
    everybody = tuple(range(len(items)))
    names = {item.communicator for own in items for item in own if isinstance(item, Call)}
    return simulate_program(NcclProgram(items, dict.fromkeys(names, everybody) | (members or {})), **rules)


def test_times_are_those_of_the_longest_path():
    """Rank 1 posts its receive at 0, rank 0 sends at 3; the message takes 2; a computation of 5 uses it."""
    outcome = _play(
        [Compute("F", cost=3.0), _batch("pp", (SEND, 1), cost=2.0), Compute("other", cost=1.0)],
        [_batch("pp", (RECEIVE, 0), cost=2.0), Compute("B", (0,), cost=5.0)],
    )
    assert outcome.completes and outcome.makespan == 10.0


def test_a_batch_completes_as_a_whole():
    """What rank 1 has got from rank 0 is not usable before what it gets in the same batch from rank 2."""

    def makespan(*batches: Call) -> float:
        needs = (0,)
        return _play(
            [_batch("x", (SEND, 1))],
            [*batches, Compute("uses what rank 0 sent", needs, cost=1.0)],
            [Compute("late", cost=10.0), _batch("x" if len(batches) == 1 else "y", (SEND, 1))],
        ).makespan

    assert makespan(_batch("x", (RECEIVE, 0), (RECEIVE, 2))) == 11.0
    assert makespan(_batch("x", (RECEIVE, 0)), _batch("y", (RECEIVE, 2))) == 10.0


def test_messages_meet_by_communicator_and_in_order():
    crossed = _play([_batch("x", (SEND, 1))], [_batch("y", (RECEIVE, 0))])
    assert [str(wait) for wait in crossed.blocked_calls] == [
        "rank 0 waits in send to rank 1 on x for rank 1",
        "rank 1 waits in receive from rank 0 on y for rank 0",
    ]
    late = _play([_batch("x", (SEND, 1)), _batch("x", (SEND, 1))], [_batch("x", (RECEIVE, 0))])
    assert [(wait.rank, wait.position) for wait in late.blocked_calls] == [(0, 1)]


def test_a_collective_meets_its_own_kind_on_all_members():
    outcome = _play([_collective("dp"), _collective("dp", "all_gather")], [_collective("dp")], [_collective("dp")])
    assert [str(wait) for wait in outcome.blocked_calls] == ["rank 0 waits in all_gather on dp for ranks 1, 2"]
    assert not _play([_collective("dp")], [_collective("dp", "all_gather")]).completes


def test_what_stands_behind_a_call_that_never_ends_is_not_reported():
    """One line per rank that has begun something: what it issues later waits for that, not for anybody else."""
    outcome = _play([_batch("x", (RECEIVE, 1)), Compute("B", (0,)), _batch("x", (SEND, 1)), _collective("y")], [])
    assert [str(wait) for wait in outcome.blocked_calls] == ["rank 0 waits in receive from rank 1 on x for rank 1"]


def test_opposite_orders_on_two_communicators_need_room_for_both():
    one, two = [_collective("tp"), _collective("dp")], [_collective("dp"), _collective("tp")]
    assert _play(one, two).completes
    assert not _play(one, two, single_stream=True).completes
    assert not _play(one, two, lazy_connect=True).completes
    blocking = [[_collective(call.communicator, blocking=True) for call in order] for order in (one, two)]
    assert not _play(*blocking).completes


def test_connecting_lazily_waits_for_all_members():
    """Rank 2 has no part in the message, but comes to the communicator only after what rank 0 sends after it."""
    program = (
        [_batch("pp", (SEND, 1)), _batch("x", (SEND, 2))],
        [_batch("pp", (RECEIVE, 0))],
        [Call("x", (Operation(RECEIVE, 0),), blocking=True), _batch("pp")],
    )
    members = {"x": (0, 2)}
    assert _play(*program, members=members).completes
    outcome = _play(*program, members=members, lazy_connect=True)
    assert str(outcome.blocked_calls[0]) == "rank 0 waits to connect pp with rank 2"


def _ring(size: int, rounds: int, send_and_receive: Callable[[int, int], list[Call]]) -> NcclProgram:
    """Context parallelism: keys and values go around while attention is computed with those that are here."""
    lists = []
    for rank in range(size):
        items: list[ProgramItem] = []
        for _ in range(rounds):
            for step in range(size - 1):
                calls = send_and_receive((rank + 1) % size, (rank - 1) % size)
                items += [*calls, Compute(f"attention {step}"), Compute("wait", (len(items) + len(calls) - 1,))]
        lists.append(items)
    names = {item.communicator for items in lists for item in items if isinstance(item, Call)}
    return NcclProgram(tuple(lists), {name: tuple(range(size)) for name in names})


@pytest.mark.parametrize("size", [2, 3, 4, 8])
def test_ring_of_context_parallelism(size: int):
    batched = _ring(size, 3, lambda to, source: [_batch("cp", (SEND, to), (RECEIVE, source))])
    assert simulate_program(batched).completes and simulate_program(batched, **STRICTEST).completes
    unbatched = simulate_program(
        _ring(size, 3, lambda to, source: [_batch("cp", (SEND, to)), _batch("cp", (RECEIVE, source))])
    )
    assert [wait.operation and wait.operation.kind for wait in unbatched.blocked_calls] == [SEND] * size


def test_ring_of_two_ranks_deadlocks_over_a_communicator_per_pair_unless_batched():
    """`alone`, which is safe for pipelines, is not for rings; a communicator per direction would be."""
    assert not simulate_program(
        _ring(2, 1, lambda to, source: [_batch("0-1", (SEND, to)), _batch("0-1", (RECEIVE, source))])
    ).completes
    directed = _ring(
        2, 1, lambda to, source: [_batch(f"to {to}", (SEND, to)), _batch(f"to {1 - to}", (RECEIVE, source))]
    )
    assert simulate_program(directed).completes
    assert not simulate_program(directed, single_stream=True).completes


def _layout(
    schedule: Schedule,
    policy: str,
    around: Callable[[Compute, int], list[ProgramItem]],
    *,
    width: int = 2,
    last: tuple[Call, ...] = (),
    ends: bool = False,
) -> NcclProgram:
    """Several pipelines side by side; `around` makes of a computation at a pipeline rank what a rank issues for it.

    Names of communicators in `around` get the pipeline rank behind them: they are those of one stage's ranks. `last` follows the
    walk, on all ranks; before it comes, if asked for, the all-reduce of the first and last pipeline rank (tied embedding).
    """
    one = pipeline_program(schedule, POLICIES[policy], ActionCosts())
    lists: list[list[ProgramItem]] = []
    members: dict[object, tuple[int, ...]] = {"world": tuple(range(schedule.ranks * width))}
    for replica in range(width):
        for stage_rank, own in enumerate(one.items):
            items: list[ProgramItem] = []
            moved: list[int] = []
            for item in own:
                if isinstance(item, Compute):
                    needed = Compute(item.label, tuple(moved[need] for need in item.needs), item.cost)
                    base = len(items)
                    for part in around(needed, stage_rank):
                        if isinstance(part, Compute) and part is not needed:
                            part = Compute(part.label, tuple(base + need for need in part.needs), part.cost)
                        items.append(part)
                else:
                    key = (str(item.communicator), replica)
                    members[key] = tuple(
                        rank + replica * schedule.ranks for rank in one.communicators[item.communicator]
                    )
                    operations = tuple(Operation(op.kind, op.peer + replica * schedule.ranks) for op in item.operations)
                    items.append(Call(key, operations))
                moved.append(len(items) - 1)
            if ends and stage_rank in (0, schedule.ranks - 1):
                members["ends", replica] = (replica * schedule.ranks, (replica + 1) * schedule.ranks - 1)
                items.append(Call(("ends", replica), (Operation("all_reduce"),)))
            lists.append([*items, *last])
    for items in lists:
        for item in items:
            if isinstance(item, Call) and item.communicator not in members:
                stage_rank = item.communicator[1]  # type: ignore[index]
                members[item.communicator] = tuple(stage_rank + replica * schedule.ranks for replica in range(width))
    return NcclProgram(tuple(lists), members)


def _experts(compute: Compute, stage_rank: int) -> list[ProgramItem]:
    """Dispatch and combine, in the midst of a layer."""
    exchange = Call(("ep", stage_rank), (Operation("all_to_all"),))
    if compute.label.kind is ActionKind.WEIGHT_GRAD:  # type: ignore[attr-defined]
        return [compute]
    return [compute, exchange, Compute("experts", (1,)), exchange, Compute("combine", (3,))]


def _fully_sharded(compute: Compute, stage_rank: int) -> list[ProgramItem]:
    """The next unit's weights are gathered beside a computation, gradients are scattered behind it and awaited at the end."""
    gather = Call(("shard", stage_rank), (Operation("all_gather"),))
    scatter = Call(("shard", stage_rank), (Operation("reduce_scatter"),))
    gathered: list[ProgramItem] = [gather, gather, Compute("wait", (0,)), compute, Compute("wait", (1,))]
    return gathered if compute.label.kind is ActionKind.FORWARD else [*gathered, scatter]  # type: ignore[attr-defined]


def _reduced(compute: Compute, stage_rank: int) -> list[ProgramItem]:
    """Gradients of the last micro-batch's buckets, over a communicator in the background."""
    last = compute.label.kind is not ActionKind.FORWARD and compute.label.micro_batch == 7  # type: ignore[attr-defined]
    return [compute, *([Call(("dp_cp", stage_rank), (Operation("reduce_scatter"),))] * (2 if last else 0))]


EXCHANGE = (_collective("world", "all_to_all", blocking=True),) * 2


@pytest.mark.parametrize("policy", ["group_batch", "pair_direction"])
@pytest.mark.parametrize(
    ("name", "virtual"), [("1f1b", 1), ("interleaved", 2), ("zb-h1", 1), ("zb-v", 2)], ids=lambda value: str(value)
)
def test_pipelines_beside_everything_else(name: str, virtual: int, policy: str):
    schedule = build_schedule(ScheduleShape(name, ranks=4, virtual=virtual, micro_batches=8))
    for around in (_experts, _fully_sharded, _reduced):
        program = _layout(schedule, policy, around, ends=True, last=EXCHANGE)
        outcome = simulate_program(program, **STRICTEST)
        assert outcome.completes, (around.__name__, [str(wait) for wait in outcome.blocked_calls])


def test_the_rule_that_deadlocked_does_so_beside_everything_else():
    schedule = build_schedule(ScheduleShape("interleaved", ranks=4, virtual=2, micro_batches=8))
    assert not simulate_program(_layout(schedule, "lone_unbatched", _experts)).completes


def test_a_reduction_at_another_place_on_one_replica_needs_room():
    """Two replicas that reduce gradients at different places of their walks: safe with a stream for each communicator only."""
    schedule = build_schedule(ScheduleShape("1f1b", ranks=2, virtual=1, micro_batches=4))
    program = _layout(schedule, "group_batch", lambda compute, stage_rank: [compute])
    reduction = Call("dp", (Operation("all_reduce"),))
    items = [list(own) for own in program.items]
    # Ranks 0 and 1 are one pipeline, 2 and 3 the other.
    items[1].insert(0, reduction)  # before rank 1 receives what rank 0 sends
    items[3].append(reduction)  # after rank 3 has received all
    program = NcclProgram(tuple(items), {**program.communicators, "dp": (1, 3)})
    assert (
        simulate_program(program).completes and simulate_program(program, single_stream=True).completes
    )  # nothing leads back from one pipeline to the other
    items[0].insert(0, Call("dp first", (Operation("all_reduce"),)))
    items[2].append(Call("dp first", (Operation("all_reduce"),)))
    items[1].append(items[1].pop(0))
    items[3].insert(0, items[3].pop())
    program = NcclProgram(tuple(items), {**program.communicators, "dp first": (0, 2)})
    assert simulate_program(program).completes
    assert not simulate_program(program, single_stream=True).completes
