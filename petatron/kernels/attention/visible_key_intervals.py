"""The attention mask as intervals of visible keys: never a dense S x S mask.

Token i attends to tokens first(i), ..., stop(i) - 1. Causally stop(i) is i + 1, and without windows and documents first(i) is 0. A window
of w tokens makes first(i) at least i - w + 1, packed documents make it at least the first position of i's document, and chunks of c tokens
(Llama 4) cut a document d into [d, d + c), [d + c, d + 2 c), ... In full attention stop(i) is the end of the document, at most i + w; in a
prefix it is the end of the prefix; in cross attention both are positions of another sequence. Both are monotonic in i, and all that
follows relies on it. First tokens that stay visible outside of a window are a second interval.

A block is some queries against some keys, each a list of runs of consecutive positions (a context-parallel rank has two runs).
`mask_rectangles` cuts it into rectangles of three kinds, and leaves out what is masked:

    full      every query sees every key                          any attention kernel
    causal    square; query i sees keys 0 ... i of the square     any causal attention kernel
    bounded   the mask depends on first(i) and stop(i)            tiles, each with its own mask tensor

With bounds, the queries are processed `tile_size` at a time. For queries a ... b - 1, the keys before min first(a) are visible to
none, and from max first(b - 1) on there is no bound but causality, minimum and maximum being over the batch; only the keys between
the two are bounded. Likewise up to min stop(a) all see a key, and from max stop(b - 1) on none does. So work is proportional to what is
visible.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from petatron.kernels.attention.document_layout import chunk_starts, document_ends
from petatron.kernels.attention.visibility import Visibility

TILE = 512
"""Rows and columns of a tile: large enough to keep matrix units busy, small enough that a few fit in any memory."""

RectangleKind = Literal["full", "causal", "bounded"]


@dataclass(frozen=True, slots=True, eq=False)
class KeyBounds:
    """One end of the interval of every query of a whole sequence.

    `by_query_BS` is on the device of the tensors, with one row if all sequences agree. `lowest` and `highest` are its minimum and
    maximum over the batch on the host, where rectangles are computed.
    """

    by_query_BS: Tensor
    lowest: np.ndarray
    highest: np.ndarray

    @classmethod
    def of(cls, by_query_BS: Tensor, device: torch.device) -> KeyBounds:
        """Bounds on an accelerator cost one copy of 2 x length numbers."""
        ends = torch.stack((by_query_BS.amin(0), by_query_BS.amax(0))).cpu().numpy()
        return cls(by_query_BS.to(device, non_blocking=True), ends[0], ends[1])


@dataclass(frozen=True, slots=True, eq=False)
class KeyInterval:
    """first(i) and stop(i); a stop of None is i + 1."""

    first: KeyBounds
    stop: KeyBounds | None = None


@dataclass(frozen=True, slots=True, eq=False)
class VisibleKeys:
    """The intervals of a visibility. Without an `interval` a query sees all keys, or, where it is causal, those up to itself."""

    causal: bool = True
    interval: KeyInterval | None = None
    first_tokens: KeyInterval | None = None

    @classmethod
    def of(cls, visibility: Visibility, length: int, device: torch.device) -> VisibleKeys:
        """Makes the intervals of sequences of `length` queries; once for all layers with the same visibility of a batch's documents."""
        parts = visibility.documents or visibility.key_spans
        if parts is None:
            return _visible_keys(visibility, length, device)
        key = (visibility, length, device)
        if key not in parts.computed:
            parts.computed[key] = _visible_keys(visibility, length, device)
        return parts.computed[key]


def _visible_keys(visibility: Visibility, length: int, device: torch.device) -> VisibleKeys:
    visibility = visibility.within(length)
    where = device if visibility.documents is not None or visibility.key_spans is not None else torch.device("cpu")
    bounds = interval_tensors(visibility, length, where)
    if bounds is None:
        return VisibleKeys(visibility.is_causal)
    first, stop = bounds
    interval = KeyInterval(KeyBounds.of(first, device), None if visibility.is_causal else KeyBounds.of(stop, device))
    first_tokens = None
    if visibility.first_k:
        starts = _starts(visibility, length, where)
        last = torch.minimum(starts + visibility.first_k, first)
        first_tokens = KeyInterval(KeyBounds.of(starts, device), KeyBounds.of(last, device))
    return VisibleKeys(visibility.is_causal, interval, first_tokens)


def interval_tensors(visibility: Visibility, length: int, device: torch.device) -> tuple[Tensor, Tensor] | None:
    """Returns first(i) and stop(i) [1 or B, S] of `length` queries on a device, without first tokens; None: all, but for causality."""
    visibility = visibility.within(length)
    spans = visibility.key_spans
    if visibility.kind == "cross":
        if spans is None:
            return None
        assert spans.first_BS.shape[1] == length, "spans of keys are those of the whole sequence"
        return spans.first_BS.to(device), spans.stop_BS.to(device)
    unbounded = visibility.window is None and visibility.chunk is None and visibility.documents is None
    if unbounded and visibility.kind != "prefix":
        return None
    starts, positions = _starts(visibility, length, device), torch.arange(length, device=device).unsqueeze(0)
    first = starts if visibility.window is None else torch.maximum(starts, positions + 1 - visibility.window)
    if visibility.is_causal:
        return first, (positions + 1).expand_as(first)
    return first, _stops(visibility, positions, starts)


