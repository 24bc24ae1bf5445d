"""The attention mask as intervals of visible keys: never a dense S x S mask.

Token i attends to tokens first(i), ..., i. Without windows and documents first(i) is 0; a window of w tokens makes it at least
i - w + 1, packed documents make it at least the first position of i's document, and chunks of c tokens (Llama 4) cut a document d into
[d, d + c), [d + c, d + 2 c), ... All are monotonic in i, and all that follows relies on it.

A block is some queries against some keys, each a list of runs of consecutive positions (a context-parallel rank has two runs).
`mask_rectangles` cuts it into rectangles of three kinds, and leaves out what is masked:

    full      every query sees every key                          any attention kernel
    causal    square; query i sees keys 0 ... i of the square     any causal attention kernel
    bounded   the mask depends on first(i)                        tiles, each with its own mask tensor

With bounds, the queries are processed `tile_size` at a time. For queries a ... b - 1, the keys before min first(a) are visible to
none, and from max first(b - 1) on there is no bound but causality, minimum and maximum being over the batch; only the keys between
the two are bounded. So work is proportional to what is visible.
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

RectangleKind = Literal["full", "causal", "bounded"]


@dataclass(frozen=True, slots=True, eq=False)
class AttentionBounds:
    """first(i) for every position of a whole sequence.

    `first_visible_BS` is on the device of the tensors, with one row if all sequences agree. `min_first_visible` and
    `max_first_visible` are its minimum and maximum over the batch on the host, where rectangles are computed.
    """

    first_visible_BS: Tensor
    min_first_visible: np.ndarray
    max_first_visible: np.ndarray

    @classmethod
    def build(
        cls,
        length: int,
        *,
        window: int | None,
        document_starts_BS: Tensor | None,
        device: torch.device,
        chunk: int | None = None,
    ) -> AttentionBounds | None:
        """Returns None if a token attends to all before it. Documents on an accelerator cost one copy of 2 x length numbers."""
        slides = window is not None and window < length
        if not slides and document_starts_BS is None and (chunk is None or chunk >= length):
            return None
        where = torch.device("cpu") if document_starts_BS is None else device
        first = torch.zeros(1, length, dtype=torch.int64, device=where)
        if slides:
            first = (torch.arange(1, length + 1, device=where) - window).clamp_(min=0).unsqueeze(0)
        if document_starts_BS is not None:
            assert document_starts_BS.shape[1] == length, "document starts are those of the whole sequence"
            first = torch.maximum(first, document_starts_BS.to(device))
        if chunk is not None:
            first = torch.maximum(first, chunk_starts(length, chunk, document_starts_BS, where))
        ends = torch.stack((first.amin(0), first.amax(0))).cpu().numpy()
        return cls(first.to(device, non_blocking=True), ends[0], ends[1])


def chunk_starts(length: int, chunk: int, document_starts_BS: Tensor | None, device: torch.device) -> Tensor:
    """Returns the first position of each token's chunk, [1 or B, S]; the chunks of a document begin with it.

    >>> chunk_starts(5, 2, torch.tensor([[0, 0, 0, 3, 3]]), torch.device("cpu")).tolist()
    [[0, 0, 2, 3, 3]]
    """
    positions = torch.arange(length, device=device).unsqueeze(0)
    starts = positions.new_zeros(1, 1) if document_starts_BS is None else document_starts_BS.to(device)
    return positions - (positions - starts) % chunk


@dataclass(frozen=True, slots=True)
class BlockMask:
    """The positions of a block's queries and keys, as runs in the order of its rows, and their lower bounds."""

    queries: tuple[range, ...]
    keys: tuple[range, ...]
    bounds: AttentionBounds | None = None
    tile_size: int = TILE


@dataclass(frozen=True, slots=True)
class MaskRectangle:
    """A rectangle of a block: rows and columns of the block, and the positions of the first row and column.

    Positions are consecutive in bounded rectangles; in causal ones only the equality of the first two matters.
    """

    kind: RectangleKind
    rows: range
    columns: range
    row_position: int
    column_position: int


@dataclass(frozen=True, slots=True)
class MaskTile:
    """A part of a rectangle, computed at once; `masked_out` is its mask, or None, broadcast over [B, Q, T]."""

    rows: range
    columns: range
    masked_out: Tensor | None


