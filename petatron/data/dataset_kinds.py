"""The registry of dataset kinds: how the files of `--data-path` become samples, and samples a batch.

A kind opens one source at a time (a word of `--data-path`). What it returns has units that `--split` divides (documents, records) and
builds the samples of some of them. Splits, blends, caches, several validation sets and the position of a run are then the same for
every kind (`build_datasets.py`).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, ClassVar, Literal, Self

from petatron.base.errors import ConfigError, DataError, Problem
from petatron.config.build_plugin import build_plugin, find_plugin
from petatron.config.schema.run import RunConfig
from petatron.data.batch_loader import LoaderOptions, Sample, SampleDataset, epoch_permutation, make_batch
from petatron.data.check_token_ids import TokenPlace
from petatron.data.documents_of_sample import SampleTrace, TracedDocument
from petatron.data.index_cache import IndexLog, fingerprint
from petatron.data.object_storage.storage_cache import ObjectStorageCache
from petatron.data.tokenizer import Tokenizer
from petatron.models.batch import Batch

_FLAG, _SETTINGS_FLAG = "--dataset-type", "--dataset-settings"
Split = Literal["train", "valid", "test"]


@dataclass(frozen=True, slots=True, kw_only=True)
class DatasetRequest:
    """What a run wants of a dataset: `num_samples` of a split, of `seq_length` tokens and one to predict, in the order of a seed.

    vocab_size is None where nothing says it; cache_dir, a folder for what is expensive to compute, where there is none.

    >>> DatasetRequest(split="train", num_samples=9, seq_length=4, seed=1).num_samples
    9
    """

    split: Split
    num_samples: int
    seq_length: int
    seed: int
    tokenizer: Tokenizer | None = None
    vocab_size: int | None = None
    cache_dir: Path | None = None
    object_storage: ObjectStorageCache | None = None
    """Where a source behind an address is kept on this machine."""
    index_log: IndexLog | None = None
    """Told which cached indices were found and which were built."""


@dataclass(frozen=True, slots=True)
class SourceShare:
    """What one split takes from one source: some of its units, of a size, and the samples in the whole run or in one evaluation."""

    source: DataSource
    units: range
    size: int
    samples: float


class DataSource(ABC):
    """One opened source: units that `--split` divides, in the order of the file.

    >>> class Nothing(DataSource):
    ...     def dataset(self, units, request):
    ...         raise NotImplementedError
    >>> Nothing("file", num_units=9).size(range(2, 5))
    3
    """

    unit: str = "records"
    """What the units are called in messages, in the plural."""
    size_unit: str = "records"
    """What `size` counts."""
    splits_units: bool = True
    """Whether `--split` divides the units; else every split has all of them, and samples of its own."""

    def __init__(self, name: str, *, num_units: int) -> None:
        """`name` is the word of `--data-path` that it was opened by."""
        self.name, self.num_units = name, num_units

    @abstractmethod
    def dataset(self, units: range, request: DatasetRequest) -> SampleDataset:
        """Returns at least `request.num_samples` samples of some units; sample i is a pure function of the files, the seed and i."""

    def size(self, units: range) -> int:
        """Returns the size of units: sources without weights are blended in proportion to it."""
        return len(units)

    def samples_per_epoch(self, units: range, request: DatasetRequest) -> int:
        """Returns the samples of one pass over units."""
        return len(units)

    def epochs(self, units: range, request: DatasetRequest) -> float:
        """Returns how often the requested samples pass over units."""
        return request.num_samples / max(1, self.samples_per_epoch(units, request))


class RecordSource(DataSource):
    """A source whose units are a sample each, in another order in every epoch.

    >>> import numpy as np
    >>> class Numbers(RecordSource):
    ...     def record(self, index, request):
    ...         return np.full(request.seq_length + 1, index)
    >>> request = DatasetRequest(split="train", num_samples=6, seq_length=1, seed=1)
    >>> dataset = Numbers("numbers", num_units=3, fingerprint="3").dataset(range(3), request)
    >>> sorted(int(dataset[index][0]) for index in range(3)), sorted(int(dataset[index][0]) for index in range(3, 6))
    ([0, 1, 2], [0, 1, 2])
    """

    def __init__(self, name: str, *, num_units: int, fingerprint: str) -> None:
        """`fingerprint` is equal for equal records."""
        super().__init__(name, num_units=num_units)
        self.fingerprint = fingerprint

    @abstractmethod
    def record(self, index: int, request: DatasetRequest) -> Sample:
        """Returns the sample that a record is: token ids, or arrays by name."""

    def dataset(self, units: range, request: DatasetRequest) -> SampleDataset:
        return _ShuffledRecords(self, units, request)


class _ShuffledRecords:
    def __init__(self, source: RecordSource, units: range, request: DatasetRequest) -> None:
        self._source, self._units, self._request = source, units, request
        key = {"kind": type(source).__qualname__, "source": source.fingerprint, "units": [units.start, units.stop]}
        self.fingerprint = fingerprint({**key, "seed": request.seed, "seq_length": request.seq_length})
        self._order = lru_cache(maxsize=2)(lambda epoch: epoch_permutation(request.seed, epoch, len(units)))

    def __len__(self) -> int:
        return self._request.num_samples

    def __getitem__(self, index: int) -> Sample:
        if not 0 <= index < len(self):
            raise IndexError(f"sample {index} of {len(self)}")
        epoch, place = divmod(index, len(self._units))
        return self._source.record(self._units[int(self._order(epoch)[place])], self._request)

    def trace(self, index: int) -> SampleTrace:
        """Returns the record, which is the document of its sample."""
        epoch, place = divmod(index, len(self._units))
        record = TokenPlace(self._units[int(self._order(epoch)[place])], None, 0)
        return SampleTrace(self._source.name, index, (TracedDocument(record, self._request.seq_length + 1, None),))


class DatasetKind(ABC):
    """A kind of dataset. Subclasses are frozen dataclasses whose fields are settings (`--dataset-settings NAME=VALUE`).

    >>> @dataclass(frozen=True)
    ... class Empty(DatasetKind):
    ...     def open(self, source, request):
    ...         raise DataError(f"{source} is empty. Give {self.reads} with something in them.")
    >>> Empty().reads
    'files'
    """

    reads: ClassVar[str] = "files"
    """What a word of `--data-path` is, for messages."""

    def of_run(self, run: RunConfig) -> Self:
        """Returns the kind with what flags of the run say beside its settings; raises `ConfigError` for a run that it does not suit."""
        return self

    @abstractmethod
    def open(self, source: str, request: DatasetRequest) -> DataSource:
        """Opens a source; raises `DataError` for one that is missing, damaged, or does not suit the vocabulary."""

    def collate(self, samples: Sequence[Any], options: LoaderOptions) -> Batch:
        """Makes the batch of a micro-batch's samples, on the host; by default samples are seq_length + 1 token ids of text."""
        return make_batch(samples, options)

    def mock(self, request: DatasetRequest) -> SampleDataset:
        """Returns samples without files, for `--mock-data`."""
        raise DataError(
            f"{type(self).__name__} makes no data up. Give --data-path {self.reads} instead of --mock-data."
        )

    def size_warnings(self, shares: Sequence[SourceShare], request: DatasetRequest, *, eval_iters: int) -> list[str]:
        """Returns what makes sources too small for what a split takes of them, a line each."""
        return []


_KINDS: dict[str, type[DatasetKind]] = {}


def register_dataset(name: str, kind: type[DatasetKind]) -> None:
    """Makes `--dataset-type name` open datasets of a kind, a frozen dataclass; the name must be new, or have the same class.

    >>> @dataclass(frozen=True)
    ... class Characters(DatasetKind):
    ...     first: int = 0
    ...     def open(self, source, request):
    ...         raise NotImplementedError
    >>> register_dataset("characters", Characters)
    >>> dataset_kind("characters", ["first=3"])
    Characters(first=3)
    """
    if _KINDS.setdefault(name, kind) is not kind:
        raise ConfigError([Problem(_FLAG, name, "is registered already", "Register it under another name.")])


def dataset_kind(name: str, settings: Sequence[str] = ()) -> DatasetKind:
    """Returns a registered kind with its settings; raises `ConfigError` with every problem."""
    kind = find_plugin(name, _KINDS, flag=_FLAG, what="kind of dataset")
    return build_plugin(kind, settings, flag=_FLAG, settings_flag=_SETTINGS_FLAG, name=name)
