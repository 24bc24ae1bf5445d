"""`--profile`: which iterations and ranks are traced, where the trace goes, and what happens when a run ends too early."""

from __future__ import annotations

import gzip
import json
import logging
from pathlib import Path

import pytest
import torch

from petatron.base.errors import ConfigError
from petatron.train.report.profiler import StepProfiler, profile_directory
from petatron.train.run_training import run_training
from petatron.validate import load_config, resolve_config
from tests.heard import heard
from tests.parity.harness import TINY, tiny_run

BASE = [*TINY.split(), "--eval-iters", "0", "--live", "off"]


def traced(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_a_run_writes_a_trace_of_the_chosen_iterations(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    flags = f"--train-iters 5 --save {tmp_path} --profile --profile-step-start 2 --profile-step-end 4".split()
    run_training(load_config([*BASE, *flags], world_size=1))
    assert traced(tmp_path / "profile") == ["iterations-2-3-rank-0.json.gz"]
    with gzip.open(tmp_path / "profile" / "iterations-2-3-rank-0.json.gz", "rt") as file:
        events = json.load(file)["traceEvents"]
    backwards = [event for event in events if event.get("name", "").startswith("autograd::engine::evaluate_function")]
    assert events and backwards
    text = capsys.readouterr().out
    before, after = (
        f"--profile: will trace iterations 2 to 3 on rank 0 into {tmp_path}/profile\n",
        f"wrote the trace of iterations 2 to 3 to {tmp_path}/profile/iterations-2-3-rank-0.json.gz\n",
    )
    assert -1 < text.find(before) < text.find("iteration        1/") < text.find(after)


def test_without_any_folder_the_log_says_where_traces_go(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    profile, told = start("--profile --profile-step-start 1 --profile-step-end 2")
    steps(profile, range(1, 3))
    assert told[0] == "--profile: will trace iteration 1 on rank 0 into runs/profile"
    assert told[1] == "wrote the trace of iteration 1 to runs/profile/iterations-1-1-rank-0.json.gz"


def test_rank_0_speaks_for_the_ranks_that_are_traced(tmp_path: Path):
    flags = f"--tp 2 --profile --profile-ranks 1 --profile-dir {tmp_path}"
    told: list[str] = []
    for rank in (1, 0):
        run = tiny_run(flags, world_size=2)
        profile = StepProfiler(run, rank=rank, iterations=20, device=torch.device("cpu"), log_event=told.append)
        profile.begin(1)
    assert told == [f"--profile: will trace iterations 10 to 11 on rank 1 into {tmp_path}"]


def start(flags: str, *, rank: int = 0, iterations: int = 20) -> tuple[StepProfiler, list[str]]:
    told: list[str] = []
    device = torch.device("cpu")
    return StepProfiler(tiny_run(flags), rank=rank, iterations=iterations, device=device, log_event=told.append), told


def steps(profile: StepProfiler, numbers: range) -> None:
    with profile:
        for number in numbers:
            profile.begin(number)
            torch.ones(3).sum()
            profile.end(number)


@pytest.mark.parametrize(
    ("flags", "numbers", "name"),
    [
        ("--profile-step-start 2 --profile-step-end 5", range(1, 9), "iterations-2-4-rank-0.json.gz"),
        ("--profile-step-start 2 --profile-step-end 9", range(1, 5), "iterations-2-4-rank-0.json.gz"),  # ended early
        ("--profile-step-start 2 --profile-step-end 6", range(4, 9), "iterations-4-5-rank-0.json.gz"),  # resumed
        ("--profile-step-start 2 --profile-step-end 3", range(4, 9), None),
        ("--profile-step-start 2 --profile-step-end 4 --profile-ranks 0", range(0), None),
    ],
)
def test_what_is_traced(tmp_path: Path, flags: str, numbers: range, name: str | None):
    profile, told = start(f"--profile --profile-dir {tmp_path} {flags}")
    steps(profile, numbers)
    assert traced(tmp_path) == ([] if name is None else [name])
    assert [text.split(" ")[0] for text in told[1:]] == ([] if name is None else ["wrote"])
    if numbers:
        assert told[0].startswith("nothing will be traced: the run is at" if name is None else "--profile: will trace")


@pytest.mark.parametrize(
    ("asked", "begun", "plan"),
    [
        ((2, 100), 1, "--profile: will trace iterations 2 to 5 on rank 0 into {folder}"),
        ((2, 100), 5, "--profile: will trace iteration 5 on rank 0 into {folder}"),
        ((2, 4), 4, "nothing will be traced: the run is at iteration 4, and --profile-step-end is 4"),
        ((7, 9), 1, "nothing will be traced: --profile-step-start is 7, and the run ends with iteration 5"),
    ],
)
def test_the_plan_ends_with_the_run(tmp_path: Path, asked: tuple[int, int], begun: int, plan: str):
    """Its length may come from samples, with which steps that lie behind it are accepted."""
    flags = f"--profile --profile-dir {tmp_path} --profile-step-start {asked[0]} --profile-step-end {asked[1]}"
    profile, told = start(flags, iterations=5)
    for number in range(begun, 6):
        profile.begin(number)
        profile.end(number)
    assert told[0] == plan.format(folder=tmp_path)
    assert len(traced(tmp_path)) == plan.startswith("--profile"), (
        "the trace ends with the last iteration, before what comes after it"
    )


def test_other_ranks_and_runs_without_the_flag_do_nothing(tmp_path: Path):
    for flags, rank in (("--profile", 1), ("--no-profile", 0)):
        profile, told = start(f"{flags} --profile-dir {tmp_path / 'traces'}", rank=rank)
        steps(profile, range(1, 20))
        assert not (tmp_path / "traces").exists() and told == []


def test_a_failing_iteration_leaves_its_trace(tmp_path: Path):
    profile, _ = start(f"--profile --profile-dir {tmp_path} --profile-step-start 1 --profile-step-end 9")
    with pytest.raises(ZeroDivisionError), profile:
        profile.begin(1)
        _ = 1 / 0
    assert traced(tmp_path) == ["iterations-1-1-rank-0.json.gz"]


def test_a_trace_that_cannot_be_written_does_not_end_the_run(tmp_path: Path):
    folder = tmp_path / "traces"
    profile, told = start(f"--profile --profile-dir {folder} --profile-step-start 1 --profile-step-end 2")
    folder.rmdir()
    folder.write_text("in the way")
    steps(profile, range(1, 3))
    assert told[1].startswith("WARNING: the trace could not be written")
    assert told[1].count(str(folder)) == 1


def test_another_rank_says_that_it_could_not_write(tmp_path: Path):
    """As an error: of other ranks than 0 nothing else is shown."""
    folder, told = tmp_path / "traces", list[str]()
    run = tiny_run(f"--tp 2 --profile --profile-ranks 0 1 --profile-dir {folder} --profile-step-start 1", world_size=2)
    profile = StepProfiler(run, rank=1, iterations=20, device=torch.device("cpu"), log_event=told.append)
    folder.rmdir()
    folder.write_text("in the way")
    with heard("petatron", level=logging.ERROR) as messages:
        steps(profile, range(1, 2))
    assert "the trace could not be written" in messages[0] and told == []


def test_a_folder_that_cannot_be_made_is_found_before_training(tmp_path: Path):
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match=r"--profile-dir .* cannot be made"):
        start(f"--profile --profile-dir {tmp_path / 'file' / 'traces'}")


def test_where_traces_go():
    places = {
        "--save a": "a/profile",
        "--save a --log-dir b": "b/profile",
        "--save a --tensorboard-dir c": "c/profile",
        "--save a --profile-dir d": "d",
        "": "runs/profile",
    }
    assert {flags: str(profile_directory(tiny_run(flags))) for flags in places} == places


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ("--profile-step-start 0", "--profile-step-start 0 is below 1. Use 1 or more."),
        (
            "--profile --profile-step-start 5 --profile-step-end 5",
            "--profile-step-end 5 is not after --profile-step-start 5, so nothing would be traced. Use 6 or more.",
        ),
        (
            "--profile --train-iters 9",
            "--profile-step-start 10 (default) is after the last of --train-iters 9, so nothing would be traced. Use 9 or less.",
        ),
        (
            "--profile --profile-step-start 15",
            "--profile-step-end 12 (default) is not after --profile-step-start 15, so nothing would be traced. Use 16 or more.",
        ),
        (
            "--profile --profile-step-end 3",
            "--profile-step-end 3 is not after --profile-step-start 10 (default), so nothing would be traced. Use 11 or more.",
        ),
        (
            "--profile --profile-step-start 30 --profile-step-end 40",
            "--profile-step-start 30 is after the last of --train-iters 20, so nothing would be traced. Use 20 or less.",
        ),
        (
            "--profile --profile-ranks 0 3 -1",
            "--profile-ranks 3 -1 is not among the 1 ranks of this run. Ranks count from 0.",
        ),
    ],
)
def test_rules(flags: str, message: str):
    assert [str(problem) for problem in resolve_config([*BASE, *flags.split()], world_size=1)[1]] == [message]


def test_settings_of_a_profile_that_is_not_asked_for_are_idle():
    loaded = load_config([*BASE, "--profile-step-end", "14", "--use-pytorch-profiler"], world_size=1)
    assert any("--profile-step-end has no effect: it is for --profile" in notice for notice in loaded.notices)
    assert any("nothing changes: --use-pytorch-profiler" in notice for notice in loaded.notices)
