"""Temporary files of hashes and MinHash signatures of every document, which the system caches in memory as far as they fit.

A file has records of one size, one for each document. There is one for exact hashes and one for each band of the signatures, so that the
keys of a band are read one after the other.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
from numpy.typing import NDArray

from petatron.base.safe_files import create_file
from petatron.data.curate.dedup.duplicate_links import Documents
from petatron.data.curate.dedup.min_hash import MinHashOptions, band_keys
from petatron.data.curate.word_hashes import Hashes

_WRITE_BYTES = 1 << 16


class RecordFile:
    """Records of `width` numbers; written first, then read."""

    def __init__(self, path: Path, dtype: Any, width: int) -> None:
        self._path, self._dtype, self._width = path, np.dtype(dtype), width
        self._file: BinaryIO = create_file(path, buffering=_WRITE_BYTES)
        self._records: NDArray[Any] | None = None

    def append(self, records: NDArray[Any]) -> None:
        self._file.write(np.ascontiguousarray(records, self._dtype).data)

    def records(self) -> NDArray[Any]:
        """Returns all records, mapped, [record, number]."""
        if self._records is None:
            self._file.flush()
            is_empty = self._path.stat().st_size == 0
            content = np.zeros(0, self._dtype) if is_empty else np.memmap(self._path, self._dtype, "r")
            self._records = content.reshape(-1, self._width)
        return self._records

    def close(self) -> None:
        self._file.close()
        self._records = None


class SignatureFiles:
    """The exact hash of each document, 16 bytes, and the bands of its signature."""

    def __init__(self, exact: RecordFile, bands: list[RecordFile]) -> None:
        self._exact, self._bands = exact, bands

    def append(self, exact: Hashes, signatures: NDArray[np.unsignedinteger] | None) -> None:
        """Adds documents: hashes [document, 2], and signatures [document, band, row] where near duplicates are sought."""
        self._exact.append(exact)
        for index, band in enumerate(self._bands):
            assert signatures is not None
            band.append(signatures[:, index])

    def exact_keys(self, start: int, stop: int) -> Hashes:
        return np.array(self._exact.records()[start:stop, 0])

    def exact_similarity(self, first: Documents, second: Documents) -> NDArray[np.float64]:
        """Returns 1 where both halves of the hashes agree, else -1."""
        hashes = self._exact.records()
        return np.where((hashes[first] == hashes[second]).all(axis=1), 1.0, -1.0)

    def band_keys(self, band: int, start: int, stop: int) -> Hashes:
        return band_keys(self._bands[band].records()[start:stop])

    def estimate(self, first: Documents, second: Documents, options: MinHashOptions) -> NDArray[np.floating]:
        """Returns the estimated similarity of pairs."""
        agreeing = np.zeros(len(first), np.int64)
        for band in self._bands:
            rows = band.records()
            agreeing += (rows[first] == rows[second]).sum(axis=1)
        return options.estimate(agreeing / options.num_hashes)


@contextmanager
def signature_files(folder: Path, options: MinHashOptions | None) -> Iterator[SignatureFiles]:
    """Yields files of a folder, and removes them at the end; None: without signatures."""
    with ExitStack() as stack:

        def open_file(name: str, dtype: Any, width: int) -> RecordFile:
            stack.callback((folder / name).unlink, missing_ok=True)
            file = RecordFile(folder / name, dtype, width)
            stack.callback(file.close)
            return file

        bands = 0 if options is None else options.bands
        exact = open_file("exact", np.uint64, 2)
        dtype, rows = (np.uint8, 1) if options is None else (options.row_dtype, options.rows)
        yield SignatureFiles(exact, [open_file(f"band-{index}", dtype, rows) for index in range(bands)])
