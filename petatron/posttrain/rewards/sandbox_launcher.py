"""The process that isolates a program and runs it: `python -I -S sandbox_launcher.py`, with a job of JSON as its input.

It imports the standard library alone, as it is started for every run. Three processes are one run:

    launcher     makes namespaces of network, mounts, processes, and of users unless it is root
    init         number 1 of the new processes: builds the file system, waits for the program, and tells its end; all others end with it
    program      has no capabilities, limits of its resources, no environment, and no open files but its own

The file system is a tmpfs of limited size with Python and system libraries, read-only, and `/tmp` to write to. `/proc` is that of the new
processes, or empty. Nothing of the caller's files, processes, environment or network can be reached through it.
"""

from __future__ import annotations

import ctypes
import errno
import json
import os
import resource
import signal
import sys
import time
from contextlib import suppress
from typing import Any

_NEWNS, _NEWUTS, _NEWIPC, _NEWUSER, _NEWPID, _NEWNET = 0x20000, 0x4000000, 0x8000000, 0x10000000, 0x20000000, 0x40000000
_RDONLY, _NOSUID, _NODEV, _REMOUNT, _BIND, _REC, _PRIVATE = 1, 2, 4, 32, 4096, 16384, 1 << 18
_LOCKED_FLAGS = {2: 2, 4: 4, 8: 8, 1024: 1024, 2048: 2048, 4096: 1 << 21}
"""What a new mount of a path has to keep of the old one: those of statvfs, as mount has them."""
_PR_SET_PDEATHSIG, _PR_SET_NO_NEW_PRIVS = 1, 38
_FIRST_FOREIGN_ID = 3_000_000_000
"""Root runs each program as a user that nobody is: limits of the number of processes count by user."""
_INSIDE_ID = 65534
_DEVICES = ("null", "zero", "random", "urandom")
_ONE_THREAD = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
"""Threads count as processes."""
_MAX_INODES = 20_000
_libc = ctypes.CDLL(None, use_errno=True)


def main() -> None:
    job = json.loads(sys.stdin.buffer.read())
    _die_with_parent()
    try:
        if job["isolated"]:
            _enter_namespaces()
        init = os.fork()
        if init == 0:
            _die_with_parent()
            _tell(_run(job))
            os._exit(0)
        os.waitpid(init, 0)
    except OSError as error:
        _tell({"error": f"{error.strerror} ({error.filename or 'no file'})"})


def _die_with_parent() -> None:
    if sys.platform == "linux":
        _libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def _enter_namespaces() -> None:
    """Makes namespaces; the next process that is forked is the first of its own."""
    if sys.platform != "linux":
        raise OSError(errno.ENOSYS, "only Linux has them", "namespaces")
    user, group = os.geteuid(), os.getegid()
    others = _NEWNS | _NEWPID | _NEWNET | _NEWIPC | _NEWUTS
    _check(_libc.unshare(others if user == 0 else others | _NEWUSER), "namespaces")
    if user != 0:
        for name, text in (
            ("setgroups", "deny"), ("uid_map", f"{_INSIDE_ID} {user} 1"), ("gid_map", f"{_INSIDE_ID} {group} 1"),
        ):  # fmt: skip
            descriptor = os.open(f"/proc/self/{name}", os.O_WRONLY)
            os.write(descriptor, text.encode())
            os.close(descriptor)
    _mount("none", "/", None, _REC | _PRIVATE)


def _run(job: dict[str, Any]) -> dict[str, Any]:
    """Runs the program in this namespace, and returns how it ended and what it wrote."""
    try:
        folder = _build_root(job) if job["isolated"] else job["folder"]
        os.chdir(folder)
        for name, text in (("main.py", job["program"]), ("stdin", job["input"])):
            _write(name, text.encode())
        descriptors = [os.open("stdin", os.O_RDONLY), _create("stdout"), _create("stderr")]
        program = os.fork()
        if program == 0:
            _become_program(job, descriptors, folder)
        status = _wait(program, job["seconds"])
        texts = {name: _read(name, job["max_output_bytes"]) for name in ("stdout", "stderr")}
    except OSError as error:
        return {"error": f"{error.strerror} ({error.filename or 'no file'})"}
    return {"status": status, **texts}


