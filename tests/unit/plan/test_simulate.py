"""Simulated pipelines: idle time equals theory, is never worse than PyTorch's schedules, and zero-bubble beats 1F1B."""

from __future__ import annotations

from itertools import pairwise
from types import SimpleNamespace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.distributed import pipelining

from petatron.plan.pipeline_simulator import ActionCosts, Simulation, peak_activations, simulate, theoretical_bubble
from petatron.schedule import Action, Schedule, ScheduleShape, build_schedule, forward_only, stage_rank
from petatron.schedule.actions import ActionKind
from petatron.schedule.send_recv import insert_send_recv
from tests.longform import diagonal

KINDS = {
    "FORWARD": ActionKind.FORWARD,
    "FULL_BACKWARD": ActionKind.BACKWARD,
    "BACKWARD_INPUT": ActionKind.INPUT_GRAD,
    "BACKWARD_WEIGHT": ActionKind.WEIGHT_GRAD,
}
UNEQUAL = (
    ActionCosts(),
    ActionCosts(forward=1.0, input_grad=1.2, weight_grad=0.8),
    ActionCosts(forward=1.0, input_grad=1.0, weight_grad=0.7, transfer=0.1),
    ActionCosts(transfer=0.5),
)


def _run(name: str, p: int, v: int, m: int, costs: ActionCosts | None = None) -> Simulation:
    return simulate(build_schedule(ScheduleShape(name, ranks=p, virtual=v, micro_batches=m)), costs or ActionCosts())


@settings(max_examples=25, deadline=None)
@given(st.integers(1, 8), st.integers(1, 24))
def test_bubble_of_gpipe_and_1f1b(p: int, m: int):
    for name in ("gpipe", "1f1b"):
        result = _run(name, p, 1, m, ActionCosts(forward=1, backward=2))
        assert result.bubble == pytest.approx((p - 1) / (m + p - 1), abs=1e-12)
        assert result.makespan == 3 * (m + p - 1)


@settings(max_examples=25, deadline=None)
@given(st.integers(2, 6), st.integers(2, 4), st.integers(0, 14))
def test_bubble_of_interleaved_for_any_number_of_micro_batches_from_p(p: int, v: int, more: int):
    m = p + more
    assert _run("interleaved", p, v, m).bubble == pytest.approx((p - 1) / (v * m + p - 1), abs=1e-12)


@settings(max_examples=25, deadline=None)
@given(st.integers(2, 7), st.integers(0, 14))
def test_bubble_of_zero_bubble_schedules_is_the_least_possible(p: int, more: int):
    m = p + more
    assert _run("zb-h1", p, 1, m).makespan == 3 * m + p - 1
    if m >= 3 * p // 2:
        assert _run("zb-v", p, 2, m).makespan == 6 * m + p - 1


