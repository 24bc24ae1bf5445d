"""A run is killed at random moments again and again, in one folder, until it has reached its end: nothing is lost."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from random import Random

import pytest

from petatron.config import RunConfig
from tests.crash.disks import DeadlyDisk
from tests.crash.nursery import Death, Nursery
from tests.crash.training import TINY, Content, check_folder, tiny_run, train
from tests.load_deadline import scaled

ROOT = Path(__file__).parent.parent.parent
TWO_RANKS = "--dp 2 --use-distributed-optimizer"


def _run(folder: Path, flags: str, iterations: int, ranks: int = 1) -> RunConfig:
    return tiny_run(f"{flags} --train-iters {iterations} --save {folder} --load {folder}", world_size=ranks)


def _start(nursery: Nursery, run: RunConfig, ranks: int, kill_after_s: float | None) -> list[Death]:
    return nursery.run_ranks([(train, (run,))] * ranks, kill_after_s=kill_after_s)


def _check_kills(
    nursery: Nursery, tmp_path: Path, flags: str, *, iterations: int, seed: int, kills: int = 3, ranks: int = 1
) -> None:
    """Kill the run until it reaches its end. Ends that come before so many kills do not count: the machine was quick."""
    began = time.monotonic()
    for death in _start(
        nursery, _run(tmp_path / "whole", flags.partition("--save-")[0], iterations, ranks), ranks, None
    ):
        death.lived()
    whole_s = time.monotonic() - began
    expected = Content.of(tmp_path / "whole")
    random = Random(seed)
    for attempt in range(20):
        if _killed_until_done(nursery, tmp_path / str(attempt), expected, flags, whole_s, random, ranks) >= kills:
            return
        whole_s /= 2
    pytest.fail("the run is always quicker than its death")


def _killed_until_done(
    nursery: Nursery, folder: Path, expected: Content, flags: str, whole_s: float, random: Random, ranks: int
) -> int:
    newest, kills, iterations = None, 0, max(expected.steps)
    while True:
        # Lives are too short for a step, or long enough for some; ever longer, so that the end comes even if all were too short.
        life_s = random.uniform(0.02, 0.35) * whole_s * (1 + kills / 20)
        deaths = _start(nursery, _run(folder, flags, iterations, ranks), ranks, life_s)
        newest = check_folder(folder, expected, at_least=newest)
        if not any(death.killed for death in deaths):
            break
        kills += 1
        assert kills < 300, f"no progress: {newest} of {iterations}"
    for death in deaths:
        death.lived()
    assert newest == iterations
    return kills


@pytest.mark.parametrize(
    "flags", [pytest.param("", marks=pytest.mark.crash), "--async-save --bf16 --save-total-limit 2"]
)
def test_killed_again_and_again(nursery: Nursery, tmp_path: Path, flags: str):
    _check_kills(nursery, tmp_path, flags, iterations=10, seed=1)


@pytest.mark.crash
@pytest.mark.parametrize("seed", range(10))
@pytest.mark.parametrize(
    "flags",
    [
        "",
        "--save-total-limit 1",
        "--async-save --bf16",
        "--fp16 --initial-loss-scale 1e12 --async-save --save-total-limit 2",
    ],
)
def test_killed_many_times(nursery: Nursery, tmp_path: Path, flags: str, seed: int):
    _check_kills(nursery, tmp_path, flags, iterations=40, seed=100 + seed, kills=5)


@pytest.mark.crash
@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("flags", ["", "--async-save --bf16 --save-total-limit 2"])
def test_two_ranks_killed_many_times(nursery: Nursery, tmp_path: Path, flags: str, seed: int):
    _check_kills(nursery, tmp_path, f"{TWO_RANKS} {flags}", iterations=15, seed=seed, ranks=2)


def _deadly(run: RunConfig, kill_at: int | None) -> None:
    train(run, None if kill_at is None else DeadlyDisk(kill_at))


def _check_rank_dies(nursery: Nursery, tmp_path: Path, rank: int, flags: str, moments: range) -> None:
    """One rank of two dies at moments of its own, later each time; the other cannot publish without it."""
    for death in _start(nursery, _run(tmp_path / "whole", TWO_RANKS, 3, 2), 2, None):
        death.lived()
    expected = Content.of(tmp_path / "whole")
    folder = tmp_path / "folder"
    newest = None
    for kill_at in moments:
        run = _run(folder, f"{TWO_RANKS} {flags}", 3, 2)
        deaths = nursery.run_ranks([(_deadly, (run, kill_at if own == rank else None)) for own in range(2)])
        assert not any(death.error.startswith("some rank") for death in deaths)
        newest = check_folder(folder, expected, at_least=newest)
        if not deaths[rank].killed:
            deaths[rank].lived()
            break
    for death in _start(nursery, _run(folder, f"{TWO_RANKS} {flags}", 3, 2), 2, None):
        death.lived()
    assert check_folder(folder, expected) == 3


@pytest.mark.parametrize(("rank", "flags"), [pytest.param(0, "", marks=pytest.mark.crash), (1, "--async-save")])
def test_a_rank_dies(nursery: Nursery, tmp_path: Path, rank: int, flags: str):
    _check_rank_dies(nursery, tmp_path, rank, flags, range(3, 90, 40))


@pytest.mark.crash
@pytest.mark.parametrize("flags", ["", "--async-save"])
@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_dies_at_any_moment(nursery: Nursery, tmp_path: Path, rank: int, flags: str):
    _check_rank_dies(nursery, tmp_path, rank, flags, range(0, 150, 3))


def _children(pid: int) -> list[int]:
    """Processes below a process, the deepest last."""
    found = []
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = path.read_text().rpartition(")")[2].split()
        except OSError:
            continue
        if int(fields[1]) == pid:
            found.append(int(path.parent.name))
    return found + [below for child in found for below in _children(child)]


@pytest.mark.crash
def test_under_the_launcher(tmp_path: Path):
    """The command as people type it: a rank is killed, or the whole group at once; the same command goes on."""
    command = [sys.executable, "-m", "petatron", "train", *TINY.split(), *TWO_RANKS.split(), "--live", "off"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}

    def start(folder: Path) -> subprocess.Popen[bytes]:
        words = f"--train-iters 60 --save {folder} --load {folder} --save-total-limit 3".split()
        return subprocess.Popen(
            [*command, *words],
            cwd=tmp_path,
            env=environment,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )

    def saved(folder: Path) -> int:
        latest = folder / "latest"
        return int(latest.read_text().strip().rpartition("-")[2]) if latest.exists() else 0

    words = f"--train-iters 60 --save {tmp_path / 'whole'} --save-interval 1".split()
    subprocess.run(
        [*command, *words], cwd=tmp_path, env=environment, check=True, capture_output=True, timeout=scaled(120)
    )
    expected, folder = Content.of(tmp_path / "whole"), tmp_path / "folder"
    for number, random in ((number, Random(number)) for number in range(4)):
        before = saved(folder)
        launcher = start(folder)
        deadline = time.monotonic() + 60
        while saved(folder) <= before + 2 and time.monotonic() < deadline:
            time.sleep(0.02)
        time.sleep(random.uniform(0.0, 0.1))
        if number % 2:
            os.killpg(launcher.pid, signal.SIGKILL)
        else:
            os.kill(random.choice(_ranks(launcher.pid)), signal.SIGKILL)
        assert launcher.wait(timeout=scaled(60)) != 0
        newest = check_folder(folder, expected, at_least=before)
        assert newest is not None and before < newest < 60
    assert start(folder).wait(timeout=scaled(120)) == 0
    assert check_folder(folder, expected) == 60


def _ranks(launcher: int) -> list[int]:
    """The processes that train: the ones with nobody below them."""
    return [pid for pid in _children(launcher) if not _children(pid)]
