"""Creates and replaces files safely in folders that others may have filled: links are not followed, temporary names are unguessable, writes
are atomic, and the umask decides who may read.

A folder that came from elsewhere may have a symbolic link, a pipe or a folder under any name that we use. The folder to work
in is the user's choice, and may be a link itself (to scratch storage, say); what is inside it is checked here. New files
are created exclusively. A file that replaces another is complete before it has its name. A file that is reopened must be a regular
file. Removal uses folder descriptors, so a folder that is replaced by a link meanwhile is not entered either.
"""

from __future__ import annotations

import contextlib
import errno
import os
import secrets
import stat
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

_CREATE_FLAGS = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW
_REOPEN_FLAGS = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK  # the last: a pipe would wait for another reader
_OPEN_FOLDER_FLAGS = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW
_IS_A_LINK = "a symbolic link, and links are not followed"
_MAX_DEPTH = 100
"""The deepest nesting that is removed; deeper folders are not ours, and would exhaust the process's descriptors."""


def create_file(path: Path, *, buffering: int = 0) -> BinaryIO:
    """Opens a new file for writing and reading; a file or link that has its name is unlinked first.

    >>> import tempfile
    >>> folder = Path(tempfile.mkdtemp())
    >>> _ = (folder / "theirs").write_text("kept")
    >>> (folder / "ours").symlink_to(folder / "theirs")
    >>> with create_file(folder / "ours") as file:
    ...     _ = file.write(b"new")
    >>> (folder / "theirs").read_text(), (folder / "ours").read_text()
    ('kept', 'new')
    """
    try:
        descriptor = os.open(path, _CREATE_FLAGS, 0o666)
    except FileExistsError:
        path.unlink(missing_ok=True)
        descriptor = os.open(path, _CREATE_FLAGS, 0o666)
    return open(descriptor, "w+b", buffering=buffering)


def reopen_file(path: Path, flags: int = 0) -> int:
    """Opens the descriptor of a persistent file, creating it if missing; OSError if it is anything but a file."""
    try:
        descriptor = os.open(path, _REOPEN_FLAGS | flags, 0o666)
    except OSError as error:
        if path.is_symlink():
            raise OSError(errno.ELOOP, _IS_A_LINK, str(path)) from error
        raise
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise OSError(errno.EINVAL, "not a file", str(path))
    return descriptor


def tmp_path_for(path: Path) -> Path:
    """Returns a new name next to a path, for the file that will replace it."""
    return path.with_name(f".{path.name}.{secrets.token_hex(6)}.tmp")


@contextmanager
def open_atomic(path: Path, *, sync: bool = True) -> Iterator[BinaryIO]:
    """Yields a temporary file that is renamed to `path` once complete, replacing a file or link.

    sync: also survives a power cut; without it, a reader must be able to detect an incomplete file.
    """
    tmp_file = tmp_path_for(path)
    try:
        with create_file(tmp_file, buffering=1 << 16) as file:
            yield file
            file.flush()
            if sync:
                os.fsync(file.fileno())
        tmp_file.replace(path)
    except BaseException:
        tmp_file.unlink(missing_ok=True)
        raise


def write_atomic(path: Path, content: str | bytes) -> None:
    """Writes a whole file atomically: readers see the old content or the new.

    >>> import tempfile
    >>> write_atomic(Path(tempfile.mkdtemp()) / "config.yaml", "model: {}")
    """
    with open_atomic(path) as file:
        file.write(content.encode() if isinstance(content, str) else content)


def make_folder(path: Path) -> None:
    """Creates a folder and its parents; it may exist, but not as a link or a file."""
    try:
        path.mkdir(parents=True)
    except FileExistsError:
        mode = path.lstat().st_mode
        if not stat.S_ISDIR(mode):
            why = _IS_A_LINK if stat.S_ISLNK(mode) else "not a folder"
            raise NotADirectoryError(errno.ENOTDIR, why, str(path)) from None


