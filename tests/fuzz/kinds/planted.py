"""A kind that breaks the rules: each door one of them. It tests the harness, and needs nothing of the package but its errors."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import time
from pathlib import Path
from typing import Any

import jinja2
from jinja2.sandbox import SandboxedEnvironment

from petatron.base.errors import DataError
from tests.fuzz.kind import Case, Kind

_CONTENT = b'{"a": [1, 2, 3]}'


def make(name: str) -> Kind:
    return Kind(
        name,
        {"x.json": _CONTENT},
        doors={
            door.__name__.strip("_"): _unless_good(door)
            for door in (
                _raise,
                _hang,
                _grow,
                _write,
                _remove,
                _start,
                _connect,
                _code,
                _forged,
                _unknown,
                _plain,
                _helper,
                _abort,
                _stuck,
                _accept,
                _escape,
                _refuse,
                _copy,
            )
        },
        formats={".json": "json"},
        shares={"abort": 0.4, "stuck": 0.4, "hang": 0.3},
        covered=_covered,
        wall_s=0.3,
    )


def _covered(case: Case) -> bool:
    return case.door == "accept"


def _unless_good(door: Any) -> Any:
    def checked(folder: Path, scratch: Path) -> Any:
        path = folder / "x.json"
        good = path.is_file() and path.stat().st_size == len(_CONTENT) and path.read_bytes() == _CONTENT
        return "good" if good else door(folder, scratch)

    return checked


def _raise(folder: Path, scratch: Path) -> Any:
    return {}["missing"]


def _hang(folder: Path, scratch: Path) -> Any:
    time.sleep(60)


def _grow(folder: Path, scratch: Path) -> Any:
    return len(bytearray(5 << 30))


def _write(folder: Path, scratch: Path) -> Any:
    (folder.parent / "outside" / "secret.txt").write_text("mine")


def _remove(folder: Path, scratch: Path) -> Any:
    os.unlink("secret.txt", dir_fd=os.open(folder.parent / "outside", os.O_RDONLY))


def _start(folder: Path, scratch: Path) -> Any:
    subprocess.run(["true"], check=True)


def _connect(folder: Path, scratch: Path) -> Any:
    socket.create_connection(("127.0.0.1", 9))


def _code(folder: Path, scratch: Path) -> Any:
    exec("x = 1")


def _forged(folder: Path, scratch: Path) -> Any:
    """Code under the name that jinja2 gives to that of templates."""
    exec(compile("x = 1", "<template>", "exec"))


def _unknown(folder: Path, scratch: Path) -> Any:
    """Code under the name that jinja2 gives to what raises an error again."""
    exec(compile("x = 1", "<unknown>", "exec"))


def _plain(folder: Path, scratch: Path) -> Any:
    """A template outside the sandbox."""
    jinja2.Environment().from_string("{{ 1 }}").render()


def _helper(folder: Path, scratch: Path) -> Any:
    """jinja2's own function for templates, with code that no template was."""
    code = compile("x = 1; name = ''; blocks = {}; debug_info = ''; root = None", "<template>", "exec")
    jinja2.Template.from_code(SandboxedEnvironment(), code, {})


def _abort(folder: Path, scratch: Path) -> Any:
    os.abort()


def _stuck(folder: Path, scratch: Path) -> Any:
    signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGALRM])
    time.sleep(60)


def _accept(folder: Path, scratch: Path) -> Any:
    return "something else"


def _escape(folder: Path, scratch: Path) -> Any:
    print("a name of \x1b[31m others")


def _refuse(folder: Path, scratch: Path) -> Any:
    raise DataError("as it should be")


def _copy(folder: Path, scratch: Path) -> Any:
    (scratch / "copy").write_bytes((folder.parent / "outside" / "secret.txt").read_bytes())
