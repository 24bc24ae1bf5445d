"""The texts that samples are made of, before anything is masked: sentences of a document, or pieces of documents without sentences."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property, lru_cache
from typing import NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from petatron.base.errors import DataError
from petatron.data.batch_loader import epoch_permutation
from petatron.data.check_token_ids import can_hold_only, first_beyond, raise_beyond
from petatron.data.dataset_kinds import DatasetRequest
from petatron.data.document_provenance import ProvenanceTable, provenance_of
from petatron.data.documents_of_sample import SampleTrace, trace_documents
from petatron.data.index_cache import Arrays, fingerprint, load_or_build
from petatron.data.indexed_dataset import IndexedDataset
from petatron.data.masked.sentence_samples import (
    SAMPLE_ARRAYS,
    GatheringRule,
    gather_sentences,
    no_samples_error,
    usable_documents,
)

Ids = NDArray[np.int64]
Piece = tuple[int, int, int]
"""Tokens of a sequence of a file: its number, the first of them, and how many."""
_OTHER_DOCUMENT_TRIES = 10


class SampleText(NamedTuple):
    """The text of a sample. ends: of its sentences; a piece of a document is one. target: how many tokens the sample may have."""

    tokens: Ids
    ends: NDArray[np.integer]
    target: int


class TextSamples(Protocol):
    """Texts by sample number; text i is a pure function of the files, the seed and i."""

    @property
    def fingerprint(self) -> str: ...
    def __len__(self) -> int: ...
    def read(self, index: int, random: np.random.RandomState) -> SampleText:
        """`random` is the sample's generator."""
        ...

    def other(self, index: int, random: np.random.RandomState) -> int:
        """Draws another sample, of another document if there is one."""
        ...

    def trace(self, index: int, change: str) -> SampleTrace: ...


class TokenReader:
    """Reads tokens of a file, and checks that the vocabulary has them."""

    def __init__(self, indexed: IndexedDataset, vocab_size: int | None) -> None:
        """vocab_size: None if ids are not checked."""
        self.indexed = indexed
        self._checked_size = None if vocab_size is None or can_hold_only(indexed, vocab_size) else vocab_size

    def read(self, piece: Piece) -> Ids:
        """Returns the tokens of a piece."""
        sequence, start, length = piece
        tokens = self.indexed.get(sequence, start, length)
        if self._checked_size is not None and (place := first_beyond(tokens, self._checked_size)) is not None:
            raise_beyond(self.indexed, sequence, start + place, int(tokens[place]), self._checked_size)
        return tokens.astype(np.int64)

    def read_sequences(self, first: int, stop: int) -> tuple[Ids, NDArray[np.int64]]:
        """Returns the tokens of consecutive sequences, and where each ends among them."""
        tokens = self.indexed.get_sequences(first, stop)
        ends = np.cumsum(self.indexed.lengths[first:stop], dtype=np.int64)
        if self._checked_size is not None and (place := first_beyond(tokens, self._checked_size)) is not None:
            number = int(np.searchsorted(ends, place, side="right"))
            start = int(ends[number - 1]) if number else 0
            raise_beyond(self.indexed, first + number, place - start, int(tokens[place]), self._checked_size)
        return tokens.astype(np.int64), ends

    def read_document(self, document: int, start: int, length: int) -> Ids:
        """Returns tokens of a document, whose sequences are contiguous."""
        tokens = self.indexed.get_document(document, start, length)
        if self._checked_size is not None and (place := first_beyond(tokens, self._checked_size)) is not None:
            sequence, position, _ = self.sequence_pieces(document, start + place, 1)[0]
            raise_beyond(self.indexed, sequence, position, int(tokens[place]), self._checked_size)
        return tokens.astype(np.int64)

    def sequence_pieces(self, document: int, start: int, length: int) -> list[Piece]:
        """Returns the pieces of sequences that tokens of a document are."""
        if self.indexed.one_sequence_per_document:
            return [(document, start, length)]
        first, stop = self.indexed.document_indices[document : document + 2].tolist()
        ends = np.cumsum(self.indexed.lengths[first:stop], dtype=np.int64).tolist()
        begins = [0, *ends[:-1]]
        cuts = [(max(start, begin), min(start + length, end)) for begin, end in zip(begins, ends)]
        return [
            (first + number, low - begins[number], high - low) for number, (low, high) in enumerate(cuts) if low < high
        ]

    def trace(self, index: int, pieces: Sequence[Piece], change: str) -> SampleTrace:
        return SampleTrace(
            self.indexed.prefix, index, trace_documents(self.indexed, self._sources, list(pieces)), change
        )

    @cached_property
    def _sources(self) -> ProvenanceTable | None:
        return provenance_of(self.indexed)


