"""Reads ranges of a token file in object storage, in chunks that a folder of this machine keeps.

A file is divided into chunks of equal size. A read of tokens downloads the chunks that it touches and the folder does not have, all
that follow one another in one request. A shuffled run reads documents in any order, so nothing is gained by reading far ahead: a chunk
(1 MiB by default) is what a connection transfers in about the time that it needs to answer, which makes the tokens around a document
nearly free, and they are used when their turn comes. The loader's threads overlap the requests with training.

A chunk is a file: its bytes, then 16 bytes of digest. It is checked when a process first uses it, and one that is damaged or has another
length is downloaded again. The chunks of all datasets in the folder together stay below a bound: those that were not used for the
longest time are removed. A process that has opened one reads on, and a chunk that is gone is downloaded again, so no reader needs a
lock.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import os
import threading
import time
from pathlib import Path

from petatron.base.errors import DataError
from petatron.base.log import get_logger
from petatron.base.safe_files import open_atomic, reopen_file
from petatron.data.inputs.remote_files import read_remote_range
from petatron.data.object_storage.storage_cache import ObjectStorageCache, RemoteObject, download_lock

_DIGEST_BYTES = 16
_ATTEMPTS = 3
_WAIT_S = 0.2
"""Before a failed request is repeated, longer each time."""
_TOUCHED_AFTER_S = 300.0
_SCANS_PER_BOUND = 64
_KEPT_SHARE = 0.9
"""Of the bound, when chunks are removed, so that not every new one removes another."""


class ChunkedTokens:
    """The bytes of one remote token file. Several threads may read."""

    def __init__(self, remote: RemoteObject, cache: ObjectStorageCache) -> None:
        self.remote, self._cache = remote, cache
        # Chunks of another size have other numbers.
        self._folder = Path(cache.folder) / "chunks" / f"{remote.key}-{cache.chunk_bytes}"
        self._checked: dict[int, int] = {}
        self._written_bytes: int | None = None
        self._is_warned = False
        self._state_lock = threading.Lock()

    def read(self, start: int, num_bytes: int) -> bytes:
        """Returns a range of bytes; raises `DataError` if the server does not send it."""
        if num_bytes == 0:
            return b""
        size, stop = self._cache.chunk_bytes, start + num_bytes
        numbers = range(start // size, (stop - 1) // size + 1)
        parts: dict[int, bytes] = {}
        missing: list[int] = []
        for number in numbers:
            first = max(start - number * size, 0)
            part = self._kept_part(number, first, min(stop - number * size, size) - first)
            if part is None:
                missing.append(number)
            else:
                parts[number] = part
        for run in _runs(missing):
            for number, chunk in self._download(run).items():
                parts[number] = chunk[max(start - number * size, 0) : stop - number * size]
        return b"".join(parts[number] for number in numbers)

    def _chunk_length(self, number: int) -> int:
        return min(self._cache.chunk_bytes, self.remote.size - number * self._cache.chunk_bytes)

    def _kept_part(self, number: int, first: int, length: int) -> bytes | None:
        """Returns bytes of a chunk that the folder has; None if it has none, or a damaged one."""
        try:
            descriptor = os.open(self._folder / str(number), os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
        except OSError:
            return None
        try:
            status, expected = os.fstat(descriptor), self._chunk_length(number)
            if status.st_size != expected + _DIGEST_BYTES:
                return None
            if time.time() - status.st_mtime > _TOUCHED_AFTER_S:
                with contextlib.suppress(OSError):
                    os.utime(descriptor)
            if self._checked.get(number) == status.st_ino:
                part = os.pread(descriptor, length, first)
                return part if len(part) == length else None
            content = os.pread(descriptor, expected + _DIGEST_BYTES, 0)
            chunk = content[:expected]
            if content[expected:] != self._digest(number, chunk):
                return None
            self._checked[number] = status.st_ino
            return chunk[first : first + length]
        except OSError:
            return None
        finally:
            os.close(descriptor)

    def _download(self, numbers: range) -> dict[int, bytes]:
        """Downloads chunks that follow one another, unless another process has done it meanwhile, and keeps them."""
        with download_lock(self._cache, f"{self.remote.key}/{numbers.start}"):
            kept = {number: self._kept_part(number, 0, self._chunk_length(number)) for number in numbers}
            if all(chunk is not None for chunk in kept.values()):
                return {number: chunk for number, chunk in kept.items() if chunk is not None}
            size = self._cache.chunk_bytes
            start, stop = numbers.start * size, (numbers.stop - 1) * size + self._chunk_length(numbers.stop - 1)
            content = self._request(start, stop)
            chunks = {number: content[(number - numbers.start) * size :][:size] for number in numbers}
            for number, chunk in chunks.items():
                self._keep(number, chunk)
        return chunks

    def _request(self, start: int, stop: int) -> bytes:
        attempt = 1
        while True:
            try:
                content = read_remote_range(self.remote.address, start, stop)
                if len(content) != stop - start:
                    raise DataError(
                        f"{self.remote.address}: bytes {start:,} to {stop:,} were asked for, and its server sent {len(content):,} bytes. "
                        "It may have no ranges, or the object was replaced: start again, or copy the files to a disk."
                    )
                return content
            except DataError as error:
                if attempt == _ATTEMPTS:
                    raise DataError(f"{error} (Tried {_ATTEMPTS} times, for bytes {start:,} to {stop:,}.)") from error
            time.sleep(_WAIT_S * attempt)
            attempt += 1

    def _keep(self, number: int, chunk: bytes) -> None:
        """Writes a chunk; a folder without space costs only later downloads."""
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            with open_atomic(self._folder / str(number), sync=False) as file:
                file.write(chunk + self._digest(number, chunk))
        except OSError as error:
            with self._state_lock:
                is_first, self._is_warned = not self._is_warned, True
            if is_first:
                text = (
                    "%s cannot be written (%s): tokens are downloaded again whenever they are read. "
                    "Give --object-storage-cache-path another folder."
                )
                get_logger(__name__).warning(text, self._folder, error.strerror or error)
            return
        with self._state_lock:
            scans = self._written_bytes is None or self._written_bytes > self._cache.max_bytes // _SCANS_PER_BOUND
            self._written_bytes = 0 if scans else (self._written_bytes or 0) + len(chunk)
        if scans:
            remove_old_chunks(self._cache)

    def _digest(self, number: int, chunk: bytes) -> bytes:
        return hashlib.blake2b(
            chunk, digest_size=_DIGEST_BYTES, key=f"{self.remote.key[:32]}/{number}".encode()
        ).digest()


def remove_old_chunks(cache: ObjectStorageCache) -> int:
    """Removes the chunks that were unused for longest until the rest is below the bound; returns how many."""
    folder = Path(cache.folder)
    removed = 0
    with contextlib.suppress(OSError):  # BlockingIOError: another process does it
        descriptor = reopen_file(folder / "locks" / "remove", os.O_CLOEXEC)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            files: list[tuple[float, int, str]] = []
            for key in os.scandir(folder / "chunks"):
                if key.is_dir(follow_symlinks=False):
                    for entry in os.scandir(key.path):
                        with contextlib.suppress(FileNotFoundError):
                            status = entry.stat(follow_symlinks=False)
                            files.append((status.st_mtime, status.st_size, entry.path))
            total = sum(size for _, size, _ in files)
            if total <= cache.max_bytes:
                return 0
            for _, size, path in sorted(files):
                if total <= _KEPT_SHARE * cache.max_bytes:
                    break
                with contextlib.suppress(FileNotFoundError):
                    os.unlink(path)
                total, removed = total - size, removed + 1
        finally:
            os.close(descriptor)
    return removed


def _runs(numbers: list[int]) -> list[range]:
    """
    >>> _runs([1, 2, 3, 7, 9, 10])
    [range(1, 4), range(7, 8), range(9, 11)]
    """
    runs: list[range] = []
    for number in numbers:
        if runs and runs[-1].stop == number:
            runs[-1] = range(runs[-1].start, number + 1)
        else:
            runs.append(range(number, number + 1))
    return runs
