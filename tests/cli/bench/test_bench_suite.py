"""`petatron bench suite`: which models are measured beside whom, what a failure costs, and the table it writes."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from petatron.base.errors import ConfigError, DataError
from petatron.bench import suite
from petatron.bench.measure.suite_models import ENTRIES, select_entries
from petatron.bench.measure.suite_table import (
    BEGIN,
    END,
    SuiteRow,
    find_table,
    format_table,
    measured_device,
    parse_table,
    row_from_bench,
    update_table,
)
from petatron.bench.peers import problems
from petatron.bench.peers.bench_workload import bench_spec
from petatron.cli.bench import main
from petatron.validate import load_config
from tests.load_deadline import scaled, wait_until
from tests.longform import diagonal

RESULTS = Path(__file__).parents[3] / "docs" / "benchmarks.md"
OURS = {"tokens_per_s": 2000.4, "mfu_full": 0.51234, "peak_bytes": 30_000_000_000, "breakdown": None}
FOUND = {
    "device": {"name": "NVIDIA H200"},
    "contenders": {"petatron": OURS, "hf": {"tokens_per_s": 1000.0, "peak_bytes": 40_000_000_000}},
    "ratio": {"hf": {"speed": 2.0004, "largest_loss_difference": 0.000123}},
}


class ScriptedChild:
    """Answers for `run_child`: the JSON of a measurement, or the last line of a failure."""

    def __init__(self, answers: Sequence[dict[str, Any] | str]) -> None:
        self.words: list[Sequence[str]] = []
        self._answers = list(answers)

    def __call__(self, words: Sequence[str], limit_s: float) -> tuple[dict[str, Any] | None, str]:
        self.words.append(words)
        answer = self._answers.pop(0)
        return (answer, "measured") if isinstance(answer, dict) else (None, answer)


def in_process(words: Sequence[str], limit_s: float) -> tuple[dict[str, Any] | None, str]:
    """Measures in the test's process, where torch is imported already."""
    path = Path(words[-1])
    assert main(["train", *words[:-2], "--json", str(path)]) == 0
    return json.loads(path.read_text()), ""


# One model of every family; the others take longer than they tell.
FAMILIES = (
    "llama-125m",
    "llama-8b-fp8",
    "mixtral-slice",
    "qwen3-30b-a3b",
    "qwen3-0.6b",
    "gemma3-1b",
    "gpt-125m",
    "bert-large",
    "t5-large",
    "llava-7b",
)


@diagonal(3)
@pytest.mark.parametrize(
    "name",
    [pytest.param(entry.name, marks=() if entry.name in FAMILIES else pytest.mark.slow) for entry in ENTRIES],
)
def test_tiny_form_of_every_model_trains_like_its_peer(name: str, tmp_path: Path):
    """Two steps of each are timed; in float32 losses of both agree, in emulated FP8 they are near those of bf16."""
    entry = select_entries([name])[0]
    plan = suite.SuiteRunner(on_cuda=False, peer_paths=(), seconds=1e4)
    words = [*plan.flags(entry), "--steps", "2", "--json", str(tmp_path / "found.json")]
    values, _ = in_process(words, 1e4)
    assert values is not None
    row = row_from_bench(entry.label, values)
    assert row.peer == ("bf16" if entry.fp8_recipe else "hf") and row.tokens_per_s and row.speed_ratio
    assert (row.peer_version is None) == (row.peer == "bf16")
    assert row.loss_difference is not None and row.loss_difference < (0.05 if entry.fp8_recipe else 1e-5)


@pytest.mark.parametrize("entry", ENTRIES, ids=lambda entry: entry.name)
def test_every_model_is_one_its_peers_can_build(entry: Any):
    """The full shapes: torchtitan is named where only its source is missing, and transformers has all but FP8."""
    run = load_config(entry.flags.split(), require_training=False).config
    spec = replace(bench_spec(["--preset", "tiny-llama", "--device", "cpu"]), run=run)
    assert problems("hf", spec) == []
    told = [str(problem) for problem in problems("torchtitan", spec)]
    assert (told == ["--against torchtitan needs its source. Give --peer-path the folder that holds torchtitan/, "
                     "for instance an unpacked wheel."]) == entry.has_torchtitan  # fmt: skip
    assert "--device" not in entry.flags and entry.bench_flags(on_cuda=True)[:2] == entry.flags.split()[:2]


