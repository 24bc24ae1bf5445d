"""`petatron plot`, `petatron runs` and `petatron report` as a user types them."""

from __future__ import annotations

import io
import json
import subprocess
import sys
from pathlib import Path
from xml.etree import ElementTree

import pytest

from petatron.cli.main import main
from petatron.history.draw.terminal import print_panels
from petatron.history.metric_curves import build_panels
from petatron.history.run_folder import open_runs
from tests.unit.history.run_files import event, finished_run, train, write_run

ROOT = Path(__file__).parents[3]


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("runs")
    write_run(root / "base", finished_run())
    write_run(
        root / "deeper" / "wide",
        [train(1), train(50, 3.25), event("stopping at iteration 50: SIGTERM", 50)],
        "--num-layers",
        "3",
    )
    write_run(root / "torn", [train(1), train(2, float("nan"))], raw=b'{"kind": "tr')
    return root


def say(capsys: pytest.CaptureFixture[str], *words: str | Path) -> tuple[int, str, str]:
    code = main([str(word) for word in words])
    told = capsys.readouterr()
    assert "Traceback" not in told.err
    return code, told.out, told.err


def test_curves_fit_into_seventy_columns(capsys: pytest.CaptureFixture[str], runs: Path):
    code, out, _ = say(capsys, "plot", runs / "base", "--width", "70")
    assert code == 0 and max(map(len, out.splitlines())) <= 70
    titles = (
        "Training loss  last 2.05",
        "Validation loss",
        "Learning rate",
        "Gradient norm",
        "Throughput",
        "Peak memory",
    )
    assert all(title in out for title in titles) and "◆ validation 2.55" in out
    assert out.count("┬") >= 12 and any("⠁" <= sign <= "⣿" for sign in out)


def test_several_runs_have_letters_where_there_are_no_colors(capsys: pytest.CaptureFixture[str], runs: Path):
    code, out, _ = say(
        capsys, "plot", runs / "base", runs / "deeper" / "wide", "--width", "160", "--metrics", "loss,lr"
    )
    assert code == 0 and max(map(len, out.splitlines())) <= 160
    assert out.splitlines()[0] == "a base   b wide"
    assert "Training loss" in out.splitlines()[2] and "Learning rate" in out.splitlines()[2], "side by side"


def test_a_terminal_gets_colors_and_no_escape_of_others(runs: Path):
    pytest.importorskip("rich")
    opened = open_runs([runs / "base", runs / "torn"])
    stream = io.StringIO()
    print_panels(build_panels(opened), ["a", "\x1b[2J"], stream=stream, width=80, height=6, colored=True)
    assert "\x1b[36m" in stream.getvalue() and "\x1b[2J" not in stream.getvalue() and "\\u001b[2J" in stream.getvalue()


def test_a_terminal_without_unicode_gets_letters(runs: Path):
    stream = io.TextIOWrapper(io.BytesIO(), encoding="ascii")
    print_panels(build_panels(open_runs([runs / "base"])), ["ä"], stream=stream, width=80, height=6, colored=True)
    stream.seek(0)
    drawn = stream.read()
    assert "Training loss" in drawn and "aaaa" in drawn and "*" in drawn and "+----" in drawn


def test_pictures_are_written(capsys: pytest.CaptureFixture[str], runs: Path, tmp_path: Path):
    out = tmp_path / "a.svg"
    words = ("--x", "tokens", "--smooth", "0.9", "--theme", "dark", "--out", out)
    code, text, err = say(capsys, "plot", runs / "base", runs / "torn", *words)
    assert code == 0 and text == f"wrote {out}\n" and "1 line could not be read" in err
    assert ElementTree.fromstring(out.read_text()).tag.endswith("svg")


def test_a_png_needs_matplotlib(
    capsys: pytest.CaptureFixture[str], runs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    code, _, err = say(capsys, "plot", runs / "base", "--out", tmp_path / "a.png")
    assert code == 2 and "needs matplotlib, which is not installed. pip install 'petatron[log]', or write a .svg" in err


def test_a_png_is_drawn_where_matplotlib_is_installed(capsys: pytest.CaptureFixture[str], runs: Path, tmp_path: Path):
    pytest.importorskip("matplotlib")
    out = tmp_path / "a.png"
    odd = write_run(tmp_path / "$\\frac{1}$ <b>", [train(1), train(2, float("inf")), train(3)])
    code, _, _ = say(capsys, "plot", runs / "base", odd, "--metrics", "loss", "--smooth", "0.5", "--out", out)
    assert code == 0 and out.read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("words", "code", "expected"),
    [
        (("--smooth", "1", "--out", "a.pdf", "--height", "1", "--width", "5"), 2, "4 problems"),
        (("--metrics", "los"), 2, "--metrics los is not a metric. Did you mean loss?"),
        (("--metrics", "mfu"), 0, "Model FLOP/s utilization (%)"),
        (("--metrics", "valid", "--x", "time"), 1, "none of the metrics valid was recorded"),
        (("--out", "/nowhere/at/all.svg"), 1, "--out /nowhere/at/all.svg cannot be written: No such file or directory"),
    ],
)
def test_what_cannot_be_drawn_is_told(
    capsys: pytest.CaptureFixture[str], runs: Path, words: tuple[str, ...], code: int, expected: str
):
    found, out, err = say(capsys, "plot", runs / "torn", *words)
    assert found == code and expected in out + err


