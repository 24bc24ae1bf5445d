"""Three launchers start the same program; a failing rank stops all with one traceback; signals save and exit."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from petatron.cli.main import main
from petatron.mesh.launch.local_launcher import run_ranks
from tests.forked_python import ForkedPython, run_forked
from tests.load_deadline import Deadline, scaled

ROOT = Path(__file__).parents[3]
FLAGS = (
    "--preset tiny-llama --mock-data --num-layers 1 --seq-length 32 --lr 1e-3 --global-batch-size 4 --tp 2 --eval-iters 0 "
    "--log-interval 1 --live off --num-workers 0"
).split()
ENV = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}


def _losses(text: str) -> list[str]:
    return re.findall(r"lm loss: (\S+)", text)


def _run(command: list[str], folder: Path, **more: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command, cwd=folder, env={**ENV, **more}, capture_output=True, text=True, timeout=scaled(120))


@pytest.mark.usefixtures("forked_ranks")
def test_three_launchers_one_program(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
):
    """All ranks are forked with torch loaded; the next test starts all as users do."""
    monkeypatch.chdir(tmp_path)
    flags = [*FLAGS, "--train-iters", "3"]
    assert main(["train", *flags]) == 0
    own = capfd.readouterr().out
    torchrun = [
        sys.executable,
        "-m",
        "tests.forking_launcher",
        "torch.distributed.run",
        "--nproc_per_node=2",
        "--standalone",
    ]
    theirs = run_forked([*torchrun, str(ROOT / "pretrain_gpt.py"), *flags], cwd=tmp_path, env=ENV)
    slurm = {
        "SLURM_NTASKS": "2",
        "SLURM_JOB_ID": str(os.getpid()),
        "SLURM_STEP_ID": "0",
        "SLURM_JOB_NODELIST": "localhost",
    }
    slurm |= {"SLURM_TASKS_PER_NODE": "2", "SLURM_NODEID": "0", "GLOO_SOCKET_IFNAME": "lo", "HOME": str(tmp_path)}
    ranks = [
        ForkedPython(
            [sys.executable, str(ROOT / "pretrain_gpt.py"), *flags],
            cwd=tmp_path,
            env={**ENV, **slurm, "SLURM_PROCID": str(rank), "SLURM_LOCALID": str(rank)},
        )
        for rank in range(2)
    ]
    assert [rank.wait(timeout=scaled(120)) for rank in ranks] == [0, 0]
    srun = capfd.readouterr().out
    assert theirs.returncode == 0, theirs.stderr
    assert len(_losses(own)) == 3
    assert _losses(own) == _losses(theirs.stdout) == _losses(srun)


def test_failing_rank_stops_all_with_its_traceback(tmp_path: Path):
    program = """
import os, sys
import petatron.train.training_loop as loop
step = loop.train_step
def failing(state, batches, *more, **named):
    assert "sympy" not in sys.modules, "a rank that has built its model has spent a second on an import it does not need"
    if state.mesh.rank == 1 and state.progress.iteration == 1:
        raise ValueError("a fault in rank one")
    return step(state, batches, *more, **named)
