"""Tensor and sequence parallelism: give each layer its part of the weights, and fill its seams with communication.

What to do with a layer follows from its row in the model's Shard table. A matrix split along its output (column) takes the
whole input on every rank and needs nothing after it; one split along its input (row) needs its partial products added up.
So each half of a block costs one exchange forward and one backward (Shoeybi et al., Megatron-LM):

    whole sequence on every rank       copy -> column ... row -> reduce
    sequence split between the halves  gather -> column ... row -> scatter      (Korthikanti et al.)

The second moves the same bytes but keeps norms, dropout and the residual stream split. Nobody keeps what was gathered: for the
weight's gradient it is gathered once more, beside the product that makes the input's (`layers/product.py` says how), so the
backward pass moves half as much again, beside products. The sum that a copied input's gradient needs runs beside the product
of the weight's. The vocabulary is split too, and the loss is computed where the logits are.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor, nn

from petatron.layers.dropout import Dropout
from petatron.layers.experts import GroupedLinear
from petatron.layers.linear import Linear
from petatron.layers.norm import LayerNorm, RMSNorm
from petatron.layers.product import MULTIPLY, Arrival, Multiply, TakesWeightGrads
from petatron.layers.remade import Remade, remade
from petatron.layers.rows import batch_first, from_rows, to_rows
from petatron.layers.seam import Seam
from petatron.layers.vocabulary import OutputHead, PositionEmbedding, TokenEmbedding, Vocabulary
from petatron.mesh import collectives
from petatron.mesh.collectives import Handle
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
class GatheredSequence:
    """The entrance of a product that needs the whole sequence, of which every rank of an axis has a part."""

    axis: Axis

    def enter(self, x: Tensor) -> Tensor:
        return collectives.all_gather(x, self.axis)

    def start_enter(self, x: Tensor) -> Arrival:
        part, whole = x.contiguous(), x.new_empty((x.shape[0] * self.axis.size, *x.shape[1:]))
        return partial(_arrived, collectives.start_all_gather(whole, part, self.axis), whole, part)

    def start_leave(self, grad: Tensor) -> Arrival:
        whole, part = grad.contiguous(), grad.new_empty((grad.shape[0] // self.axis.size, *grad.shape[1:]))
        return partial(_arrived, collectives.start_reduce_scatter(part, whole, self.axis), part, whole)


@dataclass(frozen=True, slots=True)
class SharedSequence:
    """The entrance of a product for which every rank of an axis has the whole sequence, and a summand of its gradient."""

    axis: Axis

    def enter(self, x: Tensor) -> Tensor:
        return x

    def start_enter(self, x: Tensor) -> Arrival:
        return lambda: x

    def start_leave(self, grad: Tensor) -> Arrival:
        by_batch = batch_first(grad)
        rows = to_rows(grad, by_batch=by_batch)
        whole = from_rows(rows, grad, by_batch=by_batch)
        return partial(_arrived, collectives.start_all_reduce(rows, self.axis), whole, rows)


def _arrived(handle: Handle, received: Tensor, sent: Tensor) -> Tensor:
    """`sent` must live until it has gone, so it is among the arguments."""
    handle.wait()
    return received


@dataclass(frozen=True, slots=True)
class ColumnProduct:
    """A product with a weight split along its output: every rank needs the whole input.

    `regather`: a gathered input is not kept but gathered a second time in the backward pass. (Low precision keeps what it
    has cast of it, either way.)
    """

    axis: Axis
    sequence: bool
    multiply: Multiply = MULTIPLY
    regather: bool = True

    def __call__(self, x: Tensor | Remade, weight: Tensor) -> Tensor:
        if self.axis.size == 1:
            return self.multiply(remade(x), weight)
        if not self.sequence:
            return self.multiply(remade(x), weight, entrance=SharedSequence(self.axis))
        here = remade(x) if self.regather else Remade(x.value if isinstance(x, Remade) else x, None)
        return self.multiply(here, weight, entrance=GatheredSequence(self.axis))


@dataclass(frozen=True, slots=True)
class RowProduct:
    """A product with a weight split along its input: the ranks' results are summands."""

    axis: Axis
    sequence: bool
    multiply: Multiply = MULTIPLY

    def __call__(self, x: Tensor | Remade, weight: Tensor) -> Tensor:
        return self.after(self.multiply(remade(x), weight))

    def after(self, partial_sum: Tensor) -> Tensor:
        together = collectives.scatter if self.sequence else collectives.reduce
        return together(partial_sum, self.axis)


@dataclass(frozen=True, slots=True)
class WholeProduct:
    """A product with a weight that is whole on every rank."""

    multiply: Multiply = MULTIPLY

    def __call__(self, x: Tensor | Remade, weight: Tensor) -> Tensor:
        return self.multiply(remade(x), weight)


def connect(
    model: nn.Module, shards: Mapping[str, Shard], axis: Axis, *, sequence: bool, shared: torch.Generator | None
) -> None:
    """Fill the seams. `sequence` splits activations between the matrices; `shared` is the dropout stream of the axis."""
    column, row = ColumnProduct(axis, sequence), RowProduct(axis, sequence)
    for name, module in model.named_modules():
        if isinstance(module, Linear):
            tp = find(shards, name + ".weight").tp
            module.product = WholeProduct() if tp is None else column if tp == 0 else row
        elif isinstance(module, TokenEmbedding):
            module.leave = row.after
        elif isinstance(module, OutputHead):
            module.product = column
            module.enter = partial(collectives.gather if sequence else collectives.copy, axis=axis)
        elif isinstance(module, PositionEmbedding) and sequence:
            module.leave = partial(collectives.local_part, axis=axis)
        elif isinstance(module, Dropout) and not sequence and axis.size > 1:
            module.generator = shared


def take_weight_gradients(model: nn.Module, taker: TakesWeightGrads) -> None:
    """Let every product, the embedding and norms give their weight gradients to a taker instead of autograd.

    Comes after `connect`, whose products keep their communication, and before recompute, which wraps what it finds.
    """
    for module in model.modules():
        if isinstance(module, Linear | OutputHead):
            product = module.product
            assert isinstance(product, ColumnProduct | RowProduct | WholeProduct)
            module.product = replace(product, multiply=replace(product.multiply, weight_grads=taker))
        if isinstance(module, OutputHead | TokenEmbedding | GroupedLinear | RMSNorm | LayerNorm):
            module.weight_grads = taker


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
                ranks=_combine(axis) if axis.size > 1 else None,
                join=partial(collectives.all_gather, axis=axis),
            )


def _combine(axis: Axis) -> tuple[Seam, Seam]:
    return partial(collectives.all_reduce, axis=axis, op="max"), partial(collectives.all_reduce, axis=axis)
