"""Outputs of a frozen model that are computed once for texts of the data, stored, and read with them.

An entry belongs to a segment or to a row of a batch, and its name is a digest of what the model reads there: token ids, positions and
other arrays of rows, and for segments the mask of what is learned. So it is found in every order, split, epoch, batch size and layout, and
an entry of another text is never taken. A folder has parts, each an array of keys and one for every output; a part exists once its keys do,
so whoever was killed goes on with what is missing, and ranks write parts side by side.
"""

from __future__ import annotations

import hashlib
import json
import secrets
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray

from petatron.base.errors import DataError
from petatron.base.safe_files import make_folder, open_atomic, write_atomic
from petatron.base.untrusted_files import read_limited_json, reading_untrusted
from petatron.data.data_file_error import data_file_error
from petatron.models.batch import SEGMENT_IDS, Batch

Unit = Literal["segment", "row"]
_DESCRIPTION = "stored-outputs.json"
_KEYS = "keys"
_OF_LOSSES = ("labels", "loss_mask")
"""Arrays that a model reads for its losses alone."""
_MAX_DESCRIPTION_BYTES = 1 << 20
_PART_BYTES, _PART_S = 64 << 20, 60.0


def unit_keys(batch: Batch, unit: Unit) -> list[bytes]:
    """Returns the keys of the segments or rows of a whole batch on the host.

    >>> batch = Batch(torch.tensor([[1, 2], [1, 3], [1, 2]]))
    >>> first, second, third = unit_keys(batch, "row")
    >>> first == third != second
    True
    """
    if unit == "row":
        return _row_keys(batch)
    tokens = batch.tokens.numpy()
    assert batch.num_segments is not None
    numbers, labels, mask = (x.numpy().reshape(-1) for x in (batch[SEGMENT_IDS], batch.labels, batch.loss_mask))
    places = (np.flatnonzero(numbers == number) for number in range(batch.num_segments))
    return [_digest(tokens.reshape(-1)[at], labels[at], mask[at] != 0) for at in places]


def _row_keys(batch: Batch) -> list[bytes]:
    """Returns digests of all that a model may read of each row; raises `DataError` for arrays that are of no row, such as patches."""
    arrays: dict[str, NDArray[Any]] = {}
    for name, x in sorted(batch.arrays.items()):
        is_read = name not in (*_OF_LOSSES, "positions") or (name == "positions" and x.ndim > 1)
        if is_read and len(x) != len(batch.tokens):
            raise DataError(
                f"The array {name!r} of a batch has {len(x)} entries for {len(batch.tokens)} rows. Outputs are stored for rows of tokens; "
                "use a live model for other data."
            )
        if is_read:
            arrays[name] = x.numpy()
    return [_digest(*(x[row] for x in arrays.values())) for row in range(len(batch.tokens))]


def _digest(*arrays: NDArray[Any]) -> bytes:
    digest = hashlib.blake2b(digest_size=16)
    for array in arrays:
        digest.update(str(array.shape).encode() + np.ascontiguousarray(array).tobytes())
    return digest.digest()


