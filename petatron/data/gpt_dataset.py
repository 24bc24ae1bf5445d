"""The dataset kind `gpt`, the default: documents of Megatron's .bin and .idx files, concatenated and cut into samples, or mock data.

Sequences of a token file are cut into windows of seq_length + 1 tokens (rules: document_sample_shuffle_index.py). The unit that is split
and shuffled is the sequence, as in Megatron: mostly a whole document, a sentence in files made for that.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import ClassVar, NamedTuple

import numpy as np
from numpy.typing import NDArray

from petatron.base.device import host_memory_bytes
from petatron.base.errors import DataError
from petatron.base.format_text import format_bytes
from petatron.base.log import get_logger
from petatron.config.schema.objective_and_dataset_names import GPT_DATASET
from petatron.data.batch_loader import SampleDataset
from petatron.data.check_token_ids import can_hold_only, check_some_ids, first_beyond, raise_beyond
from petatron.data.dataset_kinds import DatasetKind, DatasetRequest, DataSource, SourceShare, register_dataset
from petatron.data.document_provenance import ProvenanceTable, provenance_of
from petatron.data.document_sample_shuffle_index import (
    build_sample_indices,
    index_bytes,
    legacy_random_state,
    plan_epochs,
)
from petatron.data.documents_of_sample import SampleTrace, trace_documents
from petatron.data.index_cache import Arrays, IndexLog, fingerprint, load_or_build
from petatron.data.indexed_dataset import IndexedDataset
from petatron.data.small_dataset_warnings import size_warnings

# Splits of mock data differ by their seed.
_MOCK_SEEDS = {"train": 0, "valid": 1, "test": 2}
_ANNOUNCED_ENTRIES = 10_000_000
_SECONDS_PER_ENTRY = 3e-7
"""Measured on one core: two shuffles and a search per sample, limited by the memory's latency."""


class SamplePiece(NamedTuple):
    """Tokens of one sequence in a sample: `length` of them from `start`."""

    sequence: int
    start: int
    length: int


