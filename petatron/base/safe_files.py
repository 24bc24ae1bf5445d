"""Files of ours in folders that others may have filled: links are not followed, drafts have names that nobody can guess, and
the umask decides who may read.

A folder that came from elsewhere may have a symbolic link, a pipe or a folder under any name that we use. Which folder to work
in is the user's word, and that folder may be a link itself (to scratch storage, say); what is inside it is judged here. New files
are created exclusively. A file that replaces another is complete before it has its name. A file that is opened again must be
one. Removal goes by descriptors of folders, so a folder that somebody exchanges for a link meanwhile is not entered either.
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
"""Folders in folders that are removed; deeper ones are not ours, and would take all descriptors of the process."""


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
    """The descriptor of a file that stays from run to run, made if it is missing; OSError if it is anything but a file."""
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
    """A new name beside a path, for what will take its place."""
    return path.with_name(f".{path.name}.{secrets.token_hex(6)}.tmp")


@contextmanager
def open_atomic(path: Path, *, sync: bool = True) -> Iterator[BinaryIO]:
    """A file that has its name once it is complete, in the place of a file or link that had it.

    sync: also through a power cut; without it, a reader must be able to tell half a file.
    """
    draft = tmp_path_for(path)
    try:
        with create_file(draft, buffering=1 << 16) as file:
            yield file
            file.flush()
            if sync:
                os.fsync(file.fileno())
        draft.replace(path)
    except BaseException:
        draft.unlink(missing_ok=True)
        raise


def write_atomic(path: Path, content: str | bytes) -> None:
    """Writes a whole file, seen by others as it was or as it is to be.

    >>> import tempfile
    >>> write_atomic(Path(tempfile.mkdtemp()) / "config.yaml", "model: {}")
    """
    with open_atomic(path) as file:
        file.write(content.encode() if isinstance(content, str) else content)


def make_folder(path: Path) -> None:
    """Makes a folder and those above it; it may be there, but not as a link or a file."""
    try:
        path.mkdir(parents=True)
    except FileExistsError:
        mode = path.lstat().st_mode
        if not stat.S_ISDIR(mode):
            why = _IS_A_LINK if stat.S_ISLNK(mode) else "not a folder"
            raise NotADirectoryError(errno.ENOTDIR, why, str(path)) from None


def remove_tree(path: Path, on_removed: Callable[[Path], None] = lambda path: None) -> None:
    """Removes a file, a link, or a folder with all that is in it, but never what a link points to; it may be missing.

    on_removed: is told of every entry that is gone, a folder's before the folder itself.

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
    """`name` is the entry as seen from the open folder `parent`, `path` the same for people."""
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
    """Whether a folder belongs to this user, and nobody else may look into it.

    >>> import tempfile
    >>> is_private_folder(Path(tempfile.mkdtemp())), is_private_folder(Path("/"))
    (True, False)
    """
    status = folder.lstat()
    return stat.S_ISDIR(status.st_mode) and status.st_uid == os.getuid() and not status.st_mode & 0o077


def symlink_target(path: Path, folder: Path) -> Path | None:
    """Where a link leads; None for what is no link, and for the links of which the hub's cache of models consists.

    The cache keeps files in `models--NAME/blobs`, and `models--NAME/snapshots/REVISION/...` are links to them. `folder` is such a
    revision, or is inside one.
    """
    if not path.is_symlink():
        return None
    target = Path(os.path.realpath(path))
    return None if target.parent in _hub_blob_folders(folder) else target


def symlink_target_outside(path: Path, folder: Path) -> Path | None:
    """Where a link leads if that is neither inside its folder nor in the hub's cache; None for all else.

    >>> import tempfile
    >>> folder = Path(tempfile.mkdtemp())
    >>> (folder / "tokenizer.json").symlink_to("/etc/passwd")
    >>> str(symlink_target_outside(folder / "tokenizer.json", folder)), symlink_target_outside(folder / "config.json", folder)
    ('/etc/passwd', None)
    """
    target = symlink_target(path, folder)
    return None if target is None or target.is_relative_to(os.path.realpath(folder)) else target


def _hub_blob_folders(folder: Path) -> list[Path]:
    """The folder of blobs that belongs to a revision, or to a folder in one."""
    whole = Path(os.path.realpath(folder))
    return [
        place.parent.parent / "blobs"
        for place in (whole, *whole.parents)
        if place.parent.name == "snapshots" and place.parent.parent.name.startswith("models--")
    ]
