"""Caches index arrays on disk under a hash of everything they depend on, without trusting files that are merely present.

Several ranks may build the same entry at once. Each writes its own temporary file and renames it into place; as an entry's content is
a function of its name, the order does not matter. A folder that cannot be written costs only the time to build on each start.

Why an entry is not trusted. The folder is next to the data by default, so whoever ships a dataset can ship a cache with it, and so can
anyone else who may write there. Its name is a hash of the index of the data and of the settings, which they can compute; a digest of
its content stored with it would be theirs as well. A cheaper proof than building (each document and sample counted) leaves open which
shuffle it is, and takes a third of the time. So an entry that this user has not built is built, compared, and replaced if it differs.

Why that costs nothing at most starts. Once this user has built an entry, its files' identity (inode, size, times of change) is recorded
in a folder of the user's home that nobody else can write to, and a file that still has it is not read again: neither by the other
ranks nor by later starts. For a billion samples (16 GB, some minutes to build) a start makes a few calls of `stat`.
Entries that are built quickly are not recorded, except by `petatron data build-index`, after which a start builds nothing.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import os
import time
import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import BinaryIO

import numpy as np
from numpy.typing import NDArray

from petatron.base.log import get_logger
from petatron.base.safe_files import open_atomic, private_folder, reopen_file, write_atomic
from petatron.base.untrusted_files import open_regular_file, read_limited_bytes

FORMAT_VERSION = 1
MIN_RECORDED_BYTES = 1 << 23
"""Smaller entries are built at every start and compared: 8 MB take about a tenth of a second."""
_COMPARED_ELEMENTS = 1 << 20
_MIN_FILE_AGE_NS = 2_000_000_000
_MAX_RECORD_BYTES = 1 << 16

Arrays = dict[str, NDArray]


@dataclass(slots=True)
class IndexLog:
    """The entries that a start has used, by their stems: found and trusted, found and built again to compare them, and new ones.

    records_all: small entries are recorded too.
    """

    records_all: bool = False
    reused: set[str] = field(default_factory=set)
    compared: set[str] = field(default_factory=set)
    built: set[str] = field(default_factory=set)

    def __str__(self) -> str:
        """
        >>> str(IndexLog(reused={"a", "b"}, built={"c"}))
        '2 found, 1 built'
        """
        counts = {
            "found": self.reused,
            "built": self.built,
            "built again to check those that were there": self.compared - self.built,
        }
        return ", ".join(f"{len(stems)} {text}" for text, stems in counts.items() if stems)


def _description(key: Mapping[str, object]) -> str:
    return json.dumps({"format": FORMAT_VERSION, **key}, sort_keys=True)


def fingerprint(key: Mapping[str, object]) -> str:
    """Returns a short name for a key: equal keys have equal names on every machine."""
    return hashlib.blake2b(_description(key).encode(), digest_size=16).hexdigest()


def load_or_build(
    folder: str | Path | None,
    key: Mapping[str, object],
    names: tuple[str, ...],
    *,
    build: Callable[[], Arrays],
    log: IndexLog | None = None,
    is_slow: bool = False,
) -> Arrays:
    """Returns arrays `names` for `key`: memory-mapped from the folder if they exist, else built and stored there.

    is_slow: small ones take long to build too, and are not built at every start to be compared. Of several ranks one builds, while the
    others wait for it.
    """
    if folder is None:
        return build()
    log = IndexLog() if log is None else log
    stem = fingerprint(key)
    paths = {name: Path(folder) / f"{stem}-{name}.npy" for name in names}
    arguments = Path(folder), key, paths, build, log
    if not is_slow:
        return _load_trusted(paths, stem, log) or _build_and_keep(*arguments, any_size=log.records_all)
    with _one_at_a_time(paths):
        return _load_trusted(paths, stem, log) or _build_and_keep(*arguments, any_size=True)


def _load_trusted(paths: Mapping[str, Path], stem: str, log: IndexLog) -> Arrays | None:
    """Returns an entry that this user has built."""
    mapped, identities = _map_existing(paths)
    if mapped is None or _read_trust_record(paths) != identities:
        return None
    if stem not in log.built | log.compared:  # by this start itself, a moment ago
        log.reused.add(stem)
    return mapped


@contextlib.contextmanager
def _one_at_a_time(paths: Mapping[str, Path]) -> Iterator[None]:
    """Waits until no other process of this user builds an entry; where that cannot be known, several build it, as it was."""
    descriptor = None
    with contextlib.suppress(OSError):
        record = _trust_record_path(paths)
        if record is not None:
            descriptor = reopen_file(record.with_suffix(".lock"))
            fcntl.flock(descriptor, fcntl.LOCK_EX)
    try:
        yield
    finally:
        if descriptor is not None:
            os.close(descriptor)  # which ends the lock


def _build_and_keep(
    folder: Path,
    key: Mapping[str, object],
    paths: Mapping[str, Path],
    build: Callable[[], Arrays],
    log: IndexLog,
    *,
    any_size: bool,
) -> Arrays:
    """Builds an entry, and compares it with the one that is there, or stores it."""
    stem = fingerprint(key)
    mapped, identities = _map_existing(paths)
    arrays = build()
    if mapped is not None:
        different = [name for name in paths if not _arrays_equal(mapped[name], arrays[name])]
        if not different:
            log.compared.add(stem)
            newest = max(time_ns for identity in identities for time_ns in identity[-2:])
            if time.time_ns() - newest > _MIN_FILE_AGE_NS and _file_identities(paths) == identities:
                _write_trust_record(paths, identities, any_size=any_size)
            return mapped
        _warn_mismatch(paths, " and ".join(different) + (" differ" if len(different) > 1 else " differs"))
    try:
        folder.mkdir(parents=True, exist_ok=True)
        kept = {name: _save_and_map(path, arrays[name]) for name, path in paths.items()}
        # For people who wonder what a file is; never read by us.
        write_atomic(folder / f"{stem}.json", _description(key) + "\n")
        _write_trust_record(paths, _file_identities(paths), any_size=any_size)
        log.built.add(stem)
    except OSError as error:
        get_logger(__name__).warning(
            "Sample indices cannot be kept in %s (%s); they stay in memory and are built again on the next start. "
            "Set --data-cache-path to a writable folder.",
            folder,
            error,
        )
        return arrays
    return kept


def cached_digest(folder: str | Path | None, path: Path, subject: str, compute: Callable[[], str]) -> str:
    """Returns `compute()` of a file's content, cached while the file is unchanged.

    An index of a billion documents is 20 GB, and every rank of a node would read it at every start. A file counts as unchanged if its
    size, inode and times of change are; `subject` is whatever else the digest depends on. One that changed moments ago is not cached,
    because it could change once more and keep its times. The digest is only a name: what is found under a wrong one is checked against
    the data.
    """
    if folder is None:
        return compute()
    before = _file_identity(path)
    kept = Path(folder) / f"{fingerprint({'digest of': str(path.resolve())})}-digest.json"
    with contextlib.suppress(OSError, ValueError, TypeError, KeyError, RecursionError):
        record = json.loads(read_limited_bytes(kept, _MAX_RECORD_BYTES))
        if record["file"] == before and record["subject"] == subject and isinstance(record["digest"], str):
            return record["digest"]
    digest = compute()
    if _file_identity(path) == before and time.time_ns() - path.stat().st_mtime_ns > _MIN_FILE_AGE_NS:
        record = {"path": str(path.resolve()), "file": before, "subject": subject, "digest": digest}
        with contextlib.suppress(OSError):  # sample indices go there too, and warn if they cannot
            Path(folder).mkdir(parents=True, exist_ok=True)
            write_atomic(kept, json.dumps(record) + "\n")
    return digest


def _file_identity(path: Path) -> list[int]:
    status = path.stat()
    return [status.st_size, status.st_ino, status.st_mtime_ns, status.st_ctime_ns]


FileIdentities = list[list[int]]


def _file_identities(paths: Mapping[str, Path]) -> FileIdentities:
    """Returns what changes with the content of the files. Not the device: a shared disk has another number on each machine."""
    return [_file_identity(path) for path in paths.values()]


def _map_existing(paths: Mapping[str, Path]) -> tuple[Arrays | None, FileIdentities]:
    """Maps the existing arrays, if all exist and can be mapped, and returns their file identities."""
    if not any(os.path.lexists(path) for path in paths.values()):
        return None, []
    try:
        identities = _file_identities(paths)
        mapped: Arrays = {}
        for name, path in paths.items():
            with open_regular_file(path) as file:  # numpy would wait for the other end of a FIFO
                mapped[name] = _map_open_file(file)
        if identities == _file_identities(paths):
            return mapped, identities
        flaw = "somebody writes it"
    except Exception as error:  # numpy parses a header as Python's own text, and raises whatever its tokenizer does
        flaw = str(error) or type(error).__name__
    _warn_mismatch(paths, flaw)
    return None, []


def _warn_mismatch(paths: Mapping[str, Path], reason: str) -> None:
    get_logger(__name__).warning(
        "%s and the files beside it are not the index of this data (%s): it is built again and they are replaced.",
        next(iter(paths.values())),
        reason,
    )


def _arrays_equal(mapped: NDArray, built: NDArray) -> bool:
    if mapped.shape != built.shape or mapped.dtype != built.dtype:
        return False
    mapped, built = mapped.reshape(-1), built.reshape(-1)
    starts = range(0, len(built), _COMPARED_ELEMENTS)
    return all(
        np.array_equal(mapped[at : at + _COMPARED_ELEMENTS], built[at : at + _COMPARED_ELEMENTS]) for at in starts
    )


def _trust_record_path(paths: Mapping[str, Path]) -> Path | None:
    """Returns where this user's trust in these files is recorded; None if there is no such place."""
    folder = private_folder("checked-indices")
    return (
        folder / f"{fingerprint({'files': [str(path.resolve()) for path in paths.values()]})}.json" if folder else None
    )


