"""Computes a number of every token of answers with a model of the mesh: a critic's values, or log-probabilities of another model.

Every rank computes those of its rows, on the last pipeline stage and for its part of the sequences, and all ranks get all numbers: what is
made of them, advantages for instance, is a matter of all answers of a step.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from petatron.data.packed_segments import PackedSegment
from petatron.mesh import collectives
from petatron.mesh.mesh import ParallelMesh
from petatron.models.batch import Batch
from petatron.models.stage_inputs_outputs import SequenceOrder
from petatron.parallel.context import split_batch
from petatron.parallel.model_beneath_adapters import RoleModel
from petatron.posttrain.rollout_batches import RolloutPacking

ReadOutputs = Callable[[Mapping[str, Tensor], Batch], Tensor]
"""Returns a number of each position [B, S] of outputs and the part of the batch that they are of."""
_PLACES = "places"


@torch.no_grad()
def measure_tokens(
    model: RoleModel,
    segments: Sequence[PackedSegment],
    packing: RolloutPacking,
    *,
    mesh: ParallelMesh,
    order: SequenceOrder,
    collect: Collection[str],
    read: ReadOutputs,
) -> list[NDArray[np.float64]]:
    """Returns the numbers of the ids of each segment [ids]: each is computed where the id is predicted, and the first one's is 0.

    order: how the model's sequences are distributed by context parallelism.
    """
    device = mesh.device
    ends = np.cumsum([segment.num_positions for segment in segments])
    together = torch.zeros(int(ends[-1]), dtype=torch.float64, device=device)
    batches = [
        batch.with_arrays(**{_PLACES: places}).to(device)
        for batch, places in zip(packing.micro_batches(segments), packing.places(segments), strict=True)
    ]
    at_a_time = mesh.pp.size if "logits" in collect else len(batches)  # logits of a step would fill the memory
    for start in range(0, len(batches), at_a_time):
        part = batches[start : start + at_a_time]
        for batch, outputs in zip(part, model.forward(part, collect=collect), strict=True):
            if outputs and mesh.tp.rank == 0:  # the others have the same
                _put(together, outputs, split_batch(batch, mesh.cp, order=order), read)
    numbers = collectives.all_reduce(together, mesh.world).cpu().numpy()
    return [
        np.concatenate([np.zeros(1), numbers[end - segment.num_positions : end]])
        for end, segment in zip(ends, segments, strict=True)
    ]


def _put(together: Tensor, outputs: Mapping[str, Tensor], batch: Batch, read: ReadOutputs) -> None:
    wide = {name: x.to(torch.promote_types(x.dtype, torch.float32)) for name, x in outputs.items()}
    places = batch[_PLACES]
    is_token = places >= 0
    together[places[is_token]] = read(wide, batch)[is_token].double()
