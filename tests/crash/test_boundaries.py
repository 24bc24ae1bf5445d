"""The process dies at every write, sync and rename of a save; whatever was published before is there, and training goes on.

A step is judged by its bytes: those that the same step has in a run that nobody interrupted.
"""

from __future__ import annotations

import shutil
from dataclasses import dataclass
from pathlib import Path

import pytest

from petatron.checkpoint.files import step_folder
from petatron.config import RunConfig
from tests.crash.disks import DeadlyDisk, Moment, WatchedDisk
from tests.crash.nursery import Nursery
from tests.crash.training import Content, check_folder, tiny_run, train


@dataclass(frozen=True, slots=True)
class Scenario:
    """How the deadly run saves, and what its folder holds: `saved` steps, of which it continues from `latest` (None: the last).

    left_over: with traces of an earlier crash.
    """

    saving: str = ""
    precision: str = ""
    saved: int = 2
    latest: int | None = None
    left_over: bool = False

    def run_to(self, iteration: int, folder: Path) -> RunConfig:
        return tiny_run(f"{self.precision} {self.saving} --train-iters {iteration} --save {folder} --load {folder}")


SCENARIOS = {
    "first step of all": Scenario(saved=0),
    "next step": Scenario(),
    "same step again": Scenario(saved=3, latest=2),
    "with pruning": Scenario("--save-total-limit 1"),
    "same step again, with pruning": Scenario("--save-total-limit 2", saved=4, latest=3),
    "after another crash": Scenario(saved=3, latest=2, left_over=True),
    "in the background": Scenario("--async-save", "--bf16"),
    "in the background, with pruning": Scenario("--async-save --save-total-limit 1"),
    "half precision, every second kept": Scenario(
        "--save-retain-interval 2 --save-total-limit 1", "--fp16 --initial-loss-scale 65536", saved=3
    ),
}
DEFAULT = ("in the background", pytest.param("same step again, with pruning", marks=pytest.mark.crash))


def _watched(run: RunConfig) -> list[Moment]:
    disk = WatchedDisk()
    train(run, disk)
    return disk.moments


def _deadly(run: RunConfig, kill_at: int) -> None:
    train(run, DeadlyDisk(kill_at))


def _prepare(nursery: Nursery, scenario: Scenario, folder: Path, base: Path) -> Content:
    """The uninterrupted run, and the folder as it is before the deadly save."""
    whole = folder / "whole"
    nursery.run(train, tiny_run(f"{scenario.precision} --train-iters 5 --save {whole}")).lived()
    base.mkdir()
    for step in range(1, scenario.saved + 1):
        shutil.copytree(whole / step_folder.step_name(step), base / step_folder.step_name(step))
    if scenario.saved:
        latest = scenario.latest or scenario.saved
        (base / step_folder.LATEST_FILE).write_text(f"{step_folder.step_name(latest)}\n")
    if scenario.left_over:
        one, three = base / step_folder.step_name(1), base / step_folder.step_name(3)
        shutil.copytree(one, base / f"{step_folder.step_name(4)}.tmp")
        one.rename(base / f"{one.name}.pruned")
        three.rename(base / f"{three.name}.replaced")
        (base / f"{step_folder.LATEST_FILE}.tmp").write_text("step-")
    return Content.of(whole)


def _chosen(moments: list[Moment], every: int) -> list[int]:
    """All moments; of those between two parts of a file and between two removals, every so many."""
    many = [index for index, (what, _) in enumerate(moments) if what in ("written", "removed")]
    return sorted({*range(len(moments))} - {*many} | {*many[::every]})


def check_moments(
    nursery: Nursery, tmp_path: Path, scenario: Scenario, *, every: int = 1, stride: int = 1, every_life: int = 1
) -> None:
    """Die at the moments of a save, one in `stride` and the last, and after every so many deaths live on to the end of the run."""
    base, copy = tmp_path / "base", tmp_path / "copy"
    expected = _prepare(nursery, scenario, tmp_path, base)
    before = step_folder.latest_step(base)
    step = (before or 0) + 1
    shutil.copytree(base, copy)
    moments: list[Moment] = nursery.run(_watched, scenario.run_to(step, copy)).lived()
    assert {"renamed", "synced", "folder synced", "written", "opened"} <= {what for what, _ in moments}
    newest, chosen = [], _chosen(moments, every)
    for number, kill_at in enumerate(sorted({*chosen[::stride], chosen[-1]})):
        shutil.rmtree(copy)
        shutil.copytree(base, copy)
        assert nursery.run(_deadly, scenario.run_to(step, copy), kill_at).killed, moments[kill_at]
        newest.append(check_folder(copy, expected, at_least=before))
        if number % every_life == 0:
            nursery.run(train, scenario.run_to(5, copy)).lived()
            assert check_folder(copy, expected) == 5, moments[kill_at]
            assert not [path for path in copy.iterdir() if path.suffix in (".tmp", ".replaced", ".pruned")]
    assert newest == sorted(newest, key=lambda found: found or 0), "a step that was once the newest stays it"
    assert newest[0] == before and newest[-1] == step, "the save was followed from its beginning to its end"


@pytest.mark.parametrize("name", DEFAULT)
def test_main_moments(nursery: Nursery, tmp_path: Path, name: str):
    check_moments(nursery, tmp_path, SCENARIOS[name], every=40, stride=5, every_life=5)


@pytest.mark.crash
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("name", SCENARIOS)
def test_every_moment(nursery: Nursery, tmp_path: Path, name: str):
    check_moments(nursery, tmp_path, SCENARIOS[name], every_life=3)
