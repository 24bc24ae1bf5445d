"""`FsdpParamGroup`: this rank's shards under fully_shard, as a parameter group like any other, and the reduction of their gradients.

`fsdp.py` makes modules of a stage units of torch's `fully_shard`; here is what a rank owns of their parameters. A parameter is sharded
along its first dimension, the last shards being shorter or empty; one with fewer rows than ranks (few experts per rank, on many ranks)
along the first dimension that divides evenly.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from petatron.mesh import collectives
from petatron.mesh.mesh import Axis, ParallelMesh
from petatron.parallel.data.fsdp_all_gather_reduce_scatter import Fp8AllGather
from petatron.parallel.data.gradient_reduction import all_reduce_partial_grads, groups_with_partial_grads
from petatron.sharding.flat_shard import FlatShard, OwnedRange, ParamRange, rank_share
from petatron.sharding.optimizer_group_spec import GroupSpec
from petatron.sharding.shard_spec import Placement, Shape


def shard_dim(shape: Shape, ranks: int) -> int:
    """Returns the dimension along which a parameter is sharded.

    >>> shard_dim((7, 6), 2), shard_dim((1, 7, 6), 2), shard_dim((1, 7), 2)
    (0, 2, 0)
    """
    if shape[0] >= ranks:
        return 0
    return next((dim for dim, size in enumerate(shape) if size % ranks == 0), 0)


def owned_flat_shard(placement: Placement, axis: Axis, replica_axis: Axis) -> FlatShard:
    """Returns this rank's shard of a parameter, in the order of its memory."""
    parts, length = [], 0
    for begin, end in _rank_ranges(placement.shape, axis.size, axis.rank):
        parts.append(ParamRange(placement, begin, end, length))
        length += end - begin
    return FlatShard(length, tuple(parts), rank_share(length, replica_axis))


