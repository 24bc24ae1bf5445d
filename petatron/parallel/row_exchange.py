"""The exchange of rows between the ranks that share a table (`layers/vocabulary/row_sharded_table.py`), and the tokens of all of them.

Each rank owns as many consecutive rows as the others, the last ones fewer. Distinct ids that are sorted are sorted by owner, so one
all-to-all of counts and one of ids are a request; gradients take the same way with the same counts.

The exchange has a communicator of its own: lookups run in forward and backward passes, beside reductions of gradients that overlap them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor, nn

from petatron.layers.vocabulary.item_head import ItemHead
from petatron.layers.vocabulary.row_sharded_table import RowShardedTable
from petatron.layers.vocabulary.vocabulary_shard import VocabShard
from petatron.mesh import collectives
from petatron.mesh.mesh import Axis, ParallelMesh
from petatron.sharding.row_sharded_group import RowShardedGroup

ROW_COMMUNICATOR = "rows"


@dataclass(frozen=True, slots=True)
class OwnerRoutes:
    """`RowRoutes` between the ranks of an axis."""

    axis: Axis
    local_rows: Tensor
    asked: Sequence[int]
    """The ids that this rank asked of each."""
    answered: Sequence[int]
    """The ids that each asked of this rank."""

    def to_askers(self, rows_RD: Tensor) -> Tensor:
        return collectives.all_to_all(rows_RD, self.axis, send=self.answered, receive=self.asked)

    def to_owners(self, grads_UD: Tensor) -> Tensor:
        return collectives.all_to_all(grads_UD, self.axis, send=self.asked, receive=self.answered)


@dataclass(frozen=True, slots=True)
class OwnerExchange:
    """`RowExchange` over an axis: rank k has `rows_per_rank` rows from `first_id` + k x `rows_per_rank` on."""

    axis: Axis
    first_id: int
    rows_per_rank: int

    def route(self, ids_U: Tensor) -> OwnerRoutes:
        starts = self.first_id + self.rows_per_rank * torch.arange(self.axis.size + 1, device=ids_U.device)
        counts = torch.searchsorted(ids_U, starts).diff()
        ones = [1] * self.axis.size
        received = collectives.all_to_all(counts, self.axis, send=ones, receive=ones)
        asked, answered = torch.stack((counts, received)).tolist()
        ids_R = collectives.all_to_all(ids_U, self.axis, send=asked, receive=answered)
        return OwnerRoutes(self.axis, ids_R - int(starts[self.axis.rank]), asked, answered)


@dataclass(frozen=True, slots=True)
class TokensOfAxis:
    """`TokensOfRanks` over an axis: every rank has the tokens of all, and uses the losses of its own."""

    axis: Axis

    def gather(self, x_S: Tensor) -> Tensor:
        return collectives.all_gather(x_S, self.axis)

    def gather_activations(self, x_SBD: Tensor) -> Tensor:
        return collectives.gather_from_region(x_SBD, self.axis)

    def local_part(self, losses_SB: Tensor) -> Tensor:
        return collectives.slice_to_region(losses_SB, self.axis)


def row_sharded_tables(stage: nn.Module) -> list[tuple[str, RowShardedTable]]:
    """Returns the tables of a stage whose rows are split over data-parallel ranks, by name."""
    return [(name, module) for name, module in stage.named_modules() if isinstance(module, RowShardedTable)]


def row_axis(mesh: ParallelMesh) -> Axis:
    """Returns the ranks with other tokens, over a communicator for rows."""
    return replace(mesh.dp_cp, communicator_name=ROW_COMMUNICATOR)


def apply_row_sharding(stage: nn.Module, mesh: ParallelMesh) -> None:
    """Gives the tables of a stage, and heads that compute with them, their part and the exchange; after tensor parallelism."""
    axis = row_axis(mesh)
    for _, table in row_sharded_tables(stage):
        size, rows = table.vocab_shard.vocab_size, table.weight.shape[0]
        first = min(mesh.tp.rank * axis.size * rows, size)
        table.part = VocabShard(size, first, min(axis.size * rows, size - first))
        table.exchange = OwnerExchange(axis, first, rows)
        table.row_output_comm = partial(collectives.reduce_from_region, axis=mesh.tp)
    for module in stage.modules():
        if isinstance(module, ItemHead):
            module.tokens_of_ranks = TokensOfAxis(axis)


def set_row_grad_targets(stage: nn.Module, groups: Sequence[RowShardedGroup]) -> None:
    """Makes the gradients of a stage's tables go to their groups; a head computes with the last of them."""
    for (_, table), group in zip(row_sharded_tables(stage), groups, strict=True):
        target = group if group.spec.trainable else None
        table.row_grad_target = target
        for module in stage.modules():
            if isinstance(module, ItemHead):
                module.weight_grad_target = target