def test_a_folder_without_log_points_is_told(capsys: pytest.CaptureFixture[str], tmp_path: Path):
    code, _, err = say(capsys, "plot", write_run(tmp_path / "new", [event("x", 0)]))
    assert code == 1 and "there is no log point yet" in err
    code, _, err = say(capsys, "plot", *["."] * 17)
    assert code == 2 and "more than the 16" in err
    code, _, err = say(capsys, "report", tmp_path)
    assert code == 1 and "is not the folder of a run" in err


def test_runs_are_listed(capsys: pytest.CaptureFixture[str], runs: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("COLUMNS", "70")
    code, out, _ = say(capsys, "runs", runs)
    assert code == 0 and max(map(len, out.splitlines())) <= 70
    rows = [line.split() for line in out.splitlines()]
    assert [row[:5] for row in rows[1:]] == [
        ["base", "finished", "100/100", "2.05", "2.55"],
        ["deeper/wide", "stopped", "50/100", "3.25", "-"],
        ["torn", "failed", "2/100", "7", "-"],
    ]
    listed = json.loads(say(capsys, "runs", runs, "--json")[1])["runs"]
    assert [run["state"] for run in listed] == ["finished", "stopped", "failed"] and listed[0][
        "best_validation_loss"
    ] == 2.55
    code, out, _ = say(capsys, "runs", runs / "base" / "..", "--json")
    assert code == 0 and len(json.loads(out)["runs"]) == 3


def test_a_folder_that_cannot_be_read_does_not_hide_the_others(capsys: pytest.CaptureFixture[str], tmp_path: Path):
    write_run(tmp_path / "good", [train(1)])
    (tmp_path / "bad").mkdir()
    (tmp_path / "bad" / "metrics.jsonl").symlink_to(tmp_path / "good" / "metrics.jsonl")
    code, out, _ = say(capsys, "runs", tmp_path)
    assert code == 0 and "good" in out and "bad/metrics.jsonl cannot be read: is a symbolic link" in out
    code, out, _ = say(capsys, "runs", tmp_path / "bad" / "..", "--json")
    assert code == 0 and len(json.loads(out)["notes"]) == 1
    (tmp_path / "none").mkdir()
    assert "no runs below" in say(capsys, "runs", tmp_path / "none")[1]


def test_two_runs_are_compared(capsys: pytest.CaptureFixture[str], runs: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("COLUMNS", "100")
    code, out, _ = say(capsys, "runs", "diff", runs / "base", runs / "deeper" / "wide")
    assert code == 0 and max(map(len, out.splitlines())) <= 100
    row = next(line for line in out.splitlines() if line.startswith("model.num_layers"))
    assert row.endswith("3  [set]") and "[preset tiny-llama]" in row
    assert "model.hidden_size" not in out and "loss at step 50" in out
    found = json.loads(say(capsys, "runs", "diff", runs / "base", runs / "deeper" / "wide", "--json")[1])
    assert {row["name"] for row in found["settings"]} == {"model.num_layers"} and len(found["runs"]) == 2
    same = say(capsys, "runs", "diff", runs / "base", runs / "base")[1]
    assert "settings: no difference" in same


def test_a_report_is_one_file(capsys: pytest.CaptureFixture[str], runs: Path, tmp_path: Path):
    out = tmp_path / "report.html"
    assert say(capsys, "report", runs / "base", "--out", out)[:2] == (0, f"wrote {out}\n")
    assert out.read_text().startswith("<!doctype html>")
    run = write_run(tmp_path / "run", finished_run())
    assert say(capsys, "report", run)[1] == f"wrote {run / 'report.html'}\n"


def test_nothing_of_this_needs_torch(runs: Path):
    program = (
        "import sys; from petatron.cli.main import main\n"
        f"for words in (['plot', {str(runs / 'base')!r}], ['runs', {str(runs)!r}], ['report', {str(runs / 'base')!r}]):\n"
        "    assert main(words) == 0\n"
        "sys.exit('torch' in sys.modules or 'matplotlib' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
