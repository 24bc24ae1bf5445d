"""Folders in this user's home that nobody else can read or write: their content was written by this user's runs."""

from __future__ import annotations

from pathlib import Path

from petatron.base.safe_files import is_private_folder


def private_folder(name: str) -> Path | None:
    """Returns `~/.petatron/<name>`, created if needed; None without a home, or where others could write into the folder."""
    try:
        folder = Path.home() / ".petatron" / name
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        return folder if is_private_folder(folder) else None
    except (OSError, RuntimeError):  # RuntimeError: nobody knows where home is
        return None