class SentenceText:
    """Sentences of some documents of a file, gathered to target lengths (rules: sentence_samples.py)."""

    def __init__(self, indexed: IndexedDataset, documents: range, rule: GatheringRule, request: DatasetRequest) -> None:
        self._reader, self._documents = TokenReader(indexed, request.vocab_size), documents
        self._starts = indexed.document_indices[documents.start : documents.stop + 1]
        key: dict[str, object] = {
            "kind": "sentences",
            "dataset": indexed.digest(request.cache_dir),
            "documents": [documents.start, documents.stop],
            "max_length": rule.max_length,
            "min_sentences": rule.min_sentences,
            "short_ratio": rule.short_ratio,
            "longest_sentence": rule.longest_sentence,
            "seed": request.seed,
        }

        def load(num_samples: int) -> Arrays:
            return load_or_build(
                request.cache_dir,
                {**key, "num_samples": num_samples},
                SAMPLE_ARRAYS,
                build=lambda: gather_sentences(
                    indexed.lengths, self._starts, rule, num_samples=num_samples, seed=request.seed
                ),
                log=request.index_log,
            )

        arrays = load(1)
        epoch_ends = arrays["epoch_ends"]
        if not len(epoch_ends):
            raise no_samples_error(indexed.prefix, len(documents), rule)
        self.samples_per_epoch = int(epoch_ends[0])
        if request.num_samples > self.samples_per_epoch:
            arrays = load(request.num_samples)
        self._first, self._stop, self._target = (arrays[name] for name in SAMPLE_ARRAYS[:3])
        self.fingerprint = fingerprint({**key, "epochs": len(arrays["epoch_ends"])})
        self._rule = rule

    def __len__(self) -> int:
        return len(self._first)

    def read(self, index: int, random: np.random.RandomState) -> SampleText:
        tokens, ends = self._reader.read_sequences(int(self._first[index]), int(self._stop[index]))
        return SampleText(tokens, ends, int(self._target[index]))

    def other(self, index: int, random: np.random.RandomState) -> int:
        document, candidate = self._document(index), index
        for _ in range(_OTHER_DOCUMENT_TRIES):
            candidate = int(random.randint(0, len(self)))
            if self._document(candidate) != document:
                break
        return candidate

    def _document(self, index: int) -> int:
        return int(np.searchsorted(self._starts, self._first[index], side="right"))

    def trace(self, index: int, change: str) -> SampleTrace:
        sentences = range(int(self._first[index]), int(self._stop[index]))
        pieces = [(sentence, 0, int(self._reader.indexed.lengths[sentence])) for sentence in sentences]
        return self._reader.trace(index, pieces, change)

    def left_out(self) -> str:
        """Returns how many documents make no samples, if there are any."""
        indexed, count, rule = self._reader.indexed, len(self._documents), self._rule
        usable = int(usable_documents(indexed.lengths, self._starts, rule).sum())
        if usable == count:
            return ""
        return (
            f"{indexed.prefix}: {count - usable:,} of {count:,} documents are left out: they have fewer than {rule.min_sentences} "
            f"sentences, or one of more than {rule.longest_sentence:,} tokens"
        )


class DocumentText:
    """Documents of a file without sentences, cut into pieces of the full length; each epoch has them in another order.

    A share of the samples has a short target, which is drawn for each sample.
    """

    def __init__(self, indexed: IndexedDataset, documents: range, rule: GatheringRule, request: DatasetRequest) -> None:
        self._reader, self._rule, self._num_samples = (
            TokenReader(indexed, request.vocab_size),
            rule,
            request.num_samples,
        )
        key: dict[str, object] = {
            "kind": "document pieces",
            "dataset": indexed.digest(request.cache_dir),
            "documents": [documents.start, documents.stop],
            "max_length": rule.max_length,
        }
        arrays = load_or_build(
            request.cache_dir,
            key,
            ("documents", "starts"),
            build=lambda: cut_pieces(indexed.lengths, documents, rule.max_length),
            log=request.index_log,
        )
        self._pieces, self._starts = arrays["documents"], arrays["starts"]
        self.samples_per_epoch = len(self._pieces)
        if not self.samples_per_epoch:
            raise DataError(
                f"{indexed.prefix}: documents {documents.start}..{documents.stop} hold no tokens. "
                "Give this split a larger share (--split), or use a larger dataset."
            )
        self.fingerprint = fingerprint({**key, "short_probability": rule.short_probability, "seed": request.seed})
        self._order = lru_cache(maxsize=2)(lambda epoch: epoch_permutation(request.seed, epoch, self.samples_per_epoch))

    def __len__(self) -> int:
        return self._num_samples

    def read(self, index: int, random: np.random.RandomState) -> SampleText:
        target = full = self._rule.max_length
        if self._rule.short_probability and random.random_sample() < self._rule.short_probability:
            target = int(random.randint(2, full + 1))
        piece = self._piece(index)
        return SampleText(self._reader.read(piece), np.array([piece[2]]), target)

    def _piece(self, index: int) -> Piece:
        epoch, place = divmod(index, self.samples_per_epoch)
        number = int(self._order(epoch)[place])
        document, start = int(self._pieces[number]), int(self._starts[number])
        return document, start, min(self._rule.max_length, int(self._reader.indexed.lengths[document]) - start)

    def other(self, index: int, random: np.random.RandomState) -> int:
        return int(random.randint(0, len(self)))

    def trace(self, index: int, change: str) -> SampleTrace:
        return self._reader.trace(index, [self._piece(index)], change)


def cut_pieces(lengths: NDArray[np.integer], documents: range, size: int) -> Arrays:
    """Returns the document and the first token of each piece of at most `size` tokens.

    >>> pieces = cut_pieces(np.array([3, 0, 7, 4]), range(1, 4), 3)
    >>> pieces["documents"].tolist(), pieces["starts"].tolist()
    ([2, 2, 2, 3, 3], [0, 3, 6, 0, 3])
    """
    counts = -(-lengths[documents.start : documents.stop].astype(np.int64) // size)
    numbers = np.repeat(np.arange(documents.start, documents.stop), counts)
    places = np.arange(len(numbers)) - np.repeat(np.cumsum(counts) - counts, counts)
    return {"documents": numbers, "starts": (places * size).astype(np.int32)}
