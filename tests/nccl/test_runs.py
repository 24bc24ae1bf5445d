"""Whole runs over NCCL through the command line: clean output, evaluation, saving in the background, resuming, signals, a killed rank."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch

from tests.load_deadline import scaled, wait_until, within

ROOT = Path(__file__).parent.parent.parent
SHARED = -(-4 // max(1, torch.cuda.device_count()))
FLAGS = (
    "tiny-llama --mock-data --num-layers 4 --seq-length 256 --lr 1e-3 --lr-decay-style constant --lr-decay-iters 100 "
    "--min-lr 0 --lr-warmup-iters 0 "
    "--global-batch-size 8 --eval-iters 2 --eval-interval 4 --log-interval 1 --live off --num-workers 0 --no-compile "
    f"--device cuda --save-interval 4 --ranks-per-device {SHARED}"
).split()
# Not under MPS: a client that is killed may take the others with it.
ENV = {name: value for name, value in os.environ.items() if not name.startswith("CUDA_MPS")}
ENV |= {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"}
QUIET = re.compile(
    r"warn|guess|unbatched|no current CUDA context|barrier\(\)|deprecat|destroy_process_group", re.IGNORECASE
)


def command(words: str, folder: Path) -> list[str]:
    return [sys.executable, "-m", "petatron", "train", *FLAGS, *words.split(), "--save", str(folder)]


def train(words: str, folder: Path) -> subprocess.CompletedProcess[str]:
    done = subprocess.run(command(words, folder), env=ENV, capture_output=True, text=True, timeout=scaled(150))
    assert done.returncode == 0, done.stderr[-3000:]
    return done


def losses(text: str) -> list[float]:
    return [float(found) for found in re.findall(r"lm loss: (\S+)", text)]


@contextmanager
def running(words: str, folder: Path) -> Iterator[subprocess.Popen[str]]:
    process = subprocess.Popen(
        command(words, folder), env=ENV, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    try:
        yield process
    finally:
        process.kill()
        process.wait()


def read_until(process: subprocess.Popen[str], text: str) -> str:
    assert process.stdout is not None
    seen = ""
    for line in process.stdout:
        seen += line
        if text in line:
            return seen
    raise AssertionError(f"ended without {text!r}:\n{seen}\n{process.stderr.read() if process.stderr else ''}")


def state_files(folder: Path, step: int) -> dict[str, bytes]:
    here = folder / f"step-{step:08d}"
    return {str(file.relative_to(here)): file.read_bytes() for file in sorted(here.rglob("*.safetensors"))}


def test_saved_in_the_background_and_resumed_in_another_layout_without_a_warning(tmp_path: Path):
    first = train("--pp 2 --dp 2 --use-distributed-optimizer --async-save --train-iters 8", tmp_path / "a")
    assert not QUIET.search(first.stderr), first.stderr
    assert "validation loss at iteration 4" in first.stdout
    more = f"--tp 2 --sequence-parallel --dp 2 --async-save --train-iters 8 --load {tmp_path / 'a'} --ckpt-step 4"
    second = train(more, tmp_path / "b")
    assert not QUIET.search(second.stderr), second.stderr
    assert losses(second.stdout) == pytest.approx(losses(first.stdout)[4:], rel=2e-4)


def test_a_killed_rank_ends_the_run_at_once_and_it_resumes_bitwise(tmp_path: Path):
    words = "--tp 2 --sequence-parallel --pp 2 --bf16 --deterministic-mode"
    train(f"{words} --train-iters 8", tmp_path / "whole")
    with running(f"{words} --train-iters 100000", tmp_path / "killed") as process:
        read_until(process, "iteration        7/")
        children = subprocess.run(["pgrep", "-P", str(process.pid)], capture_output=True, text=True).stdout.split()
        os.kill(int(sorted(children, key=int)[2]), signal.SIGKILL)
        with within(15, "the end of the run after the death of a rank"):
            assert process.wait(timeout=scaled(60)) == 128 + signal.SIGKILL
        report = process.stderr.read() if process.stderr else ""
    assert "Rank 2 of 4 failed first: it was ended by SIGKILL" in report, report
    train(f"{words} --train-iters 8 --load {tmp_path / 'killed'} --ckpt-step 4", tmp_path / "resumed")
    assert state_files(tmp_path / "resumed", 8) == state_files(tmp_path / "whole", 8)


FAULTY = """
import sys, time
import petatron.train.training_loop as loop
step = loop.train_step
def faulty(state, batches, *more):
    if state.mesh.rank == 2 and state.progress.iteration == 2:
        time.sleep(1000)
    return step(state, batches, *more)
