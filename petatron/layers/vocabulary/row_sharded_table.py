"""A table of rows that is larger than the memory of one rank: an embedding whose rows are split over the ranks, and looked up by exchange.

The vocabulary is split over tensor-parallel ranks as that of a token embedding is, and the part of each over the ranks with other tokens
(data and context parallel). With one part per rank nothing of the table is replicated, and no gradient of it is reduced. A rank that
looks up T ids does five things:

    ids      the U distinct ones, sorted, which sorts them by owner
    request  all-to-all of their numbers, then of the ids                    8 U bytes
    answer   owners read the rows, and an all-to-all brings them back        D U elements
    result   rows of the distinct ids -> rows of the T ids
    backward the gradients of a row's uses are summed, and an all-to-all takes the U sums, with the ids that are there already, to their
             owners: gradients travel as (index, row), never as a table

So communication is proportional to the distinct ids of a micro-batch and not to the table, and a step touches few rows, which are all
that the optimizer updates (`optim/touched_row_update.py`). The host needs the numbers of ids before it can start the exchange: one
synchronization per lookup.

Padding is the id -1: it is looked up nowhere, its vector is zero, and it has no gradient.

T ids, U distinct ids, R rows asked of this rank, D width.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from petatron.base.autograd_op import AutogradOp, first_derivative
from petatron.kernels import embedding_grad as embedding_reference
from petatron.layers.parallel_slots import CommSlot, TensorSlot, identity
from petatron.layers.vocabulary.embedding import EmbeddingKernels
from petatron.layers.vocabulary.vocabulary_shard import VocabShard

PADDING_ID = -1
"""The id of padding in a batch: no row of the table."""


class RowRoutes(Protocol):
    """Which rows of this rank's part all ranks asked for, and the way between owners and askers."""

    @property
    def local_rows(self) -> Tensor:
        """The rows [R] of this rank's part that were asked for; a row is there once for each rank that asked."""
        ...

    def to_askers(self, rows_RD: Tensor) -> Tensor:
        """Sends rows to the ranks that asked for them; returns those [U, D] that this one asked for."""
        ...

    def to_owners(self, grads_UD: Tensor) -> Tensor:
        """Sends the gradients of rows to their owners; returns those [R, D] of `local_rows`."""
        ...


class RowExchange(Protocol):
    """The ranks that share the rows of a table."""

    def route(self, ids_U: Tensor) -> RowRoutes:
        """Asks the owners for distinct ids, sorted."""
        ...


class LocalRows:
    """`RowExchange` of one rank, which has all rows."""

    def route(self, ids_U: Tensor) -> RowRoutes:
        return _LocalRoutes(ids_U)


class _LocalRoutes:
    def __init__(self, local_rows: Tensor) -> None:
        self.local_rows = local_rows

    def to_askers(self, rows_RD: Tensor) -> Tensor:
        return rows_RD

    def to_owners(self, grads_UD: Tensor) -> Tensor:
        return grads_UD


class RowGradTarget(Protocol):
    """Receives the gradients of rows (`sharding/row_sharded_group.py`)."""

    def add_rows(self, rows_R: Tensor, grads_RD: Tensor) -> None:
        """Adds gradients to those of rows of this rank's part; a row may be there several times."""
        ...


class _RowLookup(AutogradOp):
    @staticmethod
    def forward(ctx: Any, ids_T: Tensor, weight: Tensor, table: RowShardedTable) -> Tensor:
        is_row = ids_T >= 0
        distinct_U, inverse = torch.unique(ids_T[is_row], return_inverse=True)
        places_T = torch.full_like(ids_T, PADDING_ID)
        places_T[is_row] = inverse
        routes = table.exchange.route(distinct_U)
        rows_UD = routes.to_askers(weight.index_select(0, routes.local_rows))
        ctx.save_for_backward(places_T)
        ctx.routes, ctx.table, ctx.weight, ctx.num_distinct = routes, table, weight, distinct_U.shape[0]
        out = weight.new_zeros((ids_T.shape[0], weight.shape[1]))
        out[is_row] = rows_UD.index_select(0, inverse)
        return out

    @staticmethod
    @first_derivative
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (places_T,) = ctx.saved_tensors
        weight, table = ctx.weight, ctx.table
        wide = torch.promote_types(weight.dtype, torch.float32)
        sums_UD = torch.empty((ctx.num_distinct, weight.shape[1]), dtype=wide, device=weight.device)
        if ctx.num_distinct:
            table.kernels.embedding_grad(places_T, grads[0].contiguous(), sums_UD, accumulate=False)
        rows_R, grads_RD = ctx.routes.local_rows, ctx.routes.to_owners(sums_UD)
        if not weight.requires_grad:
            return None, None, None
        if table.row_grad_target is not None:
            table.row_grad_target.add_rows(rows_R, grads_RD)
            return None, None, None
        out = torch.zeros_like(weight, dtype=wide)
        return None, out.index_add_(0, rows_R, grads_RD).to(weight.dtype), None


class RowShardedTable(nn.Module):
    """Looks up ids: [B, S] to [S, B, D], or any number of them in a row, [T] to [T, D], which all tensor-parallel ranks get whole."""

    tensor_slots: Mapping[str, TensorSlot] = {"output_comm": "summed output", "vocab_shard": "vocabulary shard"}

    def __init__(self, num_rows: int, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(num_rows, width))
        self.vocab_shard = VocabShard(num_rows, 0, num_rows)
        self.part = VocabShard(num_rows, 0, num_rows)
        """The rows of the table that a tensor-parallel rank looks up; `vocab_shard` are those that this rank has."""
        self.exchange: RowExchange = LocalRows()
        self.output_comm: CommSlot = identity
        self.row_output_comm: CommSlot = identity
        """Sums rows over tensor-parallel ranks, which all use them for the same."""
        self.row_grad_target: RowGradTarget | None = None
        self.kernels: EmbeddingKernels = embedding_reference

    def kernel_slots(self) -> Mapping[str, str]:
        return {"kernels": "embedding gradient"}

    def forward(self, ids_BS: Tensor) -> Tensor:
        vectors = self._lookup(ids_BS.flatten()).view(*ids_BS.shape, -1)
        return self.output_comm(vectors.transpose(0, 1))

    def rows(self, ids_T: Tensor) -> Tensor:
        """Returns the rows of ids, whole on every tensor-parallel rank."""
        return self.row_output_comm(self._lookup(ids_T))

    def _lookup(self, ids_T: Tensor) -> Tensor:
        part = self.part
        elsewhere = (ids_T < part.first_id) | (ids_T >= part.first_id + part.num_ids)
        return _RowLookup.apply(ids_T.masked_fill(elsewhere, PADDING_ID), self.weight, self)  # pyright: ignore[reportReturnType]
