"""Disks on which things go wrong: the process dies at a chosen moment, or an operation fails."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

from petatron.checkpoint.files.digested_file_io import Disk, StoredFile

Moment = tuple[str, str]
"""What was just done, and the name of what it was done to."""


class WatchedDisk(Disk):
    """Keeps every moment that is reached. Parts are written in halves, so that a moment lies in the middle of each."""

    def __init__(self) -> None:
        self.moments: list[Moment] = []

    def failpoint(self, event: str, path: Path) -> None:
        self.moments.append((event, path.name))

    def write(self, path: Path, parts: Iterable[bytes | memoryview]) -> StoredFile:
        return super().write(path, _halves(parts))


class DeadlyDisk(WatchedDisk):
    """The process is killed when the n-th moment (from 0) is reached."""

    def __init__(self, kill_at: int) -> None:
        super().__init__()
        self._kill_at = kill_at

    def failpoint(self, event: str, path: Path) -> None:
        super().failpoint(event, path)
        if len(self.moments) > self._kill_at:
            os.kill(os.getpid(), signal.SIGKILL)
            signal.pause()  # another thread may be the one that the signal finds first


class FailingDisk(Disk):
    """Operations from the n-th on (from 0) fail, `times` of them, of the kinds that are named; a write fails halfway."""

    def __init__(self, error: OSError, *, kinds: Iterable[str], fail_at: int = 0, times: int = 1) -> None:
        self._error = error
        self._kinds = set(kinds)
        self._failing = range(fail_at, fail_at + times)
        self._count = 0
        self.failed: list[Path] = []

    def _fails(self, kind: str, path: Path) -> bool:
        if kind not in self._kinds:
            return False
        self._count += 1
        fails = self._count - 1 in self._failing
        self.failed += [path] * fails
        return fails

    def _perform(self, operation: Callable[..., Any], path: Path, *args: Any) -> Any:
        if self._fails(operation.__name__, path):
            raise self._error
        return operation(path, *args)

    def make_folder(self, path: Path) -> None:
        self._perform(super().make_folder, path)

    def write(self, path: Path, parts: Iterable[bytes | memoryview]) -> StoredFile:
        if self._fails("write", path):
            parts = _half_then_raise(parts, self._error)
        return super().write(path, parts)

    def rename(self, old: Path, new: Path) -> None:
        self._perform(super().rename, old, new)

    def sync_folder(self, path: Path) -> None:
        self._perform(super().sync_folder, path)

    def remove(self, path: Path) -> None:
        self._perform(super().remove, path)


def _halves(parts: Iterable[bytes | memoryview]) -> Iterator[bytes | memoryview]:
    for part in parts:
        yield part[: len(part) // 2]
        yield part[len(part) // 2 :]


def _half_then_raise(parts: Iterable[bytes | memoryview], error: OSError) -> Iterator[bytes | memoryview]:
    content = b"".join(parts)
    yield content[: len(content) // 2]
    raise error
