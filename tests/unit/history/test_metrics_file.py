"""Reading metrics.jsonl: damaged lines are counted, the later record wins, and links and pipes are refused."""

from __future__ import annotations

import math
import os
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from petatron.base.errors import RunFolderError
from petatron.history.metrics_file import MAX_LINE_BYTES, RunMetrics, read_metrics
from petatron.history.run_folder import find_run_folders, open_run, open_runs
from tests.unit.history.run_files import event, finished_run, lines, train, valid, write_run


def read(tmp_path: Path, content: bytes, *, every_point: bool = True) -> RunMetrics:
    (tmp_path / "metrics.jsonl").write_bytes(content)
    return read_metrics(tmp_path / "metrics.jsonl", every_point=every_point)


def steps(metrics: RunMetrics) -> list[int]:
    return [int(step) for step in metrics.columns["iteration"]]


def test_damaged_lines_are_skipped_and_counted(tmp_path: Path):
    damaged = [
        b'{"kind": "train", "iteration": 7, "lm_l\n',  # torn by a power cut
        b"\x00\x00\xff\n",
        b"[1, 2]\n",
        b'"text"\n',
        b'{"kind": "train", "iteration": -3}\n',
        b'{"kind": 5, "iteration": 1}\n',
        b'{"kind": "train", "lm_loss": 2.0}\n',
        b'{"kind": "valid", "iteration": 1, "split": "valid"}\n',
        b'{"kind": "event", "iteration": 1}\n',
        b'{"kind": "train", "iteration": ' + b"9" * 5000 + b"}\n",
        b"[" * 100_000 + b"\n",
        b"x" * (MAX_LINE_BYTES + 5) + b"\n",
        b'{"kind": "train", "itera',
    ]
    content = lines([train(1)]) + b"".join(damaged[:-1]) + b"\n" + lines([train(2), train(3)]) + damaged[-1]
    metrics = read(tmp_path, content)
    assert steps(metrics) == [1, 2, 3]
    assert metrics.damaged_lines == len(damaged)


def test_reading_ends_in_a_hole(tmp_path: Path):
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(lines([train(1)]))
    os.truncate(path, 1 << 40)
    metrics = read_metrics(path)
    assert steps(metrics) == [1] and metrics.damaged_lines == 1


def test_the_later_record_of_a_step_wins(tmp_path: Path):
    first = [train(1), train(10, 4.0), valid(10, 4.5), train(20, 3.0), valid(20, 3.5), train(25, 2.9), train(30, 2.8)]
    again = [event("resumed at iteration 20 from there", 20), train(30, 2.7), train(40, 2.6)]
    metrics = read(tmp_path, lines([*first, *again]))
    assert steps(metrics) == [1, 10, 20, 30, 40]
    assert metrics.columns["lm_loss"].tolist()[2:] == [3.0, 2.7, 2.6]
    assert metrics.superseded == 2 and metrics.resumed_at == [20]
    assert [found.iteration for found in metrics.evaluations] == [10, 20]
    redone = read(tmp_path, lines([*first, event("resumed at iteration 10", 10), train(20, 3.1), valid(20, 3.4)]))
    assert [found.loss for found in redone.evaluations] == [4.5, 3.4]
    waiting = read(tmp_path, lines([*first, event("resumed at iteration 10", 10)]))
    assert steps(waiting)[-1] == 30, "a start that has trained nothing hides nothing"


@settings(max_examples=40, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 30), st.integers(1, 12)), min_size=1, max_size=6))
def test_any_number_of_resumes_leaves_one_rising_curve(
    tmp_path_factory: pytest.TempPathFactory, starts: list[tuple[int, int]]
):
    records, standing = [], {}
    for number, (resumed, count) in enumerate(starts):
        records.append(event(f"resumed at iteration {resumed}", resumed))
        standing = {step: loss for step, loss in standing.items() if step <= resumed}
        for step in range(resumed + 1, resumed + 1 + count):
            records.append(train(step, float(number)))
            standing[step] = float(number)
    metrics = read(tmp_path_factory.mktemp("resumes"), lines(records))
    assert dict(zip(steps(metrics), metrics.columns["lm_loss"].tolist())) == standing


def test_numbers_that_are_not_finite_are_told_from_missing_ones(tmp_path: Path):
    run = write_run(tmp_path, [train(1, math.nan), train(2, -math.inf), {**train(3), "lm_loss": None}, train(4, 2.0)])
    losses = read_metrics(run / "metrics.jsonl").columns["lm_loss"]
    assert losses.tolist()[:2] == [math.inf, -math.inf] and math.isnan(losses[2]) and losses[3] == 2.0


