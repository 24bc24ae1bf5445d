"""The update of a table of which a step touches few rows: the run's update rule, on the touched rows alone.

The weights, master weights and moments of the touched rows are gathered into consecutive memory, the rule updates them as it would any
elements, and they are written back. All other rows stay as they are: neither do their moments decay, nor does weight decay apply to them.
So a step costs what it touches, whatever the size of the table. With Adam this is torch's `SparseAdam`: the number of updates in the
bias corrections is that of the optimizer, not of the row. A step that touches all rows (a full softmax) is the dense one.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from petatron.optim.state_segments import StateSegment
from petatron.optim.update_rules import ParamSlice, UpdateFunction
from petatron.sharding.row_sharded_group import RowShardedGroup


@dataclass(frozen=True, slots=True)
class TouchedRowUpdate:
    """A table and its state on this rank."""

    group: RowShardedGroup
    segment: StateSegment

    def run(self, update: UpdateFunction) -> None:
        """Updates the touched rows by a rule whose step has started."""
        if self.group.frozen():
            return
        touched, [weight] = self.group.touched, self.group.weights()
        segment, rows = self.segment, touched.rows
        master = segment.master if segment.has_master_weights else weight
        model_weight = weight if segment.has_master_weights else None
        if rows is None:
            elements = ParamSlice(
                grad=touched.grads.view(-1), master=master, moments=segment.moments, model_weight=model_weight, start=0
            )
            update(elements, self.group.spec)
            return
        if not rows.shape[0]:
            return
        width = touched.grads.shape[1]

        def gathered(state: Tensor) -> Tensor:
            return state.view(-1, width).index_select(0, rows).view(-1)

        elements = ParamSlice(
            grad=touched.grads.view(-1),
            master=gathered(master),
            moments=tuple(map(gathered, segment.moments)),
            model_weight=None if model_weight is None else gathered(model_weight),
            start=0,
        )
        update(elements, self.group.spec)
        updated = [(master, elements.master), *zip(segment.moments, elements.moments, strict=True)]
        if model_weight is not None and elements.model_weight is not None:
            updated.append((model_weight, elements.model_weight))
        for state, new in updated:
            state.view(-1, width).index_copy_(0, rows, new.view(-1, width))
