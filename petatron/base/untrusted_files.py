"""Reads untrusted files: only regular files are opened, too large ones are not read, and any failure is one error.

A parser may raise nearly anything on malformed bytes: an index or key error, an overflow, endless recursion, a panic of a Rust
library. To the user all of these mean that the file cannot be used. So every importer runs inside `reading_untrusted`, and the code
there states what it expects without guarding each line.
"""

from __future__ import annotations

import errno
import json
import os
import stat
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO

from petatron.base.errors import PetatronError

MAX_INT64 = (1 << 63) - 1
"""The largest size or offset accepted from a file; beyond it, arithmetic would wrap or take for ever."""
_KINDS = (
    (stat.S_ISLNK, "a symbolic link"),
    (stat.S_ISDIR, "a folder"),
    (stat.S_ISFIFO, "a FIFO"),
    (stat.S_ISSOCK, "a socket"),
    (stat.S_ISCHR, "a device"),
    (stat.S_ISBLK, "a device"),
)
_MAX_REASON_CHARS = 200


@contextmanager
def reading_untrusted(path: Path, make_error: Callable[[Path, str], PetatronError]) -> Iterator[None]:
    """Turns any failure inside into one error, which `make_error` builds from the file and a predicate about it.

    Our own errors pass, and so do interrupts and exits.

    >>> from petatron.base.errors import CheckpointError
    >>> with reading_untrusted(Path("config.json"), lambda path, why: CheckpointError(f"{path} {why}.")):
    ...     {}["hidden_size"]
    Traceback (most recent call last):
    petatron.base.errors.CheckpointError: config.json cannot be understood (KeyError: 'hidden_size').
    """
    try:
        yield
    except PetatronError:
        raise
    except OSError as error:
        raise make_error(path, f"cannot be read: {error.strerror or error}") from error
    except BaseException as error:
        # Rust libraries raise their panics past `except Exception`.
        if not (isinstance(error, Exception) or type(error).__module__ == "pyo3_runtime"):
            raise
        raise make_error(path, f"cannot be understood ({_reason(error)})") from error


def _reason(error: BaseException) -> str:
    if isinstance(error, RecursionError):
        return "it is nested too deeply"
    if isinstance(error, MemoryError):
        return "it needs more memory than there is"
    lines = str(error).strip().splitlines()
    said = lines[0][:_MAX_REASON_CHARS] if lines else ""
    return f"{type(error).__name__}: {said}" if said else type(error).__name__


def open_regular_file(path: Path, *, buffering: int = -1, follow_links: bool = True) -> BinaryIO:
    """Opens a regular file; OSError for anything else: opening a FIFO would block and opening a device may have effects.

    follow_links: without, a symbolic link is refused too.

    >>> open_regular_file(Path("/dev/null"))
    Traceback (most recent call last):
    OSError: [Errno 22] it is a device, not a file: '/dev/null'
    """
    _check_regular(os.stat(path, follow_symlinks=follow_links), path)
    opener = _open_nonblocking if follow_links else _open_no_link
    file: Any = open(path, "rb", buffering=buffering, opener=opener)  # noqa: SIM115
    try:
        _check_regular(os.fstat(file.fileno()), path)
    except BaseException:
        file.close()
        raise
    return file


def _open_nonblocking(path: str, flags: int) -> int:
    """The name may have been replaced since it was checked."""
    return os.open(path, flags | os.O_NONBLOCK | os.O_CLOEXEC)


def _open_no_link(path: str, flags: int) -> int:
    return _open_nonblocking(path, flags | os.O_NOFOLLOW)


def _check_regular(status: os.stat_result, path: Path) -> None:
    if stat.S_ISDIR(status.st_mode):
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
    if not stat.S_ISREG(status.st_mode):
        raise OSError(errno.EINVAL, f"it {_kind_text(status.st_mode)}", str(path))


def _kind_text(mode: int) -> str:
    kind = next((name for matches, name in _KINDS if matches(mode)), "something else")
    return f"is {kind}, not a file"


def not_a_file_reason(path: Path) -> str | None:
    """Returns why a path is not a regular file, as a predicate of it; None if it is one, also behind a link.

    >>> not_a_file_reason(Path("/dev/null")), not_a_file_reason(Path("/none")), not_a_file_reason(Path(__file__))
    ('is a device, not a file', 'is missing', None)
    """
    try:
        mode = os.stat(path).st_mode
    except (FileNotFoundError, NotADirectoryError, ValueError):  # the last: a name that no file can have
        return "is a symbolic link that leads nowhere" if os.path.islink(path) else "is missing"
    except OSError as error:
        return f"cannot be read: {error.strerror or error}"
    return None if stat.S_ISREG(mode) else _kind_text(mode)


def read_limited_bytes(path: Path, max_bytes: int, *, follow_links: bool = True) -> bytes:
    """Reads a file of at most `max_bytes`; OSError otherwise."""
    with open_regular_file(path, follow_links=follow_links) as file:
        size = os.fstat(file.fileno()).st_size
        if size > max_bytes:
            raise OSError(errno.EFBIG, f"it has {size:,} bytes, and such a file at most {max_bytes:,}", str(path))
        content = file.read(size + 1)
    if len(content) != size:
        raise OSError(errno.EIO, "its size changes while it is read", str(path))
    return content


def read_limited_json(path: Path, max_bytes: int) -> Any:
    """Reads a JSON file in UTF-8; OSError or ValueError (RecursionError) otherwise."""
    return json.loads(read_limited_bytes(path, max_bytes).decode())


def is_count(value: object, minimum: int = 0) -> bool:
    """Whether a value of a file is an integer that can be a size, an offset or a count.

    >>> is_count(7), is_count(-1), is_count(True), is_count(7.0), is_count(1 << 64)
    (True, False, False, False, False)
    """
    return type(value) is int and minimum <= value <= MAX_INT64
