"""The documents of a packed batch, laid out once on the host, so that no layer synchronises with the device.

The fastest attention kernel (cuDNN's) needs batches of equally long sequences, and takes a tenth of a second to plan for a new
shape. A varlen kernel is half as fast, and on short documents launches cost more than arithmetic. So tokens are laid out in
*rows*:

    long documents     padded to one of a few lengths; documents of one padded length are grouped, in groups whose sizes are
                       powers of two (5 documents: a group of 4 and one of 1), for the dense kernel
    short documents    after them, concatenated without padding, for the varlen kernel

Under a causal mask padding *after* a document changes nothing: no token of the document attends to it, and its own output is
dropped. The padded lengths are multiples of 1/16 of the next power of two, so on average a thirtieth of the rows is padding; and
since shapes repeat over a run, so do the plans.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from petatron.kernels.attention.mask import chunk_starts

MIN_PADDED_DOCUMENT = 1024
"""The shortest document, in tokens, that goes to the dense kernel."""

PADDED_LENGTHS_PER_OCTAVE = 16
"""Padded lengths per octave: more of them waste less arithmetic, and need more plans."""


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
    """

    starts_BS: Tensor
    cu_seqlens: Tensor
    max_seqlen: int
    equal_length: int | None
    padded_rows: PaddedRows | None

    @classmethod
    def build(cls, starts_BS: NDArray[np.int64]) -> Documents:
        """Builds them on the host, from the first position of each token's document."""
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
        )

    @classmethod
    def of(cls, starts_BS: Tensor) -> Documents:
        """Builds them from a tensor; synchronises with its device, and the result is on that device."""
        return cls.build(starts_BS.cpu().numpy()).to(starts_BS.device)

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """Its tensors, which `to` moves."""
        return (
            self.starts_BS,
            self.cu_seqlens,
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
        )
        documents.copy_(self)
        return documents

    def copy_(self, other: Documents) -> None:
        """Copies other documents, at most as many, of a batch of the same shape."""
        count = other.cu_seqlens.numel()
        self.starts_BS.copy_(other.starts_BS, non_blocking=True)
        self.cu_seqlens[:count].copy_(other.cu_seqlens, non_blocking=True)
        self.cu_seqlens[count:].fill_(self.starts_BS.numel())

    def _with_tensors(self, tensors: list[Tensor]) -> Documents:
        rows = self.padded_rows
        if rows is not None:
            rows = replace(rows, token_index=tensors[2], short_cu_seqlens=tensors[3])
        return replace(self, starts_BS=tensors[0], cu_seqlens=tensors[1], padded_rows=rows)


def cut_into_chunks(
    documents: Documents | None, chunk: int, *, batch: int, length: int, device: torch.device
) -> Documents:
    """Returns documents of at most `chunk` tokens; without documents to cut, one and the same object for the same sizes.

    Cutting documents that are on an accelerator synchronises with it.
    """
    if documents is None:
        return _equal_chunks(chunk, batch, length, device)
    starts = documents.starts_BS
    return Documents.of(chunk_starts(length, chunk, starts, starts.device))


@lru_cache(maxsize=8)
def _equal_chunks(chunk: int, batch: int, length: int, device: torch.device) -> Documents:
    starts = chunk_starts(length, chunk, None, torch.device("cpu"))
    return Documents.of(starts.expand(batch, length)).to(device)


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
