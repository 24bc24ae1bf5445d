"""What the replicas' last stages found in a step, made known to every rank."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from petatron.infer.step.step_result import SequenceResult, StepLayout
from petatron.mesh import collectives
from petatron.mesh.mesh import ParallelMesh


def exchange_results(
    mesh: ParallelMesh, layouts: Sequence[StepLayout], own: list[SequenceResult] | None
) -> list[list[SequenceResult]]:
    """Returns the results of all replicas on every rank; `own` is None before the last stage."""
    if mesh.pp.size == 1 and mesh.dp.size == 1:  # tensor-parallel ranks have the same logits, so the same result
        assert own is not None
        return [own]
    sizes = [layout.num_values for layout in layouts]
    values = torch.zeros(sum(sizes), dtype=torch.float64)
    begin = sum(sizes[: mesh.dp.rank])
    if own is not None and mesh.tp.rank == 0:
        packed = np.array([number for result in own for number in result.pack()], dtype=np.float64)
        values[begin : begin + sizes[mesh.dp.rank]] = torch.from_numpy(packed)
    # Every value is zero on all ranks but one, so the sum has its bits.
    parts = collectives.all_reduce(values, mesh.control).split(sizes)
    return [layout.unpack(part.tolist()) for layout, part in zip(layouts, parts)]
