"""Temporary folders that are removed when the process that made them ends, however it ends.

Whoever makes such a folder holds a lock on it for as long as it lives, and the kernel releases the lock when the process dies. So a
folder of this name that belongs to this user and is not locked has no owner any more, and the next run removes it. Nothing is written
down that could be out of date, as a process id could. Folders of other users, links and anything else under such a name stay.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from petatron.base.safe_files import is_private_folder, remove_tree

RANKS_PREFIX, VERIFY_PREFIX = "petatron-ranks-", "petatron-verify-"
_MIN_EMPTY_AGE_S = 60.0
_OPEN_FOLDER_FLAGS = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC


@contextmanager
def scratch_folder(prefix: str) -> Iterator[Path]:
    """Yields a new private folder, which is removed at the end; those that killed processes have left are removed first."""
    parent = Path(tempfile.gettempdir())
    remove_abandoned_folders(parent)
    with tempfile.TemporaryDirectory(prefix=prefix, dir=parent) as name:
        descriptor = os.open(name, _OPEN_FOLDER_FLAGS)  # not inherited: ranks may outlive their launcher for a moment
        try:
            with contextlib.suppress(OSError):  # a file system without locks, where nothing is ever taken for abandoned
                fcntl.flock(descriptor, fcntl.LOCK_EX)
            yield Path(name)
        finally:
            os.close(descriptor)


def remove_abandoned_folders(parent: Path) -> list[Path]:
    """Removes this user's scratch folders in `parent` that no living process holds; returns them."""
    removed: list[Path] = []
    for prefix in (RANKS_PREFIX, VERIFY_PREFIX):
        for folder in sorted(parent.glob(f"{prefix}*")):
            with contextlib.suppress(OSError):  # gone meanwhile, locked by its owner, or not ours to open
                if _is_abandoned(folder):
                    remove_tree(folder)
                    removed.append(folder)
    return removed


def _is_abandoned(folder: Path) -> bool:
    if not is_private_folder(folder):
        return False
    descriptor = os.open(folder, _OPEN_FOLDER_FLAGS)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        # Between making a folder and locking it, its owner has written nothing there.
        return bool(os.listdir(descriptor)) or time.time() - os.fstat(descriptor).st_mtime > _MIN_EMPTY_AGE_S
    finally:
        os.close(descriptor)
