"""Gives DoRA's magnitudes their first values: the norms of the rows of the weights beside which they are.

They are the only initial values that depend on other weights. A row may be in pieces on several ranks, or whole on many: each rank adds the
squares of the elements that it has and counts them. Every rank has every element of a row equally often, so that sum / count is
the mean of the squares, whatever the layout.
"""

from __future__ import annotations

import math

import torch

from petatron.layers.adapters.adapter import MAGNITUDE
from petatron.layers.adapters.adapter_spec import section_weight_names
from petatron.mesh import collectives
from petatron.models.adapter_targets import adapted_linears
from petatron.optim.mixed_precision import MixedPrecisionOptimizer
from petatron.parallel.parallel_model import ParallelModel
from petatron.parallel.quantize_frozen_weights import quantize_frozen_weights
from petatron.sharding.flat_shard import group_tensor_shards


def quantize_frozen(model: ParallelModel) -> None:
    """Quantizes the frozen weights of a model that has them, if it is to."""
    if model.frozen_format is not None:
        quantize_frozen_weights([*model.stages.values()], model.param_groups, model.frozen_format)


@torch.no_grad()
def set_magnitudes(model: ParallelModel, optimizer: MixedPrecisionOptimizer | None = None) -> None:
    """Sets all magnitudes of a model, and their master weights, to the norms of its weights' rows; every rank calls it."""
    if model.spec.config.adapter != "dora":
        return
    weights = {n for linear in adapted_linears(model.spec) for n in section_weight_names(*linear[:3])}
    shapes, offsets, end = model.spec.logical_shapes(), dict[str, int](), 0
    for name in sorted(weights):
        offsets[name], end = end, end + shapes[name][0]
    dtype = torch.promote_types(model.dtype, torch.float32)
    sums = torch.zeros((2, end), dtype=dtype, device=model.mesh.device)
    for group in model.param_groups:
        for shard, view in group_tensor_shards(group, group.weights(), wanted=lambda shard: shard.name in offsets):
            start = offsets[shard.name] + shard.start[0]
            rows = sums[:, start : start + shard.shape[0]]
            rows[0] += torch.linalg.vector_norm(view, dim=1, dtype=dtype).square_()
            rows[1] += view.shape[1]
    collectives.all_reduce(sums, model.mesh.world)
    mean_squares = sums[0] / sums[1].clamp_(min=1.0)
    weight_of = {name.removesuffix("weight") + MAGNITUDE: name for name in weights}
    views = [
        (shard, view)
        for group in model.param_groups
        for shard, view in group_tensor_shards(group, group.weights(), wanted=lambda shard: shard.name in weight_of)
    ]
    masters = () if optimizer is None else optimizer.master_weights()
    views += [(shard, view) for _, shard, view in masters if shard.name in weight_of]
    for shard, view in views:
        weight = weight_of[shard.name]
        start = offsets[weight] + shard.start[0]
        norms = (mean_squares[start : start + shard.shape[0]] * math.prod(shapes[weight][1:])).sqrt()
        view.copy_(norms.to(model.dtype))
    model.all_gather_params()
