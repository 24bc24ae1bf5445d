"""The live view, driven by a console that records; and when it is shown at all."""

from __future__ import annotations

import io
import json
import logging
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from petatron.train.report.console import (
    ConsoleWriter,
    LiveWriter,
    LossPlot,
    build_console_writer,
    column_means,
    downsample,
    format_compact,
)
from petatron.train.report.earlier_loss_curves import read_history
from petatron.train.report.log_records import event_record, validation_record
from petatron.train.report.metric_writers import JsonlWriter
from tests.unit.train.report.records import SUMMARY, log_record

rich_console = pytest.importorskip("rich.console")


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def console(width: int = 80, height: int = 30):
    return rich_console.Console(width=width, height=height, force_terminal=True, file=io.StringIO(), _environ={})


def text_of(renderable: object, width: int = 80) -> str:
    plain = rich_console.Console(width=width, height=30, file=io.StringIO(), _environ={})
    plain.print(renderable)
    return plain.file.getvalue()


@pytest.fixture
def view() -> Iterator[LiveWriter]:
    writer = LiveWriter(console(), auto_refresh=False)
    yield writer
    writer.close()


def test_the_view_shows_what_matters(view: LiveWriter) -> None:
    assert "waiting for the first iteration" in text_of(view.render())
    for iteration in range(1, 101):
        view.write(log_record(iteration=iteration, lm_loss=3 + 5 / iteration).as_record())
    view.write(validation_record(iteration=100, lm_loss=3.25, consumed_samples=8))
    view.write(event_record("saved step-100", iteration=100))
    shown = text_of(view.render())
    for words in ("iteration 100 of 1,000", "10%", "3.0500", "3.2500", "1.02M", "40.5%", "61.23 GB", "saved step-100"):
        assert words in shown, words
    assert "◆" in shown
    assert all(len(line) <= 80 for line in shown.splitlines())
    braille = [char for char in shown if 0x2800 < ord(char) <= 0x28FF]
    assert len(braille) > 30


LABELS = ("loss", "valid", "lr", "grad norm", "tokens/s", "ms/step", "MFU", "memory")


@pytest.mark.parametrize(("width", "shown"), [(160, "61.23 GB"), (70, "61.23 GB"), (64, "61.2 GB"), (40, "61.23 GB")])
def test_numbers_shorten_before_labels_vanish(width: int, shown: str) -> None:
    view = LiveWriter(console(width), auto_refresh=False)
    try:
        for iteration in (1, 100_000):
            record = log_record(
                iteration=iteration, train_iters=1_000_000, eta_s=1e6, eta_is_time_limit=True, grad_norm=12.3456
            )
            view.write(record.as_record())
        view.write(validation_record(iteration=100_000, lm_loss=3.25, consumed_samples=8))
        view.write(event_record(f"saved checkpoint to /{'long/' * 8}end", iteration=100_000))
        text = text_of(view.render(), width)
    finally:
        view.close()
    missing = [word for word in (*LABELS, shown, "10%", "time limit", "1.02M", "40.5%") if word not in text]
    assert not missing and "…" not in text, text
    assert all(len(line) <= width for line in text.splitlines())
    assert "/long/end" in "".join(line.strip("│ ") for line in text.splitlines()), "a long message goes on below"


def test_a_message_without_end_ends_with_dots(view: LiveWriter) -> None:
    view.write(log_record().as_record())
    view.write(event_record("x" * 1000, iteration=100))
    lines = [line for line in text_of(view.render()).splitlines() if "xxx" in line]
    assert len(lines) == 3 and lines[-1].rstrip("│ ").endswith("x…")


def test_a_number_that_a_cpu_does_not_have_takes_no_place(view: LiveWriter) -> None:
    view.write(log_record(mfu=None).as_record())
    assert "MFU" not in text_of(view.render())


