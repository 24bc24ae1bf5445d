"""Checks that the ids of a token file are below the size of the vocabulary.

Nothing in a file says which ids it has, and an id without an embedding is an error far from its cause, or none. So each sample is checked
when `GPTDataset` reads it, before anything else sees it: that costs microseconds and needs no trust in anything recorded
earlier. A start checks parts of each file only, because a scan of 15 trillion tokens would take hours; `petatron data inspect`
scans a whole file at the speed of the disk (`scan_ids`).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from petatron.base.errors import DataError
from petatron.base.format_text import count_with_noun
from petatron.data.indexed_dataset import IndexedDataset

CHECKED_SEQUENCES = 64
CHECKED_TOKENS = 4096
"""A start checks this many tokens at the beginning of this many sequences, spread over the file."""


@dataclass(frozen=True, slots=True)
class TokenPlace:
    """Where a token is. `position` counts within the sequence, and `sequence` is None if each document is one."""

    document: int
    sequence: int | None
    position: int

    def __str__(self) -> str:
        sequence = "" if self.sequence is None else f", sequence {self.sequence:,}"
        return f"document {self.document:,}{sequence}, token {self.position:,}"


@dataclass(frozen=True, slots=True)
class IdRange:
    """The ids of a file. `first_beyond`: the first that is no id of the vocabulary, and its place; None if all are."""

    low: int
    high: int
    num_beyond: int = 0
    first_beyond: tuple[int, TokenPlace] | None = None

    def problem(self, prefix: str, vocab_size: int) -> str | None:
        """Returns what is wrong with a file for a vocabulary."""
        if self.first_beyond is None:
            return None
        number, place = self.first_beyond
        return (
            f"{prefix}: {place}, has the id {number}, and the vocabulary has {vocab_size:,} ids. "
            f"{count_with_noun(self.num_beyond, 'token')} of the file exceed it; ids are {self.low} to {self.high}. "
            "Use the tokenizer the data was preprocessed with."
        )


def token_place(dataset: IndexedDataset, sequence: int, position: int) -> TokenPlace:
    """Returns the place of a token of a sequence."""
    if dataset.one_sequence_per_document:
        return TokenPlace(sequence, None, position)
    document = int(np.searchsorted(dataset.document_indices, sequence, side="right")) - 1
    return TokenPlace(document, sequence, position)


def first_beyond(ids: NDArray, vocab_size: int) -> int | None:
    """Returns the place of the first id that the vocabulary does not have.

    >>> first_beyond(np.array([1, 2, 9, 3]), 9), first_beyond(np.array([1, -1]), 9), first_beyond(np.array([1, 2]), 9)
    (2, 1, None)
    """
    if not ids.size or (int(ids.max()) < vocab_size and int(ids.min()) >= 0):
        return None
    return int(np.argmax((ids >= vocab_size) | (ids < 0)))


def raise_beyond(dataset: IndexedDataset, sequence: int, position: int, number: int, vocab_size: int) -> None:
    """Raises for an id that the vocabulary does not have."""
    raise DataError(
        f"{dataset.prefix}: {token_place(dataset, sequence, position)}, has the id {number}, but the vocabulary has {vocab_size} ids. "
        f"Use the tokenizer the data was preprocessed with, or set --vocab-size. `petatron data inspect {dataset.prefix} --vocab-size "
        f"{vocab_size}` counts all such tokens."
    )


def check_some_ids(dataset: IndexedDataset, vocab_size: int) -> None:
    """Checks ids in parts of a file, so that most files of another vocabulary are refused before a run starts."""
    if can_hold_only(dataset, vocab_size):
        return
    chosen = np.unique(np.linspace(0, dataset.num_sequences - 1, CHECKED_SEQUENCES).astype(np.int64))
    for sequence in chosen.tolist():
        tokens = dataset.get(sequence, 0, min(CHECKED_TOKENS, int(dataset.lengths[sequence])))
        if (position := first_beyond(tokens, vocab_size)) is not None:
            raise_beyond(dataset, sequence, position, int(tokens[position]), vocab_size)


def can_hold_only(dataset: IndexedDataset, vocab_size: int) -> bool:
    """Whether the type of a file's tokens has no value beyond the vocabulary."""
    return dataset.dtype.kind == "u" and int(np.iinfo(dataset.dtype).max) < vocab_size


def scan_ids(
    dataset: IndexedDataset, vocab_size: int | None, on_progress: Callable[[int, int], None] = lambda done, total: None
) -> IdRange:
    """Reads all ids of a file; `on_progress` is told the tokens that are done, and all.

    vocab_size: None if only the range is asked for.
    """
    low, high, num_beyond, done = np.iinfo(np.int64).max, np.iinfo(np.int64).min, 0, 0
    first: tuple[int, TokenPlace] | None = None
    for sequence, ids in dataset.blocks():
        block_low, block_high = int(ids.min()), int(ids.max())
        low, high = min(low, block_low), max(high, block_high)
        if vocab_size is not None and (block_high >= vocab_size or block_low < 0):
            beyond = (ids >= vocab_size) | (ids < 0)
            num_beyond += int(beyond.sum())
            if first is None:
                place = int(np.argmax(beyond))
                first = int(ids[place]), token_place(dataset, *dataset.token_in_block(sequence, place))
        done += len(ids)
        on_progress(done, dataset.num_tokens)
    return IdRange(low, high, num_beyond, first)