def _starts(visibility: Visibility, length: int, device: torch.device) -> Tensor:
    """Returns the first position of each token's document, or of its chunk."""
    documents = visibility.documents
    starts = torch.zeros((1, length), dtype=torch.int64, device=device)
    if documents is not None:
        assert documents.starts_BS.shape[1] == length, "document starts are those of the whole sequence"
        starts = documents.starts_BS.to(device)
    return starts if visibility.chunk is None else chunk_starts(length, visibility.chunk, starts, device)


def _stops(visibility: Visibility, positions: Tensor, starts_BS: Tensor) -> Tensor:
    """Returns stop(i) of full attention and of prefixes."""
    stops = document_ends(starts_BS)
    if visibility.kind == "prefix":
        documents = visibility.documents
        assert documents is not None and documents.prefix_ends_BS is not None, "the batch has no prefixes"
        stops = torch.minimum(stops, documents.prefix_ends_BS.to(stops.device))
        stops = torch.maximum(stops, positions + 1)
    return stops if visibility.window is None else torch.minimum(stops, positions + visibility.window)


CAUSAL_KEYS = VisibleKeys()


@dataclass(frozen=True, slots=True)
class BlockMask:
    """The positions of a block's queries and keys, as runs in the order of its rows, and what is visible.

    keep_positions: the positions in a rectangle are consecutive, which biases of scores need.
    """

    queries: tuple[range, ...]
    keys: tuple[range, ...]
    visible: VisibleKeys = CAUSAL_KEYS
    tile_size: int = TILE
    keep_positions: bool = False


@dataclass(frozen=True, slots=True)
class MaskRectangle:
    """A rectangle of a block: rows and columns of the block, and the positions of the first row and column.

    Positions are consecutive in bounded rectangles; in causal ones only the equality of the first two matters. `interval` is the one
    that bounds it.
    """

    kind: RectangleKind
    rows: range
    columns: range
    row_position: int
    column_position: int
    interval: KeyInterval | None = None


@dataclass(frozen=True, slots=True)
class MaskTile:
    """A part of a rectangle, computed at once; `masked_out` is its mask, or None, broadcast over [B, Q, T].

    distance: the position of its first column minus that of its first row.
    """

    rows: range
    columns: range
    masked_out: Tensor | None
    distance: int = 0


def mask_rectangles(mask: BlockMask) -> list[MaskRectangle]:
    """Returns the rectangles of a block that are not entirely masked."""
    visible, starts = mask.visible, [run.start for run in mask.queries]
    same_keys = visible.causal and visible.interval is None and mask.queries == mask.keys and starts == sorted(starts)
    if same_keys and not mask.keep_positions:
        positions = range(sum(len(run) for run in mask.queries))
        return [MaskRectangle("causal", positions, positions, 0, 0)]
    rectangles: list[MaskRectangle] = []
    for first_row, queries in _with_first_row(mask.queries):
        for first_column, keys in _with_first_row(mask.keys):
            for kind, q, k, interval in _rectangles_between(queries, keys, mask):
                rows = _shifted(q, first_row - queries.start)
                columns = _shifted(k, first_column - keys.start)
                rectangles.append(MaskRectangle(kind, rows, columns, q.start, k.start, interval))
                if not mask.keep_positions:
                    _merge_last_two(rectangles)
    return rectangles


def mask_tiles(rectangle: MaskRectangle, mask: BlockMask, device: torch.device) -> Iterator[MaskTile]:
    """Yields the tiles of a rectangle that are not entirely masked, in a fixed order."""
    interval = rectangle.interval if rectangle.kind == "bounded" else None
    for top in range(0, len(rectangle.rows), mask.tile_size):
        for left in range(0, len(rectangle.columns), mask.tile_size):
            rows, columns = rectangle.rows[top : top + mask.tile_size], rectangle.columns[left : left + mask.tile_size]
            q = _shifted(rows, rectangle.row_position - rectangle.rows.start)
            k = _shifted(columns, rectangle.column_position - rectangle.columns.start)
            if rectangle.kind == "full":
                yield MaskTile(rows, columns, None, k.start - q.start)
            elif not _is_masked_out(q, k, interval):
                yield MaskTile(rows, columns, _masked_out(q, k, interval, device), k.start - q.start)


def _is_masked_out(q: range, k: range, interval: KeyInterval | None) -> bool:
    stop = q.stop if interval is None or interval.stop is None else interval.stop.highest[q.stop - 1]
    return k.start >= stop or (interval is not None and bool(k.stop <= interval.first.lowest[q.start]))


