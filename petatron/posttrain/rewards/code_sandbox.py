"""`CodeSandbox`: runs programs that nobody has read, isolated from the machine (`sandbox_launcher.py`).

A program has no network, no environment, its own process numbers, and of the file system Python, system libraries and an empty folder in
memory. Limits are on its memory, processor seconds, time, processes, and what it writes. What remains is the kernel: whoever finds a hole
in that is out. On a machine where the system refuses namespaces (many containers do) nothing is isolated but environment and limits.
"""

from __future__ import annotations

import itertools
import json
import os
import secrets
import signal
import subprocess
import sys
import tempfile
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from petatron.base.safe_files import remove_tree

_LAUNCHER = Path(__file__).with_name("sandbox_launcher.py")
_SYSTEM_FOLDERS = ("/usr", "/lib", "/lib32", "/lib64", "/bin", "/nix/store")
_MAX_OUTPUT_BYTES = 1 << 20
_MAX_FILE_BYTES = 16 << 20
_DISK_BYTES = 64 << 20
_MAX_PROCESSES = 32
_MAX_OPEN_FILES = 128
_GRACE_S = 5.0
"""The launcher ends a run itself; it is ended after so much more."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SandboxLimits:
    """Of one run. isolated: False runs programs with the caller's files and network, and limits alone."""

    seconds: float = 5.0
    memory_bytes: int = 1 << 30
    isolated: bool = True


@dataclass(frozen=True, slots=True)
class RunOutcome:
    """status: the exit status, negative for a signal; None after the time limit."""

    status: int | None
    stdout: str
    stderr: str


class SandboxUnavailable(Exception):
    """The system does not let a program be isolated, and why."""


class CodeSandbox:
    """Runs programs; several threads may at a time."""

    def __init__(self, limits: SandboxLimits) -> None:
        self._limits = limits
        self._folder = tempfile.TemporaryDirectory(prefix="petatron-sandbox-")
        self._root = Path(self._folder.name)
        self._slots = itertools.count(secrets.randbelow(1_000_000_000))

    def run(self, program: str, *, stdin: str = "", seconds: float | None = None) -> RunOutcome:
        """Runs a Python program with an input; raises `SandboxUnavailable` if it cannot be isolated."""
        limits = self._limits
        seconds = limits.seconds if seconds is None else min(seconds, limits.seconds)
        folder = str(self._root) if limits.isolated else tempfile.mkdtemp(dir=self._root)
        job = {
            "isolated": limits.isolated,
            "folder": folder,
            "slot": next(self._slots) % 1_000_000_000,
            "python": sys.executable,
            "read_only": read_only_folders(),
            "program": program,
            "input": stdin,
            "seconds": seconds,
            "disk_bytes": _DISK_BYTES,
            "max_output_bytes": _MAX_OUTPUT_BYTES,
            "limits": self._resource_limits(seconds),
        }
        try:
            values = _launch(job, seconds + _GRACE_S)
        finally:
            if not limits.isolated:
                with suppress(OSError):
                    remove_tree(Path(folder))
        if "error" in values:
            raise SandboxUnavailable(str(values["error"]))
        return RunOutcome(values["status"], values["stdout"], values["stderr"])

    def close(self) -> None:
        self._folder.cleanup()

    def _resource_limits(self, seconds: float) -> dict[str, int]:
        limits = {
            "RLIMIT_AS": self._limits.memory_bytes,
            "RLIMIT_CPU": max(1, int(seconds) + 1),
            "RLIMIT_FSIZE": _MAX_FILE_BYTES,
            "RLIMIT_NOFILE": _MAX_OPEN_FILES,
            "RLIMIT_CORE": 0,
        }
        # Without namespaces, all processes of the user count.
        return limits | ({"RLIMIT_NPROC": _MAX_PROCESSES} if self._limits.isolated else {})


def read_only_folders() -> list[str]:
    """Returns what a program sees of the file system: system libraries, and the folders of this Python."""
    folders = [folder for folder in _SYSTEM_FOLDERS if os.path.exists(folder)]
    executable = os.path.dirname(os.path.realpath(sys.executable))
    for folder in sorted({sys.base_prefix, sys.prefix, os.path.dirname(executable)}, key=len):
        if not any(folder == other or folder.startswith(f"{other}/") for other in folders):
            folders.append(folder)
    return folders


def _launch(job: dict[str, Any], timeout_s: float) -> dict[str, Any]:
    process = subprocess.Popen(
        [sys.executable, "-I", "-S", str(_LAUNCHER)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env={},
        start_new_session=True,
    )
    try:
        text, errors = process.communicate(json.dumps(job).encode(), timeout=timeout_s)
    except subprocess.TimeoutExpired:
        return {"status": None, "stdout": "", "stderr": ""}
    finally:
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(process.pid, signal.SIGKILL)
        process.communicate()
    if not text:
        return {"error": f"its launcher ended: {errors.decode(errors='replace')[-400:].strip()}"}
    return json.loads(text)
