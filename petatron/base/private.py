"""Folders in this user's home that nobody else can write to or look into: what is read from there, this user's runs have written."""

from __future__ import annotations

import os
import stat
from pathlib import Path


def private_folder(name: str) -> Path | None:
    """`~/.petatron/<name>`, made if need be; None where there is no home, or where others could write into the folder."""
    try:
        folder = Path.home() / ".petatron" / name
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        found = folder.lstat()
    except (OSError, RuntimeError):  # RuntimeError: nobody knows where home is
        return None
    alone = stat.S_ISDIR(found.st_mode) and found.st_uid == os.getuid() and not found.st_mode & 0o077
    return folder if alone else None
