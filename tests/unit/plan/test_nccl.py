"""Pipeline transfers under NCCL's rules: the rule that deadlocked is found to, the others end for every schedule."""

from __future__ import annotations

from collections.abc import Iterable

import pytest

from petatron.plan.pipeline_simulator import ActionCosts, simulate
from petatron.schedule import Schedule, ScheduleShape, build_schedule, forward_only
from petatron.schedule.actions import Action, ActionKind
from tests.longform import diagonal
from tests.nccl_rules.nccl_program import simulate_program
from tests.nccl_rules.pipeline_program import POLICIES, pipeline_program, unordered_makespan

Case = tuple[str, int, int, int]
"""schedule, stages per rank, ranks, micro-batches"""
STAGES = (
    ("gpipe", 1),
    ("1f1b", 1),
    ("zb-h1", 1),
    ("zb-v", 2),
    ("interleaved", 2),
    ("interleaved", 3),
    ("interleaved", 4),
)
# The evaluation walk depends on which rank holds a stage, and on nothing else of a schedule.
PLACEMENTS = tuple(stages for stages in STAGES if stages[0] not in ("gpipe", "zb-h1"))
SAFE = ("group_batch", "pair", "pair_direction", "alone")


def _ends(schedule: Schedule, policy: str, **rules: bool) -> bool:
    return simulate_program(pipeline_program(schedule, POLICIES[policy], ActionCosts()), **rules).completes


def _training(case: Case) -> Schedule:
    name, virtual, ranks, micro_batches = case
    return build_schedule(ScheduleShape(name, ranks=ranks, virtual=virtual, micro_batches=micro_batches))


def _evaluation(case: Case) -> Schedule:
    name, virtual, ranks, micro_batches = case
    return forward_only(ScheduleShape(name, ranks=ranks, virtual=virtual, micro_batches=micro_batches))


def _check(schedules: Iterable[Schedule], policies: Iterable[str]) -> None:
    """With the strictest rules: what ends under them ends under all others."""
    for schedule in schedules:
        for policy in policies:
            program = pipeline_program(schedule, POLICIES[policy], ActionCosts())
            outcome = simulate_program(program, lazy_connect=True, single_stream=True)
            what = (policy, schedule.name, schedule.ranks, schedule.stages, schedule.micro_batches)
            assert outcome.completes, (what, [str(wait) for wait in outcome.blocked_calls])


@diagonal(3)
@pytest.mark.parametrize("ranks", [2, 3, 4, 5, 8, 16])
def test_safe_policies_end(ranks: int):
    """A part of the range: fewer micro-batches than ranks (a batch ramp's first steps), as many, more, and many more."""
    counts = {2: (1, 2, 3, 8), 16: (1, 17)}.get(ranks, (1, ranks - 1, ranks + 1, 2 * ranks + 1))
    cases = [(name, virtual, ranks, m) for name, virtual in STAGES for m in counts if ranks < 8 or virtual < 3]
    _check(map(_training, cases), ("group_batch", "pair_direction"))
    _check((_evaluation(case) for case in cases if case[:2] in PLACEMENTS), ("group_batch", "pair_direction"))


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize(("name", "virtual"), STAGES)
@pytest.mark.parametrize("ranks", range(2, 17))
def test_safe_policies_end_in_the_whole_range(name: str, virtual: int, ranks: int):
    """Every number of micro-batches up to 4 per rank; for long pipelines those around multiples of their length."""
    near = {k * ranks + d for k in range(1, 5) for d in (-1, 0, 1)} | {1, 2, 3}
    counts = range(1, 4 * ranks + 1) if ranks <= 8 else sorted(count for count in near if count <= 4 * ranks)
    cases = [(name, virtual, ranks, m) for m in counts]
    _check(map(_training, cases), SAFE)
    if (name, virtual) in PLACEMENTS:
        _check(map(_evaluation, cases), SAFE)


@diagonal(3)
@pytest.mark.parametrize(
    "case",
    [
        *(("interleaved", virtual, 4, m) for virtual in (2, 3, 4) for m in (8, 16)),
        *(("zb-h1", 1, ranks, ranks + more) for ranks in (3, 4, 5, 8) for more in (1, 5)),
        *(("zb-v", 2, ranks, 2 * ranks) for ranks in (3, 4, 6, 8)),
    ],
    ids=str,
)
def test_a_lone_transfer_outside_the_batch_deadlocks(case: Case):
    assert not _ends(_training(case), "lone_unbatched")
    assert _ends(_training(case), "group_batch") and _ends(_training(case), "pair_direction")