def _rank_ranges(shape: Shape, num_ranks: int, rank: int) -> Iterator[tuple[int, int]]:
    """Yields the ranges of a parameter's elements that a rank owns."""
    dim = shard_dim(shape, num_ranks)
    inner, size = math.prod(shape[dim + 1 :]), shape[dim]
    most = -(-size // num_ranks)
    begin, end = (min(at * most, size) * inner for at in (rank, rank + 1))
    if begin < end:
        for outer in range(math.prod(shape[:dim])):
            yield outer * size * inner + begin, outer * size * inner + end


@dataclass(eq=False, kw_only=True)
class FsdpParamGroup:
    """This rank's shards of one stage's parameters in one optimizer group; one flat shard per parameter.

    Gradients are in one buffer that fully_shard accumulates into: its views are the parameters' `grad`. Frozen parameters have none: their
    buffer is on the meta device. `shard_axes` are the ranks that shard dense parameters, and those that shard experts.
    """

    parameters: Sequence[DTensor]
    placements: Sequence[Placement]
    flat_shards: Sequence[FlatShard]
    replica_axis: Axis
    shard_axes: tuple[Axis, Axis]
    spec: GroupSpec
    stage: FSDPModule
    reduce_dtype: torch.dtype | None
    fp8_gathers: Sequence[Fp8AllGather] = ()

    def __post_init__(self) -> None:
        first, trainable = self.parameters[0].to_local(), self.spec.trainable
        wide = torch.promote_types(first.dtype, torch.float32)
        length, device = sum(shard.length for shard in self.flat_shards), first.device if trainable else "meta"
        self.flat_grads = torch.zeros(length, dtype=wide, device=device)
        trained = zip(self.parameters, self.grads()) if trainable else ()
        self._grads = [self._as_dtensor(parameter, grad) for parameter, grad in trained]
        self._units = _units_of(self.parameters, self.stage)

    @staticmethod
    def _as_dtensor(parameter: DTensor, grad: Tensor) -> DTensor:
        local = grad.view(parameter.to_local().shape)
        spec = {"shape": parameter.shape, "stride": parameter.stride()}
        return DTensor.from_local(local, parameter.device_mesh, parameter.placements, run_check=False, **spec)

    @torch.no_grad()
    def weights(self) -> list[Tensor]:
        return [parameter.to_local().detach().view(-1) for parameter in self.parameters]

    def grads(self) -> list[Tensor]:
        return list(self.flat_grads.split([shard.length for shard in self.flat_shards]))

    def frozen(self) -> list[Placement]:
        pairs = zip(self.placements, self.parameters, strict=True)
        return [placement for placement, parameter in pairs if not parameter.requires_grad]

    def shard_axis(self, placement: Placement) -> Axis:
        """Returns the ranks over which a parameter is sharded."""
        return self.shard_axes[placement.expert]

    def owned_ranges(self, placement: Placement) -> list[OwnedRange]:
        """Returns which elements of a parameter each rank of `shard_axis` owns."""
        size = self.shard_axis(placement).size
        return [
            OwnedRange(rank, begin, end)
            for rank in range(size)
            for begin, end in _rank_ranges(placement.shape, size, rank)
        ]

    def sync_fp8_scales(self) -> None:
        """Does nothing: scales are reduced where a layer is gathered."""

    def all_gather_params(self) -> None:
        """Frees gathered parameters, so that the next forward all-gathers the updated ones."""
        for unit in self._units:
            unit.reshard()
        for gather in self.fp8_gathers:
            gather.weights_changed()

    def reset_grads(self) -> None:
        """Sets gradients to zero, in this group's buffer."""
        self.flat_grads.zero_()
        for parameter, grad in zip(self.parameters, self._grads):
            parameter.grad = grad


class FsdpGradientReducer:
    """Starts and ends a step's gradient reduction by fully_shard, and all-reduces over the replicas of shards."""

    def __init__(self, param_groups: Sequence[FsdpParamGroup], mesh: ParallelMesh) -> None:
        self._param_groups = [group for group in param_groups if group.spec.trainable]
        self._mesh = mesh
        self._partial_groups = groups_with_partial_grads(self._param_groups)
        self._stages = list(dict.fromkeys(group.stage for group in param_groups))

    def start_step(self, micro_batches: int) -> None:
        """Resets gradients. The number of micro-batches does not matter: each is reduce-scattered by itself."""
        for group in self._param_groups:
            group.reset_grads()
        for stage in self._stages:
            stage.set_is_last_backward(False)

    @torch.no_grad()
    def finish_grad_sync(self) -> None:
        """Waits for started reductions, then all-reduces over the replicas of shards and inside a replica."""
        for stage in self._stages:
            stage.set_is_last_backward(True)
            # Nothing public waits outside of a backward pass; torch's own pipeline stages call this one too.
            stage._get_fsdp_state()._root_post_backward_final_callback()
        if self._mesh["dp_outer"].size > 1:
            self._all_reduce_over_replicas()
        all_reduce_partial_grads(self._partial_groups, self._mesh)

    def _all_reduce_over_replicas(self) -> None:
        started = []
        for group in self._param_groups:
            grads = group.flat_grads
            reduced = grads if group.reduce_dtype is None else grads.to(group.reduce_dtype)
            started.append((grads, reduced, collectives.start_all_reduce(reduced, group.replica_axis)))
        for grads, reduced, handle in started:
            handle.wait()
            if reduced is not grads:
                grads.copy_(reduced)


def _units_of(parameters: Sequence[DTensor], stage: nn.Module) -> list[FSDPModule]:
    """Returns the units that gather some of these parameters themselves, not through a unit inside of them."""
    wanted, units, inner = set(parameters), [], set[nn.Parameter]()
    for unit in reversed(list(fsdp_units(stage))):  # inner units first
        gathered = set(unit.parameters()) - inner
        inner |= gathered
        if not wanted.isdisjoint(gathered):
            units.append(unit)
    return units[::-1]


def fsdp_units(stage: nn.Module) -> Iterator[FSDPModule]:
    """Yields the modules that `fully_shard` gathers by themselves."""
    return (module for module in stage.modules() if isinstance(module, FSDPModule))
