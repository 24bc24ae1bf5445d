"""A table whose rows are on one rank each, as a parameter group: gradients of the touched rows alone, and state for this rank's rows.

Lookups add gradients as (rows, values), as often as they like in a step; an output head that computes with the whole table adds a matrix
(`submit`). At the end of a step the first kind is sorted by row, and equal rows are summed: `touched` has the rows with their gradients.
After a matrix all rows are touched. Nothing is reduced over ranks: the exchange has brought the gradients here already.

The optimizer updates touched rows and leaves the others as they are, moments included (`optim/touched_row_update.py`).

R rows of this rank, padding included, U touched rows, D width.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from petatron.kernels.embedding_grad import embedding_grad
from petatron.mesh.mesh import Axis
from petatron.sharding.flat_shard import FlatShard, OwnedRange, ParamRange
from petatron.sharding.optimizer_group_spec import GroupSpec
from petatron.sharding.shard_spec import Placement


@dataclass(frozen=True, slots=True)
class TouchedRows:
    """The rows of a table that have a gradient in this step, each once and sorted, and their gradients [U, D]; rows None: all."""

    rows: Tensor | None
    grads: Tensor


class RowShardedGroup:
    """One table. It receives gradients during a step, and has the owned weights and the touched rows after it."""

    defers = False

    def __init__(
        self,
        parameter: nn.Parameter,
        placement: Placement,
        axis: Axis,
        spec: GroupSpec,
        *,
        sum_rows: Callable[..., None] = embedding_grad,
    ) -> None:
        """`axis` is any axis of the mesh: no rank has the same rows. `sum_rows` adds gradients of equal rows, in a fixed order."""
        self.parameter, self.placement, self.spec = parameter, placement, spec
        self._sum_rows = sum_rows
        self.replica_axis = axis.alone()
        self.grad_dtype = torch.promote_types(parameter.dtype, torch.float32)
        length = parameter.numel()
        self.flat_shards: Sequence[FlatShard] = [FlatShard(length, (ParamRange(placement, 0, length, 0),), (0, length))]
        self._added: list[tuple[Tensor, Tensor]] = []
        self._matrix: Tensor | None = None
        self._touched: TouchedRows | None = None

    @property
    def num_rows(self) -> int:
        """The rows of the table that this rank has, without padding."""
        return sum(shard.shape[0] for shard in self.placement.tensor_shards)

    @property
    def placements(self) -> list[Placement]:
        return [self.placement]

    def frozen(self) -> list[Placement]:
        return [] if self.parameter.requires_grad else [self.placement]

    def shard_axis(self, placement: Placement) -> Axis:
        return self.replica_axis

    def owned_ranges(self, placement: Placement) -> list[OwnedRange]:
        return [OwnedRange(0, 0, self.parameter.numel())]

    def weights(self) -> list[Tensor]:
        return [self.parameter.detach().view(-1)]

    def start_step(self) -> None:
        """Drops the gradients of the last step."""
        self._added, self._matrix, self._touched = [], None, None

    def add_rows(self, rows_R: Tensor, grads_RD: Tensor) -> None:
        """Adds gradients to those of some rows; a row may be there several times."""
        self._touched = None
        self._added.append((rows_R, grads_RD.to(self.grad_dtype)))

    def submit(
        self,
        weight: Tensor,
        write: Callable[[Tensor, bool], None],
        *,
        now: bool = False,
        start_comm: Callable[[], None] | None = None,
    ) -> None:
        """Lets `write` add a gradient of the whole table (`WeightGradTarget`)."""
        accumulate, self._touched = self._matrix is not None, None
        if self._matrix is None:
            self._matrix = torch.empty(weight.shape, dtype=self.grad_dtype, device=weight.device)
        write(self._matrix, accumulate)

    @property
    @torch.no_grad()
    def touched(self) -> TouchedRows:
        """The touched rows and their gradients, summed over all that was added in this step."""
        if self._touched is None:
            self._touched = self._sum_added()
            self._added = []
        return self._touched

    def _sum_added(self) -> TouchedRows:
        if self._matrix is not None:
            for rows, grads in self._added:
                self._sum_rows(rows, grads, self._matrix, accumulate=True)
            return TouchedRows(None, self._matrix)
        device, width = self.parameter.device, self.parameter.shape[1]
        if not self._added:
            empty = torch.empty((0, width), dtype=self.grad_dtype, device=device)
            return TouchedRows(torch.empty(0, dtype=torch.int64, device=device), empty)
        rows, places = torch.unique(torch.cat([rows for rows, _ in self._added]), return_inverse=True)
        sums = torch.empty((rows.shape[0], width), dtype=self.grad_dtype, device=device)
        if rows.shape[0]:
            self._sum_rows(places, torch.cat([grads for _, grads in self._added]), sums, accumulate=False)
        return TouchedRows(rows, sums)

    def grads(self) -> list[Tensor]:
        """Returns the gradient of all rows, zero where nothing touched them: for comparisons, which see whole tensors."""
        touched = self.touched
        if touched.rows is None:
            return [touched.grads.view(-1)]
        dense = torch.zeros(self.parameter.shape, dtype=self.grad_dtype, device=self.parameter.device)
        return [dense.index_copy_(0, touched.rows, touched.grads).view(-1)]

    def sync_fp8_scales(self) -> None:
        """Does nothing: no rank gathers these weights."""

    def all_gather_params(self) -> None:
        """Does nothing: every lookup asks the owners."""
