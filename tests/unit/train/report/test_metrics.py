"""The meter's arithmetic, and a line that Megatron users' scripts can still read."""

from __future__ import annotations

import dataclasses
import math
import re

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from petatron.train.report.format_records import format_record, megatron_log_line, validation_line
from petatron.train.report.log_records import (
    IntervalMeter,
    LogRecord,
    StepMetrics,
    event_record,
    format_duration,
    perplexity,
    validation_record,
)
from tests.unit.train.report.records import log_record


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def step(iteration: int, loss: float | torch.Tensor, **changes: object) -> StepMetrics:
    values = {
        "iteration": iteration,
        "consumed_samples": 8 * iteration,
        "tokens": 800,
        "loss": loss if isinstance(loss, torch.Tensor) else torch.tensor(loss),
        "lr": 0.1,
        "global_batch_size": 8,
    }
    return StepMetrics(**(values | changes))  # type: ignore[arg-type]


def meter(clock: Clock, **changes: object) -> IntervalMeter:
    values = {"train_iters": 10, "num_devices": 2, "flops_per_token": 1e9, "peak_flops": 4e12, "clock": clock}
    return IntervalMeter(**(values | changes))  # type: ignore[arg-type]


def test_an_interval_adds_up() -> None:
    clock = Clock()
    interval = meter(clock, consumed_tokens=5000, read_memory_bytes=lambda: 42)
    interval.update(step(3, 2.0))
    interval.update(step(4, 4.0, grad_norm=torch.tensor(0.5), loss_scale=8.0, num_zeros=7, params_norm=3.0))
    clock.now = 0.5
    record = interval.report()
    assert (record.iteration, record.train_iters, record.consumed_samples) == (4, 10, 32)
    assert record.consumed_tokens == 6600
    assert record.lm_loss == 3.0
    assert record.elapsed_ms_per_iteration == 250.0
    assert (record.tokens_per_second, record.tokens_per_second_per_device) == (3200.0, 1600.0)
    assert record.tflops_per_device == pytest.approx(1.6)
    assert record.mfu == pytest.approx(0.4)
    assert (record.grad_norm, record.loss_scale, record.num_zeros, record.params_norm) == (0.5, 8.0, 7, 3.0)
    assert (record.skipped, record.nan, record.memory_bytes) == (0, 0, 42)
    assert record.eta_s == pytest.approx(1.5)


def test_the_next_interval_starts_afresh() -> None:
    clock = Clock()
    interval = meter(clock)
    interval.update(step(1, 9.0, skipped=True, nan=True))
    clock.now = 1.0
    interval.report()
    interval.update(step(2, 1.0))
    clock.now = 1.25
    record = interval.report()
    assert (record.lm_loss, record.skipped, record.nan) == (1.0, 0, 0)
    assert record.elapsed_ms_per_iteration == 250.0


def test_skipped_steps_do_not_count_even_when_their_loss_is_not_a_number() -> None:
    interval = meter(Clock())
    interval.update(step(1, 2.0))
    interval.update(step(2, math.nan, skipped=torch.tensor(True), nan=torch.tensor(True)))
    interval.update(step(3, math.inf, skipped=torch.tensor(1.0)))
    interval.update(step(4, 4.0))
    record = interval.report()
    assert (record.lm_loss, record.skipped, record.nan) == (3.0, 2, 1)


def test_when_all_steps_are_skipped_there_is_no_loss() -> None:
    interval = meter(Clock(), peak_flops=None)
    interval.update(step(1, math.nan, skipped=True))
    record = interval.report()
    assert (record.lm_loss, record.mfu, record.grad_norm, record.num_zeros) == (None, None, None, None)


def test_a_nan_loss_that_was_not_skipped_shows() -> None:
    interval = meter(Clock())
    interval.update(step(1, math.nan))
    record = interval.report()
    assert record.lm_loss is not None and math.isnan(record.lm_loss)


def test_paused_time_does_not_count() -> None:
    clock = Clock()
    interval = meter(clock)
    interval.update(step(1, 1.0))
    clock.now = 1.0
    interval.pause()
    clock.now = 50.0
    interval.pause()  # pausing twice is harmless
    interval.resume()
    clock.now = 51.0
    interval.resume()
    assert interval.report().elapsed_ms_per_iteration == 2000.0


