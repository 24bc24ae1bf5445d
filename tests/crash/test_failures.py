"""A disk that fails without killing anybody: a save is lost and reported, training goes on, and earlier steps are intact."""

from __future__ import annotations

import errno
import os
import resource
import signal
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from petatron.base.errors import CheckpointError
from petatron.checkpoint.files import step_folder
from petatron.checkpoint.files.digested_file_io import Disk
from petatron.config import RunConfig
from tests.crash.disks import FailingDisk
from tests.crash.nursery import Nursery
from tests.crash.training import Content, Events, check_folder, tiny_run, train

ITERATIONS = 4
WARNING = "WARNING: a checkpoint was not saved"
KINDS = ("make_folder", "write", "rename", "sync_folder")
IN_FOREGROUND = [(kind, "") for kind in KINDS]
IN_BACKGROUND = [(kind, "--async-save") for kind in KINDS]
ERRORS = {
    "make_folder": (errno.EROFS, errno.EACCES),
    "write": (errno.ENOSPC, errno.EDQUOT),
    "rename": (errno.EIO, errno.ESTALE),
    "sync_folder": (errno.EIO,),
}


def _error(number: int) -> OSError:
    return OSError(number, os.strerror(number))


def _run(folder: Path, saving: str = "") -> RunConfig:
    folder.mkdir(exist_ok=True)  # so that the first save has no more to do than the others
    return tiny_run(f"{saving} --train-iters {ITERATIONS} --save {folder} --load {folder}")


@pytest.fixture(scope="module")
def expected(tmp_path_factory: pytest.TempPathFactory) -> Content:
    folder = tmp_path_factory.mktemp("whole")
    train(_run(folder))
    return Content.of(folder)


