"""The folder of this machine that keeps what is read from object storage: copies of indices, and chunks of token files.

    FOLDER/index/NAME-KEY.idx     a whole copy of an index
    FOLDER/chunks/KEY/NUMBER      a chunk of a token file and its digest (chunked_tokens.py)
    FOLDER/locks/NUMBER           what processes of one machine lock while they download or remove

A key is a hash of the address, the size and the version (ETag, checksum or time) that the server states, so an object that was replaced
has other files. Every file is complete before it has its name, and all ranks of a machine share the folder: one of them downloads, the
others wait for it and read what it has written.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from petatron.base.errors import DataError
from petatron.base.log import get_logger
from petatron.base.safe_files import open_atomic, reopen_file
from petatron.data.index_cache import fingerprint
from petatron.data.inputs.remote_files import open_remote, remote_state

_COPY_BLOCK_BYTES = 1 << 22
_NUM_LOCKS = 256


@dataclass(frozen=True, slots=True)
class ObjectStorageCache:
    """Where remote datasets are kept, how much is read at once, and how many bytes of tokens are kept at most.

    >>> ObjectStorageCache("/scratch").chunk_bytes
    1048576
    """

    folder: str
    chunk_bytes: int = 1 << 20
    max_bytes: int = 1 << 36


@dataclass(frozen=True, slots=True)
class RemoteObject:
    """One object: its address, and the size and key of the version that is there now."""

    address: str
    size: int
    key: str

    @classmethod
    def find(cls, address: str) -> RemoteObject:
        """Asks the server; raises `DataError` for an object that is missing or whose size nobody states."""
        size, version = remote_state(address)
        if size is None:
            raise DataError(f"{address}: its server does not state a size, which ranges need. Copy the file to a disk.")
        return cls(address, size, fingerprint({"object": address, "size": size, "version": version}))


@contextmanager
def download_lock(cache: ObjectStorageCache, what: str) -> Iterator[None]:
    """Holds a lock among the processes and threads of this machine; on a file system without locks all go ahead."""
    path = Path(cache.folder) / "locks" / str(zlib.crc32(what.encode()) % _NUM_LOCKS)
    with contextlib.ExitStack() as stack:
        with contextlib.suppress(OSError):
            path.parent.mkdir(parents=True, exist_ok=True)
            descriptor = reopen_file(path, os.O_CLOEXEC)
            stack.callback(os.close, descriptor)
            fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield


def copied_index(index: RemoteObject, cache: ObjectStorageCache) -> Path:
    """Returns the local copy of an index, which is downloaded unless a copy of this version and size is there."""
    name = index.address.rsplit("/", 1)[-1].removesuffix(".idx")
    path = Path(cache.folder) / "index" / f"{name}-{index.key}.idx"
    if _local_size(path) == index.size:
        return path
    with download_lock(cache, index.key):
        size = _local_size(path)
        if size == index.size:
            return path
        if size is not None:
            text = "%s has %s bytes, and %s has %s: it is downloaded again"
            get_logger(__name__).warning(text, path, f"{size:,}", index.address, f"{index.size:,}")
        _download(index, path)
    return path


def _local_size(path: Path) -> int | None:
    try:
        return path.stat().st_size
    except FileNotFoundError:
        return None
    except OSError as error:
        raise _folder_error(path, error) from error


def _download(index: RemoteObject, path: Path) -> None:
    received = 0
    source = open_remote(index.address, in_order=True)
    with source:
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            with open_atomic(path) as file:
                while block := _next_block(source, index.address):
                    file.write(block)
                    received += len(block)
                if received != index.size:
                    raise DataError(
                        f"{index.address} has {index.size:,} bytes, and its server sent {received:,}. Start again; if it "
                        "happens again, copy the files to a disk."
                    )
        except OSError as error:
            raise _folder_error(path, error) from error


def _next_block(source: object, address: str) -> bytes:
    try:
        return source.read(_COPY_BLOCK_BYTES)  # type: ignore[attr-defined]
    except (OSError, EOFError) as error:
        raise DataError(
            f"{address} cannot be read to its end: {error or type(error).__name__}. Check the server, and start again."
        ) from error


def _folder_error(path: Path, error: OSError) -> DataError:
    return DataError(
        f"{path} cannot be written: {error.strerror or error}. Give --object-storage-cache-path a writable folder on a disk with space."
    )
