"""The shared secret of a run over several machines, by which each rank proves that it belongs to the run.

It comes from PETATRON_SECRET where that is set. Otherwise rank 0 writes one to a file in the user's home that nobody else may read, and
the others wait for it there. It is never a command argument, which every user of a machine can list. `encrypted_channel.py` says what is
done with it.
"""

from __future__ import annotations

import os
import secrets
import time
from pathlib import Path

from petatron.base.errors import LaunchError
from petatron.base.log import get_logger
from petatron.base.safe_files import is_private_folder, private_folder

_log = get_logger(__name__)
SECRET_VARIABLE = "PETATRON_SECRET"
_MIN_CHARS = 16
_POLL_S, _NOTICE_S = 0.2, 30.0


def find_secret_folder() -> Path | None:
    """Returns the folder of secrets; None where others could open it."""
    return private_folder("rendezvous")


def secret_folder() -> Path:
    """Returns the folder of secrets, which has to be there."""
    folder = find_secret_folder()
    if folder is None:
        raise LaunchError(
            "There is no folder ~/.petatron/rendezvous that only you can open, where ranks would leave their secret. Make it with "
            f"mode 700, or export {SECRET_VARIABLE} with one random value for all ranks."
        )
    return folder


def check_secret(text: str) -> str:
    """Returns the user's secret, if it is long enough not to be guessed."""
    if len(text) < _MIN_CHARS:
        raise LaunchError(
            f"{SECRET_VARIABLE} has {len(text)} characters; give at least {_MIN_CHARS} random ones, the same for all ranks, "
            "for instance from `openssl rand -hex 16`."
        )
    return text


def write_secret(name: str, folder: Path) -> str:
    """Writes a new secret for the others to read, replacing one of an earlier run."""
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    _check_private(folder)
    text, tmp_file = secrets.token_hex(16), folder / f".{name}.{secrets.token_hex(4)}"
    descriptor = os.open(tmp_file, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600)
    with os.fdopen(descriptor, "w") as file:
        file.write(text)
    tmp_file.replace(folder / name)
    return text


def remove_secret(name: str) -> None:
    """Removes a secret that all ranks have read."""
    folder = find_secret_folder()
    if folder is not None:
        (folder / name).unlink(missing_ok=True)


def wait_for_secret(name: str, folder: Path, *, timeout_s: float) -> str:
    """Waits for the secret that `write_secret` writes on another machine."""
    path, started, noticed = folder / name, time.monotonic(), False
    while not path.is_file():
        waited = time.monotonic() - started
        if waited > timeout_s:
            raise LaunchError(
                f"There is no secret of this run at {path} after {waited:.0f} s; rank 0 leaves it there. "
                f"Where machines do not share home folders, export {SECRET_VARIABLE} with one random value for all."
            )
        if waited > _NOTICE_S and not noticed:
            noticed = True
            _log.info("waiting for the secret of this run at %s", path)
        time.sleep(_POLL_S)
    _check_private(folder)
    return path.read_text()


def _check_private(folder: Path) -> None:
    if not is_private_folder(folder):
        raise LaunchError(f"{folder} holds secrets and is open to other users. Make it yours alone: chmod 700 {folder}")