loop.train_step = faulty
from petatron.cli.main import main
sys.exit(main(["train", *sys.argv[1:]]))
"""


def test_a_hung_rank_is_named_before_nccl_ends_the_others(tmp_path: Path):
    """NCCL's watchdog ends a process without a word of Python; the report is written before, and the launcher shows it."""
    (tmp_path / "faulty.py").write_text(FAULTY)
    words = [
        *FLAGS,
        *"--dp 4 --train-iters 50 --distributed-timeout-minutes 0.5".split(),
        "--save",
        str(tmp_path / "out"),
    ]
    launch = (
        "import sys; from petatron.mesh.launch.local_launcher import run_ranks;"
        f"sys.exit(run_ranks([sys.executable, {str(tmp_path / 'faulty.py')!r}, *{words!r}], nproc=4))"
    )
    done = subprocess.run([sys.executable, "-c", launch], env=ENV, capture_output=True, text=True, timeout=scaled(120))
    assert done.returncode != 0
    assert re.search(r"Rank 2 did not arrive at a collective over \w+ \(ranks 0-3\): \d+ collectives", done.stderr), (
        done.stderr
    )
    assert "faulty.py:7 faulty" in done.stderr and "operation timeout" not in done.stderr, done.stderr


def test_ctrl_c_saves_and_ends_also_in_an_evaluation(tmp_path: Path):
    with running("--pp 2 --train-iters 100000 --eval-interval 2 --eval-iters 100000", tmp_path) as process:
        read_until(process, "iteration        2/")
        time.sleep(2)  # the evaluation has begun
        process.send_signal(signal.SIGINT)
        process.wait(timeout=scaled(30))
    assert (tmp_path / "latest").read_text().strip() == "step-00000002"


@pytest.mark.parametrize(
    ("layout", "option"),
    [
        ("--dp 2 --bf16 --use-distributed-optimizer --cuda-graphs off", "--cuda-graphs"),
        ("--tp 2 --sequence-parallel --pp 2 --bf16 --cuda-graphs off", "--cuda-graphs auto"),
        ("--dp 2 --bf16 --use-distributed-optimizer", "--optimizer-cpu-offload"),
        ("--tp 2 --sequence-parallel --bf16", "--cpu-offloading-num-layers 2"),
    ],
    ids=["graphs", "graphs if faster", "optimizer offload", "activation offload"],
)
def test_an_option_beside_communication_changes_no_loss(tmp_path: Path, layout: str, option: str):
    words = f"{layout} --train-iters 10 --eval-iters 0 --save-interval 100"
    plain = train(words, tmp_path / "plain")
    other = train(f"{words} {option}", tmp_path / "other")
    assert losses(other.stdout) == pytest.approx(losses(plain.stdout), rel=1e-5)
    assert not QUIET.search(other.stderr), other.stderr


def test_ranks_that_share_a_gpu_by_accident_are_told(tmp_path: Path):
    if torch.cuda.device_count() > 1:
        pytest.skip("every rank has a GPU of its own here")
    words = command("--dp 2 --train-iters 1", tmp_path)
    words[words.index("--ranks-per-device") + 1] = "1"
    done = subprocess.run(words, env=ENV, capture_output=True, text=True, timeout=scaled(100))
    assert done.returncode != 0 and "--ranks-per-device" in done.stderr, done.stderr


def test_the_doctor_gives_a_verdict_within_two_minutes(tmp_path: Path):
    words = [sys.executable, "-m", "petatron", "doctor", "--nccl", "--json", str(tmp_path / "found.json")]
    with within(120, "the verdict"):
        done = subprocess.run(words, env=ENV, capture_output=True, text=True, timeout=scaled(120))
    assert done.returncode == 0, done.stdout + done.stderr
    assert "VERDICT: communication over nccl works" in done.stdout
    assert not QUIET.search(done.stderr), done.stderr


def test_sigterm_ends_a_run_of_which_one_rank_hangs(tmp_path: Path):
    """A mutex is locked twice: no signal wakes the main thread of that rank, and the other one waits for it in a collective."""
    fault = (
        f"open({str(tmp_path / 'hangs')!r}, 'w').close(); import ctypes; lock = ctypes.CDLL(None).pthread_mutex_lock; "
    )
    fault += "mutex = ctypes.create_string_buffer(64); lock(mutex); lock(mutex)"
    program = (
        FAULTY.replace("time.sleep(1000)", fault)
        .replace("rank == 2", "rank == 1")
        .replace("iteration == 2", "iteration == 5")
    )
    (tmp_path / "faulty.py").write_text(program)
    words = [*FLAGS, "--dp", "2", "--train-iters", "50", "--exit-signal-grace-s", "2", "--save", str(tmp_path / "out")]
    launch = (
        "import sys; from petatron.mesh.launch.local_launcher import run_ranks;"
        f"sys.exit(run_ranks([sys.executable, {str(tmp_path / 'faulty.py')!r}, *{words!r}], nproc=2))"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", launch], env=ENV, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    try:
        wait_until((tmp_path / "hangs").exists, "the step that hangs", seconds=120)
        time.sleep(1.0)  # the other rank waits in a collective by then
        process.send_signal(signal.SIGTERM)
        said = process.communicate(timeout=scaled(40))[0]
    finally:
        process.kill()
    assert process.returncode == 128 + signal.SIGTERM, said[-3000:]
    assert "iteration 6 is not finished. The last checkpoint is that of iteration 4" in said, said[-3000:]
    assert (tmp_path / "out" / "latest").read_text().strip() == "step-00000004"