def remove_tree(path: Path, on_removed: Callable[[Path], None] = lambda path: None) -> None:
    """Removes a file, a link, or a folder with its contents, but never a link's target; it may be missing.

    on_removed: called for every removed entry, a folder's before the folder itself.

    >>> import tempfile
    >>> folder = Path(tempfile.mkdtemp())
    >>> (folder / "theirs").mkdir()
    >>> (folder / "ours" / "model").mkdir(parents=True)
    >>> (folder / "ours" / "link").symlink_to(folder / "theirs")
    >>> remove_tree(folder / "ours")
    >>> [path.name for path in folder.iterdir()]
    ['theirs']
    """
    _remove_entry(str(path), None, path, on_removed, depth=0)


def _remove_entry(name: str, parent: int | None, path: Path, on_removed: Callable[[Path], None], depth: int) -> None:
    """`name` is the entry relative to the open folder `parent`, `path` the same for messages."""
    with contextlib.suppress(FileNotFoundError):
        if stat.S_ISDIR(os.stat(name, dir_fd=parent, follow_symlinks=False).st_mode):
            if depth > _MAX_DEPTH:
                raise OSError(errno.EINVAL, f"nested more than {_MAX_DEPTH} folders deep", str(path))
            folder = os.open(name, _OPEN_FOLDER_FLAGS, dir_fd=parent)
            try:
                for child in sorted(os.listdir(folder)):
                    _remove_entry(child, folder, path / child, on_removed, depth + 1)
            finally:
                os.close(folder)
            os.rmdir(name, dir_fd=parent)
        else:
            os.unlink(name, dir_fd=parent)
    on_removed(path)


def is_private_folder(folder: Path) -> bool:
    """Whether a folder belongs to this user, and nobody else may read it.

    >>> import tempfile
    >>> is_private_folder(Path(tempfile.mkdtemp())), is_private_folder(Path("/"))
    (True, False)
    """
    status = folder.lstat()
    return stat.S_ISDIR(status.st_mode) and status.st_uid == os.getuid() and not status.st_mode & 0o077


def symlink_target(path: Path, folder: Path) -> Path | None:
    """Returns a link's target; None for anything else, and for the links of the Hugging Face hub's model cache.

    The cache stores files in `models--NAME/blobs`, and `models--NAME/snapshots/REVISION/...` are links to them. `folder` is such a
    revision, or is inside one.
    """
    if not path.is_symlink():
        return None
    target = Path(os.path.realpath(path))
    return None if target.parent in _hub_blob_folders(folder) else target


def symlink_target_outside(path: Path, folder: Path) -> Path | None:
    """Returns a link's target if it is neither inside its folder nor in the hub's cache; else None.

    >>> import tempfile
    >>> folder = Path(tempfile.mkdtemp())
    >>> (folder / "tokenizer.json").symlink_to("/etc/passwd")
    >>> str(symlink_target_outside(folder / "tokenizer.json", folder)), symlink_target_outside(folder / "config.json", folder)
    ('/etc/passwd', None)
    """
    target = symlink_target(path, folder)
    return None if target is None or target.is_relative_to(os.path.realpath(folder)) else target


def _hub_blob_folders(folder: Path) -> list[Path]:
    """Returns the blob folder of a revision, or of a folder in one."""
    real_folder = Path(os.path.realpath(folder))
    return [
        place.parent.parent / "blobs"
        for place in (real_folder, *real_folder.parents)
        if place.parent.name == "snapshots" and place.parent.parent.name.startswith("models--")
    ]


def private_folder(name: str) -> Path | None:
    """Returns `~/.petatron/<name>`, created if needed; None without a home, or where others could write into the folder."""
    try:
        folder = Path.home() / ".petatron" / name
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        return folder if is_private_folder(folder) else None
    except (OSError, RuntimeError):  # RuntimeError: nobody knows where home is
        return None