def _read_trust_record(paths: Mapping[str, Path]) -> FileIdentities | None:
    record = _trust_record_path(paths)
    with contextlib.suppress(OSError, ValueError):
        return json.loads(read_limited_bytes(record, _MAX_RECORD_BYTES)) if record else None
    return None


def _write_trust_record(paths: Mapping[str, Path], identities: FileIdentities, *, any_size: bool) -> None:
    if not any_size and sum(identity[0] for identity in identities) < MIN_RECORDED_BYTES:
        return
    with contextlib.suppress(OSError):  # a full home: the next start checks again
        record = _trust_record_path(paths)
        if record is not None:
            write_atomic(record, json.dumps(identities) + "\n")


def _map_open_file(file: BinaryIO) -> NDArray:
    """Maps the array of a file. A plain view: indexing numpy's memmap class is several times slower."""
    file.seek(0)
    if np.lib.format.read_magic(file) != (1, 0):
        raise ValueError("it has another version of numpy's format")
    with warnings.catch_warnings(action="ignore"):  # Python's parser would print the bytes it wonders about
        shape, fortran, dtype = np.lib.format.read_array_header_1_0(file)
    if fortran or dtype.hasobject:
        raise ValueError("it is not an array of plain numbers")
    return np.memmap(file, dtype, mode="r", offset=file.tell(), shape=shape).view(np.ndarray)


def _save_and_map(path: Path, array: NDArray) -> NDArray:
    """Saves an array and returns it mapped from the very file that was written."""
    with open_atomic(path, sync=False) as file:
        np.save(file, array, allow_pickle=False)
        file.flush()
        return _map_open_file(file)