def test_the_first_ten_models_fit_ten_minutes():
    assert sum(entry.estimated_s for entry in ENTRIES[:10]) <= 570 and ENTRIES[0].name == "llama-1b"
    assert len({entry.name for entry in ENTRIES}) == len({entry.label for entry in ENTRIES}) == len(ENTRIES)


def test_a_failure_costs_one_row(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    child = ScriptedChild([FOUND, "Traceback ...\nOutOfMemoryError: a | b", FOUND])
    monkeypatch.setattr(suite, "run_child", child)
    out = tmp_path / "out"
    names = "llama-1b,gpt-125m,qwen3-4b"
    assert main(["suite", "--device", "cpu", "--only", names, "--out", str(out)]) == 0
    rows = parse_table((out / "suite.md").read_text())
    assert [row.failure for row in rows] == [None, "failed: OutOfMemoryError: a / b", None]
    assert [row.label for row in rows] == [f"{name}, a tiny form on a CPU" for name in names.split(",")]
    assert rows[0].speed_ratio == 2.0 and rows[0].memory_ratio == 0.75 and rows[0].loss_difference == 0.00012
    content = json.loads((out / "suite.json").read_text())
    assert content["models"]["llama-1b"]["bench"] == FOUND and content["models"]["gpt-125m"]["bench"] is None
    assert (out / "gpt-125m.log").read_text().startswith("Traceback")
    assert "2,000 tok/s (51.2 % MFU), 30.0 GB, hf: 1,000 tok/s, 40.0 GB, speed 2.00x" in capsys.readouterr().out
    assert all("--against" in words for words in child.words)


def test_what_would_measure_something_else_is_refused(tmp_path: Path):
    words = ["suite", "--device", "cpu"]
    with pytest.raises(ConfigError) as found:
        main([*words, "--seconds", "nan", "--peer-path", str(tmp_path / "none"), "--only", "nosuch"])
    told = str(found.value)
    assert "--seconds nan must be positive" in told and "is no folder" in told and "nosuch" in told


def test_words_that_do_nothing_and_files_that_are_not_there_are_told_at_once(tmp_path: Path):
    rule = "chooses what is measured, and --table measures nothing. Leave one of them out."
    fix = "Give the suite.json that `petatron bench suite --out DIR` wrote."
    (tmp_path / "file").touch()
    words = f"--only llama-1b --seconds 60 --device auto --peer-path {tmp_path} --replace --out {tmp_path}/file"
    with pytest.raises(ConfigError) as found:
        main(["suite", *words.split(), "--table", f"{tmp_path}/none.json", "--table", str(tmp_path)])
    assert [str(problem) for problem in found.value.problems] == [
        f"--only llama-1b {rule}",
        f"--seconds 60 {rule}",
        f"--device auto {rule}",
        f"--peer-path {tmp_path} {rule}",
        f"--table {tmp_path}/none.json is not there. {fix}",
        f"--table {tmp_path} is a folder. {fix}",
        "--replace has no effect without --into. Give --into the file whose table is replaced.",
        f"--out {tmp_path}/file cannot be written: File exists. Choose a writable folder.",
    ]
    with pytest.raises(ConfigError) as found:
        main(["suite", "--seconds", "0", "--into", f"{tmp_path}/page.md"])
    assert [str(problem) for problem in found.value.problems] == [
        "--seconds 0.0 must be positive and finite. Use more than 0, or leave it out.",
        f"--into {tmp_path}/page.md is not there. Give a file that has the lines {BEGIN} and {END}.",
    ]


def test_rows_of_several_suites_are_one_table(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """What was left out in one run and measured in another is there once, in its first place; a failure replaces nothing."""
    faster = {**FOUND, "ratio": {"hf": {"speed": 3.0}}}
    answers = [FOUND, "failed", faster, FOUND, "failed"]
    monkeypatch.setattr(suite, "run_child", ScriptedChild(answers))
    tables: list[str] = []
    for number, names in enumerate(["llama-1b,llama-8b,gpt-125m", "llama-8b,gpt-125m"]):
        assert main(["suite", "--device", "cpu", "--only", names, "--out", str(tmp_path / str(number))]) == 0
        tables += ["--table", str(tmp_path / str(number) / "suite.json")]
    assert main(["suite", *tables, "--out", str(tmp_path / "both")]) == 0
    rows = parse_table((tmp_path / "both" / "suite.md").read_text())
    assert [row.label.partition(",")[0] for row in rows] == ["llama-1b", "llama-8b", "gpt-125m"]
    assert [row.speed_ratio for row in rows] == [2.0, 2.0, 3.0]
    models = json.loads((tmp_path / "both" / "suite.json").read_text())["models"]
    assert models["llama-8b"]["bench"] == FOUND and models["gpt-125m"]["bench"] == faster


def test_rows_name_the_version_of_the_peer():
    theirs = {"tokens_per_s": 1000.0, "peak_bytes": 40_000_000_000, "version": "0.3.0"}
    row = row_from_bench("a model", {**FOUND, "contenders": {"petatron": OURS, "torchtitan": theirs}, "ratio": {}})
    assert (row.peer, row.peer_version) == ("torchtitan", "0.3.0")
    assert row.cells()[2] == "torchtitan 0.3.0: 1,000 tok/s, 40.0 GB"


def test_fp8_has_no_share_of_the_peak_of_bf16():
    assert row_from_bench("a model", FOUND).mfu == 0.51234
    assert row_from_bench("a model", {**FOUND, "fp8_recipe": "tensorwise"}).mfu is None


def test_models_beyond_the_time_budget_are_left_out(monkeypatch: pytest.MonkeyPatch):
    clock = iter(range(0, 1000, 30))
    monkeypatch.setattr(suite.time, "monotonic", lambda: float(next(clock)))
    plan = suite.SuiteRunner(on_cuda=True, peer_paths=(), seconds=140.0)
    child = ScriptedChild([FOUND] * 5)
    entries = select_entries(["llama-1b,llama-8b,llama-125m"])
    rows, details = plan.measure(entries, child)
    assert list(details) == ["llama-1b"] and details["llama-1b"]["seconds"] == 30
    assert [row.failure for row in rows] == [
        None,
        "left out: takes about 68 s, which were not left",
        "left out: takes about 43 s, which were not left",
    ]


def test_whom_a_model_is_compared_with(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    for package in ("torchtitan", "torchao"):
        (tmp_path / package / package).mkdir(parents=True)
        (tmp_path / package / package / "__init__.py").touch()
    llama, fp8, qwen = (select_entries([name])[0] for name in ("llama-1b", "llama-8b-fp8", "qwen3-0.6b"))
    paths = (str(tmp_path / "torchtitan"), str(tmp_path / "torchao"))
    plan = suite.SuiteRunner(on_cuda=True, peer_paths=paths, seconds=1.0)
    assert [plan.peer(entry) for entry in (llama, fp8, qwen)] == ["torchtitan", "torchtitan", "hf"]
    assert plan.flags(llama)[-6:] == ["--against", "torchtitan", "--peer-path", paths[0], "--peer-path", paths[1]]
    assert plan.flags(qwen)[-2:] == ["--against", "hf"] and "--breakdown" in plan.flags(qwen)
    assert plan.flags(fp8)[-8:-6] == ["--fp8-recipe", "tensorwise"]
    newer = tmp_path / "torchtitan" / "torchtitan" / "models" / "common"
    newer.mkdir(parents=True)
    (newer / "decoder.py").touch()
    assert [plan.peer(entry) for entry in (llama, fp8)] == ["torchtitan", "bf16"], "0.3 has no tensorwise FP8"
    (newer / "decoder.py").unlink()
    without = replace(plan, peer_paths=paths[:1])
    assert [without.peer(entry) for entry in (llama, fp8)] == ["torchtitan", "bf16"]
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert plan.peer(qwen) is None and "--against" not in plan.flags(qwen)


def test_a_child_is_stopped_with_its_children(monkeypatch: pytest.MonkeyPatch):
    """What it started is killed too, and the log says after how long."""
    script = (
        "import subprocess, sys, time;"
        "child = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(1000)']);"
        "print('begun', child.pid, flush=True); time.sleep(1000)"
    )
    popen = subprocess.Popen
    monkeypatch.setattr(suite.subprocess, "Popen", lambda command, **how: popen([sys.executable, "-c", script], **how))
    limit_s = scaled(0.5)
    values, log = suite.run_child([], limit_s)
    assert values is None and log.endswith(f"stopped after {limit_s:.0f} s")
    grandchild = int(log.partition("begun ")[2].split()[0])
    wait_until(lambda: _has_ended(grandchild), "the end of what the child had started")


def _has_ended(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] in "ZX"
    except OSError:
        return True


def test_a_child_that_fails_leaves_its_log(monkeypatch: pytest.MonkeyPatch):
    script, popen = "import sys; print('cannot do', *sys.argv[1:], file=sys.stderr); sys.exit(2)", subprocess.Popen
    monkeypatch.setattr(
        suite.subprocess, "Popen", lambda command, **how: popen([sys.executable, "-c", script, *command[1:]], **how)
    )
    values, log = suite.run_child(["--no-such-flag", "1"], 60.0)
    assert values is None and log.startswith("cannot do -m petatron bench train --json") and "--no-such-flag 1" in log


@pytest.mark.slow
def test_the_suite_in_processes_of_their_own(tmp_path: Path):
    assert main(["suite", "--device", "cpu", "--only", "llama-125m", "--out", str(tmp_path)]) == 0
    (row,) = parse_table((tmp_path / "suite.md").read_text())
    assert row.failure is None and row.peer == "hf" and row.loss_difference is not None and row.loss_difference < 1e-5


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("--only llama-1", "--only 'llama-1' is nothing that this bench measures. Did you mean llama-1b?"),
        ("--seconds 0", "--seconds 0.0 must be positive and finite."),
        ("--seconds inf", "--seconds inf must be positive and finite."),
    ],
)
def test_what_cannot_be_asked(words: str, message: str):
    with pytest.raises(ConfigError) as error:
        main(["suite", "--device", "cpu", *words.split()])
    assert message in str(error.value)


def test_a_folder_that_cannot_be_written_is_told_first(tmp_path: Path):
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match=r"--out .*file cannot be written"):
        main(["suite", "--device", "cpu", "--out", str(tmp_path / "file")])


