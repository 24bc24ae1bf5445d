"""Schedules as data: complete, in an order that can be carried out, with transfers that no backend can hang on."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from petatron.config.schema.pipeline_schedules import OVERLAP_SCHEDULES
from petatron.plan.pipeline_simulator import ActionCosts, messages_by_peer, peak_activations, simulate
from petatron.schedule import Action, Schedule, ScheduleShape, build_schedule, forward_only, stage_rank
from petatron.schedule.actions import COMPUTE_KINDS, SCHEDULES, ActionKind, needed_by, produced_by
from petatron.schedule.gpipe_and_1f1b import micro_batch_groups
from petatron.schedule.pipeline_plan import PipelinePlan
from petatron.schedule.send_recv import insert_send_recv
from tests.longform import diagonal


@st.composite
def shapes(draw: st.DrawFn) -> dict:
    name = draw(st.sampled_from(SCHEDULES))
    ranks = draw(st.integers(1, 7))
    virtual = draw(st.integers(1, 4)) if name == "interleaved" else 2 if name == "zb-v" else 1
    return {"name": name, "ranks": ranks, "virtual": virtual, "micro_batches": draw(st.integers(1, 20))}


def _text(actions: tuple[Action, ...]) -> str:
    return " ".join(f"{action.kind}{action.stage}.{action.micro_batch}" for action in actions)


def _kinds(schedule: Schedule, rank: int) -> str:
    return "".join(action.kind for action in schedule.actions[rank] if action.kind in COMPUTE_KINDS)


def _stages_of(schedule: Schedule, rank: int) -> tuple[int, ...]:
    return tuple(stage for stage in range(schedule.stages) if schedule.rank_of(stage) == rank)


def _stuck(schedule: Schedule) -> list[str]:
    """Carry a schedule out on the strictest backend there is: every transfer holds its rank until the other end is there.

    Answers what the ranks that never come to their end wait for.
    """
    at = [0] * schedule.ranks
    made: set = set()

    def head(rank: int) -> Action | None:
        actions = schedule.actions[rank]
        return actions[at[rank]] if at[rank] < len(actions) else None

    moved = True
    while moved:
        moved = False
        for rank in range(schedule.ranks):
            while (action := head(rank)) is not None and action.kind in COMPUTE_KINDS:
                if not all((rank, need) in made for need in needed_by(action, stages=schedule.stages)):
                    break
                if (product := produced_by(action)) is not None:
                    made.add((rank, product))
                at[rank] += 1
                moved = True
            if action is None or action.kind not in (ActionKind.SEND_FORWARD, ActionKind.SEND_BACKWARD):
                continue
            forward = action.kind is ActionKind.SEND_FORWARD
            stage = action.stage + (1 if forward else -1)
            receiver = schedule.rank_of(stage)
            kind = ActionKind.RECEIVE_FORWARD if forward else ActionKind.RECEIVE_BACKWARD
            if head(receiver) == Action(kind, stage, action.micro_batch):
                product = (ActionKind.FORWARD if forward else ActionKind.INPUT_GRAD, action.stage, action.micro_batch)
                assert (rank, product) in made, f"rank {rank} sends what it has not made: {action}"
                made.add((receiver, product))
                at[rank] += 1
                at[receiver] += 1
                moved = True
    return [f"rank {rank}: {head(rank)}" for rank in range(schedule.ranks) if head(rank) is not None]


@settings(max_examples=80, deadline=None)
@given(shapes())
def test_every_micro_batch_passes_every_stage_once_each_way(shape: dict):
    schedule = build_schedule(ScheduleShape(**shape))
    count = Counter(action for actions in schedule.actions for action in actions)
    assert max(count.values()) == 1
    for stage in range(schedule.stages):
        for m in range(schedule.micro_batches):
            kinds = {kind for kind in COMPUTE_KINDS if Action(kind, stage, m) in count}
            assert kinds in (
                {ActionKind.FORWARD, ActionKind.BACKWARD},
                {ActionKind.FORWARD, ActionKind.INPUT_GRAD, ActionKind.WEIGHT_GRAD},
            )
    for rank, actions in enumerate(schedule.actions):
        assert {action.stage for action in actions} == set(_stages_of(schedule, rank))


@settings(max_examples=80, deadline=None)
@given(shapes())
def test_no_deadlock_even_if_every_send_waits_for_its_receive(shape: dict):
    assert _stuck(build_schedule(ScheduleShape(**shape))) == []


@settings(max_examples=50, deadline=None)
@given(shapes(), st.data())
def test_both_ends_list_their_messages_in_the_same_order(shape: dict, data: st.DataObject):
    group_size = None
    if shape["name"] == "interleaved":
        group_size = data.draw(st.none() | st.integers(shape["ranks"], shape["ranks"] + 5))
    schedule = build_schedule(ScheduleShape(**shape, group_size=group_size))
    for rank in range(schedule.ranks):
        for peer, messages in messages_by_peer(schedule, rank).items():
            assert messages == messages_by_peer(schedule, peer)[rank]
    boundaries = sum(schedule.rank_of(s) != schedule.rank_of(s + 1) for s in range(schedule.stages - 1))
    transfers = sum(action.kind not in COMPUTE_KINDS for actions in schedule.actions for action in actions)
    assert transfers == 4 * boundaries * schedule.micro_batches


@settings(max_examples=40, deadline=None)
@given(st.integers(1, 8), st.integers(1, 24))
def test_memory_of_each_schedule(ranks: int, micro_batches: int):
    def peak(name: str, virtual: int = 1) -> tuple[int, ...]:
        return peak_activations(
            build_schedule(ScheduleShape(name, ranks=ranks, virtual=virtual, micro_batches=micro_batches))
        )

    assert peak("1f1b") == tuple(min(micro_batches, ranks - rank) for rank in range(ranks))
    assert peak("gpipe") == ((micro_batches,) * ranks if ranks > 1 else (1,))
    assert max(peak("zb-h1")) <= ranks
    assert max(peak("zb-v", 2)) <= 2 * ranks


@settings(max_examples=40, deadline=None)
@given(shapes())
def test_stages_hold_between_them_what_their_rank_holds(shape: dict):
    schedule = build_schedule(ScheduleShape(**shape))
    plan = PipelinePlan(shape["name"], shape["ranks"], shape["virtual"])
    by_stage = plan.in_flight(shape["micro_batches"])
    for rank, held in enumerate(peak_activations(schedule)):
        own = [by_stage[stage] for stage in _stages_of(schedule, rank)]
        assert max(own) <= held <= sum(own)
        assert min(own) >= 1 and max(own) <= shape["micro_batches"]


@settings(max_examples=40, deadline=None)
@given(st.integers(2, 6), st.integers(2, 4), st.integers(1, 20), st.integers(0, 6))
def test_interleaved_runs_as_far_ahead_as_its_first_group_says(p: int, v: int, m: int, larger: int):
    schedule = build_schedule(ScheduleShape("interleaved", ranks=p, virtual=v, micro_batches=m, group_size=p + larger))
    first = len(micro_batch_groups(m, ranks=p, group_size=p + larger)[0])
    for rank in range(p):
        ahead = (v - 1) * first + 2 * (p - 1 - rank)
        assert _kinds(schedule, rank).index("B") == min(ahead + 1, v * m)


@settings(max_examples=40, deadline=None)
@given(st.integers(1, 60), st.integers(1, 8), st.integers(0, 6))
def test_groups_cover_the_micro_batches_and_none_is_larger_than_the_first(m: int, ranks: int, larger: int):
    groups = micro_batch_groups(m, ranks=ranks, group_size=ranks + larger)
    assert [index for group in groups for index in group] == list(range(m))
    sizes = [len(group) for group in groups]
    assert sizes == sorted(sizes, reverse=True)
    assert m < ranks or min(sizes) >= ranks


@settings(max_examples=40, deadline=None)
@given(shapes())
def test_forward_only_has_the_same_stages_and_no_backward(shape: dict):
    evaluation, training = forward_only(ScheduleShape(**shape)), build_schedule(ScheduleShape(**shape))
    assert _stuck(evaluation) == []
    forwards = [action for actions in evaluation.actions for action in actions if action.kind in COMPUTE_KINDS]
    assert {action.kind for action in forwards} == {ActionKind.FORWARD}
    assert len(set(forwards)) == len(forwards) == evaluation.stages * evaluation.micro_batches
    for rank in range(training.ranks):
        assert _stages_of(evaluation, rank) == _stages_of(training, rank)


@pytest.mark.parametrize("name", SCHEDULES)
def test_one_rank_keeps_one_micro_batch_alive(name: str):
    schedule = build_schedule(ScheduleShape(name, ranks=1, virtual=1, micro_batches=3))
    assert _text(schedule.actions[0]) == "F0.0 B0.0 F0.1 B0.1 F0.2 B0.2"


def test_stages_in_a_loop_and_in_a_v():
    assert [stage_rank("interleaved", s, ranks=3, stages=6) for s in range(6)] == [0, 1, 2, 0, 1, 2]
    assert [stage_rank("zb-v", s, ranks=3, stages=6) for s in range(6)] == [0, 1, 2, 2, 1, 0]
    assert _stages_of(build_schedule(ScheduleShape("zb-v", ranks=3, virtual=2, micro_batches=4)), 1) == (1, 4)


def test_orders_written_out():
    one = build_schedule(ScheduleShape("1f1b", ranks=2, virtual=1, micro_batches=3))
    assert _text(one.actions[0]) == "F0.0 SF0.0 F0.1 SF0.1 RB0.0 B0.0 RB0.1 F0.2 SF0.2 B0.1 RB0.2 B0.2"
    assert _text(one.actions[1]) == "RF1.0 RF1.1 F1.0 B1.0 SB1.0 F1.1 B1.1 SB1.1 RF1.2 F1.2 B1.2 SB1.2"
    assert _kinds(build_schedule(ScheduleShape("gpipe", ranks=2, virtual=1, micro_batches=3)), 0) == "FFFBBB"
    assert _kinds(build_schedule(ScheduleShape("zb-h1", ranks=2, virtual=1, micro_batches=3)), 1) == "FIFIWFIWW"
    assert [len(g) for g in micro_batch_groups(11, ranks=4, group_size=4)] == [6, 5]
    assert [len(g) for g in micro_batch_groups(11, ranks=4, group_size=6)] == [6, 5]
    assert [len(g) for g in micro_batch_groups(13, ranks=4, group_size=6)] == [7, 6]


@pytest.mark.parametrize(
    ("shape", "words"),
    [
        (("2f2b", 2, 1, 4, None), "there is no '2f2b'"),
        (("1f1b", 0, 1, 4, None), "at least 1"),
        (("1f1b", 2, 1, 0, None), "at least 1"),
        (("1f1b", 2, 2, 4, None), "one stage per rank, not 2"),
        (("zb-h1", 2, 2, 4, None), "one stage per rank"),
        (("zb-v", 2, 1, 4, None), "exactly two stages per rank, not 1"),
        (("interleaved", 4, 2, 8, 3), "smaller than the pipeline's 4 ranks"),
    ],
)
def test_what_is_no_schedule_says_why(shape: tuple, words: str):
    name, ranks, virtual, micro_batches, group_size = shape
    arguments = {"ranks": ranks, "virtual": virtual, "micro_batches": micro_batches, "group_size": group_size}
    problem = ScheduleShape(name, **arguments).problem()
    assert problem is not None and words in problem
    with pytest.raises(ValueError, match=words):
        build_schedule(ScheduleShape(name, **arguments))
    if group_size is None:
        with pytest.raises(ValueError, match=words):
            forward_only(ScheduleShape(name, ranks=ranks, virtual=virtual, micro_batches=micro_batches))


def test_a_group_size_is_nothing_to_the_other_schedules():
    shape = {"ranks": 4, "virtual": 1, "micro_batches": 8}
    assert (
        build_schedule(ScheduleShape("1f1b", **shape, group_size=2)).action_batches
        == build_schedule(ScheduleShape("1f1b", **shape)).action_batches
    )


def test_orders_that_wait_in_a_circle_are_refused():
    backward_first = [[Action(ActionKind.BACKWARD, 0, 0), Action(ActionKind.FORWARD, 0, 0)]]
    with pytest.raises(ValueError, match=r"never ends: rank 0 waits for B\(stage 0, micro-batch 0\)"):
        insert_send_recv(backward_first, [0])


def _replay(schedule: Schedule, *, latency: float) -> float:
    """Bubble when a rank's transfers run one batch after the other and a batch is there only as a whole (NCCL)."""
    cost = {ActionKind.FORWARD: 1.0, ActionKind.BACKWARD: 2.0, ActionKind.INPUT_GRAD: 1.0, ActionKind.WEIGHT_GRAD: 1.0}
    at, free, stream = [0] * schedule.ranks, [0.0] * schedule.ranks, [0.0] * schedule.ranks
    begun: dict[tuple[Action, int], float] = {}  # a transfer on one end's stream
    over: dict[Action, float] = {}  # a receive, with all of its batch
    busy = 0.0
    moved = True
    while moved:
        moved = False
        for rank in range(schedule.ranks):
            while at[rank] < len(schedule.action_batches[rank]):
                batch = schedule.action_batches[rank][at[rank]]
                first = batch[0]
                if first.kind in COMPUTE_KINDS:
                    needs = [need for action in batch if (need := _receive_of(schedule, action)) is not None]
                    if any(need not in over for need in needs):
                        break
                    costs = sum(cost[action.kind] for action in batch)
                    free[rank] = max([free[rank], *(over[need] for need in needs)]) + costs
                    busy += costs
                else:
                    ends = [_other_end(schedule, action) for action in batch]
                    for action in batch:
                        begun.setdefault((action, rank), max(free[rank], stream[rank]))
                    if any(end not in begun for end in ends):
                        moved |= any((action, rank) not in begun for action in batch)
                        break
                    done = max(max(begun[end], begun[action, rank]) for end, action in zip(ends, batch)) + latency
                    stream[rank] = done
                    over |= dict.fromkeys(batch, done)
                at[rank] += 1
                moved = True
    assert at == [len(batches) for batches in schedule.action_batches], "batches wait for each other in a circle"
    return 1.0 - busy / (schedule.ranks * max(free))