def mask_rectangles(mask: BlockMask) -> list[MaskRectangle]:
    """Returns the rectangles of a block that are not entirely masked."""
    starts = [run.start for run in mask.queries]
    if mask.bounds is None and mask.queries == mask.keys and starts == sorted(starts):
        whole = range(sum(len(run) for run in mask.queries))
        return [MaskRectangle("causal", whole, whole, 0, 0)]
    rectangles: list[MaskRectangle] = []
    for first_row, queries in _with_first_row(mask.queries):
        for first_column, keys in _with_first_row(mask.keys):
            for kind, q, k in _rectangles_between(queries, keys, mask):
                rows = _shifted(q, first_row - queries.start)
                columns = _shifted(k, first_column - keys.start)
                rectangles.append(MaskRectangle(kind, rows, columns, q.start, k.start))
                _merge_last_two(rectangles)
    return rectangles


def mask_tiles(rectangle: MaskRectangle, mask: BlockMask, device: torch.device) -> Iterator[MaskTile]:
    """Yields the tiles of a rectangle that are not entirely masked, in a fixed order."""
    bounds = mask.bounds if rectangle.kind == "bounded" else None
    for top in range(0, len(rectangle.rows), mask.tile_size):
        for left in range(0, len(rectangle.columns), mask.tile_size):
            rows, columns = rectangle.rows[top : top + mask.tile_size], rectangle.columns[left : left + mask.tile_size]
            q = _shifted(rows, rectangle.row_position - rectangle.rows.start)
            k = _shifted(columns, rectangle.column_position - rectangle.columns.start)
            if rectangle.kind != "full" and k.start >= q.stop:
                continue
            if bounds is not None and k.stop <= bounds.min_first_visible[q.start]:
                continue
            yield MaskTile(rows, columns, None if rectangle.kind == "full" else _masked_out(q, k, bounds, device))


def _masked_out(q: range, k: range, bounds: AttentionBounds | None, device: torch.device) -> Tensor | None:
    keys = torch.arange(k.start, k.stop, device=device)
    masked = None
    if k.stop - 1 > q.start:
        masked = keys > torch.arange(q.start, q.stop, device=device).unsqueeze(-1)
    if bounds is not None and bounds.max_first_visible[q.stop - 1] > k.start:
        below_bound = keys < bounds.first_visible_BS[:, q.start : q.stop].unsqueeze(-1)
        masked = below_bound if masked is None else masked | below_bound
    return masked


def _rectangles_between(queries: range, keys: range, mask: BlockMask) -> Iterator[tuple[RectangleKind, range, range]]:
    """Yields the rectangles of one run of queries against one run of keys, in positions."""
    bounds = mask.bounds
    if bounds is None or bounds.max_first_visible[queries.stop - 1] <= keys.start:
        yield from _causal_rectangles(queries, keys)
        return
    for start in range(queries.start, queries.stop, mask.tile_size):
        rows = range(start, min(start + mask.tile_size, queries.stop))
        lowest, highest = int(bounds.min_first_visible[rows.start]), int(bounds.max_first_visible[rows.stop - 1])
        cut = range(max(keys.start, lowest), min(keys.stop, highest))
        if cut:
            yield "bounded", range(max(rows.start, cut.start), rows.stop), cut
        yield from _causal_rectangles(rows, range(max(keys.start, highest), keys.stop))


def _causal_rectangles(queries: range, keys: range) -> Iterator[tuple[RectangleKind, range, range]]:
    """Yields the keys before the queries (full), the square on the diagonal, and the rows below it (full)."""
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


def _merge_last_two(rectangles: list[MaskRectangle]) -> None:
    """Merges two adjacent full rectangles, whatever their positions: one kernel call instead of two."""
    if len(rectangles) < 2 or not rectangles[-1].kind == rectangles[-2].kind == "full":
        return
    one, two = rectangles[-2:]
    rows, columns = one.rows, one.columns
    if columns == two.columns and rows.stop == two.rows.start:
        rows = range(rows.start, two.rows.stop)
    elif rows == two.rows and columns.stop == two.columns.start:
        columns = range(columns.start, two.columns.stop)
    else:
        return
    rectangles[-2:] = [MaskRectangle("full", rows, columns, one.row_position, one.column_position)]


def _with_first_row(runs: tuple[range, ...]) -> Iterator[tuple[int, range]]:
    """Yields each run with its first row."""
    row = 0
    for run in runs:
        yield row, run
        row += len(run)


def _shifted(positions: range, by: int) -> range:
    return range(positions.start + by, positions.stop + by)