ROWS = [
    SuiteRow(label="a", tokens_per_s=12345.0, mfu=0.5, memory_gb=1.5, idle_share=0.25),
    SuiteRow(label="b", tokens_per_s=1.0, peer="hf", peer_tokens_per_s=2.0, speed_ratio=0.5, loss_difference=0.01),
    SuiteRow(label="c", tokens_per_s=1.0, memory_gb=2.0, peer="hf"),
    SuiteRow(label="d", peer="hf", peer_tokens_per_s=3.0, peer_memory_gb=4.0),
    SuiteRow(label="e", failure="failed: because"),
    SuiteRow(label="f", tokens_per_s=1.0, peer="torchtitan", peer_version="0.3.0", peer_tokens_per_s=2.0),
    SuiteRow(label="g", tokens_per_s=1.0, peer="torchtitan", peer_version="0.3.0"),
]


def test_a_table_is_parsed_as_it_was_written():
    text = format_table(ROWS)
    assert parse_table(text) == ROWS and format_table(parse_table(text)) == text


def test_the_page_of_benchmarks_has_a_table_of_the_suite():
    """Its rows are models of the suite, and it is what the documented command would write."""
    text = RESULTS.read_text()
    place = find_table(text, source=RESULTS.name)
    rows = parse_table(place.content)
    assert rows and {row.label for row in rows} <= {entry.label for entry in ENTRIES}
    assert place.device == "NVIDIA H200"
    for replace_all in (False, True):
        assert update_table(text, rows, device=place.device, replace=replace_all, source=RESULTS.name) == text
    for row in rows:
        assert row.tokens_per_s and row.peer_tokens_per_s and row.speed_ratio
        # The median over pairs is not the ratio of medians, least for a peer that waits for its host.
        assert row.tokens_per_s / row.peer_tokens_per_s == pytest.approx(row.speed_ratio, rel=0.05)