def _masked_out(q: range, k: range, interval: KeyInterval | None, device: torch.device) -> Tensor | None:
    keys = torch.arange(k.start, k.stop, device=device)
    masked, stop = None, None if interval is None else interval.stop
    if stop is not None and stop.lowest[q.start] < k.stop:
        masked = keys >= stop.by_query_BS[:, q.start : q.stop].unsqueeze(-1)
    elif stop is None and k.stop - 1 > q.start:
        masked = keys > torch.arange(q.start, q.stop, device=device).unsqueeze(-1)
    if interval is not None and interval.first.highest[q.stop - 1] > k.start:
        below_bound = keys < interval.first.by_query_BS[:, q.start : q.stop].unsqueeze(-1)
        masked = below_bound if masked is None else masked | below_bound
    return masked


_Piece = tuple[RectangleKind, range, range, KeyInterval | None]


def _rectangles_between(queries: range, keys: range, mask: BlockMask) -> Iterator[_Piece]:
    """Yields the rectangles of one run of queries against one run of keys, in positions."""
    visible = mask.visible
    if visible.first_tokens is not None:
        yield from _interval_rectangles(queries, keys, visible.first_tokens, mask.tile_size)
    if visible.interval is None and not visible.causal:
        yield "full", queries, keys, None
    elif visible.interval is None or visible.interval.stop is None:
        yield from _rectangles_up_to_diagonal(queries, keys, visible.interval, mask.tile_size)
    else:
        yield from _interval_rectangles(queries, keys, visible.interval, mask.tile_size)


def _rectangles_up_to_diagonal(
    queries: range, keys: range, interval: KeyInterval | None, tile_size: int
) -> Iterator[_Piece]:
    if interval is None or interval.first.highest[queries.stop - 1] <= keys.start:
        yield from _causal_rectangles(queries, keys)
        return
    for start in range(queries.start, queries.stop, tile_size):
        rows = range(start, min(start + tile_size, queries.stop))
        lowest, highest = int(interval.first.lowest[rows.start]), int(interval.first.highest[rows.stop - 1])
        cut = range(max(keys.start, lowest), min(keys.stop, highest))
        if cut:
            yield "bounded", range(max(rows.start, cut.start), rows.stop), cut, interval
        yield from _causal_rectangles(rows, range(max(keys.start, highest), keys.stop))


def _interval_rectangles(queries: range, keys: range, interval: KeyInterval, tile_size: int) -> Iterator[_Piece]:
    """Yields the keys that some queries see, those that all see, and again those that some see."""
    assert interval.stop is not None
    for start in range(queries.start, queries.stop, tile_size):
        rows = range(start, min(start + tile_size, queries.stop))
        first, stop, last = interval.first, interval.stop, rows.stop - 1
        seen = range(max(keys.start, int(first.lowest[start])), min(keys.stop, int(stop.highest[last])))
        by_all = range(max(seen.start, int(first.highest[last])), min(seen.stop, int(stop.lowest[start])))
        if not by_all:
            if seen:
                yield "bounded", rows, seen, interval
            continue
        before, after = range(seen.start, by_all.start), range(by_all.stop, seen.stop)
        if before:
            yield "bounded", rows, before, interval
        yield "full", rows, by_all, None
        if after:
            yield "bounded", rows, after, interval


def _causal_rectangles(queries: range, keys: range) -> Iterator[_Piece]:
    """Yields the keys before the queries (full), the square on the diagonal, and the rows below it (full)."""
    queries = range(max(queries.start, keys.start), queries.stop)
    before = range(keys.start, min(keys.stop, queries.start))
    square = range(queries.start, min(queries.stop, keys.stop))
    below = range(square.stop, queries.stop)
    if queries and before:
        yield "full", queries, before, None
    if square:
        yield "causal", square, square, None
    if square and below:
        yield "full", below, square, None


def _merge_last_two(rectangles: list[MaskRectangle]) -> None:
    """Merges two adjacent full rectangles, whatever their positions: one kernel call instead of two."""
    if len(rectangles) < 2 or not rectangles[-1].kind == rectangles[-2].kind == "full":
        return
    first, second = rectangles[-2:]
    rows, columns = first.rows, first.columns
    if columns == second.columns and rows.stop == second.rows.start:
        rows = range(rows.start, second.rows.stop)
    elif rows == second.rows and columns.stop == second.columns.start:
        columns = range(columns.start, second.columns.stop)
    else:
        return
    rectangles[-2:] = [MaskRectangle("full", rows, columns, first.row_position, first.column_position)]


def _with_first_row(runs: tuple[range, ...]) -> Iterator[tuple[int, range]]:
    row = 0
    for run in runs:
        yield row, run
        row += len(run)


def _shifted(positions: range, by: int) -> range:
    return range(positions.start + by, positions.stop + by)
