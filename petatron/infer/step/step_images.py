"""The images of one step: which rows take the vector of an image, and the coordinates of rows where these are no positions."""

from __future__ import annotations

from collections.abc import Sequence as Many
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from petatron.infer.scheduler import ScheduledSequence
from petatron.infer.step.packed_step import PackedStep
from petatron.layers.spec.generation_state import RowVectors


class StepImages(NamedTuple):
    """vectors: for the rows of prompts. coordinates_3T: of all rows; None: they have positions."""

    vectors: RowVectors
    coordinates_3T: Tensor | None


def step_images(scheduled: Many[ScheduledSequence], packed: PackedStep, device: torch.device) -> StepImages | None:
    """Returns the images of a step, whose sequences are packed in this order; None if no chunk of a prompt has some."""
    with_images = [work for work in scheduled if work.sequence.image_vectors is not None and not work.decodes]
    if not with_images:
        return None
    rows = packed.rows_3T.shape[1]
    index, vectors, before = np.full(rows, -1, np.int64), list[Tensor](), 0
    has_coordinates = with_images[0].sequence.coordinates is not None
    coordinates = np.broadcast_to(packed.rows_3T[1], (3, rows)).copy() if has_coordinates else None
    begin = 0
    for work in scheduled:
        sequence, end = work.sequence, begin + work.count
        if not work.decodes and sequence.image_vectors is not None and sequence.image_index is not None:
            stop = work.start + work.count
            part = _padded(sequence.image_index, stop)[work.start : stop]
            index[begin:end] = np.where(part >= 0, part + before, -1)
            vectors.append(sequence.image_vectors)
            before += len(sequence.image_vectors)
            if coordinates is not None and sequence.coordinates is not None:
                known = min(stop, sequence.coordinates.shape[1])
                coordinates[:, begin : begin + max(0, known - work.start)] = sequence.coordinates[:, work.start : known]
        begin = end
    row_vectors = RowVectors(torch.cat(vectors), torch.from_numpy(index).to(device))
    return StepImages(row_vectors, None if coordinates is None else torch.from_numpy(coordinates).to(device))


def _padded(index: np.ndarray, length: int) -> np.ndarray:
    """Returns the index of a prompt's tokens, with those of the answer, which are text."""
    return np.concatenate([index, np.full(max(0, length - len(index)), -1, np.int64)])