def measured_suite(folder: Path, monkeypatch: pytest.MonkeyPatch, names: str, answers: Sequence[Any]) -> list[str]:
    """The words of `--table` for a suite that was measured with these answers."""
    monkeypatch.setattr(suite, "run_child", ScriptedChild(answers))
    assert main(["suite", "--device", "cpu", "--only", names, "--out", str(folder)]) == 0
    return ["--table", str(folder / "suite.json")]


def test_rows_of_an_earlier_suite_are_written_into_a_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Into an empty place at first; then a row takes the place of that with its label, and the others stay."""
    faster = {**FOUND, "ratio": {"hf": {"speed": 3.0}}}
    first = measured_suite(tmp_path / "a", monkeypatch, "gpt-125m,llama-1b", [FOUND, FOUND])
    later = measured_suite(tmp_path / "b", monkeypatch, "llama-1b,gpt-125m,qwen3-4b", ["failed", faster, FOUND])
    page = tmp_path / "page.md"
    page.write_text(f"before\n\n{BEGIN}\n{END}\n\nafter\n")
    assert main(["suite", *first, "--into", str(page)]) == 0
    written = page.read_text()
    assert written.startswith("before\n\n<!-- bench suite: begin, on NVIDIA H200 -->\n\n|  | Petatron")
    assert written.endswith(f"\n\n{END}\n\nafter\n")
    assert main(["suite", *later, "--into", str(page)]) == 0
    rows = parse_table(find_table(page.read_text(), source="page").content)
    assert [(row.label.partition(",")[0], row.speed_ratio) for row in rows] == [
        ("llama-1b", 2.0),
        ("gpt-125m", 3.0),
        ("qwen3-4b", 2.0),
    ]
    assert main(["suite", *first, "--into", str(page), "--replace"]) == 0
    assert page.read_text() == written


def test_rows_of_another_device_do_not_come_into_a_table(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Neither those of a file nor those that would be measured, of which none is; unless that is asked for."""
    gpu = measured_suite(tmp_path / "gpu", monkeypatch, "llama-1b", [FOUND])
    other = {**FOUND, "device": {"name": "A <strange> CPU -->\n"}}
    cpu = measured_suite(tmp_path / "cpu", monkeypatch, "gpt-125m", [other])
    page = tmp_path / "page.md"
    page.write_text(f"{BEGIN}\n{END}\n")
    assert main(["suite", *gpu, "--into", str(page)]) == 0
    before = page.read_text()
    child = ScriptedChild([])
    monkeypatch.setattr(suite, "run_child", child)
    for words in (cpu, ["--device", "cpu"]):
        with pytest.raises(DataError) as refused:
            main(["suite", *words, "--into", str(page)])
        assert f"{page} has a table of NVIDIA H200, and these rows are of " in str(refused.value)
        assert "give --replace to put them in the place of that table" in str(refused.value)
    assert page.read_text() == before and child.words == []
    page.write_text(before.replace(", on NVIDIA H200", ""))
    with pytest.raises(DataError, match="has a table that names no device, and these rows are of NVIDIA H200"):
        main(["suite", *gpu, "--into", str(page)])
    assert main(["suite", *cpu, "--into", str(page), "--replace"]) == 0
    place = find_table(page.read_text(), source="page")
    assert place.device == "A strange CPU -" and [row.label for row in parse_table(place.content)] == [
        "gpt-125m, a tiny form on a CPU"
    ]
    with pytest.raises(DataError, match="several devices, and a table is of one: A strange CPU -, NVIDIA H200"):
        main(["suite", *cpu, *gpu])


