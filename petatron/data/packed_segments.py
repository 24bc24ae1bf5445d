"""Packs segments, texts that are compared or weighted as wholes, into rows, in which each sees itself alone.

A segment of n ids has n - 1 positions: its last id predicts nothing, and is the label of the one before. Segments that belong together (the
two answers of a pair) are a group, and groups are packed as they are: their segments are in one row, or in rows of one micro-batch.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from petatron.data.best_fit_packing import pack_best_fit
from petatron.kernels.attention.document_layout import Documents
from petatron.models.batch import SEGMENT_IDS, Batch
from petatron.models.preference_objectives import CHOSEN_MASK, PAIR_MASK
from petatron.models.stage_inputs_outputs import SEGMENT_MASK


@dataclass(frozen=True, slots=True)
class PackedSegment:
    """ids [n], the mask of which of them are learned [n], further numbers of each id [n] and of the whole, by name.

    The first id is never learned: nothing is before it. counted: whether means over segments have it.
    """

    ids: NDArray[np.integer]
    learned: NDArray[np.floating | np.bool_]
    of_ids: Mapping[str, NDArray[Any]] = field(default_factory=dict)
    of_segment: Mapping[str, float] = field(default_factory=dict)
    counted: bool = True

    @property
    def num_positions(self) -> int:
        return len(self.ids) - 1


def pack_segments(num_positions: Sequence[int], seq_length: int) -> list[list[int]]:
    """Returns the segments of each row by their numbers, packed by best fit, in the order of their first ones.

    >>> pack_segments([3, 6, 5, 2, 3], 8)
    [[0, 2], [1, 3], [4]]
    """
    lengths = np.asarray(num_positions, np.int64)
    bins, count = pack_best_fit(lengths, seq_length)
    rows: list[list[int]] = [[] for _ in range(count)]
    for number, row in enumerate(bins.tolist()):
        rows[row].append(number)
    return sorted(rows)


def make_segment_batch(
    rows: Sequence[Sequence[PackedSegment]],
    seq_length: int,
    *,
    padding_id: int = 0,
    pairs: bool = False,
    rows_per_sample: int = 1,
) -> Batch:
    """Makes a micro-batch of rows of segments, numbered in the order of rows; `pairs`: segments 2k and 2k + 1 belong together."""
    shape = (len(rows), seq_length)
    tokens, labels = (np.full(shape, padding_id, np.int64) for _ in range(2))
    mask, positions = np.zeros(shape, np.float32), np.zeros(shape, np.int64)
    numbers, starts = np.full(shape, -1, np.int64), np.zeros(shape, np.int64)
    segments = [segment for row in rows for segment in row]
    named = {name: np.zeros(shape, np.float32) for segment in segments[:1] for name in segment.of_ids}
    at = 0
    for place, row in enumerate(rows):
        filled = 0
        for segment in row:
            span = slice(filled, filled + segment.num_positions)
            assert span.stop <= seq_length, "a row has room for its segments"
            tokens[place, span], labels[place, span] = segment.ids[:-1], segment.ids[1:]
            mask[place, span] = segment.learned[1:]
            positions[place, span] = np.arange(segment.num_positions)
            numbers[place, span], starts[place, span] = at, filled
            for name, values in segment.of_ids.items():
                named[name][place, span] = values[1:]
            filled, at = span.stop, at + 1
        starts[place, filled:] = filled
    is_padding = numbers < 0
    of_segment: dict[str, NDArray[Any]] = {
        SEGMENT_MASK: np.array([segment.counted for segment in segments], np.float32)
    }
    if pairs:
        assert len(segments) % 2 == 0, "the segments of a pair follow one another"
        of_segment[PAIR_MASK] = np.ones(len(segments) // 2, np.float32)
        named[CHOSEN_MASK] = np.where(numbers % 2 == 0, mask, np.float32(0))
    for name in segments[0].of_segment if segments else ():
        of_segment[name] = np.array([segment.of_segment[name] for segment in segments], np.float32)
    arrays = {
        "tokens": tokens, "labels": labels, "loss_mask": mask, "positions": positions, SEGMENT_IDS: numbers, **named, **of_segment,
    }  # fmt: skip
    return Batch(
        arrays={name: torch.from_numpy(x) for name, x in arrays.items()},
        sequence_dims=dict.fromkeys(of_segment),
        documents=Documents.build(starts, is_padding_BS=is_padding if bool(is_padding.any()) else None),
        num_segments=len(segments),
        rows_per_sample=rows_per_sample,
    )


def uncounted_like(segment: PackedSegment) -> PackedSegment:
    """Returns a segment for a row that would be empty: of one position, with the same arrays, of which nothing is learned or counted."""
    zeros = np.zeros(2, np.float32)
    of_ids, of_segment = dict.fromkeys(segment.of_ids, zeros), dict.fromkeys(segment.of_segment, 0.0)
    return PackedSegment(np.zeros(2, np.int64), zeros, of_ids, of_segment, counted=False)
