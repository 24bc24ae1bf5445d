"""Relative position biases (T5): a score gets a number of its head that depends on the class of the distance of key and query.

Distances are in classes ("buckets") that become wider: half of them are single distances from 0 on, the others are equal steps of the
logarithm of the distance up to the largest, and whatever is further away is in the last. Where tokens see those after them, half of all
classes are of keys after the query. All layers of a stack have one table, a number per class and head, so a model computes the biases of
every distance up to the largest once, and its layers those of this rank's heads (Raffel et al., 2020, "T5").

N classes, D distances, H heads.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from petatron.kernels.compute_dtype import to_compute_dtype
from petatron.layers.parallel_slots import TensorRank, TensorSlot
from petatron.layers.spec.param_spec import ParamSpec
from petatron.sharding.initial_values import NormalValues
from petatron.sharding.shard_spec import Shard

RELATIVE_BIAS = "relative_bias"
"""The name in `ForwardContext.tensors` of the biases [H, D] of this rank's heads, of the distances -(D - 1) / 2, ..., (D - 1) / 2."""


@dataclass(frozen=True, slots=True)
class RelativePositionBiasSpec:
    """The table of one stack. both_sides: tokens see those after them."""

    num_buckets: int
    max_distance: int
    num_heads: int
    both_sides: bool
    std: float

    @property
    def num_distances(self) -> int:
        return 2 * self.max_distance + 1

    def params(self) -> Mapping[str, ParamSpec]:
        """Returns the table; a tensor-parallel rank computes the gradient of its heads alone."""
        shape, shard = (self.num_buckets, self.num_heads), Shard(partial_grad="always")
        return {"weight": ParamSpec(shape=shape, shard=shard, init=NormalValues(self.std), weight_decay=True)}

    def build(self) -> RelativePositionBias:
        return RelativePositionBias(self)


class RelativePositionBias(nn.Module):
    """Looks the classes of all distances up in the table."""

    def __init__(self, spec: RelativePositionBiasSpec) -> None:
        super().__init__()
        self.spec = spec
        self.weight = nn.Parameter(torch.empty(spec.num_buckets, spec.num_heads))

    def forward(self) -> Tensor:
        """Returns the biases [D, 1, H]."""
        spec = self.spec
        buckets = _buckets_on(self.weight.device, spec.num_buckets, spec.max_distance, both_sides=spec.both_sides)
        return F.embedding(buckets, self.weight).unsqueeze(1)


@lru_cache(maxsize=8)
def _buckets_on(device: torch.device, num_buckets: int, max_distance: int, *, both_sides: bool) -> Tensor:
    """Copies the classes to a device, once: a copy in every step would wait for the host."""
    with torch.inference_mode(False):
        return torch.tensor(distance_buckets(num_buckets, max_distance, both_sides=both_sides), device=device)


class LocalHeadBias(nn.Module):
    """Takes the biases of this rank's heads."""

    tensor_slots: Mapping[str, TensorSlot] = {"tensor_rank": "tensor rank"}

    def __init__(self, num_heads: int) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.tensor_rank: TensorRank = (0, 1)

    def forward(self, bias_D1H: Tensor) -> Tensor:
        """Returns biases [H, D] of the heads of this rank, in at least float32: the gradients of all layers are added in it."""
        rank, num_ranks = self.tensor_rank
        count = self.num_heads // num_ranks
        return to_compute_dtype(bias_D1H[:, 0, rank * count : (rank + 1) * count]).t().contiguous()


@lru_cache(maxsize=8)
def distance_buckets(num_buckets: int, max_distance: int, *, both_sides: bool) -> tuple[int, ...]:
    """Returns the class of each distance (position of the key minus that of the query) from -max_distance to max_distance.

    >>> distance_buckets(4, 4, both_sides=False)
    (3, 3, 2, 1, 0, 0, 0, 0, 0)
    >>> distance_buckets(8, 4, both_sides=True)
    (3, 3, 2, 1, 0, 5, 6, 7, 7)
    """
    # In float32, step by step as the published models were trained: some distances are at the edge of two classes.
    distances = torch.arange(-max_distance, max_distance + 1)
    classes = num_buckets // 2 if both_sides else num_buckets
    sizes = distances.abs() if both_sides else -distances.clamp(max=0)
    exact = classes // 2
    steps = torch.log(sizes.float() / exact) / math.log(max_distance / exact) * (classes - exact)
    wide = (exact + steps.clamp(min=0).to(torch.long)).clamp(max=classes - 1)
    buckets = torch.where(sizes < exact, sizes, wide)
    return tuple((buckets + (classes * (distances > 0) if both_sides else 0)).tolist())