def test_time_left_follows_samples_when_the_run_is_measured_in_samples() -> None:
    clock = Clock()
    interval = meter(clock, train_samples=88)
    interval.update(step(1, 1.0))
    clock.now = 2.0
    assert interval.report().eta_s == pytest.approx(20.0)  # 80 more samples at 4 per second
    interval.update(step(20, 1.0))
    assert interval.report().eta_s == 0.0


@pytest.mark.parametrize(
    ("left_s", "eta_s", "limited"), [(None, 9.0, False), (60.0, 9.0, False), (4.0, 4.0, True), (-1.0, 0.0, True)]
)
def test_a_time_limit_that_comes_first_is_the_time_left(left_s: float | None, eta_s: float, limited: bool) -> None:
    clock = Clock()
    interval = meter(clock, time_limit_left_s=lambda: left_s)
    interval.update(step(1, 1.0))
    clock.now = 1.0
    record = interval.report()
    assert (record.eta_s, record.eta_is_time_limit) == (eta_s, limited)
    assert ("eta_is_time_limit" in record.as_record()) == limited
    assert megatron_log_line(record).endswith(" (--exit-duration-in-mins) |") == limited


def test_half_precision_losses_are_summed_in_double() -> None:
    interval = meter(Clock())
    for iteration in range(1, 2050):
        interval.update(step(iteration, torch.tensor(1.0009765625, dtype=torch.float16)))
    assert interval.report().lm_loss == 1.0009765625


@settings(max_examples=25, deadline=None)
@given(st.lists(st.tuples(st.floats(0, 20), st.booleans()), min_size=1, max_size=12))
def test_mean_over_counted_steps(steps: list[tuple[float, bool]]) -> None:
    interval = meter(Clock())
    for iteration, (loss, skipped) in enumerate(steps, 1):
        interval.update(dataclasses.replace(step(iteration, 0.0), loss=loss, skipped=skipped))
    record = interval.report()
    counted = [loss for loss, skipped in steps if not skipped]
    assert record.skipped == len(steps) - len(counted)
    assert record.lm_loss == (pytest.approx(sum(counted) / len(counted)) if counted else None)


def test_reporting_nothing_is_a_mistake_of_ours() -> None:
    with pytest.raises(AssertionError):
        meter(Clock()).report()


def test_the_line_to_the_letter() -> None:
    line = megatron_log_line(log_record())
    stamp = re.match(r" \[(\d{4}-\d\d-\d\d \d\d:\d\d:\d\d\.\d{6})\] ", line)
    assert stamp is not None
    assert line[stamp.end() :] == (
        "iteration      100/    1000 | consumed samples:        25600 | elapsed time per iteration (ms): 512.3 |"
        " throughput per GPU (TFLOP/s/GPU): 401.2 | learning rate: 1.500000E-04 | global batch size:   256 |"
        " lm loss: 6.123456E+00 | loss scale: 1.0 | grad norm: 1.234 | number of skipped iterations:   0 |"
        " number of nan iterations:   0 | tokens/s/device: 127875.0 | MFU: 40.5% | memory (GB): 61.23 | ETA: 0:07:41 |"
    )


@pytest.mark.parametrize(
    ("pattern", "value"),
    [
        (r"iteration\s+(\d+)/\s*(\d+)", ("100", "1000")),
        (r"consumed samples:\s+(\d+)", ("25600",)),
        (r"elapsed time per iteration \(ms\): ([\d.]+)", ("512.3",)),
        (r"throughput per GPU \(TFLOP/s/GPU\): ([\d.]+)", ("401.2",)),
        (r"learning rate: ([-+.\dE]+)", ("1.500000E-04",)),
        (r"global batch size:\s+(\d+)", ("256",)),
        (r"lm loss: ([-+.\dE]+) \|", ("6.123456E+00",)),
        (r"loss scale: ([\d.]+)", ("1.0",)),
        (r"grad norm: ([\d.]+)", ("1.234",)),
        (r"num zeros: (\d+)", ("12",)),
        (r"params norm: ([\d.]+)", ("99.500",)),
        (r"number of skipped iterations:\s+(\d+)", ("2",)),
        (r"number of nan iterations:\s+(\d+)", ("1",)),
    ],
)
def test_the_usual_log_parsers(pattern: str, value: tuple[str, ...]) -> None:
    found = re.search(pattern, megatron_log_line(log_record(num_zeros=12, params_norm=99.5, skipped=2, nan=1)))
    assert found is not None and found.groups() == value


