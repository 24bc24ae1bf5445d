"""Copies logical tensors into the parameters of a model, whatever its layout: every rank copies its shards."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from petatron.base.errors import CheckpointError
from petatron.sharding.shard_spec import Placement


@torch.no_grad()
def fill_model(module: nn.Module, placements: Mapping[str, Placement], logical: Mapping[str, Tensor]) -> None:
    """Overwrites this rank's weights; rows of vocabulary padding become zero.

    Tensors of `logical` without a shard on this rank are ignored. An optimizer with master weights must be built after this,
    since it copies the weights.
    """
    shards = [shard for name, _ in module.named_parameters() for shard in placements[name].tensor_shards]
    problems = sorted({f"{shard.name} is missing" for shard in shards if shard.name not in logical})
    problems += sorted(
        {
            f"{shard.name} is {list(logical[shard.name].shape)} instead of {list(shard.logical_shape)}"
            for shard in shards
            if shard.name in logical and tuple(logical[shard.name].shape) != shard.logical_shape
        }
    )
    if problems:
        raise CheckpointError(
            f"The weights do not fit the model: {'; '.join(problems[:12])}. Build the model from the weights' own config."
        )
    for name, parameter in module.named_parameters():
        parameter.zero_()
        for shard in placements[name].tensor_shards:
            parameter[shard.local_slices()].copy_(logical[shard.name][shard.logical_slices()])
