"""Index arrays kept on disk under a hash of everything they depend on.

Several ranks may build the same entry at once. Each writes its own temporary file and renames it into place; as an
entry's content is a function of its name, it does not matter who comes last. An entry that does not load (cut by a
full disk, say) is built again. A folder that cannot be written costs only the time to build on each start.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import time
from collections.abc import Callable, Mapping
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from petatron.base.files import publish, replacing
from petatron.base.log import get_logger

FORMAT_VERSION = 1
_SETTLED_NS = 2_000_000_000

Arrays = dict[str, NDArray]


def _description(key: Mapping[str, object]) -> str:
    return json.dumps({"format": FORMAT_VERSION, **key}, sort_keys=True)


def fingerprint(key: Mapping[str, object]) -> str:
    """A short name for a key: equal keys have equal names on every machine."""
    return hashlib.blake2b(_description(key).encode(), digest_size=16).hexdigest()


def load_or_build(
    folder: str | Path | None, key: Mapping[str, object], names: tuple[str, ...], build: Callable[[], Arrays]
) -> Arrays:
    """Arrays `names` for `key`: memory-mapped from the folder if they are there, else built and kept there."""
    if folder is None:
        return build()
    stem = fingerprint(key)
    paths = {name: Path(folder) / f"{stem}-{name}.npy" for name in names}
    found = _load(paths)
    if found is not None:
        return found
    arrays = build()
    try:
        Path(folder).mkdir(parents=True, exist_ok=True)
        for name, path in paths.items():
            _save(path, arrays[name])
        # For people who wonder what a file is; never read by us.
        publish(Path(folder) / f"{stem}.json", _description(key) + "\n")
    except OSError as error:
        get_logger(__name__).warning(
            "Sample indices cannot be kept in %s (%s); they stay in memory and are built again on the next start. "
            "Set --data-cache-path to a writable folder.",
            folder,
            error,
        )
        return arrays
    return _load(paths) or arrays


def remembered_digest(folder: str | Path | None, path: Path, subject: str, compute: Callable[[], str]) -> str:
    """What `compute` says of a file's content, or said when the file was as it is now.

    An index of a billion documents is 20 GB, and every rank of a node would read it at every start. A file is taken to be the same if
    its size, inode and times of change are; `subject` is whatever else the digest depends on. One that changed in the last moments is
    not remembered, because it could change once more and keep its times.
    """
    if folder is None:
        return compute()
    before = _identity(path)
    kept = Path(folder) / f"{fingerprint({'digest of': str(path.resolve())})}-digest.json"
    with contextlib.suppress(OSError, ValueError, TypeError, KeyError):
        record = json.loads(kept.read_text())
        if record["file"] == before and record["subject"] == subject and isinstance(record["digest"], str):
            return record["digest"]
    digest = compute()
    if _identity(path) == before and time.time_ns() - path.stat().st_mtime_ns > _SETTLED_NS:
        record = {"path": str(path.resolve()), "file": before, "subject": subject, "digest": digest}
        with contextlib.suppress(OSError):  # sample indices go there too, and say so if they cannot
            Path(folder).mkdir(parents=True, exist_ok=True)
            publish(kept, json.dumps(record) + "\n")
    return digest


def _identity(path: Path) -> list[int]:
    found = path.stat()
    return [found.st_size, found.st_ino, found.st_mtime_ns, found.st_ctime_ns]


def _load(paths: Mapping[str, Path]) -> Arrays | None:
    try:
        found = {name: np.load(path, mmap_mode="r", allow_pickle=False) for name, path in paths.items()}
    except (OSError, ValueError, EOFError):
        return None
    # Plain views of the mapped memory: indexing numpy's memmap class is several times slower.
    return {name: array.view(np.ndarray) for name, array in found.items()}


def _save(path: Path, array: NDArray) -> None:
    with replacing(path, sync=False) as file:
        np.save(file, array, allow_pickle=False)
