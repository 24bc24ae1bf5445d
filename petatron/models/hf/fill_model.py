"""Put logical tensors into the parameters of a model, whatever its layout: every rank copies the boxes it holds."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from petatron.base.errors import CheckpointError
from petatron.sharding.shard_spec import Placement


@torch.no_grad()
def fill_model(module: nn.Module, placements: Mapping[str, Placement], logical: Mapping[str, Tensor]) -> None:
    """Overwrite this rank's weights; rows of vocabulary padding become zero.

    Tensors of `logical` that this rank holds no part of are left alone. An optimizer with master weights must be built
    after this, since it copies the weights it finds.
    """
    pieces = [piece for name, _ in module.named_parameters() for piece in placements[name].tensor_shards]
    problems = sorted({f"{piece.name} is missing" for piece in pieces if piece.name not in logical})
    problems += sorted(
        {
            f"{piece.name} is {list(logical[piece.name].shape)} instead of {list(piece.logical_shape)}"
            for piece in pieces
            if piece.name in logical and tuple(logical[piece.name].shape) != piece.logical_shape
        }
    )
    if problems:
        raise CheckpointError(
            f"The weights do not fit the model: {'; '.join(problems[:12])}. Build the model from the weights' own config."
        )
    for name, parameter in module.named_parameters():
        parameter.zero_()
        for piece in placements[name].tensor_shards:
            parameter[piece.local_slices()].copy_(logical[piece.name][piece.logical_slices()])
