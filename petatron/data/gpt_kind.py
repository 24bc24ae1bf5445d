"""The kind `gpt`, which a run has that names none: text of Megatron's .bin and .idx files, packed into samples, or mock data."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
from numpy.typing import NDArray

from petatron.base.errors import DataError
from petatron.config.schema.default_names import GPT_DATASET
from petatron.data.batch_loader import SampleDataset
from petatron.data.dataset_kinds import DatasetKind, DatasetRequest, DataSource, SourceShare, register_dataset
from petatron.data.document_sample_shuffle_index import legacy_random_state, plan_epochs
from petatron.data.gpt_dataset import GPTDataset
from petatron.data.index_cache import fingerprint
from petatron.data.indexed_dataset import IndexedDataset
from petatron.data.size_warnings import SourceUse, size_warnings

# Token ids are checked on this many ranges of this many tokens, spread over each file.
CHECKED_SEQUENCES = 64
CHECKED_TOKENS = 4096
# Splits of mock data differ by their seed.
_MOCK_SEEDS = {"train": 0, "valid": 1, "test": 2}


class IndexedText(DataSource):
    """A token file; its units are sequences, which mostly are whole documents."""

    size_unit = "tokens"

    def __init__(self, indexed: IndexedDataset) -> None:
        super().__init__(indexed.prefix, num_units=indexed.num_sequences)
        self.indexed, self.unit = indexed, indexed.unit

    def size(self, units: range) -> int:
        return int(self.indexed.lengths[units.start : units.stop].sum(dtype=np.int64))

    def samples_per_epoch(self, units: range, request: DatasetRequest) -> int:
        return plan_epochs(self.size(units), request.seq_length, None).num_samples

    def epochs(self, units: range, request: DatasetRequest) -> float:
        return request.num_samples * request.seq_length / self.size(units)

    def dataset(self, units: range, request: DatasetRequest) -> GPTDataset:
        return GPTDataset(
            self.indexed,
            units,
            num_samples=max(1, request.num_samples),
            seq_length=request.seq_length,
            seed=request.seed,
            cache_dir=request.cache_dir,
        )


class MockDataset:
    """Documents that count 1, 2, 3, ... up to a random length, then end; sample i is a pure function of (seed, i).

    Ids count from 1 and start again when they reach `eod`, which is the last id of the vocabulary unless given.
    """

    def __init__(
        self, seq_length: int, vocab_size: int, num_samples: int, *, seed: int, eod: int | None = None
    ) -> None:
        if vocab_size < 3:
            raise ValueError(f"vocab_size {vocab_size}: counting needs two ids and an end of document")
        self.seq_length, self.num_samples, self.seed = seq_length, num_samples, seed
        self.eod = vocab_size - 1 if eod is None else eod
        self.fingerprint = fingerprint(
            {"kind": "mock", "seq_length": seq_length, "vocab_size": vocab_size, "eod": self.eod, "seed": seed}
        )
        self._ids = np.array(
            [number for number in range(min(vocab_size, seq_length + 2)) if number not in (0, self.eod)]
        )

    def __len__(self) -> int:
        return self.num_samples

    def __getitem__(self, index: int) -> NDArray[np.int64]:
        if not 0 <= index < self.num_samples:
            raise IndexError(f"sample {index} of {self.num_samples}")
        random = legacy_random_state(self.seed, index)
        total = self.seq_length + 1
        sample = np.empty(total, np.int64)
        filled = 0
        while filled < total:
            length = int(random.randint(2, max(3, self.seq_length)))
            document = np.resize(self._ids, length)
            document[-1] = self.eod
            taken = document[: total - filled]
            sample[filled : filled + len(taken)] = taken
            filled += len(taken)
        return sample


@dataclass(frozen=True)
class PackedText(DatasetKind):
    """Documents one after the other, cut into windows of seq_length + 1 tokens."""

    reads: ClassVar[str] = "the prefix of a .bin and an .idx file"

    def open(self, source: str, request: DatasetRequest) -> IndexedText:
        indexed = IndexedDataset(source)
        indexed.check_token_ids()
        if request.vocab_size is not None:
            _check_token_ids(indexed, request.vocab_size)
        return IndexedText(indexed)

    def mock(self, request: DatasetRequest) -> SampleDataset:
        if request.vocab_size is None:
            raise DataError("--mock-data needs --vocab-size or a tokenizer, to know which token ids to make up.")
        return MockDataset(
            request.seq_length,
            request.vocab_size,
            request.num_samples,
            seed=request.seed + _MOCK_SEEDS[request.split],
            eod=None if request.tokenizer is None else request.tokenizer.eod,
        )

    def size_warnings(self, shares: Sequence[SourceShare], request: DatasetRequest, *, eval_iters: int) -> list[str]:
        uses = [
            SourceUse(
                share.source.name, share.source.unit, len(share.units), share.source.size(share.units), share.samples
            )
            for share in shares
        ]
        return size_warnings(request.split, uses, seq_length=request.seq_length, eval_iters=eval_iters)


def _check_token_ids(indexed: IndexedDataset, vocab_size: int) -> None:
    """Checks a sample of ids: a model fails far from the cause, or not at all, on an id it has no embedding for."""
    chosen = np.unique(np.linspace(0, indexed.num_sequences - 1, CHECKED_SEQUENCES).astype(np.int64))
    for sequence in chosen:
        tokens = indexed.get(int(sequence), 0, min(CHECKED_TOKENS, int(indexed.lengths[sequence])))
        if tokens.size and not 0 <= int(tokens.min()) <= int(tokens.max()) < vocab_size:
            raise DataError(
                f"{indexed.prefix}: sequence {sequence} has token ids {tokens.min()}..{tokens.max()}, but the vocabulary has "
                f"{vocab_size} ids. Use the tokenizer the data was preprocessed with, or set --vocab-size."
            )


register_dataset(GPT_DATASET, PackedText)
