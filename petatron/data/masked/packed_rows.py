"""Rows of several documents: pieces of documents by best fit, each with what its row needs for it.

A document that is longer than a piece may be is cut into pieces, which do not overlap. The cost of a piece is the share of a row that it
takes at most, and rows are packed once for all epochs (best_fit_packing.py); each epoch has them in another order.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from petatron.base.errors import DataError
from petatron.data.batch_loader import epoch_permutation
from petatron.data.best_fit_packing import pack_best_fit
from petatron.data.dataset_kinds import DatasetRequest
from petatron.data.document_sample_shuffle_index import legacy_random_state
from petatron.data.documents_of_sample import SampleTrace
from petatron.data.index_cache import Arrays, fingerprint, load_or_build
from petatron.data.indexed_dataset import IndexedDataset
from petatron.data.masked.text_samples import Ids, TokenReader, cut_pieces
from petatron.kernels.attention.document_layout import Documents

GROUP_DOCUMENTS = 1 << 24
"""Documents that are packed together, which bounds memory."""
_ARRAYS = ("documents", "starts", "choices", "bounds")

Costs = Callable[[NDArray[np.int64], NDArray[np.integer]], NDArray[np.integer]]
"""The cost of pieces by their lengths and choices."""


class PackingRule(NamedTuple):
    """How pieces are packed. piece: the most tokens of one. choices: weights of what is drawn for each piece. key: names the costs."""

    piece: int
    capacity: int
    costs: Costs
    choices: tuple[float, ...]
    key: dict[str, Any]


class RowPiece(NamedTuple):
    """The tokens of a piece of a document, and what was drawn for it."""

    tokens: Ids
    choice: int


class PackedRows:
    """The rows of some documents of a file; row i is a pure function of the file, the rule, the seed and i."""

    def __init__(self, indexed: IndexedDataset, documents: range, rule: PackingRule, request: DatasetRequest) -> None:
        self._reader, self._rule, self._num_samples = (
            TokenReader(indexed, request.vocab_size),
            rule,
            request.num_samples,
        )
        key: dict[str, object] = {
            "kind": "packed rows",
            "dataset": indexed.digest(request.cache_dir),
            "documents": [documents.start, documents.stop],
            "piece": rule.piece,
            "capacity": rule.capacity,
            "choices": list(rule.choices),
            **rule.key,
            "seed": request.seed,
        }
        lengths = indexed.document_lengths
        built = load_or_build(
            request.cache_dir,
            key,
            _ARRAYS,
            build=lambda: build_rows(lengths, documents, rule, request.seed),
            log=request.index_log,
        )
        self._documents, self._starts, self._choices, self._bounds = (built[name] for name in _ARRAYS)
        self._lengths = lengths
        self.samples_per_epoch = len(self._bounds) - 1
        if not self.samples_per_epoch:
            raise DataError(
                f"{indexed.prefix}: documents {documents.start}..{documents.stop} hold no tokens. "
                "Give this split a larger share (--split), or use a larger dataset."
            )
        self.fingerprint = fingerprint(key)
        self._order = lru_cache(maxsize=2)(lambda epoch: epoch_permutation(request.seed, epoch, self.samples_per_epoch))

    def __len__(self) -> int:
        return self._num_samples

    def read(self, index: int) -> list[RowPiece]:
        """Returns the pieces of a row."""
        pieces = [(self._documents[k], self._starts[k], self._choices[k]) for k in self._places(index)]
        return [
            RowPiece(self._reader.read_document(int(document), int(start), self._length(document, start)), int(choice))
            for document, start, choice in pieces
        ]

    def trace(self, index: int, change: str) -> SampleTrace:
        pieces = [
            piece
            for k in self._places(index)
            for piece in self._reader.sequence_pieces(
                int(self._documents[k]), int(self._starts[k]), self._length(self._documents[k], self._starts[k])
            )
        ]
        return self._reader.trace(index, pieces, change)

    def describe(self) -> str:
        """Returns how many documents share a row."""
        rows, pieces = self.samples_per_epoch, len(self._documents)
        return f"{self._reader.indexed.prefix}: {pieces:,} pieces of documents in {rows:,} rows, {pieces / rows:.1f} in each"

    def _places(self, index: int) -> range:
        epoch, place = divmod(index, self.samples_per_epoch)
        row = int(self._order(epoch)[place])
        return range(int(self._bounds[row]), int(self._bounds[row + 1]))

    def _length(self, document: np.integer, start: np.integer) -> int:
        return min(self._rule.piece, int(self._lengths[document]) - int(start))


def build_rows(lengths: NDArray[np.integer], documents: range, rule: PackingRule, seed: int) -> Arrays:
    """Packs pieces: the document, first token and choice of each, by rows, and the bounds of the rows."""
    pieces = cut_pieces(lengths, documents, rule.piece)
    random = legacy_random_state(seed)
    order = random.permutation(len(pieces["documents"]))
    numbers, starts = pieces["documents"][order], pieces["starts"][order]
    weights = np.cumsum(rule.choices)
    choices = np.searchsorted(weights / weights[-1], random.random_sample(len(order)), side="right").astype(np.uint8)
    costs = rule.costs(np.minimum(rule.piece, lengths[numbers] - starts).astype(np.int64), choices).astype(np.int32)
    orders: list[NDArray] = []
    counts: list[NDArray] = []
    for first in range(0, len(order), GROUP_DOCUMENTS):
        rows, count = pack_best_fit(costs[first : first + GROUP_DOCUMENTS], rule.capacity)
        orders.append(np.argsort(rows, kind="stable") + first)
        counts.append(np.bincount(rows, minlength=count))
    by_row = np.concatenate(orders) if orders else np.zeros(0, np.int64)
    bounds = np.concatenate([[0], np.cumsum(np.concatenate(counts))]) if counts else np.zeros(1, np.int64)
    columns = (numbers[by_row], starts[by_row], choices[by_row], bounds.astype(np.int64))
    return dict(zip(_ARRAYS, columns))


def packed_documents(begins_BS: NDArray[np.int64]) -> tuple[Documents, torch.Tensor]:
    """Returns the documents of packed rows and positions that restart in each, from the first position of each token's piece.

    begins_BS: -1 for padding, which is at the end.

    >>> documents, positions = packed_documents(np.array([[0, 0, 2, 2, 2, -1]]))
    >>> documents.starts_BS.tolist(), positions.tolist()
    ([[0, 0, 2, 2, 2, 5]], [[0, 1, 0, 1, 2, 0]])
    """
    is_padding = begins_BS < 0
    filled = (~is_padding).sum(axis=1, keepdims=True)
    starts = np.where(is_padding, filled, begins_BS)
    documents = Documents.build(starts, is_padding_BS=is_padding if bool(is_padding.any()) else None)
    return documents, torch.from_numpy(np.arange(starts.shape[1]) - starts)
