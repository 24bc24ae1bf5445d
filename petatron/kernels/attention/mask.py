"""Which keys a query sees, as intervals: never a dense S x S mask.

Token i sees the tokens first(i), ..., i. Without windows and documents first(i) is 0; a window of w tokens makes it at least
i - w + 1, and packed documents make it at least the first position of i's document. Both never fall as i grows, and all
that follows rests on it.

A block is some queries against some keys, each a list of runs of consecutive positions (a context-parallel rank holds two
runs). `pieces` cuts it into rectangles of three kinds, and leaves out what nobody sees:

    full      every query sees every key                          any attention kernel
    causal    square; query i sees keys 0 ... i of the square     any causal attention kernel
    bounded   the mask depends on first(i)                        tiles, each with a mask made on the spot

With bounds, the queries are taken `tile` at a time. For queries a ... b - 1, the keys before min first(a) are seen by none,
and from max first(b - 1) on there is no bound but causality, minimum and maximum being over the batch; only what lies
between the two is bounded. So work follows what is visible.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch
from torch import Tensor

TILE = 512
"""Rows and columns of a tile: large enough to keep matrix units busy, small enough that a few fit in any memory."""

Kind = Literal["full", "causal", "bounded"]


@dataclass(frozen=True, slots=True, eq=False)
class Bounds:
    """first(i) for every position of a whole sequence.

    first_BS is on the device of the tensors, with one row if all sequences agree. lowest and highest are its minimum and
    maximum over the batch on the host, where the pieces are decided.
    """

    first_BS: Tensor
    lowest: np.ndarray
    highest: np.ndarray

    @classmethod
    def build(
        cls, length: int, *, window: int | None, document_starts_BS: Tensor | None, device: torch.device
    ) -> Bounds | None:
        """None if a token sees all before it. Documents on an accelerator cost one copy of 2 x length numbers to the host."""
        slides = window is not None and window < length
        if not slides and document_starts_BS is None:
            return None
        where = torch.device("cpu") if document_starts_BS is None else device
        first = torch.zeros(1, length, dtype=torch.int64, device=where)
        if slides:
            first = (torch.arange(1, length + 1, device=where) - window).clamp_(min=0).unsqueeze(0)
        if document_starts_BS is not None:
            assert document_starts_BS.shape[1] == length, "document starts are those of the whole sequence"
            first = torch.maximum(first, document_starts_BS.to(device))
        ends = torch.stack((first.amin(0), first.amax(0))).cpu().numpy()
        return cls(first.to(device, non_blocking=True), ends[0], ends[1])


@dataclass(frozen=True, slots=True)
class BlockMask:
    """The positions of a block's queries and keys, as runs in the order of its rows, and what limits the view back."""

    queries: tuple[range, ...]
    keys: tuple[range, ...]
    bounds: Bounds | None = None
    tile: int = TILE


@dataclass(frozen=True, slots=True)
class Piece:
    """A rectangle of a block: rows and columns of the block, and the positions of the first row and column.

    The positions run on from there in bounded pieces; in causal ones only their being equal counts.
    """

    kind: Kind
    rows: range
    columns: range
    row_position: int
    column_position: int


@dataclass(frozen=True, slots=True)
class Tile:
    """A part of a piece that is computed at once; `hidden` is what is masked, or None, to be broadcast over [B, Q, T]."""

    rows: range
    columns: range
    hidden: Tensor | None


def pieces(mask: BlockMask) -> list[Piece]:
    """The rectangles of a block in which something is seen."""
    starts = [run.start for run in mask.queries]
    if mask.bounds is None and mask.queries == mask.keys and starts == sorted(starts):
        whole = range(sum(len(run) for run in mask.queries))
        return [Piece("causal", whole, whole, 0, 0)]
    found: list[Piece] = []
    for first_row, queries in _numbered(mask.queries):
        for first_column, keys in _numbered(mask.keys):
            for kind, q, k in _between(queries, keys, mask):
                rows = _moved(q, first_row - queries.start)
                columns = _moved(k, first_column - keys.start)
                found.append(Piece(kind, rows, columns, q.start, k.start))
                _join_last_two(found)
    return found


