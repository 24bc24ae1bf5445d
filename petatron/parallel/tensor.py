"""Tensor and sequence parallelism: give each layer its part of the weights, and fill its seams with communication.

What to do with a layer follows from its row in the model's Shard table. A matrix split along its output (column) takes the
whole input on every rank and needs nothing after it; one split along its input (row) needs its partial products added up.
So each half of a block costs one exchange forward and one backward (Shoeybi et al., Megatron-LM):

    whole sequence on every rank       copy -> column ... row -> reduce
    sequence split between the halves  gather -> column ... row -> scatter      (Korthikanti et al.)

The second moves the same bytes but keeps norms, dropout and the residual stream split. The vocabulary is split too, and the
loss is computed where the logits are.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from petatron.layers.dropout import Dropout
from petatron.layers.linear import Linear, Product
from petatron.layers.vocabulary import OutputHead, PositionEmbedding, TokenEmbedding, Vocabulary
from petatron.mesh import collectives
from petatron.mesh.mesh import Axis
from petatron.mesh.spec import Placement, Shard, TensorSplit, find, place


def split_weights(model: nn.Module, shards: Mapping[str, Shard], split: TensorSplit) -> dict[str, Placement]:
    """Replace every parameter by an empty one of this rank's shape (on the meta device still), and say what lies where."""
    placements: dict[str, Placement] = {}
    for name, parameter in list(model.named_parameters()):
        module_name, _, leaf = name.rpartition(".")
        module = model.get_submodule(module_name)
        placement = place(name, tuple(parameter.shape), find(shards, name), split)
        placements[name] = placement
        setattr(
            module, leaf, nn.Parameter(torch.empty(placement.shape, dtype=parameter.dtype, device=parameter.device))
        )
        if isinstance(module, Linear) and leaf == "weight" and find(shards, name).tp == 0:
            module.sections = placement.section_rows
    return placements


@dataclass(frozen=True, slots=True)
class ColumnProduct:
    """A product with a weight split along its output: every rank needs the whole input."""

    axis: Axis
    sequence: bool
    multiply: Product = F.linear

    def __call__(self, x: Tensor, weight: Tensor) -> Tensor:
        whole = collectives.gather(x, self.axis) if self.sequence else collectives.copy(x, self.axis)
        return self.multiply(whole, weight)


@dataclass(frozen=True, slots=True)
class RowProduct:
    """A product with a weight split along its input: the ranks' results are summands."""

    axis: Axis
    sequence: bool
    multiply: Product = F.linear

    def __call__(self, x: Tensor, weight: Tensor) -> Tensor:
        return self.after(self.multiply(x, weight))

    def after(self, partial_sum: Tensor) -> Tensor:
        together = collectives.scatter if self.sequence else collectives.reduce
        return together(partial_sum, self.axis)


def connect(
    model: nn.Module, shards: Mapping[str, Shard], axis: Axis, *, sequence: bool, shared: torch.Generator | None
) -> None:
    """Fill the seams. `sequence` splits activations between the matrices; `shared` is the dropout stream of the axis."""
    column, row = ColumnProduct(axis, sequence), RowProduct(axis, sequence)
    for name, module in model.named_modules():
        if isinstance(module, Linear):
            tp = find(shards, name + ".weight").tp
            if tp is not None:
                module.product = column if tp == 0 else row
        elif isinstance(module, TokenEmbedding):
            module.leave = row.after
        elif isinstance(module, OutputHead):
            module.product = column
        elif isinstance(module, PositionEmbedding) and sequence:
            module.leave = partial(collectives.local_part, axis=axis)
        elif isinstance(module, Dropout) and not sequence and axis.size > 1:
            module.generator = shared


def split_vocabulary(model: nn.Module, shards: Mapping[str, Shard], axis: Axis) -> None:
    """Tell both ends of the model which part of the vocabulary this rank holds; a part may be all padding."""
    split = TensorSplit(tp_size=axis.size, tp_rank=axis.rank)
    for name, end in model.named_modules():
        if isinstance(end, TokenEmbedding | OutputHead):
            size = end.vocabulary.size
            pieces = place(name, (size,), find(shards, name + ".weight"), split).pieces
            end.vocabulary = Vocabulary(
                size=size,
                first=pieces[0].start[0] if pieces else size,
                rows=pieces[0].shape[0] if pieces else 0,
                max_over=partial(collectives.all_reduce, axis=axis, op="max"),
                sum_over=partial(collectives.all_reduce, axis=axis),
                join=partial(collectives.all_gather, axis=axis),
            )