class StoredOutputs:
    """The entries of a folder; raises `DataError` where it is not what `description` says."""

    def __init__(self, folder: Path, description: Mapping[str, Any]) -> None:
        self.folder, self.description = folder, dict(description)
        self._parts: list[dict[str, NDArray[Any]]] = []
        self._places: dict[bytes, tuple[int, int]] = {}
        self._read: set[str] = set()
        self.read_parts()

    @classmethod
    def open(cls, folder: Path) -> StoredOutputs:
        """Opens a folder that exists."""
        file = folder / _DESCRIPTION
        if not file.is_file():
            raise DataError(f"{folder} has no {_DESCRIPTION}. Give a folder that `petatron data teacher` wrote.")
        with reading_untrusted(file, data_file_error):
            description = read_limited_json(file, _MAX_DESCRIPTION_BYTES)
            if not isinstance(description, dict):
                raise ValueError("is no table of settings")
        return cls(folder, description)

    def create(self) -> None:
        """Makes the folder, with a file that says what is in it."""
        make_folder(self.folder)
        write_atomic(self.folder / _DESCRIPTION, json.dumps(self.description, indent=1) + "\n")

    def read_parts(self) -> None:
        """Reads the parts that were written since."""
        for file in sorted(self.folder.glob(f"*-{_KEYS}.npy")):
            stem = file.name.removesuffix(f"-{_KEYS}.npy")
            if stem in self._read:
                continue
            with reading_untrusted(file, data_file_error):
                arrays = {
                    path.name.removeprefix(f"{stem}-").removesuffix(".npy"): np.load(
                        path, mmap_mode="r", allow_pickle=False
                    )
                    for path in sorted(self.folder.glob(f"{stem}-*.npy"))
                }
                keys = arrays.pop(_KEYS)
                if (
                    keys.dtype != np.uint8
                    or keys.shape[1:] != (16,)
                    or any(len(x) != len(keys) for x in arrays.values())
                ):
                    raise ValueError("has other entries than keys")
            self._places |= {key.tobytes(): (len(self._parts), row) for row, key in enumerate(np.asarray(keys))}
            self._parts.append(arrays)
            self._read.add(stem)

    def __len__(self) -> int:
        return len(self._places)

    def __contains__(self, key: bytes) -> bool:
        return key in self._places

    def arrays(self, keys: Sequence[bytes], names: Sequence[str]) -> dict[str, NDArray[Any]]:
        """Returns the arrays of some entries, stacked; raises `DataError` for an entry that is not there."""
        missing = sum(key not in self for key in keys)
        if missing:
            raise DataError(
                f"{self.folder} has no outputs for {missing} of {len(keys)} texts of a micro-batch: they were stored for other data, or "
                "for rows of another --seq-length or --seed. Store them again with the settings of this run."
            )
        places = [self._places[key] for key in keys]
        return {name: np.stack([self._parts[part][name][row] for part, row in places]) for name in names}

    def write_part(self, keys: Sequence[bytes], arrays: Mapping[str, NDArray[Any]]) -> None:
        """Writes entries as one part, the keys last."""
        stem = secrets.token_hex(8)
        of_keys = np.frombuffer(b"".join(keys), np.uint8).reshape(-1, 16)
        for name, array in (*arrays.items(), (_KEYS, of_keys)):
            with open_atomic(self.folder / f"{stem}-{name}.npy") as file:
                np.save(file, array, allow_pickle=False)


class StoredOutputsWriter:
    """Collects the entries of one rank, and writes a part when there are enough, or a minute has passed."""

    def __init__(self, store: StoredOutputs, part_bytes: int = _PART_BYTES) -> None:
        self._store, self._part_bytes = store, part_bytes
        self._added = set[bytes]()
        self._entries: dict[bytes, dict[str, NDArray[Any]]] = {}
        self._size, self._last_s = 0, time.monotonic()

    def add(self, keys: Sequence[bytes], arrays: Mapping[str, NDArray[Any]]) -> None:
        for row, key in enumerate(keys):
            if key not in self._store and key not in self._added:
                self._added.add(key)
                self._entries[key] = {name: array[row] for name, array in arrays.items()}
                self._size += sum(array[row].nbytes for array in arrays.values())
        if self._size >= self._part_bytes or time.monotonic() - self._last_s > _PART_S:
            self.flush()

    def flush(self) -> None:
        if self._entries:
            keys, entries = list(self._entries), list(self._entries.values())
            self._store.write_part(keys, {name: np.stack([e[name] for e in entries]) for name in entries[0]})
        self._entries, self._size, self._last_s = {}, 0, time.monotonic()


def batch_extension(store: StoredOutputs, unit: Unit, names: Sequence[str]) -> Callable[[Batch], Batch]:
    """Returns what adds the stored arrays of its texts to a batch."""

    def extend(batch: Batch) -> Batch:
        stored = store.arrays(unit_keys(batch, unit), names)
        dims = {} if unit == "row" else dict.fromkeys(names)
        arrays = {name: torch.from_numpy(array) for name, array in stored.items()}
        return replace(batch, arrays={**batch.arrays, **arrays}, sequence_dims={**batch.sequence_dims, **dims})

    return extend
