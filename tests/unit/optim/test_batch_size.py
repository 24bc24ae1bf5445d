"""Batch-size ramp: closed forms against a loop over iterations."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from petatron.config.schema.run import RunConfig
from petatron.config.schema.training import TrainConfig
from petatron.train.global_batch_size import BatchSizeSchedule


@st.composite
def schedules(draw) -> BatchSizeSchedule:
    start, increment, count = draw(st.integers(1, 12)), draw(st.integers(1, 7)), draw(st.integers(0, 6))
    ramp = draw(st.integers(0, 300))
    return BatchSizeSchedule(final=start + count * increment, start=start, increment=increment, ramp_samples=ramp)


def test_values_by_hand():
    run = RunConfig(train=TrainConfig(global_batch_size=32, rampup_batch_size=(16, 8, 100)))
    schedule = BatchSizeSchedule.from_config(run)
    assert [schedule.at(consumed) for consumed in (0, 49, 50, 99, 100, 10**9)] == [16, 16, 24, 24, 32, 32]
    # 4 x 16 = 64, then 2 x 24 = 112, then 32 for ever
    assert [schedule.samples_after(iterations) for iterations in (0, 4, 5, 6, 7)] == [0, 64, 88, 112, 144]
    assert schedule.samples_after(2, consumed=64) == 112
    assert [schedule.iterations_for(samples) for samples in (0, 15, 64, 111, 112, 144)] == [0, 0, 4, 5, 6, 7]


def test_constant_batch():
    schedule = BatchSizeSchedule.from_config(RunConfig(train=TrainConfig(global_batch_size=6)))
    assert schedule.at(0) == schedule.at(100) == 6
    assert schedule.samples_after(7) == 42
    assert (schedule.iterations_for(42), schedule.iterations_for(41)) == (7, 6)


@settings(max_examples=80, deadline=None)
@given(schedule=schedules(), consumed=st.integers(0, 400), iterations=st.integers(0, 60))
def test_samples_after_agrees_with_a_loop(schedule, consumed, iterations):
    expected = consumed
    for _ in range(iterations):
        expected += schedule.at(expected)
    assert schedule.samples_after(iterations, consumed) == expected


@settings(max_examples=80, deadline=None)
@given(schedule=schedules(), samples=st.integers(0, 800))
def test_iterations_for_agrees_with_a_loop(schedule, samples):
    consumed = iterations = 0
    while consumed + schedule.at(consumed) <= samples:
        consumed += schedule.at(consumed)
        iterations += 1
    assert schedule.iterations_for(samples) == iterations


@settings(max_examples=60, deadline=None)
@given(schedule=schedules(), iterations=st.integers(0, 100))
def test_iterations_and_samples_are_inverse(schedule, iterations):
    assert schedule.iterations_for(schedule.samples_after(iterations)) == iterations


@settings(max_examples=60, deadline=None)
@given(schedule=schedules(), consumed=st.integers(0, 400))
def test_ramp_follows_the_definition(schedule, consumed):
    increments = (schedule.final - schedule.start) // schedule.increment
    if consumed >= schedule.ramp_samples:
        assert schedule.at(consumed) == schedule.final
    else:
        span = max(k for k in range(increments + 1) if consumed * increments >= k * schedule.ramp_samples)
        assert schedule.at(consumed) == schedule.start + span * schedule.increment


def test_long_runs_take_no_loop_over_iterations():
    schedule = BatchSizeSchedule(final=4096, start=32, increment=32, ramp_samples=10**12)
    samples = schedule.samples_after(10**12)  # a loop would take days
    assert schedule.iterations_for(samples) == 10**12


def test_increments_must_end_at_the_final_size():
    with pytest.raises(AssertionError, match="final batch size"):
        BatchSizeSchedule(final=10, start=4, increment=4, ramp_samples=100)
