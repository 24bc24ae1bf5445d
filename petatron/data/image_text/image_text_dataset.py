"""Samples of records: one record each, or with `packed=true` as many as fit, in rows that are packed by best fit."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from petatron.base.errors import DataError
from petatron.data.batch_loader import epoch_permutation
from petatron.data.best_fit_packing import pack_best_fit
from petatron.data.check_token_ids import TokenPlace
from petatron.data.dataset_kinds import DatasetRequest
from petatron.data.document_provenance import DocumentProvenance
from petatron.data.documents_of_sample import SampleTrace, TracedDocument
from petatron.data.image_text.record_error import RecordError
from petatron.data.image_text.record_report import RecordReport, summary
from petatron.data.image_text.sample_builder import ReadRecord, SampleBuilder
from petatron.data.images.image_error import ImageError
from petatron.data.index_cache import fingerprint

_MAX_TRIES = 1000


class CheckedRecords(Protocol):
    """What a dataset needs of the source of its records."""

    name: str
    fingerprint: str
    report: RecordReport

    def leave_out(self, number: int, error: ImageError | RecordError) -> None: ...
    def provenance(self, number: int) -> DocumentProvenance: ...


@dataclass(frozen=True, slots=True)
class RecordRows:
    """Which records a row has: row i has `numbers[bounds[i]:bounds[i + 1]]`."""

    numbers: NDArray[np.int64]
    bounds: NDArray[np.int64]

    @classmethod
    def single(cls, numbers: NDArray[np.int64]) -> RecordRows:
        """Returns rows of a record each."""
        return cls(numbers, np.arange(len(numbers) + 1))

    @classmethod
    def packed(cls, numbers: NDArray[np.int64], sizes: NDArray[np.int32], capacity: int) -> RecordRows:
        """Returns rows of records whose sizes add up to the capacity at most; those of size 0 are in none.

        >>> rows = RecordRows.packed(np.arange(5), np.array([3, 6, 0, 2, 5], np.int32), 8)
        >>> [rows.row(number).tolist() for number in range(len(rows))]
        [[1, 3], [0, 4]]
        """
        kept = np.flatnonzero(sizes)
        rows, count = pack_best_fit(np.asarray(sizes)[kept], capacity)
        bounds = np.concatenate([[0], np.cumsum(np.bincount(rows, minlength=count))])
        return cls(numbers[kept[np.argsort(rows, kind="stable")]], bounds.astype(np.int64))

    def __len__(self) -> int:
        return len(self.bounds) - 1

    def row(self, index: int) -> NDArray[np.int64]:
        return self.numbers[self.bounds[index] : self.bounds[index + 1]]


class ImageTextDataset:
    """Rows of records, in another order in every epoch; sample i is a function of the files, the seed and i."""

    def __init__(
        self, source: CheckedRecords, builder: SampleBuilder, rows: RecordRows, request: DatasetRequest
    ) -> None:
        self._source, self._builder, self._rows, self._request = source, builder, rows, request
        key = {"kind": "image-text", "source": source.fingerprint, "samples": builder.fingerprint, "seed": request.seed}
        records = [int(rows.numbers.min()), int(rows.numbers.max()), len(rows.numbers), len(rows)]
        self.fingerprint = fingerprint({**key, "records": records})
        self._order = lru_cache(maxsize=2)(lambda epoch: epoch_permutation(request.seed, epoch, len(rows)))

    @property
    def report(self) -> RecordReport:
        """What was left out while samples were made."""
        return self._source.report

    def __len__(self) -> int:
        return self._request.num_samples

    def __getitem__(self, index: int) -> dict[str, NDArray[Any]]:
        return self._builder.sample(self._records(index))

    def trace(self, index: int) -> SampleTrace:
        """Returns the records of a sample: those of the next row, where all of its own fail."""
        documents = tuple(
            TracedDocument(
                TokenPlace(record.number, None, 0), len(record.encoded.ids), self._source.provenance(record.number)
            )
            for record in self._records(index)
        )
        return SampleTrace(self._source.name, index, documents, "the tokens of images stand for their patches")

    def _records(self, index: int) -> list[ReadRecord]:
        """Returns the records of a sample that can be read."""
        if not 0 <= index < len(self):
            raise IndexError(f"sample {index} of {len(self)}")
        epoch, place = divmod(index, len(self._rows))
        tries = min(len(self._rows), _MAX_TRIES)
        for step in range(tries):
            records: list[ReadRecord] = []
            for number in self._rows.row(int(self._order(epoch)[(place + step) % len(self._rows)])).tolist():
                try:
                    records.append(self._builder.read(number, self.report))
                except (ImageError, RecordError) as error:
                    self._source.leave_out(number, error)
            if records:
                return records
        raise DataError(
            f"{self._source.name}: {tries:,} records one after the other make no samples ({summary(self.report.left_out, named=1)}). "
            "Check the files and the settings."
        )
