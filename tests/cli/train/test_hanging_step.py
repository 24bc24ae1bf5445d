"""SIGTERM in a step that does not end: every rank ends after the bound, from the last checkpoint, and the run says so."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest

from petatron.mesh.launch.local_launcher import run_ranks
from tests.forked_python import ForkedPython
from tests.load_deadline import Deadline, scaled, wait_until

ROOT = Path(__file__).parents[3]
ENV = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
FLAGS = (
    "--preset tiny-llama --mock-data --num-layers 1 --seq-length 16 --lr 1e-3 --global-batch-size 2 --eval-iters 0 --log-interval 1 "
    "--live off --num-workers 0 --train-iters 50 --save out --save-interval 2 --exit-signal-grace-s 1"
).split()
# A mutex that is locked twice: no signal wakes the main thread, and no bytecode runs there any more.
HANGING = """
import ctypes, sys
import petatron.train.training_loop as loop
step = loop.train_step
def hanging(state, batches, *more, **named):
    if state.progress.iteration == 3 and state.mesh.rank == state.mesh.world.size - 1:
        open("hangs", "w").close()
        libc, mutex = ctypes.CDLL(None), ctypes.create_string_buffer(64)
        libc.pthread_mutex_lock(mutex)
        libc.pthread_mutex_lock(mutex)
    return step(state, batches, *more, **named)
loop.train_step = hanging
from petatron.cli.main import main
sys.exit(main(["train", *sys.argv[1:]]))
"""
END = "stopping at iteration 3: received SIGTERM 1 s ago (--exit-signal-grace-s), and iteration 4 is not finished."
END_AFTER_ANOTHER = END.replace(" 1 s ago (--exit-signal-grace-s)", ", and other ranks have ended")
"""What rank 0 says where another rank is overdue first, by some milliseconds."""
LOST = "The last checkpoint is that of iteration 2 in out: 1 finished step and the one under way are lost"


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "hanging.py").write_text(HANGING)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def check_end(folder: Path) -> None:
    events = [json.loads(line) for line in (folder / "out" / "metrics.jsonl").read_text().splitlines()]
    assert [event["message"] for event in events if event["kind"] == "event"][-1] in (
        f"{END} {LOST}",
        f"{END_AFTER_ANOTHER} {LOST}",
    )
    steps = sorted(path.name for path in (folder / "out").iterdir() if path.name.startswith("step-"))
    assert steps == ["step-00000002"] and (folder / "out" / "latest").read_text().strip() == steps[0]


def test_one_rank_ends_from_the_last_checkpoint(folder: Path, capfd: pytest.CaptureFixture[str]) -> None:
    run = ForkedPython([sys.executable, "hanging.py", *FLAGS], env=ENV, cwd=folder)
    try:
        wait_until((folder / "hangs").exists, "the step that hangs", seconds=40)
        run.send_signal(signal.SIGTERM)
        assert run.wait(scaled(20)) == 128 + signal.SIGTERM
    finally:
        run.kill()
    check_end(folder)
    assert "SIGTERM: stopping after this step and saving" in capfd.readouterr().err


@pytest.mark.usefixtures("forked_ranks")
def test_two_ranks_of_our_launcher_end_though_one_hangs_and_the_other_waits_for_it(
    folder: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    ended = threading.Event()

    def send() -> None:
        deadline = Deadline(60)
        while not (folder / "hangs").exists() and not deadline.is_over:
            if ended.wait(0.05):
                return
        os.kill(os.getpid(), signal.SIGTERM)

    sender = threading.Thread(target=send)
    sender.start()
    try:
        assert run_ranks([sys.executable, "hanging.py", *FLAGS, "--dp", "2"], nproc=2) == 128 + signal.SIGTERM
    finally:
        ended.set()
        sender.join()
    check_end(folder)
    said = capfd.readouterr()
    assert said.err.endswith("Stopped by SIGTERM before the run could end by itself.\n") and LOST in said.out
    assert "Traceback" not in said.err


def ranks_of(agent: Any) -> list[int]:
    children = Path(f"/proc/{agent.pid}/task/{agent.pid}/children").read_text().split()
    return [int(pid) for pid in children]


def test_ranks_of_torchrun_end_before_its_agent_kills_them(folder: Path) -> None:
    """The agent waits 30 s for ranks that it has signaled."""
    launcher = [sys.executable, "-m", "tests.forking_launcher", "torch.distributed.run"]
    with (folder / "said").open("w") as said:
        agent = ForkedPython(
            [*launcher, "--nproc_per_node=2", "--standalone", "hanging.py", *FLAGS, "--dp", "2"],
            env=ENV,
            cwd=folder,
            stdout=said,
            stderr=subprocess.STDOUT,
        )
        try:
            wait_until((folder / "hangs").exists, "the step that hangs", seconds=40)
            agent.send_signal(signal.SIGTERM)
            assert agent.wait(scaled(25)) != 0
        finally:
            for pid in [] if agent.poll() is not None else ranks_of(agent):
                os.kill(pid, signal.SIGKILL)
            agent.kill()
    check_end(folder)


def test_a_second_sigterm_ends_at_once(folder: Path) -> None:
    run = ForkedPython([sys.executable, "hanging.py", *FLAGS, "--exit-signal-grace-s", "0"], env=ENV, cwd=folder)
    try:
        wait_until((folder / "hangs").exists, "the step that hangs", seconds=40)
        run.send_signal(signal.SIGTERM)
        with pytest.raises(subprocess.TimeoutExpired):
            run.wait(1.2)
        run.send_signal(signal.SIGTERM)
        assert run.wait(scaled(20)) == 128 + signal.SIGTERM
    finally:
        run.kill()
    assert "received SIGTERM a second time" in (folder / "out" / "metrics.jsonl").read_text()
