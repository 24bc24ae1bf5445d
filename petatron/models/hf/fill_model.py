"""Copies logical tensors into the parameters of a model, whatever its layout: every rank copies its shards."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from petatron.base.errors import CheckpointError
from petatron.sharding.shard_spec import Placement


@torch.no_grad()
def fill_model(module: nn.Module, placements: Mapping[str, Placement], logical: Mapping[str, Tensor]) -> None:
    """Overwrites this rank's weights, and its routers' expert biases; rows of vocabulary padding become zero.

    Tensors of `logical` without a shard on this rank are ignored. An optimizer with master weights must be built after this,
    since it copies the weights.
    """
    shards = [shard for name, _ in module.named_parameters() for shard in placements[name].tensor_shards]
    biases = {name: buffer for name, buffer in module.named_buffers() if name.endswith(".router.expert_bias")}
    needed = {shard.name for shard in shards} | biases.keys()
    problems = sorted(f"{name} is missing" for name in needed if name not in logical)
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
    for name, bias in biases.items():
        bias.copy_(logical[name])
