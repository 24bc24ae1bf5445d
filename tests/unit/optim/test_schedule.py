"""Learning rate and weight decay: values worked out by hand, end points and monotony."""

import math
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from petatron.base.errors import ConfigError
from petatron.config.schema.optimizer import OptimizerConfig, ScheduleConfig
from petatron.config.schema.run import RunConfig
from petatron.config.schema.training import TrainConfig
from petatron.optim.lr_schedule import LearningRateSchedule, WeightDecaySchedule

STYLES = ["constant", "linear", "cosine", "inverse-square-root", "WSD"]
FINAL_STYLES = ["exponential", "linear", "cosine", "minus_sqrt"]


def iteration_run(**schedule) -> RunConfig:
    schedule = {"lr_decay_iters": 110, "min_lr": 0.1, **schedule}
    return RunConfig(
        optim=OptimizerConfig(lr=1.1), train=TrainConfig(train_iters=200), schedule=ScheduleConfig(**schedule)
    )


def lr(run: RunConfig, iterations: int, samples: int = 0) -> float:
    return LearningRateSchedule.from_config(run).at(iterations, samples)


@pytest.mark.parametrize(
    ("style", "iterations", "expected"),
    [
        ("constant", 10, 1.1),
        ("constant", 5000, 1.1),
        ("linear", 10, 1.1),
        ("linear", 60, 0.6),
        ("linear", 110, 0.1),
        ("linear", 111, 0.1),
        ("cosine", 35, 0.1 + 0.5 * (1 + math.sqrt(0.5))),
        ("cosine", 60, 0.6),
        ("cosine", 85, 0.1 + 0.5 * (1 - math.sqrt(0.5))),
        ("cosine", 110, 0.1),
        ("inverse-square-root", 40, 0.55),
        ("inverse-square-root", 90, 1.1 / 3),
        ("inverse-square-root", 111, 0.1),
    ],
)
def test_values_by_hand(style, iterations, expected):
    run = iteration_run(lr_decay_style=style, lr_warmup_iters=10)
    assert lr(run, iterations) == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize(
    ("style", "expected"),
    [
        ("linear", 0.1 + 0.75),
        ("cosine", 0.1 + 0.5 * (1 + math.sqrt(0.5))),
        ("exponential", 0.1 + 2 * 2**-0.25 - 1),
        ("minus_sqrt", 0.1 + 0.5),
    ],
)
def test_wsd_final_decay_by_hand(style, expected):
    run = iteration_run(lr_decay_style="WSD", lr_warmup_iters=10, lr_wsd_decay_iters=40, lr_wsd_decay_style=style)
    assert [lr(run, at) for at in (10, 50, 70)] == [1.1, 1.1, 1.1]
    assert lr(run, 80) == pytest.approx(expected, rel=1e-12)
    assert lr(run, 110) == pytest.approx(0.1, rel=1e-12)
    assert lr(run, 111) == 0.1


def test_warmup_starts_at_its_first_value_and_reaches_the_peak():
    run = iteration_run(lr_warmup_iters=4, lr_warmup_init=0.1)
    assert [lr(run, at) for at in range(5)] == pytest.approx([0.1, 0.35, 0.6, 0.85, 1.1])


def test_no_warmup_starts_at_the_peak():
    assert lr(iteration_run(lr_warmup_init=0.01), 0) == 1.1
    assert lr(iteration_run(lr_decay_style="inverse-square-root"), 0) == 1.1
    assert lr(iteration_run(lr_decay_style="inverse-square-root"), 4) == 0.55


@pytest.mark.parametrize("warmup", [0, 3])
@pytest.mark.parametrize(("batch", "decay"), [(1, 110), (16, 110), (64, 50)])
def test_inverse_square_root_is_megatrons(warmup: int, batch: int, decay: int):
    """Megatron counts samples also where lengths are in iterations, and takes the larger of each and 1."""
    run = iteration_run(lr_decay_style="inverse-square-root", lr_warmup_iters=warmup, lr_decay_iters=decay, min_lr=0.01)
    run = replace(run, train=replace(run.train, global_batch_size=batch))
    for iteration in range(warmup + 1, decay + 2):
        samples, end = iteration * batch, decay * batch
        expected = 0.01 if samples > end else max(0.01, 1.1 * max(warmup * batch, 1) ** 0.5 / max(samples, 1) ** 0.5)
        assert lr(run, iteration) == pytest.approx(expected, rel=1e-12)
    assert lr(run, warmup) == 1.1
    if not warmup and batch == 16:
        assert lr(run, 4) == pytest.approx(1.1 / 8), "peak / sqrt(4 x 16)"


def test_warmup_fraction_is_of_the_decay_length_and_need_not_be_whole():
    run = iteration_run(lr_warmup_fraction=0.05)  # 5.5 iterations
    assert lr(run, 5) == pytest.approx(1.1 * 5 / 5.5)
    assert lr(run, 6) == pytest.approx(0.1 + 104 / 104.5)