def _receive_of(schedule: Schedule, action: Action) -> Action | None:
    """The receive that a computation waits for."""
    forward = action.kind is ActionKind.FORWARD
    if action.kind is ActionKind.WEIGHT_GRAD:
        return None
    source = action.stage + (-1 if forward else 1)
    if not 0 <= source < schedule.stages or schedule.rank_of(source) == schedule.rank_of(action.stage):
        return None
    return Action(
        ActionKind.RECEIVE_FORWARD if forward else ActionKind.RECEIVE_BACKWARD, action.stage, action.micro_batch
    )


def _other_end(schedule: Schedule, action: Action) -> tuple[Action, int]:
    partner = {
        ActionKind.SEND_FORWARD: (ActionKind.RECEIVE_FORWARD, 1),
        ActionKind.RECEIVE_FORWARD: (ActionKind.SEND_FORWARD, -1),
        ActionKind.SEND_BACKWARD: (ActionKind.RECEIVE_BACKWARD, -1),
        ActionKind.RECEIVE_BACKWARD: (ActionKind.SEND_BACKWARD, 1),
    }
    kind, step = partner[action.kind]
    return Action(kind, action.stage + step, action.micro_batch), schedule.rank_of(action.stage + step)


@settings(max_examples=60, deadline=None)
@given(shapes(), st.integers(0, 3))
def test_combined_passes_are_of_two_micro_batches_and_wait_for_nothing_of_each_other(shape: dict, larger: int):
    if shape["name"] not in OVERLAP_SCHEDULES and shape["ranks"] > 1:
        with pytest.raises(ValueError, match="cannot combine them; 1f1b and interleaved can"):
            build_schedule(ScheduleShape(**shape, combined=True))
        return
    group_size = shape["ranks"] + larger if shape["name"] == "interleaved" else None
    schedule = build_schedule(ScheduleShape(**shape, group_size=group_size, combined=True))
    plain = build_schedule(ScheduleShape(**shape, group_size=group_size))
    assert _stuck(schedule) == []
    _replay(schedule, latency=0.02)  # asserts that no batches wait for each other
    for rank, batches in enumerate(schedule.action_batches):
        pairs = [batch for batch in batches if batch[0].kind in COMPUTE_KINDS and len(batch) > 1]
        for forward, backward in pairs:
            assert (forward.kind, backward.kind) == (ActionKind.FORWARD, ActionKind.BACKWARD)
            assert (ActionKind.FORWARD, forward.stage, forward.micro_batch) not in needed_by(
                backward, stages=schedule.stages
            )
        for kind in (ActionKind.FORWARD, ActionKind.BACKWARD):
            orders = [[a for a in found.actions[rank] if a.kind is kind] for found in (schedule, plain)]
            assert orders[0] == orders[1], "sums of gradients and draws of random numbers keep their order"
    if schedule.ranks == schedule.stages == 1:
        assert len(pairs) == schedule.micro_batches - 1


