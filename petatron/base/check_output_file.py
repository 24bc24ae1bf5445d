"""Checks that the output file that a flag names can be written, before any work."""

from __future__ import annotations

from pathlib import Path

from petatron.base.errors import Problem


def writable_problems(flag: str, path: Path) -> list[Problem]:
    """Returns the problem of a flag that names a file to write, before the work whose result it gets; leaves everything unchanged.

    It tries to write: permissions do not reveal a read-only file system.
    """
    try:
        there = path.exists()
        with path.open("ab"):
            pass
        if not there:
            path.unlink()
    except IsADirectoryError:
        return [Problem(flag, str(path), "is a folder", "Give the path of a file.")]
    except FileNotFoundError:
        return [Problem(flag, str(path), "is in a folder that does not exist", "Make the folder first.")]
    except OSError as error:
        rule = f"cannot be written: {error.strerror or error}"
        return [Problem(flag, str(path), rule, "Choose a file in a writable folder.")]
    return []
