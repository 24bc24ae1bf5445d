"""`petatron plan schedule`: the picture, the numbers, and clear errors."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from petatron.cli.main import main
from petatron.plan.pipeline_simulator import ActionCosts, simulate
from petatron.schedule import ScheduleShape, build_schedule
from petatron.schedule.actions import TimedAction
from petatron.schedule.measured_timeline import write_measured

ROOT = Path(__file__).parents[3]


def _plan(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, str, str]:
    code = main(["plan", "schedule", *words])
    captured = capsys.readouterr()
    assert "Traceback" not in captured.err
    return code, captured.out, captured.err


def test_a_schedule_is_drawn_and_measured_against_theory(capsys: pytest.CaptureFixture[str], tmp_path: Path):
    out = tmp_path / "timeline.svg"
    code, text, _ = _plan(capsys, "--name", "1f1b", "--pp", "4", "--microbatches", "16", "--out", str(out))
    assert code == 0
    assert "1f1b: 4 ranks, 16 micro-batches" in text
    assert text.count("15.79%") == 2
    assert "peak activations  4 3 2 1\n" in text
    assert max(len(line) for line in text.splitlines()) <= 100 or "picture in" in text.splitlines()[-1]
    assert out.read_text().startswith("<svg")


def test_costs_are_of_the_whole_rank(capsys: pytest.CaptureFixture[str]):
    shape = ("--pp", "4", "--microbatches", "8", "--costs", "F=2,B=4")
    _, one, _ = _plan(capsys, "--name", "1f1b", *shape)
    _, two, _ = _plan(capsys, "--name", "interleaved", "--virtual", "2", *shape)
    assert f"time              {6 * (8 + 3)}" in one
    assert f"time              {6 * 8 + 3 * 3}" in two
    assert "each of 1/2 of the rank's layers" in two
    _, split, _ = _plan(capsys, "--name", "zb-h1", *shape)  # I and W are half of B
    assert f"time              {6 * 8 + 2 * 3}" in split
    times = [_plan(capsys, "--name", "zb-h1", *shape[:-1], costs)[1] for costs in ("B=3,I=1", "B=3,W=2", "I=1,W=2")]
    assert times[0] == times[1] == times[2]


def test_all_schedules_side_by_side(capsys: pytest.CaptureFixture[str]):
    code, text, _ = _plan(capsys, "--pp", "4", "--microbatches", "16", "--costs", "transfer=0.05")
    rows = {line.split()[0]: line.split() for line in text.splitlines()}
    assert code == 0 and list(rows) == ["schedule", "gpipe", "1f1b", "interleaved", "zb-h1", "zb-v"]
    times = [float(rows[name][2]) for name in ("1f1b", "interleaved", "zb-h1", "zb-v")]
    assert times == sorted(times, reverse=True)
    _, refused, _ = _plan(capsys, "--pp", "4", "--microbatches", "16", "--group-size", "2")
    assert "interleaved  a group of 2 micro-batches is smaller" in refused


def test_few_micro_batches_have_no_theory(capsys: pytest.CaptureFixture[str]):
    code, text, _ = _plan(capsys, "--name", "zb-v", "--pp", "4", "--microbatches", "2")
    assert code == 0 and "none for so few micro-batches" in text


def test_a_measured_timeline_is_drawn(capsys: pytest.CaptureFixture[str], tmp_path: Path):
    path, out = tmp_path / "measured.json", tmp_path / "measured.svg"
    events = simulate(build_schedule(ScheduleShape("1f1b", ranks=2, virtual=1, micro_batches=4)), ActionCosts()).events
    late = [[TimedAction(t.action, 70 + t.start / 1e3, 70 + t.end / 1e3) for t in rank] for rank in events]
    write_measured(path, "1f1b", late)
    code, text, _ = _plan(capsys, "--measured", str(path), "--out", str(out))
    assert code == 0
    assert "1f1b: 2 ranks, measured" in text and "20.00%" in text and "15.000 ms" in text
    assert "F=1.000,B=2.000 ms" in text
    assert "time (ms)" in out.read_text()


@pytest.mark.parametrize(
    ("words", "says"),
    [
        ("--name 1f1 --pp 2 --microbatches 4", "--name 1f1 is not a schedule. Did you mean 1f1b?"),
        ("--name what --pp 2 --microbatches 4", "Use one of gpipe"),
        ("--name 1f1b --pp 0 --microbatches 4", "--pp 0 must be at least 1"),
        ("--name 1f1b --pp 2", "--microbatches is missing"),
        ("--name 1f1b --pp 2 --microbatches 4 --virtual 0", "--virtual 0 must be at least 1"),
        ("--name 1f1b --pp 2 --microbatches 4 --virtual 2", "one stage per rank, not 2"),
        ("--name interleaved --pp 4 --microbatches 4 --group-size 2", "smaller than the pipeline's 4 ranks"),
        ("--name 1f1b --pp 4 --microbatches 4 --group-size 4", "means nothing for 1f1b"),
        ("--name 1f1b --pp 2 --microbatches 4 --costs F=0", "--costs F=0 is not a time above 0"),
        ("--name 1f1b --pp 2 --microbatches 4 --costs F", "--costs F is not a time above 0"),
        ("--name 1f1b --pp 2 --microbatches 4 --costs transfer=-1", "--costs transfer=-1 is not a time"),
        ("--name 1f1b --pp 2 --microbatches 4 --costs Q=1", "--costs Q=1 names no action"),
        ("--name 1f1b --pp 2 --microbatches 4 --costs F=1,F=2", "--costs F=2 contradicts F=1. Write it once."),
        (
            "--name zb-h1 --pp 2 --microbatches 4 --costs B=2,I=3,W=1",
            "--costs B=2 is not I=3 + W=1 = 4, the two halves",
        ),
        (
            "--name zb-h1 --pp 2 --microbatches 4 --costs B=2,W=2",
            "--costs W=2 leaves nothing of B=2 for the other half",
        ),
        ("--name 1f1b --pp 2 --microbatches 4 --out picture.png", "--out picture.png does not end in .svg"),
        ("--pp 2 --microbatches 4 --out picture.svg", "needs a schedule to draw"),
        ("--measured x.json --pp 2", "--pp 2 goes with a simulated schedule"),
    ],
)
def test_wrong_words_are_explained(capsys: pytest.CaptureFixture[str], words: str, says: str):
    code, text, error = _plan(capsys, *words.split())
    assert code == 2 and says in error and not text


def test_all_problems_at_once(capsys: pytest.CaptureFixture[str]):
    _, _, error = _plan(capsys, "--name", "x", "--pp", "-1", "--costs", "F=no")
    assert error.startswith("4 problems in this configuration:")


def test_files_in_the_way(capsys: pytest.CaptureFixture[str], tmp_path: Path):
    code, _, error = _plan(capsys, "--measured", str(tmp_path / "absent.json"))
    assert code == 1 and "Cannot read" in error
    (tmp_path / "folder.svg").mkdir()
    shape = ("--name", "1f1b", "--pp", "2", "--microbatches", "2", "--out")
    for out in (tmp_path / "folder.svg", tmp_path / "absent" / "x.svg"):
        code, _, error = _plan(capsys, *shape, str(out))
        assert code == 1 and f"Cannot write {out}" in error
    only = tmp_path / "transfers.json"
    only.write_text('{"name": "1f1b", "ranks": [[{"kind": "SF", "stage": 0, "micro_batch": 0, "start": 0, "end": 1}]]}')
    code, _, error = _plan(capsys, "--measured", str(only))
    assert code == 1 and "transfers only" in error


def test_planning_needs_no_torch():
    words = ["plan", "schedule", "--name", "zb-v", "--pp", "2", "--microbatches", "4"]
    program = f"import sys; from petatron.cli.main import main; main({words}); sys.exit('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_a_mistake_in_a_plan_of_memory_needs_no_torch():
    words = ["plan", "memory", "tiny-llama", "--tp", "3", "--device-memory-gb", "-5"]
    program = f"import sys; from petatron.cli.main import main; main({words}); sys.exit('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "--device-memory-gb -5 is not a size above 0." in done.stderr and "-size 3 does not divide" in done.stderr


@pytest.mark.parametrize(("name", "most"), [((), "31,250"), (("--name", "1f1b"), "62,500")])
def test_a_simulation_of_minutes_is_refused_at_once(
    capsys: pytest.CaptureFixture[str], name: tuple[str, ...], most: str
):
    code, out, err = _plan(capsys, *name, "--pp", "4", "--microbatches", "100000")
    assert (code, out) == (2, "")
    assert "are more passes than the 250,000 that are simulated" in err and f"Use {most} or fewer" in err


def test_help_names_all_that_is_planned(capsys: pytest.CaptureFixture[str]):
    with pytest.raises(SystemExit):
        main(["plan", "--help"])
    text = " ".join(capsys.readouterr().out.split())
    for what in (
        "simulates a pipeline schedule",
        "compares all schedules",
        "what a run has measured",
        "which changes would make it fit",
    ):
        assert what in text
