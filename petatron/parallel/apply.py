"""The one ordered recipe that turns a whole model on the meta device into this rank's part, with real first weights.

Order: precision -> tensor/sequence parallel -> materialise. Each step is logged with its axis.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import nn

from petatron.base.log import get_logger
from petatron.mesh.mesh import ParallelMesh
from petatron.mesh.rng import RandomStreams, normal_piece
from petatron.mesh.spec import Placement, Shard, TensorSplit
from petatron.parallel.tensor import connect, split_vocabulary, split_weights

_log = get_logger(__name__)


@dataclass(frozen=True, slots=True)
class Recipe:
    """What a model says of itself: how its weights are split, and the first spread of each (None: ones or zeros)."""

    shards: Mapping[str, Shard]
    initial_std: Callable[[str], float | None]


def parallelize(
    model: nn.Module,
    recipe: Recipe,
    mesh: ParallelMesh,
    *,
    dtype: torch.dtype,
    sequence_parallel: bool,
    seed: int,
    streams: RandomStreams,
) -> dict[str, Placement]:
    """Apply every kind of parallelism the mesh has; returns where each parameter's logical tensors lie."""
    model.to(dtype)
    sequence = sequence_parallel and mesh.tp.size > 1
    split = TensorSplit(tp_size=mesh.tp.size, tp_rank=mesh.tp.rank, sequence_parallel=sequence)
    placements = split_weights(model, recipe.shards, split)
    connect(model, recipe.shards, mesh.tp, sequence=sequence, shared=streams.shared)
    split_vocabulary(model, recipe.shards, mesh.tp)
    _log.info("tensor parallel over %d ranks%s", mesh.tp.size, ", sequence split between matrices" if sequence else "")
    model.to_empty(device=mesh.device)
    _fill(model, placements, recipe, seed)
    _log.info(
        "%s parameters in this rank's memory, padding included, %s",
        f"{sum(p.numel() for p in model.parameters()):,}",
        str(dtype)[6:],
    )
    return placements


@torch.no_grad()
def _fill(model: nn.Module, placements: Mapping[str, Placement], recipe: Recipe, seed: int) -> None:
    for name, parameter in model.named_parameters():
        std = recipe.initial_std(name)
        if std is None:
            parameter.fill_(0.0 if name.endswith(".bias") else 1.0)
            continue
        parameter.zero_()
        for piece in placements[name].pieces:
            parameter[piece.local_slices()] = normal_piece(piece, seed=seed, std=std).to(parameter)