@settings(max_examples=25, deadline=None)
@given(st.sampled_from(["gpipe", "1f1b", "interleaved", "zb-h1", "zb-v"]), st.integers(2, 6), st.integers(1, 12))
def test_stated_theory_is_what_is_simulated(name: str, p: int, m: int):
    v = 2 if name in ("interleaved", "zb-v") else 1
    theory = theoretical_bubble(name, ranks=p, virtual=v, micro_batches=m)
    fewest = {"gpipe": 1, "1f1b": 1, "zb-v": 3 * p // 2}.get(name, p)
    assert (theory is None) == (m < fewest)
    if theory is not None:
        assert _run(name, p, v, m).bubble == pytest.approx(theory, abs=1e-12)


@settings(max_examples=25, deadline=None)
@given(st.integers(2, 7), st.integers(1, 16))
def test_zero_bubble_beats_1f1b_on_the_same_model(p: int, m: int):
    half = ActionCosts(forward=0.5, input_grad=0.5, weight_grad=0.5)
    one, h1 = _run("1f1b", p, 1, m), _run("zb-h1", p, 1, m)
    interleaved, v = _run("interleaved", p, 2, m, half), _run("zb-v", p, 2, m, half)
    assert h1.makespan < one.makespan and h1.bubble < one.bubble
    assert v.makespan < min(one.makespan, interleaved.makespan)
    if m >= 3 * p // 2:
        assert v.makespan < h1.makespan
    assert max(h1.peak_activations) <= p and max(v.peak_activations) / 2 <= p


def _torch_schedule(name: str, p: int, v: int, m: int) -> Schedule | None:
    """PyTorch's order of computations, with our transfers; None where it has no such schedule."""
    fakes = [SimpleNamespace(group_size=p, group_rank=0, num_stages=p * v, stage_index=k * p) for k in range(v)]
    for fake in fakes:
        vars(fake).update(is_first=False, is_last=False, has_backward=True, submod=None, device="cpu")
    made = {
        "gpipe": pipelining.ScheduleGPipe,
        "1f1b": pipelining.Schedule1F1B,
        "interleaved": pipelining.ScheduleInterleaved1F1B,
        "zb-h1": pipelining.ScheduleInterleavedZeroBubble,
        "zb-v": pipelining.ScheduleZBVZeroBubble,
    }[name]
    single = name in ("gpipe", "1f1b")
    try:
        theirs = made(fakes[0] if single else fakes, m, loss_fn=lambda *_: None)  # type: ignore[arg-type]
    except ValueError:
        return None
    table = theirs._get_pipeline_order() if single else theirs.pipeline_order  # type: ignore[union-attr]
    orders = []
    for rank in range(p):
        order, seen = [], dict.fromkeys(((kind, s) for kind in KINDS for s in range(p * v)), 0)
        for action in table[rank]:
            kind = action and action.computation_type.name
            if kind in KINDS:
                # Micro-batches are numbered as they come: the table of Schedule1F1B counts from 1 on the last rank.
                order.append(Action(KINDS[kind], action.stage_index, seen[kind, action.stage_index]))
                seen[kind, action.stage_index] += 1
        orders.append(order)
    placement = [stage_rank(name, s, ranks=p, stages=p * v) for s in range(p * v)]
    return Schedule(name, p, p * v, m, insert_send_recv(orders, placement))


@diagonal(3)
@pytest.mark.parametrize(
    ("name", "v"), [("gpipe", 1), ("1f1b", 1), ("interleaved", 2), ("interleaved", 3), ("zb-h1", 1), ("zb-v", 2)]
)
def test_never_worse_than_pytorch(name: str, v: int):
    compared = 0
    for p in (2, 3, 5):
        for m in (1, 2, p, p + 1, 2 * p, 3 * p):
            # The table of Schedule1F1B has forwards without micro-batches when there are fewer than ranks.
            theirs = None if name == "1f1b" and m < p else _torch_schedule(name, p, v, m)
            if theirs is None:  # a number of micro-batches that PyTorch refuses
                continue
            ours = build_schedule(ScheduleShape(name, ranks=p, virtual=v, micro_batches=m))
            assert max(peak_activations(ours)) <= max(peak_activations(theirs)), (p, m)
            for costs in UNEQUAL:
                assert simulate(ours, costs).makespan <= simulate(theirs, costs).makespan + 1e-9, (p, m, costs)
                compared += 1
    assert compared >= 36


@settings(max_examples=25, deadline=None)
@given(
    st.sampled_from(["gpipe", "1f1b", "interleaved", "zb-h1", "zb-v"]),
    st.integers(1, 5),
    st.integers(1, 9),
    st.lists(st.floats(0.1, 5.0), min_size=12, max_size=12),
    st.floats(0.0, 3.0),
)
def test_any_costs_end_and_nothing_overlaps(name: str, p: int, m: int, times: list[float], transfer: float):
    v = 2 if name in ("interleaved", "zb-v") else 1
    costs = ActionCosts(forward=lambda s: times[s], weight_grad=lambda s: times[-1 - s], transfer=transfer)
    schedule = build_schedule(ScheduleShape(name, ranks=p, virtual=v, micro_batches=m))
    result = simulate(schedule, costs)
    work = sum(times[s] + times[-1 - s] + 1.0 for s in range(p * v)) * m
    assert sum(timed.end - timed.start for rank in result.events for timed in rank) == pytest.approx(work)
    when = {timed.action: timed for rank in result.events for timed in rank}
    for rank in result.events:
        assert all(one.end <= two.start + 1e-9 for one, two in pairwise(rank))
    for action, timed in when.items():
        if action.kind is ActionKind.FORWARD and action.stage > 0:
            before = when[Action(ActionKind.FORWARD, action.stage - 1, action.micro_batch)]
            apart = schedule.rank_of(action.stage) != schedule.rank_of(action.stage - 1)
            assert timed.start >= before.end + transfer * apart - 1e-9


def test_transfers_delay_and_share_the_way():
    alone = _run("1f1b", 2, 1, 1, ActionCosts(transfer=0.5))
    assert alone.makespan == 6 + 2 * 0.5
    slow = simulate(forward_only(ScheduleShape("gpipe", ranks=2, virtual=1, micro_batches=3)), ActionCosts(transfer=4))
    # The messages follow each other without a gap: each receive was posted before the computation in front of it.
    assert [timed.start for timed in slow.events[1]] == [5, 9, 13]
    assert slow.peak_activations == (0, 0)


def test_a_whole_backward_costs_its_halves_unless_it_is_given():
    assert ActionCosts(input_grad=2, weight_grad=3).time_of(ActionKind.BACKWARD, 0) == 5
    assert ActionCosts(backward=4, input_grad=2).time_of(ActionKind.BACKWARD, 0) == 4


def alone(ranks: tuple[tuple[Action, ...], ...]) -> tuple[tuple[tuple[Action, ...], ...], ...]:
    """Every action as a batch of its own."""
    return tuple(tuple((action,) for action in actions) for actions in ranks)


def test_deadlock_names_what_each_rank_waits_for():
    crossed = Schedule(
        "1f1b",
        2,
        2,
        1,
        alone(
            (
                (
                    Action(ActionKind.BACKWARD, 0, 0),
                    Action(ActionKind.FORWARD, 0, 0),
                    Action(ActionKind.SEND_FORWARD, 0, 0),
                ),
                (Action(ActionKind.RECEIVE_FORWARD, 1, 0), Action(ActionKind.FORWARD, 1, 0)),
            )
        ),
    )
    with pytest.raises(ValueError, match=r"rank 0 waits for B\(stage 0.*; rank 1 waits for F\(stage 1"):
        simulate(crossed, ActionCosts())
    early = Schedule("1f1b", 2, 2, 1, alone(((Action(ActionKind.SEND_FORWARD, 0, 0),), ())))
    with pytest.raises(ValueError, match="rank 0 sends before it has anything to send"):
        simulate(early, ActionCosts())


def test_messages_in_different_orders_are_found():
    def moved(kinds: list[tuple[ActionKind, int, int]]) -> tuple[Action, ...]:
        return tuple(Action(*kind) for kind in kinds)

    F, SF, RF = ActionKind.FORWARD, ActionKind.SEND_FORWARD, ActionKind.RECEIVE_FORWARD
    crossed = Schedule(
        "gpipe",
        2,
        2,
        2,
        alone(
            (
                moved([(F, 0, 0), (SF, 0, 0), (F, 0, 1), (SF, 0, 1)]),
                moved([(RF, 1, 1), (F, 1, 1), (RF, 1, 0), (F, 1, 0)]),
            )
        ),
    )
    with pytest.raises(ValueError, match="ranks 0 and 1 list their messages in different orders"):
        simulate(crossed, ActionCosts())
