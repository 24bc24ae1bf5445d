"""Bounds of a case: nothing is written, removed or started outside the working folder; time and memory end.

Python tells an audit hook of every file that it opens, removes or renames, of processes, connections and code that it runs. Libraries
in Rust and C do not, so files beside the working folder are compared after each case too, and a secret among them must not
turn up in what was written. A hook stays for the life of its process, which therefore is a worker's own.
"""

from __future__ import annotations

import os
import resource
import signal
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

from tests.load_deadline import Deadline

CPU_S = 3.0
"""The time that a case may take."""
GROWTH_BYTES = 2 << 30
SECRET = b"-----BEGIN SECRET OF THE FUZZ HARNESS-----"
_WRITES = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND
_NEVER = (
    "os.system", "os.exec", "os.fork", "os.forkpty", "os.posix_spawn", "os.spawn", "subprocess.Popen", "pty.spawn", "socket.connect",
    "socket.bind", "socket.sendto",
    "socket.getaddrinfo", "urllib.Request", "pickle.find_class", "os.putenv", "os.unsetenv", "ftplib.connect", "http.client.connect",
    "webbrowser.open", "ctypes.dlopen",
    "os.kill", "os.killpg",
)  # fmt: skip
# Event -> (place of a path, place of the descriptor of the folder it is meant from, if any).
_PATHS: dict[str, tuple[tuple[int, int | None], ...]] = {
    "os.remove": ((0, 1),), "os.rmdir": ((0, 1),), "os.mkdir": ((0, 2),), "os.rename": ((0, 2), (1, 3)), "os.link": ((1, 3),),
    "os.symlink": ((1, 2),),
    "os.truncate": ((0, None),), "os.chmod": ((0, 2),), "os.chown": ((0, 3),), "os.utime": ((0, 3),), "os.setxattr": ((0, None),),
    "os.removexattr": ((0, None),),
    "shutil.copyfile": ((1, None),), "shutil.move": ((0, None), (1, None)), "shutil.copymode": ((1, None),), "shutil.copystat": ((1,
    None),), "shutil.rmtree": ((0, 1),),
    "shutil.chown": ((0, None),),
}  # fmt: skip
_INSTALLED = (sys.prefix, sys.base_prefix, "<frozen ", str(Path(__file__).parents[2]))


class Forbidden(BaseException):
    """Raised inside what does something forbidden; also recorded, because it may be caught there."""


class TooLong(BaseException):
    """Raised inside what does not come back."""


@dataclass
class Guard:
    """The rules of this process, and what has broken them since `watched` began. `outside` is not part of the working folder."""

    folder: Path
    outside: Path
    active: bool = False
    broken: list[str] = field(default_factory=list)
    cpu_s: float = 0.0
    growth_bytes: int = 0
    deadline: Deadline = field(default_factory=lambda: Deadline(0.0))

    def install(self) -> None:
        """From now on, and for the life of the process; imports are over, so that memory may grow by the bound and no further."""
        sys.addaudithook(self._hear)
        signal.signal(signal.SIGALRM, self._alarm)
        limit = _status("VmSize") + GROWTH_BYTES + (512 << 20)  # threads reserve addresses that they do not use
        resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))

    @contextmanager
    def watched(self, wall_s: float) -> Iterator[None]:
        """While a door is open, for so many seconds of an idle machine; afterwards `broken` says what it did that it may not do."""
        self.broken.clear()
        Path("/proc/self/clear_refs").write_text("5")  # from here on the peak is this case's
        before, started = _status("VmRSS"), time.process_time()
        self.deadline = Deadline(wall_s)
        signal.setitimer(signal.ITIMER_REAL, wall_s, wall_s / 4)
        self.active = True
        try:
            yield
        finally:
            self.active = False
            signal.setitimer(signal.ITIMER_REAL, 0)
            self.cpu_s = time.process_time() - started
            self.growth_bytes = max(0, _status("VmHWM") - before)

    def over(self) -> list[str]:
        """All that was broken, bounds included."""
        found = list(self.broken)
        if self.cpu_s > CPU_S:
            found.append(f"took {self.cpu_s:.1f} s of CPU time")
        if self.growth_bytes > GROWTH_BYTES:
            found.append(f"grew by {self.growth_bytes >> 20} MB")
        return found

    def _alarm(self, number: int, frame: FrameType | None) -> None:
        if self.active and self.deadline.is_over:
            raise TooLong("it did not come back")

    def _hear(self, event: str, arguments: tuple[Any, ...]) -> None:
        if not self.active:
            return
        if event == "open":
            self._opened(*arguments)
        elif event in _PATHS:
            for path, folder in _PATHS[event]:
                self._check(event, arguments[path], arguments[folder] if folder is not None else -1, follow=False)
        elif _is_forbidden(event, arguments) and not _importing():
            self._forbid(event, arguments)

    def _opened(self, path: Any, mode: str | None, flags: int) -> None:
        if isinstance(path, str | bytes | os.PathLike) and flags & _WRITES:
            # With these flags a link in the last place is not followed: the call fails.
            self._check("open for writing", path, -1, follow=not flags & (os.O_EXCL | os.O_NOFOLLOW))

    def _check(self, event: str, path: Any, folder: int | None, *, follow: bool) -> None:
        if isinstance(path, int):
            path = os.readlink(f"/proc/self/fd/{path}")
        name = os.fsdecode(path)
        if folder is not None and folder >= 0 and not os.path.isabs(name):
            name = os.path.join(os.readlink(f"/proc/self/fd/{folder}"), name)
        name = os.path.abspath(name)
        whole = (
            os.path.realpath(name)
            if follow
            else os.path.join(os.path.realpath(os.path.dirname(name)), os.path.basename(name))
        )
        if not _in(whole, self.folder) or _in(whole, self.outside):
            self._forbid(event, (whole,))

    def _forbid(self, event: str, arguments: tuple[Any, ...]) -> None:
        self.broken.append(f"forbidden: {event} {str(arguments)[:200]}")
        raise Forbidden(self.broken[-1])


