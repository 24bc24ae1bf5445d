"""Reinforcement learning is killed at random moments until it has reached its end: the same answers, each learned from once."""

from __future__ import annotations

import contextlib
import io
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from random import Random

import pytest

from petatron.config import LoadedConfig
from petatron.posttrain.run_posttraining import run_posttraining
from tests.crash.nursery import Nursery
from tests.crash.training import Content, check_folder
from tests.unit.posttrain.rollouts import REWARD, TINY, load, write_environment, write_prompts

ITERATIONS = 6


def run_quietly(loaded: LoadedConfig) -> None:
    with contextlib.redirect_stdout(io.StringIO()):
        run_posttraining(loaded)


def loaded_run(prompts: Path, folder: Path, flags: str) -> LoadedConfig:
    every = "--save-interval 1 --log-interval 1 --live off --rollout-log-gigabytes 1 --lr-decay-style constant"
    sizes = f"--train-iters {ITERATIONS} --rewards exact regex:.*[a-m].* {every}"
    return load(f"--rollout-prompts {prompts} --save {folder} --load {folder} {sizes} {flags}")


def answers(folder: Path) -> dict[str, str]:
    return {path.name: path.read_text() for path in (folder / "rollouts").glob("*.jsonl")}


@pytest.mark.parametrize(
    ("flags", "kills"),
    [
        ("--updates-per-rollout 2 --async-save", 2),
        pytest.param("", 12, marks=pytest.mark.crash),
        pytest.param("--advantage gae --rollout-epochs 2", 12, marks=pytest.mark.crash),
        pytest.param("--rollout-staleness 1 --redraw-equal-rewards 1", 12, marks=pytest.mark.crash),
        pytest.param("--environment {environment}:Early --max-turns 3", 8, marks=pytest.mark.crash),
    ],
)
def test_a_killed_run_learns_from_the_same_answers(nursery: Nursery, tmp_path: Path, flags: str, kills: int):
    prompts, random = write_prompts(tmp_path / "prompts.jsonl"), Random(5)
    flags = flags.format(environment=write_environment(tmp_path / "early.py"))
    began = time.monotonic()
    nursery.run(run_quietly, loaded_run(prompts, tmp_path / "whole", flags)).lived()
    whole_s = time.monotonic() - began
    expected, drawn = Content.of(tmp_path / "whole"), answers(tmp_path / "whole")
    assert len(drawn) == ITERATIONS // (2 if "updates" in flags or "epochs" in flags else 1) + ("staleness" in flags)
    killed, folder, newest = 0, tmp_path / "killed", None
    while True:
        life_s = random.uniform(0.1, 0.6) * whole_s if killed < kills else None
        death = nursery.run(run_quietly, loaded_run(prompts, folder, flags), kill_after_s=life_s)
        newest = check_folder(folder, expected, at_least=newest)
        if not death.killed:
            death.lived()
            break
        killed += 1
    assert newest == ITERATIONS and answers(folder) == drawn


@pytest.mark.crash
@pytest.mark.parametrize("seed", [1, 2])
def test_ranks_that_draw_are_killed_with_those_that_train(tmp_path: Path, seed: int):
    """All of them at once, as where a machine fails: the run has the same answers and weights at its end."""
    prompts, random = write_prompts(tmp_path / "prompts.jsonl"), Random(seed)

    def start(folder: Path) -> subprocess.Popen[str]:
        flags = (
            f"{TINY} --rewards {REWARD} --rollout-prompts {prompts} --save {folder} --load {folder} --save-interval 1 --log-interval 1 "
            f"--rollout-log-gigabytes 1 --lr-decay-style constant --live off --device cpu --train-iters {ITERATIONS} --rollout-ranks 1 "
            "--rollout-staleness 1"
        )
        command = [sys.executable, "-m", "petatron", "posttrain", "grpo", *flags.split()]
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
        return subprocess.Popen(command, start_new_session=True, **pipes)

    def finish(process: subprocess.Popen[str]) -> None:
        output, _ = process.communicate(timeout=120)
        assert process.returncode == 0, output

    finish(start(tmp_path / "whole"))
    for _ in range(4):
        process = start(tmp_path / "killed")
        seen = len(answers(tmp_path / "killed"))
        while process.poll() is None and len(answers(tmp_path / "killed")) < min(seen + 2, ITERATIONS):
            time.sleep(0.005)
        time.sleep(random.uniform(0, 0.2))
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.communicate()
    finish(start(tmp_path / "killed"))
    assert answers(tmp_path / "killed") == answers(tmp_path / "whole")
    check_folder(tmp_path / "killed", Content.of(tmp_path / "whole"))