def test_a_resumed_run_shows_the_curve_of_earlier_starts(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    writer = JsonlWriter(path)
    for iteration in range(10, 100, 10):
        writer.write(log_record(iteration=iteration, lm_loss=9.0 - iteration / 20).as_record())
    writer.write(validation_record(iteration=50, lm_loss=6.5, consumed_samples=8))
    writer.write(validation_record(iteration=50, lm_loss=60.0, consumed_samples=8, split="test"))
    writer.close()
    history = read_history(path, up_to_iteration=60)
    view = LiveWriter(console(), auto_refresh=False, history=history)
    try:
        view.write(log_record(iteration=70, lm_loss=5.25).as_record())
        text = text_of(view.render())
    finally:
        view.close()
    assert history.train == [(float(at), 9.0 - at / 20) for at in range(10, 70, 10)] and history.valid == [(50, 6.5)]
    [axis] = [line.split() for line in text.splitlines() if line.split()[1:2] == ["step"]]
    assert axis[2:5] == ["20", "40", "60"] and "6.5000" in text and "◆" in text


def test_a_history_with_repeats_and_damage_is_one_curve(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    kept = [(1, 5.0), (2, 4.0), (3, 9.0), (2, 4.5), (3, 3.5), (4, 3.0)]
    rows = [json.dumps({"kind": "train", "iteration": at, "lm_loss": loss}) for at, loss in kept]
    bad = ['{"kind": "train", "iter', '{"kind": "train", "iteration": "x", "lm_loss": 1}', '"kind": "train"', "[]"]
    lost = [json.dumps({"kind": "train", "iteration": 2, "lm_loss": value}) for value in ("nan", None)]
    path.write_text("\n".join([*rows[:3], *bad, lost[0], lost[1], *rows[3:]]))
    assert read_history(path, up_to_iteration=3).train == [(1, 5.0), (2, 4.5), (3, 3.5)]
    path.unlink()
    path.mkdir()
    assert read_history(path, up_to_iteration=3).train == []


def test_what_comes_before_the_first_iteration_and_the_summary_are_whole_lines() -> None:
    screen = console(40)
    view = LiveWriter(screen, auto_refresh=False)
    view.write(event_record("model: " + "word " * 30, iteration=0))
    view.write(log_record().as_record())
    view.write(event_record("between", iteration=1, detail=True))
    view.write({**SUMMARY, "iteration": 100})
    view.close()
    output = screen.file.getvalue()
    assert "model: " + "word " * 30 in output and "between" not in output
    assert output.index("grad norm") < output.index("ended early: received SIGINT, at iteration 100 of 200")


def test_a_loss_that_is_missing_or_not_a_number_is_survived(view: LiveWriter) -> None:
    view.write(log_record(lm_loss=None, grad_norm=None, eta_s=None, mfu=None).as_record())
    view.write(log_record(lm_loss=float("nan")).as_record())
    assert "nan" in text_of(view.render())


def test_log_messages_go_through_the_view_while_it_runs() -> None:
    logger = logging.getLogger("petatron")
    screen = console()
    handler = logging.StreamHandler(screen.file)
    before = logger.handlers[:]
    logger.handlers[:] = [handler]
    try:
        view = LiveWriter(screen, auto_refresh=False)
        assert handler.stream is not screen.file
        view.close()
        assert handler.stream is screen.file
    finally:
        logger.handlers[:] = before


def test_closing_gives_the_terminal_back() -> None:
    screen, stderr = console(), sys.stderr
    view = LiveWriter(screen, auto_refresh=False)
    view.write(log_record().as_record())
    assert sys.stderr is not stderr
    view.close()
    assert sys.stderr is stderr
    output = screen.file.getvalue()
    assert output.rfind("\x1b[?25h") > output.rfind("\x1b[?25l")  # the cursor is shown again


@pytest.mark.parametrize(("out", "err", "live"), [(True, True, True), (False, True, False), (True, False, False)])
def test_auto_needs_two_terminals(out: bool, err: bool, live: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm")
    writer = build_console_writer(
        "auto", out=Terminal() if out else io.StringIO(), err=Terminal() if err else io.StringIO()
    )
    writer.close()
    assert isinstance(writer, LiveWriter) == live


def test_auto_stays_plain_on_a_dumb_terminal_or_without_rich(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "dumb")
    assert isinstance(build_console_writer("auto", out=Terminal(), err=Terminal()), ConsoleWriter)
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setitem(sys.modules, "rich.console", None)
    assert isinstance(build_console_writer("auto", out=Terminal(), err=Terminal()), ConsoleWriter)


def test_on_and_off_mean_it() -> None:
    assert isinstance(build_console_writer("off", out=Terminal(), err=Terminal()), ConsoleWriter)
    forced = build_console_writer("on", out=io.StringIO(), err=io.StringIO())
    forced.close()
    assert isinstance(forced, LiveWriter)


def test_plain_lines_are_flushed_one_by_one() -> None:
    stream = io.StringIO()
    writer = ConsoleWriter(stream)
    writer.write(log_record().as_record())
    writer.write(event_record("done", iteration=1))
    assert stream.getvalue().endswith("|\ndone\n")


def test_columns_average_and_interpolate() -> None:
    many = column_means([(x, float(x % 2)) for x in range(400)], count=10)
    assert many.shape == (10,) and np.allclose(many[1:-1], 0.5, atol=0.02)
    two = column_means([(0, 0.0), (10, 1.0)], count=11)
    assert np.allclose(two, np.linspace(0, 1, 11))
    assert column_means([(5, 2.0)], count=10).tolist() == [2.0]


@settings(max_examples=40, deadline=None)
@given(st.lists(st.floats(-5, 50), min_size=1, max_size=300), st.integers(20, 120), st.integers(1, 12))
def test_the_plot_fits_whatever_it_is_given(losses: list[float], width: int, height: int) -> None:
    points = [(float(10 * index), loss) for index, loss in enumerate(losses)]
    shown = text_of(LossPlot(points, points[::3], height=height), width=width).splitlines()
    assert len(shown) == height + 3
    assert all(len(line) <= width for line in shown)


def test_an_empty_plot_is_nothing() -> None:
    assert text_of(LossPlot([], [], height=5)) == ""


@settings(max_examples=40, deadline=None)
@given(st.integers(1, 200), st.integers(4, 64))
def test_thinning_keeps_the_mean_and_the_order(count: int, limit: int) -> None:
    points: list[tuple[float, float]] = []
    for index in range(count):
        points = downsample([*points, (float(index), float(index))], limit)
    assert len(points) <= limit
    assert points == sorted(points)
    assert points[0][0] >= 0 and points[-1][0] <= count - 1


@pytest.mark.parametrize(
    ("number", "text"),
    [(0, "0"), (950.4, "950"), (12_432, "12.4k"), (999_000, "999k"), (1.3e6, "1.30M"), (2e9, "2.00G")],
)
def test_compact(number: float, text: str) -> None:
    assert format_compact(number) == text
