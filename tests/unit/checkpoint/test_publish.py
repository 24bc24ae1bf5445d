"""Crash safety: the process dies at every boundary of a save, and the last good checkpoint still loads."""

import contextlib
import errno
import shutil
from pathlib import Path

import pytest
import torch

from petatron.base.errors import CheckpointError
from petatron.checkpoint.checkpoint_contents import ModelFolder
from petatron.checkpoint.files.digested_file_io import Disk
from petatron.checkpoint.files.step_folder import DamagedCheckpointError
from petatron.checkpoint.manager import CheckpointManager
from petatron.checkpoint.tensor_chunk import Chunk
from petatron.mesh.mesh import ParallelMesh
from petatron.models.hf.folder_entries import EntryRegion, FolderEntry
from tests.longform import diagonal


class Killed(BaseException):
    """The end of the process, as far as handlers of ordinary errors can tell."""


class FailingDisk(Disk):
    """Fails at its n-th operation: before it, after it, or (for a write) halfway through it."""

    def __init__(self, fail_at: int, when: str, error: BaseException) -> None:
        self.left, self.when, self.error = fail_at, when, error

    def _perform(self, operation, *args):
        self.left -= 1
        if self.left != -1:
            return operation(*args)
        if self.when == "after":
            operation(*args)
        elif self.when == "halfway" and operation.__name__ == "write":
            path, parts = args
            content = b"".join(parts)
            path.write_bytes(content[: len(content) // 2])
        raise self.error

    def make_folder(self, path: Path):
        return self._perform(super().make_folder, path)

    def write(self, path: Path, parts):
        return self._perform(super().write, path, parts)

    def rename(self, old: Path, new: Path):
        return self._perform(super().rename, old, new)

    def sync_folder(self, path: Path):
        return self._perform(super().sync_folder, path)

    def remove(self, path: Path):
        return self._perform(super().remove, path)


def manager_of(folder: Path, disk: Disk | None = None) -> CheckpointManager:
    return CheckpointManager(folder, ParallelMesh.single().world, disk=disk)


def save(manager: CheckpointManager, step: int, value: float) -> None:
    weight = torch.full((3, 2), value)
    manager.save(step, [Chunk("model/w", (3, 2), (0, 0), weight)], metadata={"value": value}, same_layout_key="one")


def load(manager: CheckpointManager) -> tuple[int, float]:
    weight = torch.zeros(3, 2)
    result = manager.load(None, [Chunk("model/w", (3, 2), (0, 0), weight)])
    assert (weight == result.metadata["value"]).all()
    return result.step, result.metadata["value"]


@diagonal(3)
@pytest.mark.parametrize("when", ["before", "halfway", "after"])
@pytest.mark.parametrize("second_step", [10, 20], ids=["same step again", "next step"])
def test_a_crash_at_any_boundary_leaves_a_checkpoint(tmp_path, second_step, when):
    outcomes, finished = [], False
    for fail_at in range(40):
        folder = tmp_path / str(fail_at)
        save(manager_of(folder), 10, 1.0)
        try:
            save(manager_of(folder, FailingDisk(fail_at, when, Killed())), second_step, 2.0)
            finished = True
        except Killed:
            pass
        outcome = load(manager_of(folder))
        assert outcome in ((10, 1.0), (second_step, 2.0))
        outcomes.append(outcome)
        save(manager_of(folder), 30, 3.0)
        assert load(manager_of(folder)) == (30, 3.0)
        assert not list(folder.glob("*.tmp")) and not list(folder.glob("*.replaced")), "the next save tidies up"
        assert (folder / "step-00000010").is_dir(), "and loses nothing"
        if finished:
            break
    assert finished and fail_at >= 9, "the loop must have passed every operation of a save"
    assert outcomes == sorted(outcomes), "once the new one is visible it stays visible"
    assert outcomes[0] == (10, 1.0) and outcomes[-1] == (second_step, 2.0)


@pytest.mark.parametrize("when", ["before", "halfway", "after"])
def test_a_crash_of_the_first_save_leaves_nothing_or_all(tmp_path, when):
    seen = []
    for fail_at in range(40):
        folder = tmp_path / str(fail_at)
        with contextlib.suppress(Killed):
            save(manager_of(folder, FailingDisk(fail_at, when, Killed())), 10, 1.0)
        manager = manager_of(folder)
        seen.append(manager.latest())
        assert seen[-1] == (10 if (folder / "step-00000010").is_dir() else None)
        if seen[-1] is not None:
            assert load(manager) == (10, 1.0)
        else:
            with pytest.raises(CheckpointError, match="no checkpoint of step 10"):
                manager.load(10, [])
    assert seen[0] is None and seen[-1] == 10


def test_a_step_is_preferred_to_the_one_it_replaces(tmp_path):
    save(manager_of(tmp_path), 10, 1.0)
    (tmp_path / "step-00000010").rename(tmp_path / "step-00000010.replaced")
    assert load(manager_of(tmp_path)) == (10, 1.0)
    shutil.copytree(tmp_path / "step-00000010.replaced", tmp_path / "kept")
    save(manager_of(tmp_path), 10, 2.0)
    (tmp_path / "kept").rename(tmp_path / "step-00000010.replaced")
    assert load(manager_of(tmp_path)) == (10, 2.0)


@pytest.mark.parametrize("second_step", [10, 20])
def test_an_error_at_any_boundary_is_reported_and_tidied_up(tmp_path, second_step):
    for fail_at in range(40):
        folder = tmp_path / str(fail_at)
        save(manager_of(folder), 10, 1.0)
        full = OSError(errno.ENOSPC, "No space left on device")
        try:
            save(manager_of(folder, FailingDisk(fail_at, "halfway", full)), second_step, 2.0)
            break
        except CheckpointError as error:
            assert f"step {second_step} could not be saved to {folder}" in str(error)
            assert "No space left on device" in str(error) and "Free space" in str(error)
        assert load(manager_of(folder)) in ((10, 1.0), (second_step, 2.0))
        assert not list(folder.glob("*.tmp"))
    else:
        pytest.fail("the save never succeeded")


def test_a_failure_of_the_tidying_does_not_hide_the_error(tmp_path):
    class Broken(Disk):
        def write(self, path, parts):
            raise OSError(errno.EIO, "Input/output error")

        def remove(self, path):
            raise OSError(errno.EROFS, "Read-only file system")

    with pytest.raises(CheckpointError, match="Input/output error"):
        save(manager_of(tmp_path, Broken()), 10, 1.0)


def test_unrelated_files_are_left_alone(tmp_path):
    for name in ("notes.tmp", "step-1.tmp", "step-00000001x.replaced"):
        (tmp_path / name).write_text("mine")
    save(manager_of(tmp_path), 10, 1.0)
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "latest",
        "notes.tmp",
        "step-00000001x.replaced",
        "step-00000010",
        "step-1.tmp",
    ]


def test_a_folder_that_is_not_shared_is_noticed_before_anything_is_published(tmp_path, monkeypatch):
    """Another machine wrote its file to a disk of its own: the manifest would name a file that is not there."""
    save(manager_of(tmp_path), 10, 1.0)

    class Elsewhere(Disk):
        def write(self, path, parts):
            stored = super().write(path, parts)
            if path.suffix == ".safetensors":
                path.unlink()
            return stored

    monkeypatch.setattr("petatron.checkpoint.files.step_folder._VISIBILITY_TIMEOUT_S", 0.3)
    with pytest.raises(
        CheckpointError, match=r"rank-00000.safetensors was written by another rank.*all machines share"
    ):
        save(manager_of(tmp_path, Elsewhere()), 20, 2.0)
    assert load(manager_of(tmp_path)) == (10, 1.0)


def test_what_a_crash_left_behind_goes_before_the_disk_is_called_full(tmp_path, monkeypatch):
    save(manager_of(tmp_path), 10, 1.0)
    draft = tmp_path / "step-00000020.tmp"
    draft.mkdir()
    (draft / "half").write_bytes(bytes(1000))
    monkeypatch.setattr("petatron.checkpoint.save.rank_writer.free_bytes", lambda _: 10 if draft.exists() else 10_000)
    save(manager_of(tmp_path), 20, 2.0)
    assert load(manager_of(tmp_path)) == (20, 2.0)


def test_latest_that_names_a_step_which_is_not_whole(tmp_path):
    for step in (10, 20):
        save(manager_of(tmp_path), step, float(step))
    (tmp_path / "step-00000020" / "manifest.json").unlink()
    with pytest.raises(DamagedCheckpointError, match=r"latest names step-00000020, which is not there.*there are: 10"):
        load(manager_of(tmp_path))
    weight = torch.zeros(3, 2)
    found = manager_of(tmp_path).load(None, [Chunk("model/w", (3, 2), (0, 0), weight)], fallback=True)
    assert (found.step, weight[0, 0]) == (10, 10.0)


def test_a_step_that_was_copied_elsewhere_is_still_one(tmp_path):
    save(manager_of(tmp_path / "run"), 10, 1.0)
    shutil.copytree(tmp_path / "run" / "step-00000010", tmp_path / "best")
    assert load(manager_of(tmp_path / "best")) == load(manager_of(tmp_path / "best" / "model")) == (10, 1.0)


def test_a_renamed_step_is_not_another_step(tmp_path):
    save(manager_of(tmp_path), 10, 1.0)
    (tmp_path / "step-00000010").rename(tmp_path / "step-00000011")
    (tmp_path / "latest").write_text("step-00000011")
    with pytest.raises(DamagedCheckpointError, match="is that of step 10: the folder was renamed"):
        load(manager_of(tmp_path))


def test_files_that_a_load_does_not_need_are_missed_all_the_same(tmp_path):
    for step in (10, 20):
        manager_of(tmp_path).save(
            step,
            [Chunk("model/w", (3, 2), (0, 0), torch.ones(3, 2)), Chunk("master/w", (3, 2), (0, 0), torch.ones(3, 2))],
            metadata={"value": 1.0},
            same_layout_key="one",
            model=ModelFolder(
                (FolderEntry("w", (3, 2), (EntryRegion("w", (0, 0), (3, 2), (0, 0)),)),), {"config.json": b"{}"}
            ),
        )
    (tmp_path / "step-00000020" / "model" / "config.json").unlink()
    with pytest.raises(DamagedCheckpointError, match=r"config\.json is missing"):
        load(manager_of(tmp_path))
    weight = torch.zeros(3, 2)
    assert manager_of(tmp_path).load(None, [Chunk("master/w", (3, 2), (0, 0), weight)], fallback=True).step == 10
    (tmp_path / "step-00000010" / "model" / "config.json").unlink()
    with pytest.raises(DamagedCheckpointError, match="There is no older step to fall back to"):
        manager_of(tmp_path).load(None, [Chunk("master/w", (3, 2), (0, 0), weight)], fallback=True)
