"""Rows of a batch: conversations packed by best fit, one in each, or the conversations of a preference side by side.

A row has `seq_length` tokens. A conversation of more is cut at its end or its beginning, left out, or ends the run; one that has
nothing left to learn is left out. Packing is one for all epochs, and each epoch has the rows in another order.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from petatron.base.errors import DataError
from petatron.base.format_text import count_with_noun
from petatron.base.log import get_logger
from petatron.data.batch_loader import epoch_permutation
from petatron.data.best_fit_packing import pack_best_fit
from petatron.data.check_token_ids import TokenPlace
from petatron.data.conversations.conversation_settings import SETTINGS_FLAG, LongConversations
from petatron.data.conversations.conversation_source import EncodedSource, Rows
from petatron.data.dataset_kinds import DatasetRequest
from petatron.data.document_sample_shuffle_index import legacy_random_state
from petatron.data.documents_of_sample import SampleTrace, TracedDocument
from petatron.data.index_cache import fingerprint

Pieces = NDArray[np.int64]
"""[records, 2]: the first token of each and the one after its last, within its row."""


@dataclass(frozen=True, slots=True)
class FittingRecords:
    """The records that fit, after cutting: their numbers, what is kept of each row, and how many were cut or left out."""

    numbers: NDArray[np.int64]
    pieces: NDArray[np.int64]
    num_cut: int
    num_long: int
    num_unlearned: int

    @property
    def lengths(self) -> NDArray[np.int64]:
        """The tokens of each record, over all of its rows."""
        return (self.pieces[..., 1] - self.pieces[..., 0]).sum(axis=1)


def fit_records(
    source: EncodedSource, units: range, seq_length: int, long_samples: LongConversations, *, rows_per_record: int = 1
) -> FittingRecords:
    """Cuts what is longer than a row; raises `DataError` where that ends the run. Every row of a record has to have something to learn."""
    rows = source.rows
    lengths = np.diff(rows.bounds)[units.start * rows_per_record : units.stop * rows_per_record].reshape(
        -1, rows_per_record
    )
    is_long = (lengths > seq_length).any(axis=1)
    num_long = int(is_long.sum())
    if num_long and long_samples == "fail":
        first = units[int(np.flatnonzero(is_long)[0])]
        raise DataError(
            f"{source.provenance(first)} has {int(lengths[first - units.start].max()):,} tokens, more than --seq-length {seq_length:,} "
            f"({count_with_noun(num_long, 'record')} of {len(units):,}). Use a longer one, or cut or leave out such records with "
            f"{SETTINGS_FLAG} long_samples=truncate or skip."
        )
    stops = np.minimum(lengths, seq_length)
    starts = lengths - stops if long_samples == "truncate-left" else np.zeros_like(lengths)
    pieces = np.stack([starts, starts + stops], axis=-1)
    kept = np.ones(len(units), bool)
    if long_samples == "skip":
        kept[np.flatnonzero(is_long)] = False
    num_unlearned = 0
    for place in np.flatnonzero(is_long & kept).tolist():
        record = units[place] * rows_per_record
        for row in range(rows_per_record):
            begin, end = pieces[place, row].tolist()
            if not np.any(rows.row(record + row)[1][begin + 1 : end]):
                kept[place], num_unlearned = False, num_unlearned + 1
                break
    numbers = np.arange(units.start, units.stop, dtype=np.int64)[kept]
    num_cut = int((is_long & kept).sum())
    return FittingRecords(numbers, pieces[kept], num_cut, num_long - num_cut - num_unlearned, num_unlearned)


def report_cuts(name: str, fitting: FittingRecords, seq_length: int, long_samples: LongConversations) -> None:
    """Says how many records were cut or left out."""
    side = "beginning" if long_samples == "truncate-left" else "end"
    counts = (
        (fitting.num_cut, f"cut at the {side}"),
        (fitting.num_long, "left out"),
        (fitting.num_unlearned, "left out, since nothing that is learned would be left of them"),
    )
    said = ", ".join(f"{count:,} {what}" for count, what in counts if count)
    if said:
        total = fitting.num_cut + fitting.num_long + fitting.num_unlearned
        get_logger(__name__).warning(
            "WARNING: %s: %s longer than the %d tokens of --seq-length: %s",
            name,
            count_with_noun(total, "conversation"),
            seq_length,
            said,
        )


class PackedRecords:
    """Which records each row has: one, or as many as fit."""

    def __init__(
        self, source: EncodedSource, fitting: FittingRecords, capacity: int, seed: int, *, packed: bool
    ) -> None:
        self.fitting = fitting
        count = len(fitting.numbers)
        if not count:
            raise DataError(
                f"{source.name}: no record of these makes a sample. Give this split a larger share (--split), or use a larger --seq-length."
            )
        if not packed:
            self._places, self._bounds = np.arange(count), np.arange(count + 1)
            return
        order = np.arange(count)
        legacy_random_state(seed).shuffle(order)  # of equal lengths, in an order of the seed
        bins, num_bins = pack_best_fit(fitting.lengths[order].astype(np.int32), capacity)
        self._places = order[np.argsort(bins, kind="stable")]
        self._bounds = np.concatenate([[0], np.cumsum(np.bincount(bins, minlength=num_bins))])

    def __len__(self) -> int:
        return len(self._bounds) - 1

    def places(self, row: int) -> NDArray[np.int64]:
        """Returns which of the fitting records a row has."""
        return self._places[self._bounds[row] : self._bounds[row + 1]]

    def describe(self, name: str, capacity: int) -> str:
        filled = int(self.fitting.lengths.sum())
        records = len(self.fitting.numbers)
        return (
            f"{name}: {count_with_noun(records, 'conversation')} in {count_with_noun(len(self), 'row')} of {capacity:,} tokens, "
            f"{records / len(self):.1f} in each, {1 - filled / (len(self) * capacity):.1%} padding"
        )


class ConversationDataset:
    """Rows of conversations, in another order in every epoch; sample i is a pure function of the files, the seed and i."""

    def __init__(
        self,
        source: EncodedSource,
        packing: PackedRecords,
        request: DatasetRequest,
        *,
        padding: int,
        key: dict[str, Any],
    ) -> None:
        self._source, self._packing, self._request, self._padding = source, packing, request, padding
        self.fingerprint = fingerprint(
            {**key, "source": source.fingerprint, "seed": request.seed, "seq_length": request.seq_length}
        )
        self._order = lru_cache(maxsize=2)(lambda epoch: epoch_permutation(request.seed, epoch, len(packing)))

    def __len__(self) -> int:
        return self._request.num_samples

    def __getitem__(self, index: int) -> dict[str, NDArray[Any]]:
        """Returns the tokens of a row, their weights, and the first place of each token's conversation, -1 for padding."""
        row = _Row(self._request.seq_length, self._padding, has_weights=self._source.rows.has_weights)
        for place in self._places(index):
            row.add(
                self._source.rows, int(self._packing.fitting.numbers[place]), self._packing.fitting.pieces[place, 0]
            )
        return row.arrays

    def trace(self, index: int) -> SampleTrace:
        """Returns the conversations of a sample, and where they come from."""
        fitting = self._packing.fitting
        documents = tuple(
            TracedDocument(
                TokenPlace(int(fitting.numbers[place]), None, int(fitting.pieces[place, 0, 0])),
                int(fitting.lengths[place]),
                self._source.provenance(int(fitting.numbers[place])),
            )
            for place in self._places(index)
        )
        return SampleTrace(self._source.name, index, documents)

    def _places(self, index: int) -> list[int]:
        if not 0 <= index < len(self):
            raise IndexError(f"sample {index} of {len(self)}")
        epoch, place = divmod(index, len(self._packing))
        return self._packing.places(int(self._order(epoch)[place])).tolist()


class _Row:
    """A row that is filled from its beginning."""

    def __init__(self, length: int, padding: int, *, has_weights: bool) -> None:
        self.arrays: dict[str, NDArray[Any]] = {
            "ids": np.full(length, padding, np.int64),
            "begins": np.full(length, -1, np.int64),
            "weights": np.zeros(length, np.float32 if has_weights else np.uint8),
        }
        self._filled = 0

    def add(self, rows: Rows, number: int, piece: NDArray[np.int64]) -> None:
        ids, weights = rows.row(number)
        begin, end = piece.tolist()
        place = slice(self._filled, self._filled + end - begin)
        self.arrays["ids"][place], self.arrays["weights"][place] = ids[begin:end], weights[begin:end]
        self.arrays["begins"][place] = self._filled
        self._filled = place.stop