def test_rows_without_a_device_are_not_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    failed = measured_suite(tmp_path / "a", monkeypatch, "llama-1b", ["failed"])
    page = tmp_path / "page.md"
    page.write_text(f"{BEGIN}\n{END}\n")
    with pytest.raises(DataError, match="None of these rows says on which device it was measured"):
        main(["suite", *failed, "--into", str(page)])
    for bench in (None, 1, {}, {"device": 1}, {"device": {"name": 1}}):
        assert measured_device({"a": {"bench": bench}, "b": 1}) is None


def test_something_else_between_the_comments_is_told_of(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    words = measured_suite(tmp_path / "a", monkeypatch, "llama-1b", [FOUND])
    page = tmp_path / "page.md"
    page.write_text(f"{BEGIN[:-4]}, on NVIDIA H200 -->\nold\n{END}\n")
    with pytest.raises(DataError, match=r"its header is another\. Write it anew with --into FILE --replace"):
        main(["suite", *words, "--into", str(page)])
    assert main(["suite", *words, "--into", str(page), "--replace"]) == 0 and "old" not in page.read_text()


@pytest.mark.parametrize(
    ("content", "message"),
    [("", "has no place for the table"), (f"{END} {BEGIN}", "no place"), (f"{BEGIN} {BEGIN} {END}", "no place")],
)
def test_a_file_without_a_place_is_told_before_anything_is_measured(tmp_path: Path, content: str, message: str):
    page = tmp_path / "page.md"
    page.write_text(content)
    with pytest.raises(DataError, match=message):
        main(["suite", "--device", "cpu", "--into", str(page)])


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("\xff", "Cannot read"),
        ("x", "it is no JSON. Give the suite.json that its --out wrote."),
        ("[" * 100_000, "it is no JSON. Give"),
        ("[]", "it is no JSON object. Give"),
        ("{}", "it lacks the rows of a table, or has others. Give"),
        ('{"rows": [{"label": "a"}]}', "it lacks the rows of a table, or has others"),
        ('{"rows": {}, "models": {}}', "it lacks the rows"),
        ('{"rows": [], "models": {"a": 1}}', "it lacks the rows"),
        ('{"rows": [1], "models": {}}', "it lacks the rows"),
        ('{"rows": [{"x": 1}], "models": {}}', "it lacks the rows"),
        ('{"rows": [{"label": 1}], "models": {}}', "it lacks the rows"),
        ('{"rows": [{"label": "a", "mfu": "b"}], "models": {}}', "it lacks the rows"),
        ('{"rows": [{"label": "a", "mfu": true}], "models": {}}', "it lacks the rows"),
    ],
    ids=range(13),
)
def test_what_is_no_earlier_suite(tmp_path: Path, content: str, message: str):
    path = tmp_path / "suite.json"
    path.write_bytes(content.encode("latin-1"))
    with pytest.raises(DataError) as refused:
        main(["suite", "--table", str(path)])
    assert message in str(refused.value) and "Error(" not in str(refused.value)


def test_ratios_have_as_many_digits_whatever_their_size():
    for ratio, text in {11.4834: "11.48x", 1.5324: "1.53x", 1.1: "1.10x", 0.0512: "0.05x"}.items():
        row = SuiteRow(label="a", speed_ratio=ratio, memory_gb=1000 * ratio, peer_memory_gb=1000.0, tokens_per_s=1.0)
        assert row.cells()[3:5] == (text, text)


@pytest.mark.parametrize("text", ["| a | b |\n|---|---|", format_table(ROWS) + "\n| one cell |"])
def test_what_is_no_table_of_the_suite(text: str):
    with pytest.raises(DataError, match=r"no table of petatron bench suite|1 cells in place of 7"):
        parse_table(text)