def _wait(program: int, seconds: float) -> int | None:
    """Returns the exit status, negative for a signal; None after the time limit. Other processes that end are waited for too."""
    end = time.monotonic() + seconds
    pause_s = 0.001
    while time.monotonic() < end:
        try:
            ended, status = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return None
        if ended == program:
            return os.waitstatus_to_exitcode(status)
        if not ended:
            time.sleep(pause_s)
            pause_s = min(pause_s * 1.5, 0.02)
    return None


def _become_program(job: dict[str, Any], descriptors: list[int], folder: str) -> None:
    """Gives away what this process may do, and becomes the program."""
    try:
        for number, descriptor in enumerate(descriptors):
            os.dup2(descriptor, number)
        os.setsid()
        for name, limit in job["limits"].items():
            resource.setrlimit(getattr(resource, name), (limit, limit))
        if sys.platform == "linux":
            _check(_libc.prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0), "no new privileges")
        if job["isolated"] and os.geteuid() == 0:
            identity = _FIRST_FOREIGN_ID + job["slot"]
            os.setgroups([])
            os.setresgid(identity, identity, identity)
            os.setresuid(identity, identity, identity)
        environment = {"HOME": folder, "TMPDIR": folder, "PATH": "/usr/bin:/bin", "LANG": "C.UTF-8", **_ONE_THREAD}
        os.execve(job["python"], [job["python"], "-I", "main.py"], environment)
    finally:
        os._exit(126)


def _build_root(job: dict[str, Any]) -> str:
    """Makes a file system of Python and an empty folder, enters it, and returns that folder."""
    root = job["folder"]
    _mount("tmpfs", root, "tmpfs", _NOSUID | _NODEV, f"size={job['disk_bytes']},nr_inodes={_MAX_INODES},mode=755")
    for path in job["read_only"]:
        target = root + path
        os.makedirs(os.path.dirname(target), exist_ok=True)
        if os.path.islink(path):
            os.symlink(os.readlink(path), target)
            continue
        os.makedirs(target, exist_ok=True)
        _mount(path, target, None, _BIND | _REC)
        flags = os.statvfs(target).f_flag
        locked = sum(mount for stat, mount in _LOCKED_FLAGS.items() if flags & stat)
        _mount("none", target, None, _REMOUNT | _BIND | _RDONLY | _NOSUID | _NODEV | locked)
    os.makedirs(f"{root}/dev")
    for name in _DEVICES:
        os.close(_create(f"{root}/dev/{name}"))
        _mount(f"/dev/{name}", f"{root}/dev/{name}", None, _BIND)
    os.makedirs(f"{root}/proc", exist_ok=True)
    with suppress(OSError):  # where parts of the old one are hidden the system refuses a new one: it stays empty
        _mount("proc", f"{root}/proc", "proc", _NOSUID | _NODEV)
    os.makedirs(f"{root}/tmp", exist_ok=True)
    os.chmod(f"{root}/tmp", 0o1777)
    os.chroot(root)
    return "/tmp"


def _mount(source: str, target: str, kind: str | None, flags: int, options: str = "") -> None:
    _check(
        _libc.mount(
            source.encode(), target.encode(), None if kind is None else kind.encode(), ctypes.c_ulong(flags),
            options.encode() or None,
        ),
        target,
    )  # fmt: skip


def _check(result: int, name: str) -> None:
    if result != 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number), name)


def _create(name: str) -> int:
    return os.open(name, os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW, 0o666)


def _write(name: str, content: bytes) -> None:
    with os.fdopen(_create(name), "wb") as file:
        file.write(content)
    os.chmod(name, 0o644)


def _read(name: str, max_bytes: int) -> str:
    """Returns what the program wrote; it may have put anything in the place of the file."""
    try:
        descriptor = os.open(name, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    except OSError:
        return ""
    try:
        return os.read(descriptor, max_bytes).decode(errors="replace")
    finally:
        os.close(descriptor)


def _tell(result: dict[str, Any]) -> None:
    sys.stdout.write(json.dumps(result))
    sys.stdout.flush()


if __name__ == "__main__":
    main()
