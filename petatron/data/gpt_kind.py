"""The kind `gpt`: text of Megatron's .bin and .idx files, packed into samples; the kind of a run that names none."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from petatron.base.errors import DataError
from petatron.config.schema.default_names import GPT_DATASET
from petatron.data.dataset_kinds import DatasetKind, DatasetRequest, DataSource, SourceShare, register_dataset
from petatron.data.document_sample_shuffle_index import plan_epochs
from petatron.data.gpt_dataset import GPTDataset
from petatron.data.indexed_dataset import IndexedDataset
from petatron.data.mock_dataset import MockDataset
from petatron.data.sample_dataset import SampleDataset
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
        return mock_text(request)

    def size_warnings(self, shares: Sequence[SourceShare], request: DatasetRequest, *, eval_iters: int) -> list[str]:
        uses = [
            SourceUse(
                share.source.name, share.source.unit, len(share.units), share.source.size(share.units), share.samples
            )
            for share in shares
        ]
        return size_warnings(request.split, uses, seq_length=request.seq_length, eval_iters=eval_iters)


def mock_text(request: DatasetRequest) -> MockDataset:
    """Returns made-up text: documents that count."""
    if request.vocab_size is None:
        raise DataError("--mock-data needs --vocab-size or a tokenizer, to know which token ids to make up.")
    return MockDataset(
        request.seq_length,
        request.vocab_size,
        request.num_samples,
        seed=request.seed + _MOCK_SEEDS[request.split],
        eod=None if request.tokenizer is None else request.tokenizer.eod,
    )


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
