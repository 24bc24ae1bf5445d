"""The dataset kind `best-fit`: documents of .bin and .idx files, packed into samples so that those that fit are not cut.

A sample is seq_length + 1 ids: pieces of documents (best_fit_packing.py), then padding. Each piece sees itself alone, its positions count
from 0, and neither padding nor the first token of a piece is predicted. The packing is one for all epochs, a function of the documents, the
sequence length and the seed; samples are in another order in every epoch, so a run that becomes longer keeps its order.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from copy import copy
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Any, ClassVar

import numpy as np
import torch
from numpy.typing import NDArray

from petatron.base.errors import DataError
from petatron.base.log import get_logger
from petatron.config.schema.objective_and_dataset_names import BEST_FIT_DATASET
from petatron.data.batch_loader import LoaderOptions, epoch_permutation
from petatron.data.best_fit_packing import cut_documents, pack_best_fit
from petatron.data.check_token_ids import can_hold_only, first_beyond, raise_beyond
from petatron.data.dataset_kinds import DatasetKind, DatasetRequest, DataSource, SourceShare, register_dataset
from petatron.data.document_provenance import ProvenanceTable, provenance_of
from petatron.data.document_sample_shuffle_index import legacy_random_state
from petatron.data.documents_of_sample import SampleTrace, trace_documents
from petatron.data.gpt_dataset import PackedText
from petatron.data.index_cache import Arrays, fingerprint, load_or_build
from petatron.data.indexed_dataset import IndexedDataset
from petatron.kernels.attention.document_layout import Documents
from petatron.models.batch import Batch

GROUP_DOCUMENTS = 1 << 24
"""Documents that are packed together; more of them are packed in random groups of this many, which bounds memory."""


class BestFitDataset:
    """Samples of some sequences of a token file, as many as there are bins in each epoch."""

    def __init__(self, indexed: IndexedDataset, sequences: range, request: DatasetRequest) -> None:
        self.indexed, self._request, self.num_samples = indexed, request, request.num_samples
        vocab_size, self._pad = request.vocab_size, 0 if request.tokenizer is None else request.tokenizer.eod or 0
        self._checked_size = None if vocab_size is None or can_hold_only(indexed, vocab_size) else vocab_size
        key: dict[str, object] = {
            "kind": "best fit",
            "dataset": indexed.digest(request.cache_dir),
            indexed.unit: [sequences.start, sequences.stop],
            "seq_length": request.seq_length,
            "seed": request.seed,
        }
        self.fingerprint = fingerprint({**key, "pad": self._pad})
        names = ("sequences", "starts", "bounds", "cut")
        built = load_or_build(
            request.cache_dir,
            key,
            names,
            build=lambda: build_packing(indexed.lengths, sequences, request.seq_length, request.seed),
            log=request.index_log,
        )
        self._sequences, self._starts, self._bounds, self._cut = (built[name] for name in names)
        if not self.samples_per_epoch:
            raise DataError(
                f"{indexed.prefix}: {indexed.unit} {sequences.start}..{sequences.stop} have no two tokens that follow one another. "
                "Give this split a larger share (--split), or use a larger dataset."
            )
        self._order = lru_cache(maxsize=2)(lambda epoch: epoch_permutation(request.seed, epoch, self.samples_per_epoch))

    @property
    def samples_per_epoch(self) -> int:
        return len(self._bounds) - 1

    def __len__(self) -> int:
        return self.num_samples

    def __getitem__(self, index: int) -> dict[str, NDArray[np.int64]]:
        """Returns the ids of a sample, the place of the first token of each one's piece, and -1 in its place for padding."""
        total = self._request.seq_length + 1
        ids, begins, filled = np.full(total, self._pad, np.int64), np.full(total, -1, np.int64), 0
        for sequence, start, length in self.pieces(index):
            tokens = self.indexed.get(sequence, start, length)
            if self._checked_size is not None and (place := first_beyond(tokens, self._checked_size)) is not None:
                raise_beyond(self.indexed, sequence, start + place, int(tokens[place]), self._checked_size)
            ids[filled : filled + length], begins[filled : filled + length] = tokens, filled
            filled += length
        return {"ids": ids, "begins": begins}

    def pieces(self, index: int) -> list[tuple[int, int, int]]:
        """Returns the pieces of a sample: sequence, first token, length."""
        if not 0 <= index < len(self):
            raise IndexError(f"sample {index} of {len(self)}")
        epoch, place = divmod(index, self.samples_per_epoch)
        number, total = int(self._order(epoch)[place]), self._request.seq_length + 1
        first, stop = self._bounds[number : number + 2].tolist()
        pairs = zip(self._sequences[first:stop].tolist(), self._starts[first:stop].tolist())
        return [(sequence, start, min(total, int(self.indexed.lengths[sequence]) - start)) for sequence, start in pairs]

    def trace(self, index: int) -> SampleTrace:
        """Returns the documents of a sample, and where they come from."""
        documents = trace_documents(self.indexed, self._sources, self.pieces(index))
        return SampleTrace(self.indexed.prefix, index, documents)

    @cached_property
    def _sources(self) -> ProvenanceTable | None:
        return provenance_of(self.indexed)

    def describe(self, num_tokens: int) -> str:
        """Returns the shares of documents that are cut, by this packing and by windows of concatenated text, and of padding."""
        documents, cut, cut_by_windows, ids = self._cut.tolist()
        padding = 1 - ids / (self.samples_per_epoch * (self._request.seq_length + 1))
        return (
            f"{self.indexed.prefix}: best fit cuts {cut / max(1, documents):.2%} of {documents:,} {self.indexed.unit} (concatenated, "
            f"{cut_by_windows / max(1, documents):.2%}) and pads {padding:.2%}; {self.samples_per_epoch:,} samples of {num_tokens:,} tokens"
        )


