"""One opened token file of masked text: documents are its units, and sentences, where it has some, make its samples."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Protocol

from petatron.base.log import get_logger
from petatron.data.batch_loader import SampleDataset
from petatron.data.dataset_kinds import DatasetRequest, DataSource
from petatron.data.indexed_dataset import IndexedDataset


class MaskedDataset(SampleDataset, Protocol):
    """A dataset that knows how many samples one pass over its documents has."""

    @property
    def samples_per_epoch(self) -> int: ...
    def describe(self) -> str:
        """Returns a line for the log, or nothing."""
        ...


class MaskedTextSource(DataSource):
    """A token file, divided by documents as Megatron divides those of BERT and T5."""

    unit = "documents"
    size_unit = "tokens"

    def __init__(
        self,
        indexed: IndexedDataset,
        build: Callable[[IndexedDataset, range, DatasetRequest], MaskedDataset],
    ) -> None:
        """`build` makes the samples of some documents."""
        super().__init__(indexed.prefix, num_units=indexed.num_documents)
        self._indexed, self._build = indexed, build
        self._samples: dict[tuple[range, int, int], int] = {}

    def size(self, units: range) -> int:
        if not units:
            return 0
        first, stop = self._indexed.document_indices[[units.start, units.stop]].tolist()
        return int(self._indexed.lengths[first:stop].sum(dtype="int64"))

    def samples_per_epoch(self, units: range, request: DatasetRequest) -> int:
        key = (units, request.seq_length, request.seed)
        if key not in self._samples:
            dataset = self._build(self._indexed, units, replace(request, num_samples=1))
            self._samples[key] = dataset.samples_per_epoch
            if text := dataset.describe():
                get_logger(__name__).info("%s", text)
        return self._samples[key]

    def dataset(self, units: range, request: DatasetRequest) -> SampleDataset:
        return self._build(self._indexed, units, replace(request, num_samples=max(1, request.num_samples)))