def test_combined_orders_written_out():
    def text(schedule: Schedule, rank: int) -> str:
        batches = [batch for batch in schedule.action_batches[rank] if batch[0].kind in COMPUTE_KINDS]
        return " ".join("+".join(f"{action.kind}{action.micro_batch}" for action in batch) for batch in batches)

    alone = build_schedule(ScheduleShape("1f1b", ranks=1, virtual=1, micro_batches=3, combined=True))
    assert text(alone, 0) == "F0 F1+B0 F2+B1 B2"
    two = build_schedule(ScheduleShape("1f1b", ranks=2, virtual=1, micro_batches=5, combined=True))
    assert text(two, 0) == "F0 F1 F2 F3+B0 F4+B1 B2 B3 B4"
    assert text(two, 1) == "F0 F1+B0 F2+B1 F3+B2 F4+B3 B4"
    assert peak_activations(two) == (4, 2)


@pytest.mark.parametrize(("ranks", "virtual", "micro_batches"), [(2, 1, 8), (4, 1, 16), (4, 2, 16), (8, 3, 32)])
def test_combined_passes_cost_no_bubble(ranks: int, virtual: int, micro_batches: int):
    name = "1f1b" if virtual == 1 else "interleaved"
    shape = {"ranks": ranks, "virtual": virtual, "micro_batches": micro_batches}
    plain, combined = (build_schedule(ScheduleShape(name, **shape, combined=combined)) for combined in (False, True))
    costs = ActionCosts(forward=1.0, backward=2.0)
    assert simulate(combined, costs).bubble == pytest.approx(simulate(plain, costs).bubble, abs=1e-9)


@diagonal(3)
@pytest.mark.parametrize(
    ("name", "virtual"), [("gpipe", 1), ("1f1b", 1), ("interleaved", 2), ("zb-h1", 1), ("zb-v", 2)]
)
@pytest.mark.parametrize(("ranks", "micro_batches"), [(2, 3), (4, 16), (8, 32)])
def test_batches_that_complete_as_one_cost_no_bubble(name: str, virtual: int, ranks: int, micro_batches: int):
    schedule = build_schedule(ScheduleShape(name, ranks=ranks, virtual=virtual, micro_batches=micro_batches))
    bubbles = [_replay(schedule, latency=latency) for latency in (0.0, 0.02)]
    ideal = simulate(schedule, ActionCosts(forward=1.0, backward=2.0)).bubble
    assert bubbles[0] == pytest.approx(ideal, abs=0.01)
    assert bubbles[1] <= ideal + 0.05
