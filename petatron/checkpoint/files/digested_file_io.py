"""File operations of a checkpoint, and the digests that tell whether a file is what was written.

A file has a digest per block of 8 MiB, by default folded CRC-32s: fast enough to be always on (several GB/s per core, and blocks are
independent), and a reader of a part of a file checks the blocks of that part only.
"""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from petatron.base import safe_files
from petatron.base.errors import CheckpointError
from petatron.checkpoint.files.block_digest import DigestKind, block_digest

BLOCK_BYTES = 8 << 20
_FLUSH_BYTES = 64 << 20
_MIN_THREADED_DIGEST_BYTES = 1 << 20


@dataclass(frozen=True, slots=True)
class StoredFile:
    """Size of a file, and the digest of each of its blocks (`block_digest.py`)."""

    size_bytes: int
    block_digests: tuple[str, ...]


class Disk:
    """The file operations of publishing. Tests replace `failpoint`, which is called before and after everything that changes the disk,
    to end the process at any of these moments, or single operations, to make them fail.
    """

    sha256_digests = False
    """Whether files get SHA-256 digests, so that a signature of them covers the content."""

    def failpoint(self, event: str, path: Path) -> None:
        """Is called between two states of the disk, and does nothing but in tests."""

    def make_folder(self, path: Path) -> None:
        safe_files.make_folder(path)
        self.failpoint("folder made", path)

    def write(self, path: Path, parts: Iterable[bytes | memoryview]) -> StoredFile:
        """Writes a file through to the device, and returns its size and digests."""
        with (
            safe_files.create_file(path) as file,
            ThreadPoolExecutor(1, thread_name_prefix="checkpoint-flush") as flush_pool,
            ThreadPoolExecutor(1, thread_name_prefix="checkpoint-digest") as digest_pool,
        ):
            flusher = _BackgroundFlusher(file.fileno(), flush_pool)
            digests = _FileDigester("sha256" if self.sha256_digests else "folded", digest_pool)
            self.failpoint("opened", path)
            for part in parts:
                for piece in digests.digest_pieces(part):
                    unwritten = piece
                    while unwritten:
                        unwritten = unwritten[os.write(file.fileno(), unwritten) :]
                    self.failpoint("written", path)
                    flusher.add_written(len(piece))
                digests.wait()  # the caller may reuse a part's memory from here on
            flusher.finish()
            self.failpoint("synced", path)
            return digests.result()

    def rename(self, old: Path, new: Path) -> None:
        self.failpoint("renaming", old)
        old.replace(new)
        self.failpoint("renamed", new)

    def sync_folder(self, path: Path) -> None:
        """Makes the names in a folder (new files, renames) survive a power cut."""
        descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
        self.failpoint("folder synced", path)

    def remove(self, path: Path) -> None:
        """Removes a file, a link, or a folder with its contents, file by file; links are not followed."""
        safe_files.remove_tree(path, lambda gone: self.failpoint("removed", gone))


class _BackgroundFlusher:
    """Flushes to the device while more is written: waiting for all of it at the end would take as long again."""

    def __init__(self, descriptor: int, pool: ThreadPoolExecutor) -> None:
        self._descriptor, self._pool = descriptor, pool
        self._unflushed_bytes = 0
        self._pending_flush: Future[None] | None = None

    def add_written(self, num_bytes: int) -> None:
        self._unflushed_bytes += num_bytes
        if self._unflushed_bytes < _FLUSH_BYTES or (self._pending_flush is not None and not self._pending_flush.done()):
            return
        self._raise_flush_error()
        flush = getattr(os, "fdatasync", os.fsync)  # macOS has the second only
        self._pending_flush = self._pool.submit(flush, self._descriptor)
        self._unflushed_bytes = 0

    def finish(self) -> None:
        self._raise_flush_error()
        os.fsync(self._descriptor)

    def _raise_flush_error(self) -> None:
        """Raises a failed write-back: the system reports it once, to the first that waits, so it must be handled here."""
        if self._pending_flush is not None:
            self._pending_flush.result()


class _FileDigester:
    """Computes the digests of a file's blocks on another core while the blocks are written."""

    def __init__(self, kind: DigestKind, pool: ThreadPoolExecutor) -> None:
        self._kind: DigestKind = kind
        self._pool, self._pending = pool, list[Future[None]]()
        self._blocks: list[str] = []
        self._digest, self._size = block_digest(kind), 0

    def digest_pieces(self, part: bytes | memoryview) -> Iterator[memoryview]:
        """Splits a part at block boundaries; each slice is being digested when it is yielded."""
        remaining = memoryview(part)
        num_bytes = BLOCK_BYTES - self._size % BLOCK_BYTES
        while remaining:
            piece, remaining = remaining[:num_bytes], remaining[num_bytes:]
            num_bytes = BLOCK_BYTES
            self._size += len(piece)
            ends_block = self._size % BLOCK_BYTES == 0
            if len(piece) < _MIN_THREADED_DIGEST_BYTES and not self._pending:
                self._update(piece, ends_block)
            else:
                self._pending.append(self._pool.submit(self._update, piece, ends_block))
            yield piece

    def wait(self) -> None:
        for pending in self._pending:
            pending.result()
        self._pending.clear()

    def result(self) -> StoredFile:
        self.wait()
        last = [self._digest.hexdigest()] if self._size % BLOCK_BYTES else []
        return StoredFile(self._size, (*self._blocks, *last))

    def _update(self, piece: memoryview, ends_block: bool) -> None:
        self._digest.update(piece)
        if ends_block:
            self._blocks.append(self._digest.hexdigest())
            self._digest = block_digest(self._kind)


def digest_file(path: Path, *, kind: DigestKind = "folded") -> StoredFile:
    """Returns size and digests of a file on disk."""
    blocks: list[str] = []
    size = 0
    with path.open("rb", buffering=0) as file:
        buffer = memoryview(bytearray(BLOCK_BYTES))
        while count := read_into(file.fileno(), [buffer], size):
            digest = block_digest(kind)
            digest.update(buffer[:count])
            blocks.append(digest.hexdigest())
            size += count
    return StoredFile(size, tuple(blocks))


def read_into(descriptor: int, parts: Sequence[memoryview], offset: int) -> int:
    """Fills several buffers, one after the other, from an offset in a file; fewer bytes only at the end of the file."""
    unread, got = list(parts), 0
    while unread and (count := os.preadv(descriptor, unread, offset + got)):
        got += count
        while unread and count >= len(unread[0]):
            count -= len(unread.pop(0))
        if count:  # a short read
            unread[0] = unread[0][count:]
    return got


def check_writable(folder: str | Path) -> None:
    """Raises now, rather than at the first save, if checkpoints cannot be written to a folder; creates the folder."""
    folder = Path(folder)
    try:
        if not folder.exists():
            folder.mkdir(parents=True, exist_ok=True)
            Disk().sync_folder(folder.parent)
        with tempfile.TemporaryFile(dir=folder) as file:
            file.write(b"petatron")
    except OSError as error:
        raise CheckpointError(
            f"checkpoints cannot be written to {folder}: {error.strerror or error}. "
            "Make that folder writable, or give --save another one."
        ) from error


def free_bytes(folder: Path) -> int:
    """Returns the free bytes on a folder's disk for a user that is not root."""
    return shutil.disk_usage(folder).free