class GPTDataset:
    """The i-th sample of a split, for i below the number of samples in all epochs needed for `num_samples`.

    The index is cached under the content of the token file, the split, seed, sequence length and number of epochs; so
    a longer run reuses it, and keeps its order, as long as it needs no further epoch and a short last epoch stays short.
    """

    def __init__(
        self,
        indexed: IndexedDataset,
        sequences: range,
        *,
        num_samples: int | None,
        seq_length: int,
        seed: int,
        cache_dir: str | Path | None = None,
        vocab_size: int | None = None,
        index_log: IndexLog | None = None,
    ) -> None:
        """vocab_size: None if ids are not checked."""
        self.indexed, self.sequences, self.seq_length = indexed, sequences, seq_length
        self._checked_size = None if vocab_size is None or can_hold_only(indexed, vocab_size) else vocab_size
        lengths = indexed.lengths
        self.num_tokens = int(lengths[sequences.start : sequences.stop].sum(dtype=np.int64))
        if self.num_tokens == 0:
            raise DataError(
                f"{indexed.prefix}: {indexed.unit} {sequences.start}..{sequences.stop} hold no tokens. "
                "Give this split a larger share (--split), or use a larger dataset."
            )
        self.plan = plan_epochs(self.num_tokens, seq_length, num_samples)
        key: dict[str, object] = {
            "kind": "gpt",
            "dataset": indexed.digest(cache_dir),
            # Named by the unit: an index of whole documents, of earlier versions, is not one of their sequences.
            indexed.unit: [sequences.start, sequences.stop],
            "seq_length": seq_length,
            "seed": seed,
            "epochs": self.plan.num_epochs,
            "separate_final_epoch": self.plan.separate_final_epoch,
        }

        def build() -> Arrays:
            numbers = np.arange(sequences.start, sequences.stop)
            index = build_sample_indices(numbers, lengths, self.plan, seed, on_part=self._announce(cache_dir))
            return {"documents": index.document_index, "starts": index.sample_index, "order": index.shuffle_index}

        self.fingerprint = fingerprint(key)
        names = ("documents", "starts", "order")
        arrays = load_or_build(cache_dir, key, names, build=build, log=index_log)
        self._document_index, self._sample_index, self._shuffle_index = (arrays[name] for name in names)

    @cached_property
    def _sources(self) -> ProvenanceTable | None:
        return provenance_of(self.indexed)

    def _announce(self, cache_dir: str | Path | None) -> Callable[[str], None]:
        """Says what a large index will take before it is built, and refuses one that cannot be held; returns a reporter of progress."""
        size, memory = index_bytes(self.plan, len(self.sequences)), host_memory_bytes()
        what = f"{self.indexed.prefix}: the order of {self.plan.num_samples:,} samples over {self.plan.num_epochs:,} epochs"
        if size > memory:
            raise DataError(
                f"{what} takes {format_bytes(size)}, and this machine has {format_bytes(memory)}. Train for fewer iterations or "
                "samples (a run can be continued with more), or with a longer --seq-length."
            )
        log = get_logger(__name__)
        entries = self.plan.num_samples + len(self.sequences) * self.plan.num_epochs
        if entries < _ANNOUNCED_ENTRIES:
            return lambda part: None
        kept = f" and is kept in {cache_dir} for later starts" if cache_dir is not None else ""
        seconds = entries * _SECONDS_PER_ENTRY
        log.info("%s takes about %.0f s to build (%s)%s", what, seconds, format_bytes(size), kept)
        return lambda part: log.info("%s: %s", self.indexed.prefix, part)

    def __len__(self) -> int:
        return self.plan.num_samples

    def __getitem__(self, index: int) -> NDArray[np.int64]:
        """Sample `index` as seq_length + 1 token ids."""
        pieces = self.pieces(index)
        parts = [self.indexed.get(piece.sequence, piece.start, piece.length) for piece in pieces]
        if len(parts) == 1:
            sample = parts[0].astype(np.int64)
        else:
            sample = np.concatenate(parts, dtype=np.int64, casting="unsafe")
        if self._checked_size is not None and (place := first_beyond(sample, self._checked_size)) is not None:
            number = int(sample[place])
            for piece in pieces:
                if place < piece.length:
                    raise_beyond(self.indexed, piece.sequence, piece.start + place, number, self._checked_size)
                place -= piece.length
        return sample

    def trace(self, index: int) -> SampleTrace:
        """Returns the documents of a sample, and where they come from if a table of sources is beside the dataset."""
        documents = trace_documents(self.indexed, self._sources, list(self.pieces(index)))
        return SampleTrace(self.indexed.prefix, index, documents)

    def pieces(self, index: int) -> list[SamplePiece]:
        """Returns the pieces of sequences that sample `index` consists of."""
        sample = int(self._shuffle_index[index])
        (first, start), (last, end) = self._sample_index[sample : sample + 2].tolist()
        sequences = self._document_index[first : last + 1].tolist()
        if first == last:
            return [SamplePiece(sequences[0], start, end - start + 1)]
        lengths = self.indexed.lengths
        pieces = [SamplePiece(sequences[0], start, int(lengths[sequences[0]]) - start)]
        pieces += [SamplePiece(sequence, 0, int(lengths[sequence])) for sequence in sequences[1:-1]]
        pieces.append(SamplePiece(sequences[-1], 0, end + 1))
        return pieces


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
            vocab_size=request.vocab_size,
            index_log=request.index_log,
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
            document = np.resize(self._ids, int(random.randint(2, max(3, self.seq_length))))
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
        indexed = IndexedDataset(source, object_storage=request.object_storage)
        indexed.check_token_ids()
        if request.vocab_size is not None:
            check_some_ids(indexed, request.vocab_size)
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
        return size_warnings(request.split, shares, seq_length=request.seq_length, eval_iters=eval_iters)


register_dataset(GPT_DATASET, PackedText)
