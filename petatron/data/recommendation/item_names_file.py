"""The file of item names: a line for each item, in the order of their numbers. Imports no numpy."""

from __future__ import annotations

import os
from pathlib import Path

from petatron.base.untrusted_files import read_limited_bytes, reading_untrusted
from petatron.data.data_file_error import data_file_error

NAMES_SUFFIX = ".items.txt"
_MAX_NAMES_BYTES = 1 << 32


def names_path(path: str | os.PathLike[str]) -> Path:
    """Returns where the names of a file's items are."""
    return Path(f"{path}{NAMES_SUFFIX}")


def read_item_names(path: Path) -> list[str]:
    """Reads a file of names, a line each."""
    with reading_untrusted(path, data_file_error):
        names = read_limited_bytes(path, _MAX_NAMES_BYTES).decode().splitlines()
        if len(set(names)) != len(names):
            twice = next(name for name in names if names.count(name) > 1)
            raise data_file_error(path, f"has the name {twice!r} twice")
        return names
