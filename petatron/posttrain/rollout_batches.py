"""Packs the answers of a step into the micro-batches of each data-parallel rank: as many for each, the missing rows empty."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from petatron.config.schema.run import RunConfig
from petatron.data.packed_segments import PackedSegment, make_segment_batch, pack_segments, uncounted_like
from petatron.mesh.mesh import Axis
from petatron.models.batch import Batch


class RolloutPacking:
    """micro_batch_multiple: of which the number of micro-batches is to be a multiple, as interleaved pipelines need."""

    def __init__(self, run: RunConfig, dp: Axis, *, micro_batch_multiple: int = 1) -> None:
        self._length, self._micro = run.model.seq_length, run.train.micro_batch_size
        self._dp, self._multiple = dp, micro_batch_multiple

    def micro_batches(self, segments: Sequence[PackedSegment]) -> list[Batch]:
        """Returns this rank's share of the segments, packed by best fit."""
        empty = [uncounted_like(segments[0])]
        return [
            make_segment_batch([[segments[number] for number in row] or empty for row in rows], self._length)
            for rows in self._rows(segments)
        ]

    def places(self, segments: Sequence[PackedSegment]) -> list[Tensor]:
        """Returns where each position of the micro-batches is among all positions of all segments, one after the other; -1: nowhere."""
        ends = np.cumsum([segment.num_positions for segment in segments])
        result = []
        for rows in self._rows(segments):
            places = np.full((len(rows), self._length), -1, np.int64)
            for row, numbers in zip(places, rows):
                filled = 0
                for number in numbers:
                    count = segments[number].num_positions
                    row[filled : filled + count] = np.arange(ends[number] - count, ends[number])
                    filled += count
            result.append(torch.from_numpy(places))
        return result

    def _rows(self, segments: Sequence[PackedSegment]) -> list[list[list[int]]]:
        """Returns the rows of each micro-batch of this rank, as numbers of segments."""
        packed = pack_segments([segment.num_positions for segment in segments], self._length)
        per_rank = self._micro * self._multiple
        count = -(-len(packed) // (per_rank * self._dp.size)) * per_rank
        of_rank = [
            packed[at] if at < len(packed) else [] for at in range(self._dp.rank, count * self._dp.size, self._dp.size)
        ]
        return [of_rank[at : at + self._micro] for at in range(0, count, self._micro)]