def test_fields_split_at_bars() -> None:
    fields = dict(part.rsplit(":", 1) for part in megatron_log_line(log_record(eta_s=None)).split("|")[1:-1])
    assert float(fields[" lm loss"]) == 6.123456
    assert fields[" ETA"].strip() == "n/a"


def test_optional_fields_are_left_out() -> None:
    line = megatron_log_line(log_record(lm_loss=None, grad_norm=None, mfu=None), throughput=False)
    for absent in ("lm loss", "grad norm", "num zeros", "params norm", "throughput per GPU"):
        assert absent not in line
    assert " MFU: n/a |" in line


def test_validation_line() -> None:
    frame, line, again = validation_line({"iteration": 500, "lm_loss": 2.5, "split": "valid"}).split("\n")
    assert line == " validation loss at iteration 500 | lm loss value: 2.500000E+00 | lm loss PPL: 1.218249E+01 | "
    assert frame == again == "-" * (len(line) + 1)
    assert "iteration 500 on test set |" in validation_line({"iteration": 500, "lm_loss": 2.5, "split": "test"})


def test_perplexity_is_capped() -> None:
    assert perplexity(100.0) == math.exp(20)


def test_durations() -> None:
    assert [format_duration(x) for x in (0.4, 3661, 90061, None, math.inf)] == [
        "0:00:00",
        "1:01:01",
        "1 day, 1:01:01",
        "n/a",
        "n/a",
    ]


def test_records_round_trip_and_read_as_text() -> None:
    record = log_record()
    assert LogRecord.from_record(record.as_record()) == record
    assert format_record(record.as_record()) == megatron_log_line(record)
    assert "on test set" in format_record(validation_record(iteration=1, lm_loss=1.0, consumed_samples=8, split="test"))
    assert format_record(event_record("resumed at iteration 5", iteration=5)) == "resumed at iteration 5"


def test_several_losses_are_reported_by_name() -> None:
    interval = meter(Clock())
    interval.update(step(1, 5.0, named_losses={"lm loss": torch.tensor(4.0), "aux loss": torch.tensor(10.0)}))
    interval.update(step(2, math.nan, skipped=True, named_losses={"lm loss": math.nan, "aux loss": math.inf}))
    interval.update(step(3, 3.0, named_losses={"lm loss": torch.tensor(2.0), "aux loss": torch.tensor(20.0)}))
    record = interval.report()
    assert record.lm_loss == 4.0 and record.named_losses == {"lm loss": 3.0, "aux loss": 15.0}
    line = format_record(record.as_record())
    assert "| total loss: 4.000000E+00 | lm loss: 3.000000E+00 | aux loss: 1.500000E+01 | loss scale:" in line
    interval.update(step(4, math.nan, skipped=True, named_losses={"lm loss": math.nan, "aux loss": math.nan}))
    record = interval.report()
    assert record.named_losses == {"lm loss": None, "aux loss": None} and "loss:" not in format_record(
        record.as_record()
    )


def test_one_loss_is_written_without_a_table_of_names() -> None:
    interval = meter(Clock())
    interval.update(step(1, 5.0))
    assert "named_losses" not in interval.report().as_record()
    assert "named_losses" not in validation_record(iteration=1, lm_loss=1.0, consumed_samples=8)


def test_an_evaluation_of_several_losses_prints_each() -> None:
    record = validation_record(iteration=1, lm_loss=3.0, consumed_samples=8, named_losses={"lm loss": 2.0, "aux": 10.0})
    line = format_record(record).split("\n")[1]
    assert line == (
        " validation loss at iteration 1 | total loss value: 3.000000E+00 | lm loss value: 2.000000E+00 | aux value: 1.000000E+01 | "
    )
