"""The folder of a run: metrics and settings, which lists, plots and reports read. No digest covers them."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

from tests.fuzz.kind import Kind
from tests.fuzz.kinds.commands import petatron_says
from tests.fuzz.kinds.files import files_of
from tests.unit.history.run_files import event, finished_run, train, valid, write_run


def make(name: str) -> Kind:
    samples = [{"prompt": "once", "text": " upon a time"}]
    records = [
        *finished_run(train_iters=20),
        {"kind": "sample", "time": 1.0, "iteration": 20, "samples": samples},
        event("resumed at iteration 10", 10),
        train(11, float("nan")),
        valid(20, 3.0),
        {"kind": "summary", "time": 2.0, "iteration": 20, "outcome": "complete", "duration_s": 9.5},
    ]
    with tempfile.TemporaryDirectory() as folder:
        files = files_of(write_run(Path(folder) / "run", records).parent)
    return Kind(
        name,
        files,
        doors={"plot": _plot, "svg": _svg, "runs": _runs, "diff": _diff, "report": _report},
        shares={"plot": 2, "report": 2},
        formats={".yaml": "yaml", ".jsonl": "jsonl"},
    )


def _plot(folder: Path, scratch: Path) -> Any:
    return petatron_says("plot", str(folder / "run"), "--width", "70", "--smooth", "0.5")


def _svg(folder: Path, scratch: Path) -> Any:
    petatron_says("plot", str(folder / "run"), "--x", "time", "--out", str(scratch / "plot.svg"))
    return (scratch / "plot.svg").read_text()


def _runs(folder: Path, scratch: Path) -> Any:
    return petatron_says("runs", str(folder))


def _diff(folder: Path, scratch: Path) -> Any:
    return petatron_says("runs", "diff", str(folder / "run"), str(folder / "run"), "--json")


def _report(folder: Path, scratch: Path) -> Any:
    petatron_says("report", str(folder / "run"), "--out", str(scratch / "report.html"))
    text = (scratch / "report.html").read_text()
    assert text.count("<script") == text.count("</script>"), "a record has put an element into the page"
    return len(text)
