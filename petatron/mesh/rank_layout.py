"""The rank layout: from parallel sizes to the coordinates and groups of ranks, as integers without process groups.

Ranks are numbered with tp fastest, then cp, then data parallel, then pp: Megatron's `tp-cp-ep-dp-pp` order; with `pp_before_dp` pp comes
before data parallel, its `tp-cp-ep-pp-dp`. Data parallel is `dp_outer x dp_shard` (replicas of shards; dp_outer is 1 unless hybrid
sharding is on). Experts factor the same ranks a second time as `pp x edp x ep x etp`, with the same pp, and with dp_outer as the slowest
part of edp. Any set of dimensions of one factorization is an axis: its groups are the ranks that agree on all the other dimensions.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from petatron.config.schema.parallel import ParallelConfig

DENSE_DIMS = ("pp", "dp_outer", "dp_shard", "cp", "tp")
EXPERT_DIMS = ("pp", "dp_outer", "edp_shard", "ep", "etp")

AXES: dict[str, tuple[str, ...]] = {
    "pp": ("pp",),
    "dp": ("dp_outer", "dp_shard"),
    "dp_outer": ("dp_outer",),
    "dp_shard": ("dp_shard",),
    "cp": ("cp",),
    "tp": ("tp",),
    "dp_cp": ("dp_outer", "dp_shard", "cp"),  # ranks with the same dense weights
    "shard": ("dp_shard", "cp"),  # ranks that may shard the state of the same dense weights
    "losses": ("pp", "dp_outer", "dp_shard", "cp"),  # ranks whose losses add up to that of the global batch
    "sequence": ("cp", "tp"),  # ranks with parts of the same sequences
    "stage": ("dp_outer", "dp_shard", "cp", "tp"),  # ranks with the same layers
    "edp": ("dp_outer", "edp_shard"),  # ranks with the same expert weights
    "edp_shard": ("edp_shard",),
    "ep": ("ep",),
    "etp": ("etp",),
    "ep_etp": ("ep", "etp"),  # ranks with one replica of a layer's experts among them
    "world": DENSE_DIMS,
}
"""Axis name -> the dimensions it runs over."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """Sizes of every dimension; `edp` follows from the others."""

    pp: int = 1
    dp_outer: int = 1
    dp_shard: int = 1
    cp: int = 1
    tp: int = 1
    ep: int = 1
    etp: int = 1
    pp_before_dp: bool = field(default=False, repr=False)  # repr is in checkpoints: layout_key adds it

    def __post_init__(self) -> None:
        ranks = self.dp_shard * self.cp * self.tp
        assert ranks % (self.ep * self.etp) == 0, f"ep x etp does not divide the {ranks} ranks of a stage and instance"

    @classmethod
    def from_config(cls, config: ParallelConfig) -> Layout:
        """Returns the layout of a resolved config."""
        outer = config.num_distributed_optimizer_instances
        return cls(
            pp=config.pipeline_model_parallel_size,
            dp_outer=outer,
            dp_shard=config.data_parallel_size // outer,
            cp=config.context_parallel_size,
            tp=config.tensor_model_parallel_size,
            ep=config.expert_model_parallel_size,
            etp=config.expert_tensor_parallel_size,
            pp_before_dp=config.use_tp_pp_dp_mapping,
        )

    @property
    def dp(self) -> int:
        return self.dp_outer * self.dp_shard

    @property
    def edp_shard(self) -> int:
        return self.dp_shard * self.cp * self.tp // (self.ep * self.etp)

    @property
    def edp(self) -> int:
        return self.dp_outer * self.edp_shard

    @property
    def world_size(self) -> int:
        return self.pp * self.dp * self.cp * self.tp

    def size(self, axis: str) -> int:
        return int(np.prod([getattr(self, dim) for dim in AXES[axis]]))

    def groups(self, axis: str) -> list[tuple[int, ...]]:
        """Returns every group of an axis, each in axis order; together they have every rank once."""
        dims, order, grid = self._grid(axis)
        moved = np.moveaxis(grid, [order.index(dim) for dim in dims], range(-len(dims), 0))
        return [tuple(sorted(row)) for row in moved.reshape(-1, self.size(axis)).tolist()]

    def group_of(self, axis: str, rank: int) -> tuple[int, ...]:
        """Returns the group of an axis that a rank belongs to."""
        dims, order, grid = self._grid(axis)
        index = np.unravel_index(rank, grid.shape)
        selection = tuple(slice(None) if dim in dims else coordinate for dim, coordinate in zip(order, index))
        return tuple(sorted(grid[selection].reshape(-1).tolist()))

    def _grid(self, axis: str) -> tuple[tuple[str, ...], tuple[str, ...], np.ndarray]:
        """Returns the dimensions of an axis, those of its factorization, and all ranks by these."""
        dims = AXES[axis]
        order = DENSE_DIMS if set(dims) <= set(DENSE_DIMS) else EXPERT_DIMS
        if self.pp_before_dp:
            replicas = [dim for dim in order if dim in ("dp_outer", "dp_shard", "edp_shard")]
            order = (*replicas, *(dim for dim in order if dim not in replicas))
        return dims, order, np.arange(self.world_size).reshape([getattr(self, dim) for dim in order])
