"""`Chunk`: a box of a logical tensor and the local tensor that stores it, under the key that it has in a checkpoint."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from petatron.mesh.rng import stable_seed
from petatron.sharding.boxes import Box, Shape
from petatron.sharding.flat_shard import ParameterGroup
from petatron.sharding.shard_spec import TensorShard

ChunkMetadata = tuple[str, Shape, torch.dtype, Box]
"""Key, logical shape, dtype and box of a chunk."""

WEIGHT_PREFIX = "model/"
"""Key prefix of the model's weights, which are saved in the model folder."""
MASTER_PREFIX = "master/"
"""Key prefix of the optimizer's master weights, where they are separate tensors."""
ROUTER_PREFIX = "router/"
"""Key prefix of router state that is not a parameter: the expert biases, which are saved in the model folder too."""


def folder_tensor_key(name: str) -> str:
    """Returns the key of a logical tensor of the model folder.

    >>> folder_tensor_key("layers.1.mlp.router.weight"), folder_tensor_key("layers.1.mlp.router.expert_bias")
    ('model/layers.1.mlp.router.weight', 'router/layers.1.mlp.router.expert_bias')
    """
    return (ROUTER_PREFIX if name.endswith(".router.expert_bias") else WEIGHT_PREFIX) + name


def folder_tensor_name(key: str) -> str | None:
    """Returns the name of the logical tensor with a key of the model folder; None for keys of other state."""
    kind, _, name = key.partition("/")
    return name if f"{kind}/" in (WEIGHT_PREFIX, ROUTER_PREFIX) else None


@dataclass(frozen=True, slots=True, eq=False)
class Chunk:
    """A box of a logical tensor and the tensor that stores it.

    key: the logical tensor, `kind/name`: `model/layers.0.attention.q.weight`, `exp_avg/layers.0.attention.q.weight`. Weights in the
    optimizer's precision are of the kind `master`.
    tensor: a view of live storage with the shape of the box, any strides; saved from and loaded into.
    primary: whether this rank is the one that saves the box, among the ranks that hold it; every rank loads it.

    >>> Chunk("mine/rows", (4, 2), (2, 0), torch.zeros(2, 2)).box.stop
    (4, 2)
    """

    key: str
    logical_shape: Shape
    start: Shape
    tensor: Tensor
    primary: bool = True

    def __post_init__(self) -> None:
        fits = all(
            at + size <= dim_size for at, size, dim_size in zip(self.start, self.tensor.shape, self.logical_shape)
        )
        assert fits and len(self.start) == self.tensor.dim() == len(self.logical_shape), (
            f"{self.key}: a box at {self.start} of shape {tuple(self.tensor.shape)} is not inside {self.logical_shape}"
        )

    @classmethod
    def of_shard(cls, kind: str, group: ParameterGroup, shard: TensorShard, view: Tensor) -> Chunk:
        """Returns the chunk of a tensor that is sharded like a parameter, under the key `KIND/NAME OF THE PARAMETER`.

        `MixedPrecisionOptimizer.master_weights` and `group_tensor_shards` yield groups, shards and views. Replicas share the writing: which
        of them is primary for a box follows from its name.
        """
        replicas = group.replica_axis
        primary = shard.primary and replicas.rank == stable_seed(f"{kind}/", shard.name, shard.start) % replicas.size
        return cls(f"{kind}/{shard.name}", shard.logical_shape, shard.start, view, primary)

    @property
    def name(self) -> str:
        """Returns the name of the logical tensor."""
        return self.key.partition("/")[2]

    @property
    def metadata(self) -> ChunkMetadata:
        """Returns what other ranks need to know of the chunk."""
        return self.key, self.logical_shape, self.tensor.dtype, self.box

    @property
    def box(self) -> Box:
        return Box(self.start, tuple(self.tensor.shape))
