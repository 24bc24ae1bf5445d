"""Curves: axes, smoothing, thinning, and what remains of odd runs."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from petatron.base.errors import ConfigError
from petatron.history.draw.axis_ticks import compact, ticks
from petatron.history.draw.braille import BrailleCanvas
from petatron.history.draw.terminal import panel_lines
from petatron.history.metric_curves import build_panels, check_metrics, moving_average, thin, x_values
from petatron.history.run_folder import RecordedRun, open_run
from tests.longform import diagonal
from tests.unit.history.run_files import START_S, event, finished_run, train, valid, write_run


def run_of(folder: Path, *records: dict) -> RecordedRun:
    return open_run(write_run(folder, records))


def test_a_million_points_are_thinned_and_spikes_stay():
    x = np.arange(1_000_000, dtype=np.float64)
    y = np.random.default_rng(0).normal(size=x.size)
    y[[123_456, 765_432]] = 99.0, -99.0
    few_x, few_y = thin(x, y, 400)
    assert few_x.size <= 802 and few_y.max() == 99.0 and few_y.min() == -99.0
    assert (np.diff(few_x) > 0).all() and few_x[[0, -1]].tolist() == [0.0, 999_999.0]


def test_few_points_are_left_alone():
    x = np.array([1.0, 2.0, 5.0])
    assert thin(x, x, 2)[0] is x


def test_smoothing_has_no_bias_to_the_start():
    assert moving_average(np.full(50, 3.0), 0.99) == pytest.approx(np.full(50, 3.0))
    noisy = np.tile([1.0, 3.0], 100)
    assert moving_average(noisy, 0.95)[-20:] == pytest.approx(np.full(20, 2.0), abs=0.06)


def test_schedules_and_peaks_are_not_smoothed(tmp_path: Path):
    panels = {panel.title: panel for panel in build_panels([run_of(tmp_path, *finished_run())], smooth=0.9)}
    assert panels["Training loss"].curves[0].raw is not None
    assert panels["Learning rate"].curves[0].raw is None and panels["Peak memory"].curves[0].raw is None


def test_tokens_and_time_go_on_after_a_resume(tmp_path: Path):
    later = [train(step, time=START_S + 1e6 + 10 * step) for step in (20, 30)]
    run = run_of(tmp_path, train(1), train(10), train(20), event("resumed at iteration 10", 10), *later, valid(25, 3.0))
    assert x_values(run.metrics, "time").tolist() == [10.0, 100.0, 200.0, 300.0], "the gap is not training time"
    assert x_values(run.metrics, "tokens").tolist() == [1000.0, 10_000.0, 20_000.0, 30_000.0]
    panel = build_panels([run], metrics=["valid"], x_axis="tokens")[0]
    assert panel.curves[0].x.tolist() == [25_000.0], "an evaluation lies between the log points around it"


def test_not_finite_values_are_marked_and_do_not_stretch_the_axis(tmp_path: Path):
    run = run_of(tmp_path, train(1, 3.0), train(2, math.nan), train(3, math.inf), train(4, 2.0))
    panel = build_panels([run], metrics=["loss"])[0]
    assert panel.curves[0].lost_x == (2.0, 3.0) and panel.curves[0].y.tolist() == [3.0, 2.0]
    assert panel.limits[2] > 1.9 and panel.limits[3] < 3.1
    drawn = "\n".join(
        "".join(text for text, _ in line) for line in panel_lines([panel], ["a"], width=60, height=6, colored=False)
    )
    assert "×" in drawn and "not finite" in drawn


@diagonal(3)
@pytest.mark.parametrize(
    "records",
    [[train(7)], [train(7, math.nan)], [train(7), train(8, 2.0 + 5 / 7)], [valid(7, 3.0)], [train(1, 1e300), train(2, -1e300)]],
)  # fmt: skip
@pytest.mark.parametrize("x_axis", ["step", "tokens", "time"])
def test_odd_runs_can_be_drawn(tmp_path: Path, records: list[dict], x_axis: str):
    panels = build_panels([run_of(tmp_path, *records)], x_axis=x_axis)
    assert panels
    for panel in panels:
        assert panel.limits[0] < panel.limits[1] and panel.limits[2] < panel.limits[3]
    lines = panel_lines(panels, ["a"], width=70, height=8, colored=False)
    assert max(sum(len(text) for text, _ in line) for line in lines) <= 70


def test_unknown_metrics_are_named_together():
    with pytest.raises(ConfigError) as caught:
        check_metrics(["loss", "gradnorm", "weather"])
    assert len(caught.value.problems) == 2 and "Did you mean grad-norm?" in str(caught.value)


@settings(max_examples=40, deadline=None)
@given(st.floats(-1e12, 1e12), st.floats(1e-9, 1e12), st.integers(2, 10))
@example(225179981368.578, 6.1e-05, 2)
def test_ticks_are_few_and_inside(low: float, span: float, most: int):
    found = ticks(low, low + span, most)
    assert len(found) <= 4 * most
    assert all(low - span * 1e-3 <= value <= low + span * 1.001 for value in found)


def test_numbers_are_short():
    assert all(len(compact(value)) <= 8 for value in (1.23456e-30, 123456.789, 9.9999e14, -1234.5, 0.00012345))
    assert compact(math.inf) == "inf"


def test_a_line_of_dots_is_joined():
    canvas = BrailleCanvas(2, 1)
    canvas.line((0, 3), (3, 0), color=2)
    assert canvas.rows() == ["⡠⠊"] and canvas.color(0, 1) == 2 and canvas.color(0, 0) == 2