def tiles(piece: Piece, mask: BlockMask, device: torch.device) -> Iterator[Tile]:
    """The tiles of a piece in which something is seen, in an order that is always the same."""
    bounds = mask.bounds if piece.kind == "bounded" else None
    for top in range(0, len(piece.rows), mask.tile):
        for left in range(0, len(piece.columns), mask.tile):
            rows, columns = piece.rows[top : top + mask.tile], piece.columns[left : left + mask.tile]
            q = _moved(rows, piece.row_position - piece.rows.start)
            k = _moved(columns, piece.column_position - piece.columns.start)
            if piece.kind != "full" and k.start >= q.stop:
                continue
            if bounds is not None and k.stop <= bounds.lowest[q.start]:
                continue
            yield Tile(rows, columns, None if piece.kind == "full" else _hidden(q, k, bounds, device))


def _hidden(q: range, k: range, bounds: Bounds | None, device: torch.device) -> Tensor | None:
    keys = torch.arange(k.start, k.stop, device=device)
    hidden = None
    if k.stop - 1 > q.start:
        hidden = keys > torch.arange(q.start, q.stop, device=device).unsqueeze(-1)
    if bounds is not None and bounds.highest[q.stop - 1] > k.start:
        behind = keys < bounds.first_BS[:, q.start : q.stop].unsqueeze(-1)
        hidden = behind if hidden is None else hidden | behind
    return hidden


def _between(queries: range, keys: range, mask: BlockMask) -> Iterator[tuple[Kind, range, range]]:
    """The rectangles of one run of queries against one run of keys, in positions."""
    bounds = mask.bounds
    if bounds is None or bounds.highest[queries.stop - 1] <= keys.start:
        yield from _causal(queries, keys)
        return
    for start in range(queries.start, queries.stop, mask.tile):
        rows = range(start, min(start + mask.tile, queries.stop))
        lowest, highest = int(bounds.lowest[rows.start]), int(bounds.highest[rows.stop - 1])
        cut = range(max(keys.start, lowest), min(keys.stop, highest))
        if cut:
            yield "bounded", range(max(rows.start, cut.start), rows.stop), cut
        yield from _causal(rows, range(max(keys.start, highest), keys.stop))


def _causal(queries: range, keys: range) -> Iterator[tuple[Kind, range, range]]:
    """Keys before the queries are seen by all; then comes a square on the diagonal, and what is below it."""
    queries = range(max(queries.start, keys.start), queries.stop)
    before = range(keys.start, min(keys.stop, queries.start))
    square = range(queries.start, min(queries.stop, keys.stop))
    below = range(square.stop, queries.stop)
    if queries and before:
        yield "full", queries, before
    if square:
        yield "causal", square, square
    if square and below:
        yield "full", below, square


def _join_last_two(found: list[Piece]) -> None:
    """Two full pieces side by side in the block are one, whatever the positions: one call of a kernel instead of two."""
    if len(found) < 2 or not found[-1].kind == found[-2].kind == "full":
        return
    one, two = found[-2:]
    rows, columns = one.rows, one.columns
    if columns == two.columns and rows.stop == two.rows.start:
        rows = range(rows.start, two.rows.stop)
    elif rows == two.rows and columns.stop == two.columns.start:
        columns = range(columns.start, two.columns.stop)
    else:
        return
    found[-2:] = [Piece("full", rows, columns, one.row_position, one.column_position)]


def _numbered(runs: tuple[range, ...]) -> Iterator[tuple[int, range]]:
    """Each run with the row at which it begins."""
    row = 0
    for run in runs:
        yield row, run
        row += len(run)


def _moved(positions: range, by: int) -> range:
    return range(positions.start + by, positions.stop + by)
