"""Logical matrices of fused and stacked weights, which rules with `unit="matrix"` need whole, and which rank updates which.

A parameter of such a group is one or several logical matrices: q, k and v of a fused weight, gate and up, each expert of a stack. A
tensor-parallel rank has a shard of each (`TensorShard`), and the ranks that shard optimizer state own ranges of that shard.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace

from petatron.sharding.flat_shard import OwnedRange, ParameterGroup, element_ranges
from petatron.sharding.optimizer_group_spec import Unit
from petatron.sharding.shard_spec import Placement, Shape, TensorShard


@dataclass(frozen=True, slots=True)
class LogicalMatrix:
    """Logical tensors of two dimensions in one local parameter, stacked by rows.

    `placement` is the parameter's, with these tensors alone; `parameter` is the whole one.
    """

    parameter: Placement
    placement: Placement

    @property
    def shards(self) -> tuple[TensorShard, ...]:
        return self.placement.tensor_shards

    @property
    def shape(self) -> tuple[int, int]:
        """Rows and columns of the whole matrix, over all tensor-parallel ranks."""
        return sum(matrix_shape(shard.logical_shape)[0] for shard in self.shards), self.shards[0].logical_shape[-1]

    @property
    def num_elements(self) -> int:
        rows, columns = self.shape
        return rows * columns

    def owners(self, owned: Iterable[OwnedRange]) -> set[int]:
        """Returns the ranks that own some of its elements."""
        inside = [bounds for shard in self.shards for bounds in element_ranges(shard, self.parameter.shape)]
        begin, end = min(first for first, _ in inside), max(last for _, last in inside)
        return {part.rank for part in owned if part.begin < end and part.end > begin}


def matrix_shape(shape: Shape) -> tuple[int, int]:
    """Returns the two dimensions of a matrix, or of one in a stack."""
    return shape[-2], shape[-1]


def split_into_matrices(placement: Placement, unit: Unit) -> list[LogicalMatrix]:
    """Returns the matrices of a parameter; with the unit `fused_matrix`, all its tensors are one."""
    shards = [part for shard in placement.tensor_shards for part in _unstack(shard)]
    sets = [tuple(shards)] if unit == "fused_matrix" else [(shard,) for shard in shards]
    return [LogicalMatrix(placement, replace(placement, tensor_shards=tensors)) for tensors in sets]


def _unstack(shard: TensorShard) -> list[TensorShard]:
    if len(shard.shape) == 2:
        return [shard]
    assert len(shard.shape) == 3, f"{shard.name} of shape {shard.logical_shape} is no stack of matrices"
    return [
        replace(
            shard,
            start=(shard.start[0] + index, *shard.start[1:]),
            shape=(1, *shard.shape[1:]),
            local_start=(shard.local_start[0] + index, *shard.local_start[1:]),
        )
        for index in range(shard.shape[0])
    ]


def assign_matrices(
    matrices: Sequence[LogicalMatrix], group: ParameterGroup, num_ranks: int, cost: Callable[[int, int], int]
) -> list[int]:
    """Assigns each matrix to a rank: the one that owns all of it, or, costliest first, the one with the least load.

    `cost` is that of a matrix by rows and columns. Deterministic, so that every rank computes the same assignment.
    """
    load = [0] * num_ranks
    costs = [cost(*matrix.shape) for matrix in matrices]
    holders = [matrix.owners(group.owned_ranges(matrix.parameter)) for matrix in matrices]
    chosen = [next(iter(ranks)) if len(ranks) == 1 else -1 for ranks in holders]
    for index, rank in enumerate(chosen):
        if rank >= 0:
            load[rank] += costs[index]
    for index in sorted(range(len(matrices)), key=lambda at: -costs[at]):
        if chosen[index] < 0:
            chosen[index] = min(range(num_ranks), key=lambda rank: (load[rank], rank))
            load[chosen[index]] += costs[index]
    return chosen
