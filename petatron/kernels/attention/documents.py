"""Where the documents of a packed batch lie, worked out once on the host, so that no layer has to ask the device.

The fastest attention kernel (cuDNN's) wants batches of equally long sequences, and takes a tenth of a second to plan for a
shape that it has not seen. A kernel for any lengths is half as fast, and on short documents launches cost more than
arithmetic. So tokens are laid out in *rows*:

    long documents     followed by padding up to one of a few lengths; documents of one padded length stand together in groups
                       whose sizes are powers of two (5 documents: a group of 4 and one of 1), for the fast kernel
    short documents    behind them, one after the other without padding, for the kernel that takes any lengths

Under a causal mask padding *behind* a document changes nothing: no token of the document sees it, and what it would see
itself is dropped. The padded lengths are multiples of 1/16 of the next power of two, so on average a thirtieth of the rows
is padding; and since shapes repeat over a run, so do the plans.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

MIN_PADDED_DOCUMENT = 1024
"""Tokens from which on the arithmetic of a document is worth a call of its own."""

PADDED_LENGTHS_PER_OCTAVE = 16
"""Padded lengths in an octave: more of them waste less arithmetic, and meet more shapes."""


@dataclass(frozen=True, slots=True)
class DocumentGroup:
    """`count` documents of one padded `length`: rows first_row ... first_row + count * length - 1."""

    first_row: int
    count: int
    length: int


@dataclass(frozen=True, slots=True)
class PaddedRows:
    """How the tokens of a batch with long documents are laid out.

    token_index: for every row the number of its token, or -1 for padding; int32.
    groups: of long documents, from the first row on without gaps.
    short_cu_seqlens: row of each short document's first token, and of the one behind the last, counted from the first short row;
        int32.
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
    """The documents of a [B, S] batch; a token's number is row * S + position.

    starts_BS: the first position of each token's document.
    cu_seqlens: number of each document's first token, and of the one behind the last; int32.
    max_seqlen: tokens of the longest document.
    equal_length: tokens of every document, where they are all as long, and as long as a padded document: they need no other layout.
    padded_rows: the layout for kernels that want equal lengths; None when there is no long document.
    """

    starts_BS: Tensor
    cu_seqlens: Tensor
    max_seqlen: int
    equal_length: int | None
    padded_rows: PaddedRows | None

    @classmethod
    def build(cls, starts_BS: NDArray[np.int64]) -> Documents:
        """From the first position of each token's document, on the host."""
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
        """From a tensor; one on a device is waited for, and the result is on that device."""
        return cls.build(starts_BS.cpu().numpy()).to(starts_BS.device)

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """Everything of it that lies on a device."""
        return (
            self.starts_BS,
            self.cu_seqlens,
            *(() if self.padded_rows is None else (self.padded_rows.token_index, self.padded_rows.short_cu_seqlens)),
        )

    def to(self, device: torch.device, non_blocking: bool = False) -> Documents:
        return self._with_tensors([x.to(device, non_blocking=non_blocking) for x in self.tensors])

    def pin_memory(self) -> Documents:
        """In memory from which a copy to a device does not wait."""
        return self._with_tensors([x.pin_memory() for x in self.tensors])

    def _with_tensors(self, tensors: list[Tensor]) -> Documents:
        rows = self.padded_rows
        if rows is not None:
            rows = replace(rows, token_index=tensors[2], short_cu_seqlens=tensors[3])
        return replace(self, starts_BS=tensors[0], cu_seqlens=tensors[1], padded_rows=rows)


def padded_lengths(lengths: NDArray[np.int64]) -> NDArray[np.int64]:
    """The rows that documents of these lengths take when they are padded.

    >>> padded_lengths(np.array([1000, 1024, 1025, 2048, 2049, 5000])).tolist()
    [1024, 1024, 1152, 2048, 2304, 5120]
    """
    octave = 2 ** np.ceil(np.log2(lengths)).astype(np.int64)
    step = np.maximum(octave, MIN_PADDED_DOCUMENT) // PADDED_LENGTHS_PER_OCTAVE
    return -(-lengths // step) * step


def _build_padded_rows(begins: NDArray[np.int64], lengths: NDArray[np.int64], padded: NDArray[np.int64]) -> PaddedRows:
    sources, groups, first = [], [], 0
    for length in np.unique(padded[lengths >= MIN_PADDED_DOCUMENT])[::-1].tolist():
        chosen = (padded == length) & (lengths >= MIN_PADDED_DOCUMENT)
        inside = np.arange(length)
        sources.append(np.where(inside < lengths[chosen, None], begins[chosen, None] + inside, -1).reshape(-1))
        left = int(chosen.sum())
        while left:
            count = 1 << (left.bit_length() - 1)
            groups.append(DocumentGroup(first, count, length))
            first += count * length
            left -= count
    short = lengths < MIN_PADDED_DOCUMENT
    sources += [np.arange(begin, begin + length) for begin, length in zip(begins[short], lengths[short])]
    short_ends = np.concatenate(([0], np.cumsum(lengths[short]))).astype(np.int32)
    return PaddedRows(
        torch.from_numpy(np.concatenate(sources).astype(np.int32)),
        tuple(groups),
        torch.from_numpy(short_ends),
        int(lengths[short].max(initial=0)),
    )
