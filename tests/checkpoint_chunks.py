"""Everything that a rank saves of a model and its optimizer."""

from __future__ import annotations

from collections.abc import Iterator

from petatron.checkpoint.tensor_chunk import Chunk
from petatron.optim.mixed_precision import MixedPrecisionOptimizer
from petatron.parallel.parallel_model import ParallelModel
from petatron.pretrained.checkpoint_components import model_components


def checkpoint_chunks(model: ParallelModel, optimizer: MixedPrecisionOptimizer | None) -> Iterator[Chunk]:
    for component in model_components(model, optimizer):
        yield from component.chunks()
