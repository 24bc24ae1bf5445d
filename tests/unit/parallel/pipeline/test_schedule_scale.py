"""Schedules of many micro-batches: one rank keeps its own actions and nothing else, and they are those of the whole schedule."""

from __future__ import annotations

import tracemalloc
from heapq import heappop, heappush

from hypothesis import given, settings
from hypothesis import strategies as st

from petatron.schedule import (
    Action,
    ScheduleShape,
    build_schedule,
    computations,
    forward_only,
    in_flight,
    rank_schedule,
    stage_rank,
)
from petatron.schedule.actions import SCHEDULES, ActionKind, max_held_micro_batches, needed_by, produced_by

COSTS = {ActionKind.FORWARD: 10, ActionKind.BACKWARD: 20, ActionKind.INPUT_GRAD: 10, ActionKind.WEIGHT_GRAD: 10}


@st.composite
def shapes(draw: st.DrawFn) -> dict:
    name = draw(st.sampled_from(SCHEDULES))
    virtual = draw(st.integers(1, 4)) if name == "interleaved" else 2 if name == "zb-v" else 1
    return {
        "name": name,
        "ranks": draw(st.integers(1, 6)),
        "virtual": virtual,
        "micro_batches": draw(st.integers(1, 24)),
    }


def played(orders: list[list[Action]], rank_of: list[int]) -> list[list[tuple[Action, ...]]]:
    """The rule of `send_recv.py` as an event queue: a message is written into both lists when its computation ends."""
    lists: list[list[list[Action]]] = [[] for _ in orders]
    written, at, busy = [-1] * len(orders), [0] * len(orders), [False] * len(orders)
    here: list[set] = [set() for _ in orders]
    events: list[tuple] = []

    def start(rank: int, now: int) -> None:
        if busy[rank] or at[rank] == len(orders[rank]):
            return
        action = orders[rank][at[rank]]
        if all(need in here[rank] for need in needed_by(action, stages=len(rank_of))):
            busy[rank] = True
            heappush(events, (now + COSTS[action.kind], rank, ()))

    def transfer(rank: int, action: Action, now: int) -> None:
        if written[rank] == now:
            lists[rank][-1].append(action)
        else:
            lists[rank].append([action])
        written[rank] = now

    for rank in range(len(orders)):
        start(rank, 0)
    while events:
        now, ended, touched = events[0][0], [], []
        while events and events[0][0] == now:
            _, rank, arrived = heappop(events)
            touched.append(rank)
            if arrived:
                here[rank].add(arrived)
                continue
            action = orders[rank][at[rank]]
            at[rank], busy[rank], written[rank] = at[rank] + 1, False, -1
            lists[rank].append([action])
            ended.append(action)
            here[rank].add(produced_by(action))
        for action in sorted(ended, key=lambda a: (a.kind != "F", -a.stage if a.kind == "F" else a.stage)):
            forward, product = action.kind is ActionKind.FORWARD, produced_by(action)
            stage = action.stage + (1 if forward else -1)
            if product is None or not 0 <= stage < len(rank_of) or rank_of[stage] == rank_of[action.stage]:
                continue
            kinds = ("SF", "RF") if forward else ("SB", "RB")
            transfer(rank_of[action.stage], Action(ActionKind(kinds[0]), action.stage, action.micro_batch), now)
            transfer(rank_of[stage], Action(ActionKind(kinds[1]), stage, action.micro_batch), now)
            heappush(events, (now + 1, rank_of[stage], product))
        for rank in dict.fromkeys(touched):
            start(rank, now)
    return [[tuple(batch) for batch in batches] for batches in lists]


@settings(max_examples=60, deadline=None)
@given(shapes())
def test_transfers_stand_where_an_event_queue_puts_them(shape: dict):
    stages = shape["ranks"] * shape["virtual"]
    rank_of = [stage_rank(shape["name"], stage, ranks=shape["ranks"], stages=stages) for stage in range(stages)]
    expected = played([list(order) for order in computations(ScheduleShape(**shape))], rank_of)
    assert [list(batches) for batches in build_schedule(ScheduleShape(**shape)).action_batches] == expected


@settings(max_examples=40, deadline=None)
@given(shapes())
def test_a_rank_has_its_part_of_the_whole_schedule(shape: dict):
    training, evaluation = build_schedule(ScheduleShape(**shape)), forward_only(ScheduleShape(**shape))
    for rank in range(shape["ranks"]):
        assert tuple(rank_schedule(ScheduleShape(**shape), rank=rank).action_batches()) == training.action_batches[rank]
        assert (
            tuple(rank_schedule(ScheduleShape(**shape), rank=rank, training=False).action_batches())
            == evaluation.action_batches[rank]
        )


@settings(max_examples=40, deadline=None)
@given(shapes())
def test_micro_batches_in_flight_follow_from_the_computations(shape: dict):
    schedule = build_schedule(ScheduleShape(**shape))
    whole = [
        max_held_micro_batches(action for action in schedule.actions[schedule.rank_of(stage)] if action.stage == stage)
        for stage in range(schedule.stages)
    ]
    assert list(in_flight(ScheduleShape(**shape))) == whole


def test_a_rank_keeps_a_few_bytes_per_action():
    """All ranks' actions as objects are 25 MB at this size; those of one rank take ten bytes each."""
    rank_schedule.cache_clear()
    tracemalloc.start()
    try:
        before = tracemalloc.get_traced_memory()[0]
        schedule = rank_schedule(ScheduleShape("interleaved", ranks=8, virtual=4, micro_batches=128), rank=3)
        kept = tracemalloc.get_traced_memory()[0] - before
    finally:
        tracemalloc.stop()
    actions = sum(len(batch) for batch in schedule.action_batches())
    assert actions == 4 * 128 * (2 + 4)
    assert schedule.actions.num_bytes == 10 * actions
    assert kept < 64_000
