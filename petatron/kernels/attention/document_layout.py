"""The documents of a packed batch, laid out once on the host, so that no layer synchronizes with the device.

The fastest attention kernel (cuDNN's) needs batches of equally long sequences, and takes a tenth of a second to plan for a new
shape. A varlen kernel is half as fast, and on short documents launches cost more than arithmetic. So tokens are laid out in
*rows*:

    long documents     padded to one of a few lengths; documents of one padded length are grouped, in groups whose sizes are
                       powers of two (5 documents: a group of 4 and one of 1), for the dense kernel
    short documents    after them, concatenated without padding, for the varlen kernel

Under a causal mask padding *after* a document changes nothing: no token of the document attends to it, and its own output is
dropped. The padded lengths are multiples of 1/16 of the next power of two, so on average a thirtieth of the rows is padding; and
since shapes repeat over a run, so do the plans.

**Padding** is in documents of its own, of at most `PADDING_DOCUMENT` tokens: no token sees it, it costs little, and every kernel that has
documents has padding. **Prefixes** are the first tokens of documents, which all of them see (`prefix` in `visibility.py`).
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from petatron.base.errors import DataError
from petatron.kernels.size_limits import MIN_PADDED_DOCUMENT

PADDED_LENGTHS_PER_OCTAVE = 16
"""Padded lengths per octave: more of them waste less arithmetic, and need more plans."""

PADDING_DOCUMENT = 128
"""Padding is cut into documents of this many tokens."""


@dataclass(frozen=True, slots=True)
class DocumentGroup:
    """`count` documents of one padded `length`: rows first_row ... first_row + count * length - 1."""

    first_row: int
    count: int
    length: int


@dataclass(frozen=True, slots=True)
class PaddedRows:
    """The row layout of a batch with long documents.

    token_index: for every row the index of its token, or -1 for padding; int32.
    groups: of long documents, from the first row on without gaps.
    short_cu_seqlens: start row of each short document, and end of the last, counted from the first short row; int32.
    short_max_seqlen: tokens of the longest of them, 0 when there is none.
    """

    token_index: Tensor
    groups: tuple[DocumentGroup, ...]
    short_cu_seqlens: Tensor
    short_max_seqlen: int

    @property
    def first_short_row(self) -> int:
        last = self.groups[-1]
        return last.first_row + last.count * last.length


@dataclass(frozen=True, slots=True)
class Documents:
    """The documents of a [B, S] batch; a token's index is row * S + position.

    starts_BS: the first position of each token's document.
    cu_seqlens: index of each document's first token, and the end of the last; int32.
    max_seqlen: tokens of the longest document.
    equal_length: tokens of every document, where all are of one length that needs no padding.
    padded_rows: the layout for the dense kernel; None when there is no long document.
    prefix_ends_BS: the first position after the prefix of each token's document; None: documents have no prefix.
    computed: what attention makes of them once for all layers that see the same.
    """

    starts_BS: Tensor
    cu_seqlens: Tensor
    max_seqlen: int
    equal_length: int | None
    padded_rows: PaddedRows | None
    prefix_ends_BS: Tensor | None = None
    computed: dict[Any, Any] = field(default_factory=dict, compare=False, repr=False)

    @classmethod
    def build(
        cls,
        starts_BS: NDArray[np.int64],
        *,
        is_padding_BS: NDArray[np.bool_] | None = None,
        in_prefix_BS: NDArray[np.bool_] | None = None,
    ) -> Documents:
        """Builds them on the host, from the first position of each token's document.

        is_padding_BS: tokens before, after and between documents that no other one sees. in_prefix_BS: the tokens of prefixes.
        """
        if is_padding_BS is not None:
            starts_BS = _starts_beside_padding(starts_BS, is_padding_BS)
        begins = np.flatnonzero(starts_BS == np.arange(starts_BS.shape[1]))
        ends = np.append(begins, starts_BS.size)
        lengths = np.diff(ends)
        longest = int(lengths.max())
        padded = padded_lengths(lengths)
        return cls(
            torch.from_numpy(np.ascontiguousarray(starts_BS)),
            torch.from_numpy(ends.astype(np.int32)),
            longest,
            longest if (padded == longest).all() and (lengths == longest).all() else None,
            _build_padded_rows(begins, lengths, padded) if longest >= MIN_PADDED_DOCUMENT else None,
            None if in_prefix_BS is None else torch.from_numpy(_prefix_ends(starts_BS, in_prefix_BS)),
        )

    @classmethod
    def of_lengths(cls, lengths_B: NDArray[np.int64], length: int) -> Documents:
        """Builds the documents of samples padded at their end: row b has `lengths_B[b]` tokens, then padding.

        >>> Documents.of_lengths(np.array([3, 4]), 4).starts_BS.tolist()
        [[0, 0, 0, 3], [0, 0, 0, 0]]
        """
        is_padding = np.arange(length) >= lengths_B[:, None]
        return cls.build(np.zeros(is_padding.shape, np.int64), is_padding_BS=is_padding)

    @classmethod
    def of(cls, starts_BS: Tensor) -> Documents:
        """Builds them from a tensor; synchronizes with its device, and the result is on that device."""
        return cls.build(starts_BS.cpu().numpy()).to(starts_BS.device)

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """Its tensors, which `to` moves."""
        return (
            self.starts_BS,
            self.cu_seqlens,
            *(() if self.prefix_ends_BS is None else (self.prefix_ends_BS,)),
            *(() if self.padded_rows is None else (self.padded_rows.token_index, self.padded_rows.short_cu_seqlens)),
        )

    def to(self, device: torch.device, non_blocking: bool = False) -> Documents:
        return self._with_tensors([x.to(device, non_blocking=non_blocking) for x in self.tensors])

    def pin_memory(self) -> Documents:
        """Pins its tensors, so that a copy to a device is asynchronous."""
        return self._with_tensors([x.pin_memory() for x in self.tensors])

    @property
    def num_documents(self) -> int:
        return self.cu_seqlens.numel() - 1

    def bounded(self, most: int) -> Documents:
        """Returns a copy with room for `most` documents, the missing ones empty, and bounds that other documents of this shape have too.

        What the varlen kernel computes does not depend on either, so a CUDA graph of it serves them all (`copy_`).
        """
        assert self.padded_rows is None, "long documents are laid out by their lengths"
        documents = replace(
            self,
            starts_BS=self.starts_BS.clone(),
            cu_seqlens=self.cu_seqlens.new_empty(most + 1),
            max_seqlen=self.starts_BS.shape[1],
            prefix_ends_BS=None if self.prefix_ends_BS is None else self.prefix_ends_BS.clone(),
            computed={},
        )
        documents.copy_(self)
        return documents

    def copy_(self, other: Documents) -> None:
        """Copies other documents, at most as many, of a batch of the same shape."""
        count = other.cu_seqlens.numel()
        self.starts_BS.copy_(other.starts_BS, non_blocking=True)
        self.cu_seqlens[:count].copy_(other.cu_seqlens, non_blocking=True)
        self.cu_seqlens[count:].fill_(self.starts_BS.numel())
        if self.prefix_ends_BS is not None and other.prefix_ends_BS is not None:
            self.prefix_ends_BS.copy_(other.prefix_ends_BS, non_blocking=True)
        self.computed.clear()

    def _with_tensors(self, tensors: list[Tensor]) -> Documents:
        rows, (starts, cu_seqlens, *others) = self.padded_rows, tensors
        prefix_ends = None if self.prefix_ends_BS is None else others.pop(0)
        if rows is not None:
            rows = replace(rows, token_index=others[0], short_cu_seqlens=others[1])
        return Documents(
            starts, cu_seqlens, self.max_seqlen, self.equal_length, rows, prefix_ends_BS=prefix_ends, computed={}
        )


@dataclass(frozen=True, slots=True)
class KeySpans:
    """The keys of another sequence that each query sees in cross attention: first_BS <= position of the key < stop_BS.

    Both are of all positions of the queries' sequence, whichever of them a rank has, and neither decreases along it.
    """

    first_BS: Tensor
    stop_BS: Tensor
    computed: dict[Any, Any] = field(default_factory=dict, compare=False, repr=False)

    @classmethod
    def of_lengths(cls, key_lengths_B: Tensor, query_length: int) -> KeySpans:
        """Builds the spans of keys padded at their end: every query of row b sees the first `key_lengths_B[b]` keys; on their device."""
        stops = key_lengths_B.to(torch.int64).unsqueeze(1).expand(-1, query_length)
        return cls(torch.zeros_like(stops), stops)

    @classmethod
    def of_documents(cls, queries: Documents, keys: Documents) -> KeySpans:
        """Pairs the documents of two packed sequences by their order, on the host; padding is at the end of their rows.

        Where a row has more documents of queries than of keys, the others see no keys.
        """
        query_starts, key_starts = queries.starts_BS.numpy(), keys.starts_BS.numpy()
        first = np.full(query_starts.shape, key_starts.shape[1], np.int64)
        stop = first.copy()
        for row, (row_starts, row_key_starts) in enumerate(zip(query_starts, key_starts, strict=True)):
            begins, numbers = np.unique(row_key_starts), np.unique(row_starts, return_inverse=True)[1]
            paired = numbers < len(begins)
            first[row, paired] = begins[numbers[paired]]
            stop[row, paired] = np.append(begins[1:], key_starts.shape[1])[numbers[paired]]
        return cls(torch.from_numpy(first), torch.from_numpy(stop))

    def to(self, device: torch.device, non_blocking: bool = False) -> KeySpans:
        return KeySpans(*(x.to(device, non_blocking=non_blocking) for x in self.tensors))

    @property
    def tensors(self) -> tuple[Tensor, Tensor]:
        """Its tensors, which `to` moves."""
        return self.first_BS, self.stop_BS

    def clone(self) -> KeySpans:
        """Returns a copy in memory of its own, which `copy_` writes to."""
        return KeySpans(*(x.clone(memory_format=torch.contiguous_format) for x in self.tensors))

    def copy_(self, other: KeySpans) -> None:
        """Copies the spans of a batch of the same shape."""
        for target, x in zip(self.tensors, other.tensors, strict=True):
            target.copy_(x, non_blocking=True)
        self.computed.clear()

    def pin_memory(self) -> KeySpans:
        """Pins its tensors, so that a copy to a device is asynchronous."""
        return KeySpans(*(x.contiguous().pin_memory() for x in self.tensors))


def document_ends(starts_BS: Tensor) -> Tensor:
    """Returns one after the last position of each token's document, on the device of the starts.

    >>> document_ends(torch.tensor([[0, 0, 2, 3, 3]])).tolist()
    [[2, 2, 3, 5, 5]]
    """
    length = starts_BS.shape[1]
    positions = torch.arange(1, length + 1, device=starts_BS.device)
    last = torch.ones_like(starts_BS, dtype=torch.bool)
    last[:, :-1] = starts_BS[:, 1:] != starts_BS[:, :-1]
    ends = torch.where(last, positions, length)
    return ends.flip(1).cummin(dim=1).values.flip(1)


def chunk_starts(length: int, chunk: int, document_starts_BS: Tensor | None, device: torch.device) -> Tensor:
    """Returns the first position of each token's chunk, [1 or B, S]; the chunks of a document begin with it.

    >>> chunk_starts(5, 2, torch.tensor([[0, 0, 0, 3, 3]]), torch.device("cpu")).tolist()
    [[0, 0, 2, 3, 3]]
    """
    positions = torch.arange(length, device=device).unsqueeze(0)
    starts = positions.new_zeros(1, 1) if document_starts_BS is None else document_starts_BS.to(device)
    return positions - (positions - starts) % chunk


def _starts_beside_padding(starts_BS: NDArray[np.int64], is_padding_BS: NDArray[np.bool_]) -> NDArray[np.int64]:
    """Returns the starts of documents that begin after padding, and of the padding between them.

    >>> _starts_beside_padding(np.array([[0, 0, 0, 3, 3]]), np.array([[True, False, False, False, True]])).tolist()
    [[0, 1, 1, 3, 4]]
    """
    positions = np.broadcast_to(np.arange(starts_BS.shape[1]), starts_BS.shape)
    padding_before = np.maximum.accumulate(np.where(is_padding_BS, positions, -1), axis=1)
    tokens_before = np.maximum.accumulate(np.where(is_padding_BS, -1, positions), axis=1)
    offset = positions - tokens_before - 1
    padding_starts = positions - offset % PADDING_DOCUMENT
    first_token = np.maximum(starts_BS, padding_before + 1)
    same_document = ~is_padding_BS & (first_token == positions) & (starts_BS < positions)
    earlier_token = np.take_along_axis(tokens_before, np.maximum(positions - 1, 0), axis=1)
    before_padding = np.take_along_axis(earlier_token, np.maximum(padding_before, 0), axis=1)
    if (same_document & (before_padding >= starts_BS)).any():
        raise DataError("Padding is inside of a document. It may only be before or after the tokens of one.")
    return np.where(is_padding_BS, padding_starts, first_token)


def _prefix_ends(starts_BS: NDArray[np.int64], in_prefix_BS: NDArray[np.bool_]) -> NDArray[np.int64]:
    """Returns one after the last token of the prefix of each token's document.

    >>> _prefix_ends(np.array([[0, 0, 0, 3, 3]]), np.array([[True, True, False, False, False]])).tolist()
    [[2, 2, 2, 3, 3]]
    """
    counts = np.cumsum(np.pad(in_prefix_BS, ((0, 0), (1, 0))), axis=1)
    document_ends_BS = document_ends(torch.from_numpy(np.ascontiguousarray(starts_BS))).numpy()
    size = np.take_along_axis(counts, document_ends_BS, axis=1) - np.take_along_axis(counts, starts_BS, axis=1)
    ends = starts_BS + size
    if (in_prefix_BS != (np.arange(starts_BS.shape[1]) < ends)).any():
        raise DataError("A prefix is not at the beginning of its document.")
    return ends


def cut_into_chunks(
    documents: Documents | None, chunk: int, *, batch: int, length: int, device: torch.device
) -> Documents:
    """Returns documents of at most `chunk` tokens; without documents to cut, one and the same object for the same sizes.

    Cutting documents that are on an accelerator synchronizes with it.
    """
    if documents is None:
        return _equal_chunks(chunk, batch, length, device)
    starts = documents.starts_BS
    cut = Documents.of(chunk_starts(length, chunk, starts, starts.device))
    return cut if documents.prefix_ends_BS is None else replace(cut, prefix_ends_BS=documents.prefix_ends_BS)


@lru_cache(maxsize=8)
def _equal_chunks(chunk: int, batch: int, length: int, device: torch.device) -> Documents:
    return Documents.of(chunk_starts(length, chunk, None, torch.device("cpu")).expand(batch, length)).to(device)


def padded_lengths(lengths: NDArray[np.int64]) -> NDArray[np.int64]:
    """Returns the rows of documents of these lengths when padded.

    >>> padded_lengths(np.array([1000, 1024, 1025, 2048, 2049, 5000])).tolist()
    [1024, 1024, 1152, 2048, 2304, 5120]
    """
    octave = 2 ** np.ceil(np.log2(lengths)).astype(np.int64)
    step = np.maximum(octave, MIN_PADDED_DOCUMENT) // PADDED_LENGTHS_PER_OCTAVE
    return -(-lengths // step) * step


def _build_padded_rows(begins: NDArray[np.int64], lengths: NDArray[np.int64], padded: NDArray[np.int64]) -> PaddedRows:
    token_indices, groups, first = [], [], 0
    for length in np.unique(padded[lengths >= MIN_PADDED_DOCUMENT])[::-1].tolist():
        chosen = (padded == length) & (lengths >= MIN_PADDED_DOCUMENT)
        offset = np.arange(length)
        token_indices.append(np.where(offset < lengths[chosen, None], begins[chosen, None] + offset, -1).reshape(-1))
        remaining = int(chosen.sum())
        while remaining:
            count = 1 << (remaining.bit_length() - 1)
            groups.append(DocumentGroup(first, count, length))
            first += count * length
            remaining -= count
    short = lengths < MIN_PADDED_DOCUMENT
    token_indices += [np.arange(begin, begin + length) for begin, length in zip(begins[short], lengths[short])]
    short_ends = np.concatenate(([0], np.cumsum(lengths[short]))).astype(np.int32)
    return PaddedRows(
        torch.from_numpy(np.concatenate(token_indices).astype(np.int32)),
        tuple(groups),
        torch.from_numpy(short_ends),
        int(lengths[short].max(initial=0)),
    )