loop.train_step = failing
from petatron.cli.main import main
sys.exit(main(["train", *sys.argv[1:]]))
"""
    (tmp_path / "faulty.py").write_text(program)
    launch = (
        "import sys; from petatron.mesh.launch.local_launcher import run_ranks;"
        f"sys.exit(run_ranks([sys.executable, 'faulty.py', *{[*FLAGS, '--train-iters', '50']!r}], nproc=2))"
    )
    started = time.monotonic()
    done = _run([sys.executable, "-c", launch], tmp_path)
    assert done.returncode != 0
    assert done.stderr.count("Traceback (most recent call last)") == 1
    assert "a fault in rank one" in done.stderr and "Rank 1 of 2 failed first" in done.stderr
    assert time.monotonic() - started < scaled(60)


def _has_trained(metrics: Path, running: Callable[[], bool]) -> bool:
    """Waits for two steps of a run."""
    deadline = Deadline(60)
    while not deadline.is_over and running():
        if metrics.exists() and metrics.read_text().count('"kind": "train"') >= 2:
            return True
        time.sleep(0.1)
    return False


def _signal_after_two_steps(metrics: Path, number: int, wait_s: float, flags: list[str]) -> float:
    """Trains with the launcher in this process, which takes its signals while the ranks run; returns how long it then took."""
    ended, sent = threading.Event(), []

    def send() -> None:
        trained = _has_trained(metrics, lambda: not ended.is_set())
        if not ended.wait(wait_s) and trained:
            sent.append(time.monotonic())
            os.kill(os.getpid(), number)

    other = threading.Thread(target=send)
    other.start()
    try:
        assert main(["train", *flags]) == 0
    finally:
        ended.set()
        other.join()
    return time.monotonic() - sent[0]


@pytest.mark.usefixtures("forked_ranks")
def test_sigterm_saves_and_exits_cleanly(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    metrics = tmp_path / "out" / "metrics.jsonl"
    monkeypatch.chdir(tmp_path)
    flags = [*FLAGS, "--train-iters", "100000", "--save", "out"]
    assert _signal_after_two_steps(metrics, signal.SIGTERM, 0.0, flags) < scaled(60)
    events = [json.loads(line) for line in metrics.read_text().splitlines()]
    last = max(event["iteration"] for event in events)
    assert any("received SIGTERM" in event.get("message", "") for event in events)
    assert (tmp_path / "out" / "latest").read_text().strip().endswith(str(last))


@pytest.mark.usefixtures("forked_ranks")
def test_interrupt_ends_a_long_evaluation_of_two_ranks_and_the_run_resumes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
):
    without_evaluation = " ".join(FLAGS).replace("--eval-iters 0", "").split()
    flags = [*without_evaluation, *"--train-iters 4 --save out --load out --lr-decay-iters 4".split()]
    metrics = tmp_path / "out" / "metrics.jsonl"
    endless = ["--eval-interval", "2", "--eval-iters", "100000"]  # hours: a second later it is in the evaluation
    monkeypatch.chdir(tmp_path)
    assert _signal_after_two_steps(metrics, signal.SIGINT, 1.0, [*flags, *endless]) < scaled(30)
    assert "SIGINT: stopping the evaluation and saving" in capfd.readouterr().err
    text = metrics.read_text()
    assert "was interrupted after" in text and '"kind": "valid"' not in text
    assert (tmp_path / "out" / "latest").read_text().strip() == "step-00000002"
    assert main(["train", *flags, "--tp", "1", "--eval-iters", "1"]) == 0
    shown = capfd.readouterr().out
    assert "resumed at iteration 2" in shown and len(_losses(shown)) >= 2


FAULTY = """
import os, signal, sys, time
import petatron.train.training_loop as loop
step = loop.train_step
def faulty(state, batches, *more, **named):
    if state.mesh.rank == 2 and state.progress.iteration == 2:
        os.kill(os.getpid(), signal.SIGKILL) if "{fault}" == "kill" else time.sleep(1000)
    return step(state, batches, *more, **named)
loop.train_step = faulty
from petatron.cli.main import main
sys.exit(main(["train", *sys.argv[1:]]))
"""


def _faulty_command(folder: Path, fault: str, *more: str) -> list[str]:
    (folder / "faulty.py").write_text(FAULTY.format(fault=fault))
    flags = [
        *" ".join(FLAGS).replace("--tp 2", "--dp 3").replace("size 4", "size 6").split(),
        "--train-iters",
        "50",
        *more,
    ]
    return [sys.executable, "faulty.py", *flags]


@pytest.mark.usefixtures("forked_ranks")
def test_killed_rank_is_named_first_and_then_where_the_others_waited(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
):
    monkeypatch.chdir(tmp_path)
    assert run_ranks(_faulty_command(tmp_path, "kill"), nproc=3) == 128 + signal.SIGKILL
    said = capfd.readouterr().err
    told = said[said.index("Rank 2 of 3 failed first: it was ended by SIGKILL.") :]
    place = r"Ranks 0-1 were waiting in all_reduce over world \(ranks 0-2\) at parallel/parallel_model.py:\d+ _sum, operation \d+"
    assert re.search(place, told), said
    assert "Traceback" not in said and "gloo" not in told


@pytest.mark.slow
def test_hung_rank_is_named_with_the_place_where_it_is(tmp_path: Path):
    """The time limit has to be long enough for ranks to meet on a busy machine."""
    command = _faulty_command(tmp_path, "hang", "--distributed-timeout-minutes", "0.4")
    launch = (
        "import sys; from petatron.mesh.launch.local_launcher import run_ranks;"
        f"sys.exit(run_ranks([sys.executable, *{command[1:]!r}], nproc=3))"
    )
    done = _run([sys.executable, "-c", launch], tmp_path)
    assert done.returncode == 1
    assert re.search(
        r"Rank [01] of 3 gave up first:\n\nRank [01] waited \d+ s in all_reduce over world", done.stderr
    ), done.stderr
    assert re.search(r"Rank 2 did not arrive at all_reduce over world \(ranks 0-2\): \d+ collectives", done.stderr)
    assert "is at " in done.stderr and "faulty.py:7 faulty" in done.stderr
    assert "Traceback" not in done.stderr