def build_packing(lengths: NDArray[np.integer], sequences: range, seq_length: int, seed: int) -> Arrays:
    """Packs sequences: the sequence and first token of each piece, by bins; the bounds of the bins; counts for `describe`.

    Sequences of one length are taken in an order of the seed.
    """
    shuffled = np.arange(sequences.start, sequences.stop, dtype=np.int32 if sequences.stop < 1 << 31 else np.int64)
    legacy_random_state(seed).shuffle(shuffled)
    parts: list[tuple[NDArray, NDArray, NDArray]] = []
    num_ids = 0
    for start in range(0, len(shuffled), GROUP_DOCUMENTS):
        group = shuffled[start : start + GROUP_DOCUMENTS]
        pieces = cut_documents(group, lengths[group], seq_length)
        sizes = np.minimum(lengths[pieces.documents] - pieces.starts, seq_length + 1).astype(np.int32)
        bins, count = pack_best_fit(sizes, seq_length + 1)
        order = np.argsort(bins, kind="stable")
        parts.append((pieces.documents[order], pieces.starts[order], np.bincount(bins, minlength=count)))
        num_ids += int(sizes.sum(dtype=np.int64))
    ends = np.cumsum(np.concatenate([part[2] for part in parts])) if parts else np.zeros(0, np.int64)
    of_all = lengths[shuffled].astype(np.int64)
    stops = np.cumsum(of_all)
    # Window k has tokens k * seq_length to (k + 1) * seq_length; a document is whole if one window has all of it.
    by_windows = (of_all > 1) & ((stops - of_all) // seq_length != np.maximum(stops - 2, 0) // seq_length)
    cut = of_all > seq_length + 1
    counts = [int((of_all > 0).sum()), int(cut.sum()), int(by_windows.sum()), num_ids]
    return {
        "sequences": np.concatenate([part[0] for part in parts]) if parts else np.zeros(0, np.int32),
        "starts": np.concatenate([part[1] for part in parts]) if parts else np.zeros(0, np.int32),
        "bounds": np.concatenate([[0], ends]).astype(np.int64),
        "cut": np.array(counts, np.int64),
    }


class BestFitText(DataSource):
    """A token file; its units are sequences, which mostly are whole documents."""

    size_unit = "tokens"

    def __init__(self, indexed: IndexedDataset) -> None:
        super().__init__(indexed.prefix, num_units=indexed.num_sequences)
        self.indexed, self.unit = indexed, indexed.unit
        self._packed: dict[tuple[range, int, int], BestFitDataset] = {}

    def size(self, units: range) -> int:
        return int(self.indexed.lengths[units.start : units.stop].sum(dtype=np.int64))

    def samples_per_epoch(self, units: range, request: DatasetRequest) -> int:
        key = (units, request.seq_length, request.seed)
        if key not in self._packed:
            self._packed[key] = dataset = BestFitDataset(self.indexed, units, request)
            get_logger(__name__).info("%s", dataset.describe(self.size(units)))
        return self._packed[key].samples_per_epoch

    def dataset(self, units: range, request: DatasetRequest) -> BestFitDataset:
        self.samples_per_epoch(units, request)
        dataset = copy(self._packed[units, request.seq_length, request.seed])
        dataset.num_samples = max(1, request.num_samples)
        return dataset


@dataclass(frozen=True)
class BestFitKind(DatasetKind):
    """Whole documents in padded samples, each of which sees itself alone."""

    reads: ClassVar[str] = PackedText.reads

    def open(self, source: str, request: DatasetRequest) -> BestFitText:
        return BestFitText(PackedText().open(source, request).indexed)

    def collate(self, samples: Sequence[Mapping[str, NDArray[Any]]], options: LoaderOptions) -> Batch:
        return make_best_fit_batch(samples, options)

    def size_warnings(self, shares: Sequence[SourceShare], request: DatasetRequest, *, eval_iters: int) -> list[str]:
        return PackedText().size_warnings(shares, request, eval_iters=eval_iters)


def make_best_fit_batch(samples: Sequence[Mapping[str, NDArray[Any]]], options: LoaderOptions) -> Batch:
    """Makes a batch: a position is in the loss if the next one is of the same document, and not the padding's."""
    ids = np.stack([sample["ids"] for sample in samples])
    begins = np.stack([sample["begins"] for sample in samples])
    tokens, is_padding = ids[:, :-1], begins[:, :-1] < 0
    mask = ((begins[:, 1:] >= 0) & (begins[:, 1:] == begins[:, :-1])).astype(np.float32)
    if options.eod_mask_loss:
        mask[tokens == options.eod] = 0.0
    places = np.arange(tokens.shape[1])
    num_filled = (~is_padding).sum(axis=1, keepdims=True)
    starts = np.where(is_padding, num_filled, begins[:, :-1])
    arrays = {"tokens": tokens, "labels": ids[:, 1:], "loss_mask": mask, "positions": places - starts}
    tensors = {name: torch.from_numpy(np.ascontiguousarray(array)) for name, array in arrays.items()}
    documents = Documents.build(starts, is_padding_BS=is_padding if bool(is_padding.any()) else None)
    return Batch(arrays=tensors, documents=documents)


register_dataset(BEST_FIT_DATASET, BestFitKind)
