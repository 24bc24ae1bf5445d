"""Three launchers start the same program; a failing rank stops all with one traceback; signals save and exit."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from petatron.cli.main import main

ROOT = Path(__file__).parent.parent.parent
FLAGS = (
    "--preset tiny-llama --mock-data --num-layers 1 --seq-length 32 --lr 1e-3 --global-batch-size 4 --tp 2 --eval-iters 0 "
    "--log-interval 1 --live off --num-workers 0"
).split()
ENV = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}


def _losses(text: str) -> list[str]:
    return re.findall(r"lm loss: (\S+)", text)


def _run(command: list[str], folder: Path, **more: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command, cwd=folder, env={**ENV, **more}, capture_output=True, text=True, timeout=120)


def test_three_launchers_one_program(tmp_path: Path):
    flags = [*FLAGS, "--train-iters", "3"]
    own = _run([sys.executable, "-m", "petatron", "train", *flags], tmp_path)
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--nproc_per_node=2", "--standalone"]
    theirs = _run([*torchrun, str(ROOT / "pretrain_gpt.py"), *flags], tmp_path)
    slurm = {
        "SLURM_NTASKS": "2",
        "SLURM_JOB_ID": str(os.getpid()),
        "SLURM_STEP_ID": "0",
        "SLURM_JOB_NODELIST": "localhost",
    }
    slurm |= {"SLURM_TASKS_PER_NODE": "2", "SLURM_NODEID": "0", "GLOO_SOCKET_IFNAME": "lo", "HOME": str(tmp_path)}
    ranks = [
        subprocess.Popen(
            [sys.executable, str(ROOT / "pretrain_gpt.py"), *flags],
            cwd=tmp_path,
            env={**ENV, **slurm, "SLURM_PROCID": str(rank), "SLURM_LOCALID": str(rank)},
            stdout=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    srun = "".join(rank.communicate(timeout=120)[0] for rank in ranks)
    assert own.returncode == theirs.returncode == 0, own.stderr + theirs.stderr
    assert len(_losses(own.stdout)) == 3
    assert _losses(own.stdout) == _losses(theirs.stdout) == _losses(srun)


def test_failing_rank_stops_all_with_its_traceback(tmp_path: Path):
    program = """
import os, sys
import petatron.train.loop as loop
step = loop.train_step
def failing(state, batches):
    assert "sympy" not in sys.modules, "a rank that has built its model has spent a second on an import it does not need"
    if state.mesh.rank == 1 and state.progress.iteration == 1:
        raise ValueError("a fault in rank one")
    return step(state, batches)
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
    assert time.monotonic() - started < 60


def test_sigterm_saves_and_exits_cleanly(tmp_path: Path):
    flags = [*FLAGS, "--train-iters", "100000", "--save", "out"]
    run = subprocess.Popen(
        [sys.executable, "-m", "petatron", "train", *flags], cwd=tmp_path, env=ENV, stdout=subprocess.DEVNULL
    )
    metrics = tmp_path / "out" / "metrics.jsonl"
    deadline = time.monotonic() + 60
    while not (metrics.exists() and metrics.read_text().count('"kind": "train"') >= 2):
        assert time.monotonic() < deadline and run.poll() is None
        time.sleep(0.1)
    run.send_signal(signal.SIGTERM)
    assert run.wait(timeout=60) == 0
    events = [json.loads(line) for line in metrics.read_text().splitlines()]
    last = max(event["iteration"] for event in events)
    assert any("received SIGTERM" in event.get("message", "") for event in events)
    assert (tmp_path / "out" / "latest").read_text().strip().endswith(str(last))


def test_interrupt_ends_a_long_evaluation_of_two_ranks_and_the_run_resumes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    without_evaluation = " ".join(FLAGS).replace("--eval-iters 0", "").split()
    flags = [*without_evaluation, *"--train-iters 4 --save out --load out --lr-decay-iters 4".split()]
    command = [sys.executable, "-m", "petatron", "train", *flags]
    long = [*command, "--eval-interval", "2", "--eval-iters", "100000"]
    run = subprocess.Popen(long, cwd=tmp_path, env=ENV, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
    metrics = tmp_path / "out" / "metrics.jsonl"
    deadline = time.monotonic() + 60
    while not (metrics.exists() and metrics.read_text().count('"kind": "train"') >= 2):
        assert time.monotonic() < deadline and run.poll() is None
        time.sleep(0.1)
    time.sleep(1)  # into the evaluation, which would last for hours
    run.send_signal(signal.SIGINT)
    sent = time.monotonic()
    assert run.wait(timeout=60) == 0
    assert time.monotonic() - sent < 30
    assert run.stderr is not None and "SIGINT: stopping the evaluation and saving" in run.stderr.read()
    text = metrics.read_text()
    assert "was interrupted after" in text and '"kind": "valid"' not in text
    assert (tmp_path / "out" / "latest").read_text().strip() == "step-00000002"
    monkeypatch.chdir(tmp_path)
    assert main(["train", *flags, "--tp", "1", "--eval-iters", "1"]) == 0
    shown = capsys.readouterr().out
    assert "resumed at iteration 2" in shown and len(_losses(shown)) >= 2


FAULTY = """
import os, signal, sys, time
import petatron.train.loop as loop
step = loop.train_step
def faulty(state, batches):
    if state.mesh.rank == 2 and state.progress.iteration == 2:
        os.kill(os.getpid(), signal.SIGKILL) if "{fault}" == "kill" else time.sleep(1000)
    return step(state, batches)
loop.train_step = faulty
from petatron.cli.main import main
sys.exit(main(["train", *sys.argv[1:]]))
"""


def _three_ranks(folder: Path, fault: str, *more: str) -> subprocess.CompletedProcess[str]:
    (folder / "faulty.py").write_text(FAULTY.format(fault=fault))
    flags = [
        *" ".join(FLAGS).replace("--tp 2", "--dp 3").replace("size 4", "size 6").split(),
        "--train-iters",
        "50",
        *more,
    ]
    launch = (
        "import sys; from petatron.mesh.launch.local_launcher import run_ranks;"
        f"sys.exit(run_ranks([sys.executable, 'faulty.py', *{flags!r}], nproc=3))"
    )
    return _run([sys.executable, "-c", launch], folder)


def test_killed_rank_is_named_first_and_then_where_the_others_waited(tmp_path: Path):
    done = _three_ranks(tmp_path, "kill")
    assert done.returncode == 128 + signal.SIGKILL
    told = done.stderr[done.stderr.index("Rank 2 of 3 failed first: it was ended by SIGKILL.") :]
    place = r"Ranks 0-1 were waiting in all_reduce over world \(ranks 0-2\) at parallel/parallel_model.py:\d+ _sum, operation \d+"
    assert re.search(place, told), done.stderr
    assert "Traceback" not in done.stderr and "gloo" not in told


@pytest.mark.slow
def test_hung_rank_is_named_with_the_place_where_it_is(tmp_path: Path):
    """The time limit has to be long enough for ranks to meet on a busy machine."""
    done = _three_ranks(tmp_path, "hang", "--distributed-timeout-minutes", "0.4")
    assert done.returncode == 1
    assert re.search(
        r"Rank [01] of 3 gave up first:\n\nRank [01] waited \d+ s in all_reduce over world", done.stderr
    ), done.stderr
    assert re.search(r"Rank 2 did not arrive at all_reduce over world \(ranks 0-2\): \d+ collectives", done.stderr)
    assert "is at " in done.stderr and "faulty.py:7 faulty" in done.stderr
    assert "Traceback" not in done.stderr