def test_a_lone_transfer_outside_the_batch_deadlocks_evaluation():
    for ranks in (7, 8):
        assert not _ends(_evaluation(("zb-v", 2, ranks, 13)), "lone_unbatched")
        assert _ends(_evaluation(("zb-v", 2, ranks, 12)), "lone_unbatched")


def test_where_it_did_not_deadlock():
    """gpipe, 1F1B, two ranks, and zb-h1 with no more micro-batches than ranks."""
    cases = [
        (name, 1, ranks, m) for name in ("gpipe", "1f1b") for ranks in (3, 4, 8) for m in (1, ranks, 2 * ranks + 1)
    ]
    cases += [(name, virtual, 2, m) for name, virtual in STAGES for m in (1, 3, 8)]
    cases += [("zb-h1", 1, ranks, ranks) for ranks in (3, 4, 8)]
    for case in cases:
        assert _ends(_training(case), "lone_unbatched"), case


def test_the_report_names_both_ends():
    schedule = build_schedule(ScheduleShape("zb-h1", ranks=3, virtual=1, micro_batches=4))
    waits = simulate_program(pipeline_program(schedule, POLICIES["lone_unbatched"], ActionCosts())).blocked_calls
    assert str(waits[0]) == "rank 0 waits in send to rank 1 on communicator 0-1 for rank 1"
    assert str(waits[1]) == "rank 1 waits in receive from rank 0 on communicator 0-1-2 for rank 0"


def test_connecting_lazily_would_be_safe_for_policies_that_are():
    for ranks in (2, 4):
        for name, virtual in STAGES:
            schedule = build_schedule(ScheduleShape(name, ranks=ranks, virtual=virtual, micro_batches=2 * ranks))
            for policy in SAFE:
                assert _ends(schedule, policy, lazy_connect=True)


@diagonal(3)
@pytest.mark.parametrize(("name", "virtual"), STAGES)
def test_communicators_per_direction_cost_least(name: str, virtual: int):
    schedule = build_schedule(ScheduleShape(name, ranks=4, virtual=virtual, micro_batches=9))
    for costs, noise in ((ActionCosts(), 0.0), (ActionCosts(transfer=0.1), 0.2)):
        ideal = unordered_makespan(schedule, costs, noise=noise, seed=3)
        times = {
            policy: simulate_program(pipeline_program(schedule, POLICIES[policy], costs, noise=noise, seed=3)).makespan
            for policy in SAFE
        }
        assert ideal <= times["pair_direction"] + 1e-9
        assert times["pair_direction"] <= min(times.values()) + 1e-9
        if not noise:
            assert ideal == pytest.approx(simulate(schedule, costs).makespan)


def test_a_rank_has_at_most_four_communicators_per_direction():
    """To and from both neighbors, however long the pipeline."""
    for name, virtual in STAGES:
        schedule = build_schedule(ScheduleShape(name, ranks=5, virtual=virtual, micro_batches=6))
        members = pipeline_program(schedule, POLICIES["pair_direction"], ActionCosts()).communicators.values()
        assert max(sum(rank in pair for pair in members) for rank in range(5)) == 4


def test_noise_is_a_function_of_the_seed():
    schedule = build_schedule(ScheduleShape("1f1b", ranks=3, virtual=1, micro_batches=5))

    def makespan(seed: int) -> float:
        return simulate_program(
            pipeline_program(schedule, POLICIES["pair"], ActionCosts(), noise=0.2, seed=seed)
        ).makespan

    assert makespan(1) == makespan(1) != makespan(2)


def test_crossed_orders_are_found_under_every_policy():
    """Two ranks that send to each other before they receive: only a batch, or a communicator per direction, saves them."""
    send = [(Action(ActionKind.SEND_FORWARD, 0, 0),), (Action(ActionKind.SEND_BACKWARD, 1, 0),)]
    receive = [(Action(ActionKind.RECEIVE_BACKWARD, 0, 0),), (Action(ActionKind.RECEIVE_FORWARD, 1, 0),)]
    apart = Schedule("1f1b", 2, 2, 1, tuple((send[rank], receive[rank]) for rank in range(2)))
    together = Schedule("1f1b", 2, 2, 1, tuple((send[rank] + receive[rank],) for rank in range(2)))
    assert {policy: _ends(apart, policy) for policy in SAFE} == dict.fromkeys(SAFE, False) | {"pair_direction": True}
    assert {policy: _ends(together, policy) for policy in SAFE} == dict.fromkeys(SAFE, True) | {"alone": False}
    assert not _ends(apart, "pair_direction", single_stream=True)