@pytest.fixture(scope="module")
def operations(tmp_path_factory: pytest.TempPathFactory) -> Counter[str]:
    """How many operations of each kind a save needs."""
    counts: Counter[str] = Counter()

    class Counting(FailingDisk):
        def _fails(self, kind: str, path: Path) -> bool:
            counts[kind] += 1
            return False

    train(_run(tmp_path_factory.mktemp("counted")), Counting(_error(errno.EIO), kinds=KINDS))
    assert all(counts[kind] % ITERATIONS == 0 and counts[kind] >= 2 * ITERATIONS for kind in KINDS)
    return Counter({kind: counts[kind] // ITERATIONS for kind in KINDS})


def _check_lost(folder: Path, disk: FailingDisk, messages: list[str], expected: Content, error: int, lost: int) -> None:
    """One save was lost and reported; everything else is as if nothing had happened."""
    warnings = [message for message in messages if message.startswith(WARNING)]
    assert len(warnings) == 1 == len(disk.failed), messages
    assert os.strerror(error) in warnings[0] and f"step {lost} could not be saved to {folder}" in warnings[0]
    assert check_folder(folder, expected) == ITERATIONS
    found = set(step_folder.list_steps(folder))
    assert {*range(1, ITERATIONS + 1)} - {lost} <= found, (
        "a step that was published before its save failed may be there"
    )
    assert not [path.name for path in folder.iterdir() if path.suffix in (".tmp", ".replaced", ".pruned")]


def _but(default: tuple[int, ...], cases: list[tuple[str, str]]) -> list[Any]:
    """Some of the cases in the default suite, the others in `make test-crash`."""
    return [
        case if number in default else pytest.param(*case, marks=pytest.mark.crash) for number, case in enumerate(cases)
    ]


@pytest.mark.parametrize(("kind", "saving"), [*IN_FOREGROUND, *_but((1,), IN_BACKGROUND)])
def test_one_operation_fails(tmp_path: Path, kind: str, saving: str, expected: Content, operations: Counter[str]):
    for number in range(operations[kind]) if not saving else (operations[kind] - 1,):
        folder = tmp_path / str(number)
        error = ERRORS[kind][number % len(ERRORS[kind])]
        disk = FailingDisk(_error(error), kinds=[kind], fail_at=operations[kind] + number)
        _check_lost(folder, disk, train(_run(folder, saving), disk), expected, error, lost=2)


@pytest.mark.parametrize(("kind", "saving"), [*_but((0, 2), IN_FOREGROUND), *_but((1, 3), IN_BACKGROUND)])
def test_the_last_save_must_succeed(
    tmp_path: Path, kind: str, saving: str, expected: Content, operations: Counter[str]
):
    """It is tried once more at the end of the run; if that fails too, so does the run."""
    error, last = ERRORS[kind][0], (ITERATIONS - 1) * operations[kind]
    once = FailingDisk(_error(error), kinds=[kind], fail_at=last)
    _check_lost(tmp_path / "once", once, train(_run(tmp_path / "once", saving), once), expected, error, lost=ITERATIONS)
    folder, events = tmp_path / "twice", Events([])
    with pytest.raises(CheckpointError, match=os.strerror(error)):
        train(_run(folder, saving), FailingDisk(_error(error), kinds=[kind], fail_at=last, times=10**6), events)
    assert sum(message.startswith(WARNING) for message in events.messages) == 1
    assert check_folder(folder, expected) == ITERATIONS - 1
    train(_run(folder, saving))
    assert check_folder(folder, expected) == ITERATIONS


@pytest.mark.parametrize("saving", ["", "--async-save"])
def test_a_long_outage(tmp_path: Path, saving: str, expected: Content):
    """Nothing can be written for a while, not even to tidy up; then everything is as before."""
    every = (*KINDS, "remove")

    class Outage(FailingDisk):
        def _fails(self, kind: str, path: Path) -> bool:
            return super()._fails(kind, path) if self.during else False

        during = False

    class Switch(Events):
        def write(self, record) -> None:
            disk.during = record.get("iteration") in (2, 3)
            super().write(record)

    disk = Outage(_error(errno.EROFS), kinds=every, times=10**6)
    messages = train(_run(tmp_path, saving), disk, Switch([]))
    lost = sum(message.startswith(WARNING) for message in messages)
    # In the background the save of step 1 may still be under way when the outage begins.
    assert disk.failed and (lost == 2 if not saving else 1 <= lost <= 3)
    assert check_folder(tmp_path, expected) == ITERATIONS
    assert len(step_folder.list_steps(tmp_path)) >= ITERATIONS - lost
    assert not list(tmp_path.glob("*.tmp"))


@pytest.mark.parametrize("kind", ["remove", "rename"])
def test_a_step_that_cannot_be_pruned(tmp_path: Path, kind: str, expected: Content, caplog: pytest.LogCaptureFixture):
    class Stubborn(Disk):
        def remove(self, path: Path) -> None:
            if kind == "remove" and path.suffix == ".pruned":
                raise _error(errno.ENOTEMPTY)  # NFS keeps a file that somebody has open under another name
            super().remove(path)

        def rename(self, old: Path, new: Path) -> None:
            if kind == "rename" and new.suffix == ".pruned":
                raise _error(errno.EACCES)
            super().rename(old, new)

    messages = train(_run(tmp_path, "--save-total-limit 1"), Stubborn())
    assert "old checkpoints" in caplog.text and "could not be removed" in caplog.text
    assert check_folder(tmp_path, expected) == ITERATIONS, messages


class _Lifted(Events):
    """Lifts the limit on file sizes when a save has failed: somebody made room."""

    def write(self, record) -> None:
        super().write(record)
        if any(message.startswith(WARNING) for message in self.messages):
            resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))


def _limited(run: RunConfig) -> list[str]:
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (9000, resource.RLIM_INFINITY))
    return train(run, None, _Lifted([]))


@pytest.mark.parametrize("saving", ["", "--async-save"])
def test_the_system_itself_refuses(nursery: Nursery, tmp_path: Path, saving: str, expected: Content):
    """No injection: the kernel writes a part of a file and refuses the rest."""
    messages = nursery.run(_limited, _run(tmp_path, saving)).lived()
    assert os.strerror(errno.EFBIG) in next(message for message in messages if message.startswith(WARNING))
    assert check_folder(tmp_path, expected) == ITERATIONS
    assert 1 not in step_folder.list_steps(tmp_path)