def test_iteration_runs_ignore_samples_and_sample_runs_ignore_iterations():
    by_iterations = iteration_run(lr_warmup_iters=10)
    assert lr(by_iterations, 60, 7) == lr(by_iterations, 60, 10**9) == pytest.approx(0.6)
    by_samples = RunConfig(
        optim=OptimizerConfig(lr=1.1),
        train=TrainConfig(train_samples=5000),
        schedule=ScheduleConfig(
            lr_decay_style="WSD",
            min_lr=0.1,
            lr_warmup_samples=100,
            lr_decay_samples=2000,
            lr_wsd_decay_samples=1000,
            lr_wsd_decay_style="linear",
        ),
    )
    assert lr(by_samples, 3, 50) == lr(by_samples, 10**9, 50) == pytest.approx(0.55)
    assert lr(by_samples, 0, 1250) == pytest.approx(0.85)


@settings(max_examples=60, deadline=None)
@given(
    style=st.sampled_from(STYLES),
    final_style=st.sampled_from(FINAL_STYLES),
    warmup=st.integers(0, 30),
    stable=st.integers(1, 40),
    final=st.integers(1, 30),
)
def test_rises_then_never_rises_again_and_stays_in_range(style, final_style, warmup, stable, final):
    decay = warmup + stable + final
    schedule = LearningRateSchedule(
        peak=3.0,
        style=style,
        decay=decay,
        warmup=warmup,
        minimum=0.5,
        initial=0.25,
        final_decay=final,
        final_style=final_style,
    )
    values = [schedule.at(step, 0) for step in range(decay + 10)]
    rise, fall = values[: warmup + 1], values[warmup:]
    assert rise == sorted(rise)
    assert fall == sorted(fall, reverse=True)
    assert max(values) == pytest.approx(3.0)
    assert values[0] == (0.25 if warmup else 3.0)
    assert values[-1] == (3.0 if style == "constant" else 0.5)
    assert min(fall) >= 0.5 - 1e-12


def decay_run(style: str, **train) -> RunConfig:
    optim = OptimizerConfig(
        weight_decay=0.3, start_weight_decay=0.1, end_weight_decay=0.5, weight_decay_incr_style=style
    )
    return RunConfig(optim=optim, train=TrainConfig(**train))


def test_weight_decay_by_hand():
    constant = WeightDecaySchedule.from_config(decay_run("constant", train_iters=100))
    assert [constant.at(at, 0) for at in (0, 50, 200)] == [0.3, 0.3, 0.3]
    linear = WeightDecaySchedule.from_config(decay_run("linear", train_iters=100))
    assert [linear.at(at, 9) for at in (0, 25, 100, 200)] == pytest.approx([0.1, 0.2, 0.5, 0.5])
    cosine = WeightDecaySchedule.from_config(decay_run("cosine", train_samples=1000))
    assert [cosine.at(9, at) for at in (0, 250, 500, 1000, 1001)] == pytest.approx(
        [0.1, 0.1 + 0.2 * (1 - math.sqrt(0.5)), 0.3, 0.5, 0.5]
    )


@settings(max_examples=30, deadline=None)
@given(style=st.sampled_from(["constant", "linear", "cosine"]), length=st.integers(1, 60))
def test_weight_decay_only_rises(style, length):
    schedule = WeightDecaySchedule(start=0.1, end=0.4, length=length, style=style)
    values = [schedule.at(step, 0) for step in range(length + 3)]
    assert values == sorted(values)
    assert values[0] == pytest.approx(0.4 if style == "constant" else 0.1)
    assert values[length:] == [0.4] * 3


def test_unknown_style_is_a_programming_error():
    with pytest.raises(AssertionError, match="unknown decay style"):
        LearningRateSchedule(peak=1.0, style="zigzag", decay=10).at(5, 0)


def test_a_schedule_asks_for_the_settings_that_only_training_needs():
    ramp = OptimizerConfig(weight_decay_incr_style="linear", start_weight_decay=0.1)
    for from_config, run, flag in (
        (LearningRateSchedule.from_config, RunConfig(), "--lr-decay-iters"),
        (LearningRateSchedule.from_config, RunConfig(schedule=ScheduleConfig(lr_decay_iters=9)), "--lr"),
        (LearningRateSchedule.from_config, RunConfig(train=TrainConfig(train_samples=9)), "--lr-decay-samples"),
        (WeightDecaySchedule.from_config, RunConfig(), "--train-iters"),
        (
            WeightDecaySchedule.from_config,
            RunConfig(train=TrainConfig(train_iters=9), optim=ramp),
            "--end-weight-decay",
        ),
    ):
        with pytest.raises(ConfigError, match=f"{flag} is not set, and is needed here"):
            from_config(run)


def test_decoupled_rate_has_a_peak_and_a_minimum_of_its_own():
    """The warm-up's start and all lengths are shared, and its minimum is that of the others unless it is given."""
    optim = OptimizerConfig(lr=1.1, decoupled_lr=0.6)
    for given_minimum, minimum in ((0.2, 0.2), (None, 0.1)):
        run = replace(
            iteration_run(
                lr_decay_style="linear", lr_warmup_iters=10, lr_warmup_init=0.05, decoupled_min_lr=given_minimum
            ),
            optim=optim,
        )
        schedule = LearningRateSchedule.decoupled_from_config(run)
        assert schedule is not None
        points = [schedule.at(step, 0) for step in (0, 5, 10, 60, 110, 150)]
        middle = (0.6 + minimum) / 2
        assert points == pytest.approx([0.05, 0.325, 0.6, middle, minimum, minimum])
    assert LearningRateSchedule.decoupled_from_config(iteration_run()) is None
