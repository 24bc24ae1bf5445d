"""A power cut at any moment of a save, with the worst that a disk may then have kept, leaves complete checkpoints."""

from __future__ import annotations

import contextlib
import shutil
from collections.abc import Sequence
from pathlib import Path
from random import Random

import pytest

from petatron.checkpoint.files import step_folder
from tests.crash.power import PoweredDisk, chances
from tests.crash.training import Content, check_folder, tiny_run, train

KILL_PARTS = 8  # of the longest test, each within its time limit on one busy core


class Killed(BaseException):
    """The end of a process, as far as handlers of ordinary errors can tell."""


class Cutter:
    """Cuts the power after every change, in several ways, and looks at what is left. Problems are kept, not raised: what
    is being watched is a save, which reports errors and goes on."""

    def __init__(self, tmp_path: Path, saving: str, *, at_least: int, seed: int, every_life: int) -> None:
        self._left = tmp_path / "left"
        self._saving = saving
        self._at_least = at_least
        self._random = Random(seed)
        self._every_life = every_life
        self._whole = tmp_path / "whole"
        train(tiny_run(f"--train-iters 4 --save {self._whole}"))
        self._expected = Content.of(self._whole)
        self.problems: list[str] = []
        self.newest: list[int | None] = []
        self.kill_after: str | None = None
        self.moments: list[str] = []

    def begin(self, folder: Path, *, saved: int, latest: int) -> None:
        folder.mkdir()
        for step in range(1, saved + 1):
            shutil.copytree(self._whole / step_folder.step_name(step), folder / step_folder.step_name(step))
        (folder / step_folder.LATEST_FILE).write_text(f"{step_folder.step_name(latest)}\n")

    def __call__(self, disk: PoweredDisk, moment: str) -> None:
        for survives in chances(self._random):
            shutil.rmtree(self._left, ignore_errors=True)
            disk.cut(self._left, survives)
            try:
                self.newest.append(check_folder(self._left, self._expected, at_least=self._at_least))
                if len(self.newest) % self._every_life == 0:
                    train(tiny_run(f"{self._saving} --train-iters 4 --save {self._left} --load {self._left}"))
                    assert check_folder(self._left, self._expected) == 4
            except Exception as error:
                self.problems.append(f"after {moment}: {error}")
        self.moments.append(moment)
        if moment == self.kill_after:
            self.kill_after = None
            raise Killed


def _check_cuts(tmp_path: Path, *, saved: int, seed: int, every_life: int, kill_after: Sequence[str] = ()) -> list[str]:
    """Step 3 is saved, over an older one where `saved` says so, by a process that may be killed on the way, several times.

    Returns the moments that were reached.
    """
    folder, saving = tmp_path / "folder", "--save-total-limit 1"
    cutter = Cutter(tmp_path, saving, at_least=2, seed=seed, every_life=every_life)
    cutter.begin(folder, saved=saved, latest=2)
    disk = PoweredDisk(folder, cutter)

    def train_to(iteration: int) -> None:
        train(tiny_run(f"{saving} --train-iters {iteration} --save {folder} --load {folder}"), disk)

    for moment in kill_after:
        cutter.kill_after = moment
        with contextlib.suppress(Killed):
            train_to(3)
    cutter.kill_after = None
    last = 4 if step_folder.latest_step(folder) == 3 else 3
    train_to(last)
    assert not cutter.problems, "\n".join(cutter.problems)
    assert {2, 3} <= set(cutter.newest) and len(cutter.newest) > 100
    cutter(disk, "the end")
    assert set(cutter.newest[-5:]) == {last}, "what a save has reported survives"
    return cutter.moments


@pytest.mark.parametrize(
    "saved", [pytest.param(2, id="next step", marks=pytest.mark.crash), pytest.param(3, id="same step again")]
)
def test_power_cut(tmp_path: Path, saved: int):
    moments = _check_cuts(tmp_path, saved=saved, seed=saved, every_life=100)
    assert {"renamed step-00000003", "renamed step-00000001.pruned", "renamed latest"} <= set(moments)


@pytest.mark.crash
@pytest.mark.parametrize("moment", ["renamed step-00000003", "renamed step-00000001.pruned"])
def test_power_cut_after_a_kill(tmp_path: Path, moment: str):
    """What the dead process renamed was not synced when the next one removes what is left."""
    _check_cuts(tmp_path, saved=3, seed=3, every_life=100, kill_after=[moment])


@pytest.mark.crash
@pytest.mark.timeout(600)
@pytest.mark.parametrize("part", range(KILL_PARTS))
@pytest.mark.parametrize("saved", [2, 3])
def test_power_cuts_after_many_kills(tmp_path: Path, saved: int, part: int):
    """Killed after every other moment of a save (the odd ones of the next step, the even ones of the same step again)."""
    (tmp_path / "clean").mkdir()
    moments = _check_cuts(tmp_path / "clean", saved=saved, seed=1, every_life=25)
    chosen = [*enumerate([*dict.fromkeys(moments)][saved % 2 :: 2])][part::KILL_PARTS]
    assert chosen
    for number, moment in chosen:
        (tmp_path / str(number)).mkdir()
        random = Random(number)
        others = random.sample(moments, number % 3)
        _check_cuts(tmp_path / str(number), saved=saved, seed=number, every_life=100, kill_after=[moment, *others])
