"""Files with API keys, and who else may know what is in them.

Whoever can read such a file is a client, and whoever can change it decides who is. So it must be private, and where its mode is not, the
owner is told to change it. In containers nobody can: orchestrators mount secrets read-only, as files of root that everybody may read
(Kubernetes: mode 0644, Docker: 0444), and keep others out by the container. Such a file is taken, with a warning.
"""

from __future__ import annotations

import os
import shlex
import stat
from pathlib import Path

from petatron.base.errors import ConfigError, Problem
from petatron.base.log import get_logger

_ROOT = 0
_log = get_logger(__name__)


def check_key_file(path: Path) -> None:
    """Raises `ConfigError` for a file that others may change, or may read although its owner could prevent it. Links are followed."""
    status = path.stat()
    read_only = bool(os.statvfs(path).f_flag & os.ST_RDONLY)
    problem = key_file_problem(status.st_mode, status.st_uid, user=os.geteuid(), read_only=read_only)
    if problem is not None:
        rule, fix = problem
        raise ConfigError([Problem("--api-key-file", str(path), rule, fix.format(path=shlex.quote(str(path))))])
    if status.st_mode & (stat.S_IRWXG | stat.S_IRWXO):
        _log.warning(
            "--api-key-file %s may be read by everybody who sees its mount, which is right in a container alone", path
        )


def key_file_problem(mode: int, owner: int, *, user: int, read_only: bool) -> tuple[str, str] | None:
    """Returns what is wrong with a key file and what to do about it; None if nothing is.

    >>> key_file_problem(0o644, 0, user=1000, read_only=True), key_file_problem(0o600, 1000, user=1000, read_only=False)
    (None, None)
    >>> key_file_problem(0o644, 1000, user=1000, read_only=False)[0]
    'may be read or changed by other users, who could use the server'
    """
    if owner not in (user, _ROOT) and user != _ROOT:
        return "belongs to another user, who could use the server", "Make a file of your own, with mode 600."
    others_change = mode & (stat.S_IWGRP | stat.S_IWOTH)
    others_read = mode & (stat.S_IRWXG | stat.S_IRWXO)
    if others_change or (others_read and not (owner == _ROOT and read_only)):
        return "may be read or changed by other users, who could use the server", "Run: chmod 600 {path}"
    return None