def _in(path: str, folder: Path) -> bool:
    return path == str(folder) or path.startswith(f"{folder}/")


def _is_forbidden(event: str, arguments: tuple[Any, ...]) -> bool:
    if event == "exec":  # asked for this one alone: a look at frames is an event of its own
        return not _known(arguments[0], sys._getframe(2))
    return event in _NEVER


def _known(code: object, caller: FrameType) -> bool:
    """Code of an installed file, as importing and generated classes run it, or what jinja2 makes of a template in its sandbox."""
    if not isinstance(code, CodeType):
        return False
    return code.co_filename.startswith(_INSTALLED) or _is_of_jinja(code, caller)


def _is_of_jinja(code: CodeType, caller: FrameType) -> bool:
    """Whether `caller`, which runs the code, is jinja2's own function for it; names of files prove nothing, since anybody may compile under
    any. Either it is a template that an environment has just compiled, and that environment is a sandbox, which bounds it; or the one
    statement that raises an error again, as if it came from a line of the template."""
    environment, debug = sys.modules.get("jinja2.environment"), sys.modules.get("jinja2.debug")
    if environment is None or debug is None or caller.f_locals.get("code") is not code:
        return False
    if caller.f_code is environment.Template.from_code.__func__.__code__:
        is_compiled_there = (
            caller.f_back is not None and caller.f_back.f_code is environment.Environment.from_string.__code__
        )
        sandbox = sys.modules["jinja2.sandbox"].SandboxedEnvironment
        return is_compiled_there and isinstance(caller.f_locals["environment"], sandbox)
    return caller.f_code is debug.fake_traceback.__code__ and code.co_names == ("__jinja_exception__",)


def _importing() -> bool:
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if frame.f_code.co_filename.startswith("<frozen importlib"):
            return True
        frame = frame.f_back
    return False


def _status(name: str) -> int:
    """A line of the kernel's facts about this process, in bytes."""
    with open("/proc/self/status", "rb") as file:
        content = file.read()
    at = content.index(name.encode() + b":")
    return int(content[at : at + 60].split()[1]) << 10


class Outside:
    """The folder beside the working folder: a secret, and things that must stay as they are."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        (folder / "folder").mkdir(parents=True)
        for path in (
            "secret.txt",
            "folder/manifest.json",
            "folder/config.json",
            "folder/kept.txt",
            "folder/model.safetensors",
        ):
            (folder / path).write_bytes(SECRET)
        self._before = self._seen()

    def changes(self) -> list[str]:
        """What is not as it was."""
        now = self._seen()
        return [
            f"touched: {name} outside" for name in {**now, **self._before} if now.get(name) != self._before.get(name)
        ]

    def _seen(self) -> dict[str, tuple[int, ...]]:
        found = {}
        for place in (self.folder, self.folder / "folder"):
            for entry in os.scandir(place) if place.is_dir() else ():
                facts = entry.stat(follow_symlinks=False)
                found[entry.path] = (facts.st_ino, facts.st_size, facts.st_mtime_ns, facts.st_mode)
        return found


def leaks(folder: Path) -> list[str]:
    """Files under a folder that have the secret in them."""
    found = []
    for place, _, names in os.walk(folder):
        for name in names:
            path = os.path.join(place, name)
            if os.path.isfile(path) and not os.path.islink(path) and os.path.getsize(path) < 1 << 24:
                with open(path, "rb") as file:
                    if SECRET in file.read():
                        found.append(f"leaked: the secret is in {os.path.relpath(path, folder)}")
    return found
