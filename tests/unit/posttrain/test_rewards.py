"""Rewards of a user's functions run in processes: an exception, a crash, a time-out or a print costs one answer."""

from __future__ import annotations

import json
import math
import subprocess
import sys
import time
from pathlib import Path

import pytest

from petatron.base.errors import TrainError
from petatron.posttrain.rewards.reward_spec import parse_rewards
from petatron.posttrain.rewards.reward_sum import RewardSum
from tests.load_deadline import scaled

FUNCTION = """
import os, time

def reward(answer, record):
    print("to the error stream")
    if answer == "raise":
        raise KeyError("missing")
    if answer == "crash":
        os._exit(3)
    if answer == "sleep":
        time.sleep(60)
    if answer == "nan":
        return float("nan")
    return len(answer) * record["factor"]
"""


def rewards_of(path: Path, spec: str, *, timeout_s: float = 20.0, workers: int = 1) -> RewardSum:
    return RewardSum(parse_rewards([spec.format(path)]), workers=workers, timeout_s=timeout_s)


def test_a_failure_costs_one_answer(tmp_path: Path):
    path = tmp_path / "own.py"
    path.write_text(FUNCTION)
    rewards = rewards_of(path, "0.5*{}:reward", workers=2)
    texts = ["ab", "raise", "abc", "crash", "a", "nan", "abcd"]
    results = rewards.of([(text, {"factor": 2}) for text in texts])
    rewards.close()
    assert [result.reward for result in results if result.failure is None] == [2.0, 3.0, 1.0, 4.0]
    failures = [result.failure for result in results if result.failure is not None]
    assert all(math.isnan(result.reward) for result in results if result.failure is not None)
    for failure, text in zip(failures, ("KeyError: 'missing'", "has ended", "the reward is nan"), strict=True):
        assert failure.startswith(f"0.5*{path}:reward") and text in failure


def test_a_function_that_does_not_end_is_ended(tmp_path: Path):
    path = tmp_path / "own.py"
    path.write_text(FUNCTION)
    rewards = rewards_of(path, "{}:reward", timeout_s=1.0)
    first, second = rewards.of([("sleep", {"factor": 1}), ("ab", {"factor": 1})])
    rewards.close()
    assert first.failure is not None and "no reward within 1 s" in first.failure and second.reward == 2.0


@pytest.mark.parametrize(
    ("content", "text"), [("def other(): pass", "has no function reward"), ("import nothing_there", "nothing_there")]
)
def test_a_file_that_cannot_be_used_ends_the_run(tmp_path: Path, content: str, text: str):
    path = tmp_path / "own.py"
    path.write_text(content)
    rewards = rewards_of(path, "{}:reward")
    with pytest.raises(TrainError, match=text):
        rewards.of([("a", {})])
    rewards.close()


def test_rules_about_texts():
    rewards = RewardSum(
        parse_rewards(["math", "0.1*contains:word", "0.01*json", "regex:.*[0-9]"]), workers=1, timeout_s=1.0
    )
    record = {"answer": "1/2", "word": "so"}
    answers = rewards.of([("so 0.5", record), ('{"x": 1}', record), ("so", {"word": "so"})])
    assert answers[0].reward == pytest.approx(2.1) and answers[1].reward == pytest.approx(0.01)
    assert answers[2].failure == "math: the line of the prompt has no 'answer'"
    assert answers[0].parts == {"math": 1.0, "0.1*contains:word": 1.0, "0.01*json": 0.0, "regex:.*[0-9]": 1.0}


def test_a_function_that_runs_ends_with_the_run_that_was_killed(tmp_path: Path):
    (tmp_path / "slow.py").write_text("import time\ndef reward(answer, record):\n    time.sleep(600)\n")
    worker = [sys.executable, "-m", "petatron.posttrain.rewards.function_worker", str(tmp_path / "slow.py"), "reward"]
    job = json.dumps({"answer": "", "record": {}}) + "\n"
    code = (
        "import subprocess, sys, time\n"
        f"worker = subprocess.Popen({worker!r}, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)\n"
        f"worker.stdout.readline(); worker.stdin.write({job!r}); worker.stdin.flush()\n"
        "print(worker.pid, flush=True); time.sleep(600)"
    )
    run = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    assert run.stdout is not None
    pid = int(run.stdout.readline())
    run.kill()
    run.wait()
    end = time.monotonic() + scaled(30)
    while _runs(pid) and time.monotonic() < end:
        time.sleep(0.1)
    assert not _runs(pid)


def _runs(pid: int) -> bool:
    """Whether there is such a process; one that has ended, and that nobody has asked about, has no command line."""
    try:
        return bool(Path(f"/proc/{pid}/cmdline").read_bytes())
    except OSError:
        return False