def test_a_quick_reading_tells_what_a_whole_one_does(tmp_path: Path):
    records = [*finished_run(), event("resumed at iteration 50", 50), *(train(n, n / 7) for n in range(55, 101, 5))]
    content = lines([*records, valid(100, 1.5)]) + b'{"kind": "train", "iteration": 9'
    whole, quick = (read(tmp_path, content, every_point=every) for every in (True, False))
    for name in ("iteration", "lm_loss", "train_iters"):
        assert (
            whole.last(name) == quick.last(name) and whole.finite(name)[:1].tolist() == quick.finite(name)[:1].tolist()
        )
    assert whole.evaluations == quick.evaluations and whole.best_evaluation() == quick.best_evaluation()
    assert len(quick.columns["iteration"]) < len(whole.columns["iteration"])


def test_several_losses_are_columns(tmp_path: Path):
    records = [train(1), train(2, named_losses={"lm": 1.0, "aux": 2.0}), train(3, named_losses={"lm": 0.5})]
    metrics = read(tmp_path, lines(records))
    assert metrics.named_losses == ("lm", "aux")
    assert metrics.columns["lm"].tolist()[1:] == [1.0, 0.5] and math.isnan(metrics.columns["aux"][2])


def test_tasks_are_read_and_the_later_result_wins(tmp_path: Path):
    def task(iteration: int, value: float | str, name: str = "piqa") -> dict[str, Any]:
        return {"kind": "eval", "iteration": iteration, "task": name, "metrics": {"accuracy": {"value": value}}}

    wrong = [{**task(1, 0), "task": 3}, {**task(1, 0), "metrics": 3}, {**task(1, 0), "metrics": {"a": 1}}]
    metrics = read(
        tmp_path, lines([train(1), task(1, 0.5), task(2, 0.25), task(2, "nan", "arc"), task(2, 0.75), *wrong])
    )
    found = [(one.iteration, one.task, one.values["accuracy"]) for one in metrics.tasks]
    assert found == [(1, "piqa", 0.5), (2, "arc", math.inf), (2, "piqa", 0.75)] and metrics.damaged_lines == 3


def test_unknown_kinds_are_counted_and_told(tmp_path: Path):
    run = write_run(
        tmp_path, [train(1), {"kind": "weather\x1b[2J", "iteration": 1}, {"kind": "router", "iteration": 1}]
    )
    notes = " ".join(open_run(run).notes)
    assert "1 record of the kind" in notes and "router" in notes and "\x1b" not in notes


@pytest.mark.parametrize("place", ["link", "fifo", "folder", "missing"])
def test_only_a_regular_file_is_read(tmp_path: Path, place: str):
    run = tmp_path / "run"
    run.mkdir()
    path = run / "metrics.jsonl"
    (tmp_path / "secret").write_bytes(lines([train(1)]))
    make = {"link": lambda: path.symlink_to(tmp_path / "secret"), "fifo": lambda: os.mkfifo(path), "folder": path.mkdir}
    make.get(place, lambda: None)()
    words = {
        "link": "is a symbolic link",
        "fifo": "is a FIFO",
        "folder": "directory",
        "missing": "holds no metrics.jsonl",
    }
    with pytest.raises(RunFolderError, match=words[place]):
        open_run(run)


def test_a_link_as_settings_is_not_followed(tmp_path: Path):
    run = write_run(tmp_path / "run", [train(1)])
    (run / "config.yaml").rename(tmp_path / "config.yaml")
    (run / "config.yaml").symlink_to(tmp_path / "config.yaml")
    opened = open_run(run)
    assert not opened.settings.values and "config.yaml cannot be read: it is a symbolic link" in " ".join(opened.notes)


def test_all_folders_that_are_no_runs_are_named(tmp_path: Path):
    (tmp_path / "file").touch()
    (tmp_path / "empty").mkdir()
    with pytest.raises(RunFolderError) as caught:
        open_runs([tmp_path / "none", tmp_path / "file", tmp_path / "empty"])
    text = str(caught.value)
    assert "none does not exist" in text and "file is a file" in text and "petatron runs" in text


def test_runs_of_the_same_name_have_labels_that_differ(tmp_path: Path):
    folders = [write_run(tmp_path / name / "run", [train(1)]) for name in ("a", "b")]
    assert [run.label for run in open_runs([*folders, folders[0]])] == ["a/run", "b/run", "a/run (2)"]


def test_runs_are_found_below_a_folder_and_not_behind_links(tmp_path: Path):
    inside = write_run(tmp_path / "here" / "deep" / "run", [train(1)])
    outside = write_run(tmp_path / "there" / "run", [train(1)])
    (tmp_path / "here" / "link").symlink_to(outside)
    assert find_run_folders(tmp_path / "here") == [inside]
    with pytest.raises(RunFolderError, match="does not exist"):
        find_run_folders(tmp_path / "nowhere")
