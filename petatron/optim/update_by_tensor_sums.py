"""Updates logical tensors by rules that need sums over all elements of one: elements stay where they are, and sums are reduced.

Of a logical tensor, each tensor-parallel rank has a shard, and the ranks that shard optimizer state own boxes of that shard. A step of all
tensors of a group has two reductions:

    sums over rows and columns of what the rule measures of the gradient; from their means the rule updates its state of rows and
    columns, which every rank has for the rows and columns of its shard;
    sums of squares of the update directions and of the weights over whole tensors, by which the rule scales the update.

Over the axis that shards state, every sum is reduced. Over tensor-parallel ranks, those along the dimension that they split, each
distinct shard counted once (kv heads may be on several ranks). Each expert of a stack is a tensor by itself; of any other tensor with more
than two dimensions, the last two have rows and columns.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from petatron.config.schema.optimizers.update_rule_spec import UpdateRuleSpec
from petatron.mesh import collectives
from petatron.mesh.mesh import Axis, ParallelMesh
from petatron.optim.state_segments import StateSegment
from petatron.optim.update_rules import StepScalars, TensorElements, TensorRule
from petatron.sharding.flat_shard import ParameterGroup
from petatron.sharding.shard_spec import Placement, TensorShard

_BOX_ELEMENTS = 1 << 24
"""Elements of a box, unless a single row has more: temporaries of a step are as long, 64 MiB in float32."""


@dataclass(frozen=True, slots=True)
class _LocalTensor:
    """A tensor-parallel rank's shard of a logical tensor; None: the rank has no rows of it, but takes part in its reductions.

    copies: how many tensor-parallel ranks have the same shard.
    """

    parameter: Placement
    shard: TensorShard | None
    copies: int

    @property
    def shape(self) -> tuple[int, ...]:
        return self.parameter.shape if self.shard is None else self.shard.shape

    @property
    def stack_dims(self) -> int:
        """The leading dimensions that count tensors: 1 for experts."""
        return 1 if self.parameter.expert else 0

    def vector_shape(self, kind: str) -> tuple[int, ...]:
        """Returns the shape of a value for each row or column."""
        return self.shape[:-1] if kind == "row" else (*self.shape[:-2], self.shape[-1])

    def is_split_along(self, kind: str) -> bool:
        """Whether tensor-parallel ranks have parts of what is summed for a row or column."""
        summed = len(self.shape) - (1 if kind == "row" else 2)
        return self.parameter.cut_dim == summed

    @property
    def logical_shape(self) -> tuple[int, ...]:
        return self.shape if self.shard is None else self.shard.logical_shape


class _ReducedSums:
    """Vectors of sums in one buffer: those that tensor-parallel ranks reduce come first."""

    def __init__(
        self, vectors: Sequence[tuple[tuple[int, ...], bool, float]], dtype: torch.dtype, device: torch.device
    ) -> None:
        """`vectors`: the shape of each, whether tensor-parallel ranks reduce it, and the weight of a rank's sums in that reduction."""
        order = sorted(range(len(vectors)), key=lambda index: not vectors[index][1])
        sizes = [math.prod(vectors[index][0]) for index in order]
        self.flat = torch.zeros(sum(sizes), dtype=dtype, device=device)
        self._order, self._sizes, self._shapes = order, sizes, [shape for shape, _, _ in vectors]
        self.views = self.split(self.flat)
        self._split = self.flat[: sum(math.prod(shape) for shape, split, _ in vectors if split)]
        self._weights = self.fill([weight for _, _, weight in vectors])[: self._split.numel()]

    def split(self, flat: Tensor) -> list[Tensor]:
        """Returns the vectors in a tensor of this buffer's layout."""
        parts = dict(zip(self._order, flat.split(self._sizes))) if self._sizes else {}
        return [parts[index].view(shape) for index, shape in enumerate(self._shapes)]

    def fill(self, values: Sequence[float]) -> Tensor:
        """Returns a tensor of this buffer's layout with one value for each vector."""
        flat = torch.zeros_like(self.flat)
        for view, value in zip(self.split(flat), values):
            view.fill_(value)
        return flat

    def reduce(self, shard_axis: Axis, tensor_axis: Axis) -> None:
        if self.flat.numel():
            collectives.all_reduce(self.flat, shard_axis)
        if self._split.numel() and tensor_axis.size > 1:
            self._split.mul_(self._weights)
            collectives.all_reduce(self._split, tensor_axis)


@dataclass(frozen=True, slots=True)
class _Box:
    """Elements that this rank updates, and the views of the sums that they are part of."""

    tensor: _LocalTensor
    elements: TensorElements
    weight: Tensor | None
    row_sums: Tensor | None
    column_sums: Tensor | None
    squares: Tensor
    weight_squares: Tensor

    def sum_over_tensor(self, x: Tensor) -> Tensor:
        """Returns the sum of each expert's elements, or of all."""
        return x.flatten(1).sum(1) if self.tensor.stack_dims else x.sum().view(1)

    def broadcast(self, scalars: Tensor) -> Tensor:
        """Returns a scalar of each expert, or one for all, with the dimensions of the elements."""
        return scalars.view(-1, *(1 for _ in self.elements.grad.shape[1:])) if self.tensor.stack_dims else scalars[0]


class TensorUpdate:
    """Updates the dense tensors of a group, or its experts: those whose state one axis shards."""

    def __init__(
        self,
        group: ParameterGroup,
        placements: Sequence[Placement],
        segments: Mapping[int, StateSegment],
        rule: TensorRule,
        rule_spec: UpdateRuleSpec,
        mesh: ParallelMesh,
    ) -> None:
        """`segments` are those of the group's flat shards, by their index in it."""
        self._rule = rule
        self._shard_axis = group.shard_axis(placements[0])
        self._tensor_axis = mesh["etp" if placements[0].expert else "tp"]
        weight = group.weights()[0]
        dtype, device = torch.promote_types(weight.dtype, torch.float32), weight.device
        self._tensors = [tensor for placement in placements for tensor in self._local_tensors(placement)]
        shape = self._tensors[0].logical_shape[self._tensors[0].stack_dims :]
        kinds = {state.shape: state.kind for state in rule_spec.state(shape) if state.shape != "element"}
        assert set(kinds) in (set(), {"row", "column"}), "state of a tensor is of rows and columns, or of elements"
        self._kinds = kinds
        vectors = [(t.vector_shape(kind), t.is_split_along(kind), 1.0 / t.copies) for t, kind in self._keys()]
        self._sums = _ReducedSums(vectors, dtype, device)
        self._state = torch.zeros_like(self._sums.flat)
        num_summed = (t.logical_shape[-1 if kind == "row" else -2] for t, kind in self._keys())
        self._inverse_counts = self._sums.fill([1.0 / count for count in num_summed])
        self._means = [torch.zeros(tensor.shape[:-2], dtype=dtype, device=device) for tensor in self._tensors]
        scalars = [
            ((tensor.shape[0] if tensor.stack_dims else 1,), tensor.parameter.cut_dim is not None, 1.0 / tensor.copies)
            for tensor in self._tensors
            for _ in range(2)
        ]
        self._squares = _ReducedSums(scalars, dtype, device)
        sizes = [math.prod(tensor.logical_shape[tensor.stack_dims :]) for tensor in self._tensors for _ in range(2)]
        self._inverse_sizes = self._squares.fill([1.0 / size for size in sizes])
        self._boxes = list(self._build_boxes(group, placements, segments))

    def _local_tensors(self, placement: Placement) -> Iterator[_LocalTensor]:
        dim = placement.cut_dim
        if not placement.tensor_shards:
            yield _LocalTensor(placement, None, 1)
        for shard in placement.tensor_shards:
            copies = 1 if dim is None else max(1, self._tensor_axis.size * shard.shape[dim] // shard.logical_shape[dim])
            yield _LocalTensor(placement, shard, copies)

    def _keys(self) -> Iterator[tuple[_LocalTensor, str]]:
        return ((tensor, kind) for tensor in self._tensors for kind in self._kinds)

    def _build_boxes(
        self, group: ParameterGroup, placements: Sequence[Placement], segments: Mapping[int, StateSegment]
    ) -> Iterator[_Box]:
        """Yields all boxes of this rank. Views are made once: gradients and state never move in memory."""
        grads, weights = group.grads(), group.weights()
        chosen = {id(placement) for placement in placements}
        numbers = {
            (id(tensor.parameter), tensor.shard.name): number
            for number, tensor in enumerate(self._tensors)
            if tensor.shard is not None
        }
        for index, segment in segments.items():
            for part in segment.flat_shard.param_ranges:
                if id(part.placement) not in chosen:
                    continue
                alone = replace(segment.flat_shard, param_ranges=(part,))
                quantities = (grads[index], segment.master, weights[index], *segment.moments)
                for views in zip(*(alone.tensor_shards(flat) for flat in quantities)):
                    number = numbers[id(part.placement), views[0][0].name]
                    for shard, rows in _row_chunks(views[0][0]):
                        grad, master, weight, *moments = (view[rows] for _, view in views)
                        elements = TensorElements(grad, master, tuple(moments))
                        yield self._box(number, shard, elements, weight if segment.has_master_weights else None)

    def _box(self, number: int, shard: TensorShard, elements: TensorElements, weight: Tensor | None) -> _Box:
        tensor = self._tensors[number]
        assert tensor.shard is not None
        inside = tuple(
            slice(at - base, at - base + size)
            for at, base, size in zip(shard.local_start, tensor.shard.local_start, shard.shape)
        )
        squares, weight_squares = (
            view[inside[0]] if tensor.stack_dims else view for view in self._squares.views[2 * number : 2 * number + 2]
        )
        sums: list[Tensor | None] = [None, None]
        if self._kinds:
            at, states = number * len(self._kinds), self._sums.split(self._state)
            where = {"row": inside[:-1], "column": (*inside[:-2], inside[-1])}
            vectors = {
                kind: (self._sums.views[at + offset][where[kind]], states[at + offset][where[kind]])
                for offset, kind in enumerate(self._kinds)
            }
            sums = [vectors["row"][0], vectors["column"][0]]
            row, column = vectors["row"][1].unsqueeze(-1), vectors["column"][1].unsqueeze(-2)
            mean = self._means[number][inside[:-2]].unsqueeze(-1).unsqueeze(-1)
            elements = replace(elements, row=row, column=column, mean=mean)
        return _Box(tensor, elements, weight, sums[0], sums[1], squares, weight_squares)

    @torch.no_grad()
    def run(self, step: StepScalars, *, frozen: Collection[int] = ()) -> None:
        """Updates all tensors but those of parameters in `frozen`, the identities of placements; `step` has the rates of their group."""
        boxes = [box for box in self._boxes if id(box.tensor.parameter) not in frozen]
        self._update_state(boxes, step, frozen)
        self._squares.flat.zero_()
        for box in boxes:
            direction = self._rule.direction(box.elements, step)
            box.squares.add_(box.sum_over_tensor(direction.square()))
            box.weight_squares.add_(box.sum_over_tensor(box.elements.master.square()))
        self._squares.reduce(self._shard_axis, self._tensor_axis)
        self._squares.flat.mul_(self._inverse_sizes).sqrt_()
        for box in boxes:
            rms, weight_rms = box.broadcast(box.squares), box.broadcast(box.weight_squares)
            self._rule.apply(box.elements, self._rule.direction(box.elements, step), rms, weight_rms, step)
            if box.weight is not None:
                box.weight.copy_(box.elements.master)

    def _update_state(self, boxes: Sequence[_Box], step: StepScalars, frozen: Collection[int]) -> None:
        """Updates the state of elements, or, from sums over all ranks, that of rows and columns."""
        self._sums.flat.zero_()
        for box in boxes:
            if box.row_sums is None or box.column_sums is None:
                self._rule.update_moments(box.elements, step)
                continue
            values = self._rule.measure(box.elements.grad, step)
            box.row_sums.add_(values.sum(-1))
            box.column_sums.add_(values.sum(-2))
        if not self._kinds:
            return
        self._sums.reduce(self._shard_axis, self._tensor_axis)
        states = self._sums.split(self._state)
        stays = [
            (state, state.clone()) for (tensor, _), state in zip(self._keys(), states) if id(tensor.parameter) in frozen
        ]
        self._rule.update_means(self._state, self._sums.flat * self._inverse_counts, step)
        for state, before in stays:
            state.copy_(before)
        for number, tensor in enumerate(self._tensors):
            # The means of rows and of columns are the same number: the vector that no rank has a part of is the whole one.
            kind = "column" if tensor.parameter.cut_dim == len(tensor.shape) - 2 else "row"
            state = states[number * len(self._kinds) + list(self._kinds).index(kind)]
            self._means[number].copy_(state.mean(-1))

    def matrix_state(self) -> Iterator[tuple[str, TensorShard, Tensor]]:
        """Yields the state of rows and columns on this rank: kind, box of a logical tensor, and view."""
        for (tensor, shape), view in zip(self._keys(), self._sums.split(self._state)):
            shard = tensor.shard
            if shard is None:
                continue
            chosen = [dim for dim in range(len(shard.shape)) if dim != len(shard.shape) - (1 if shape == "row" else 2)]
            logical, start, size = (
                tuple(values[dim] for dim in chosen) for values in (shard.logical_shape, shard.start, shard.shape)
            )
            # Of ranks with the same values, one saves them: all that shard state have them, and those along a split dimension too.
            primary = shard.primary and self._shard_axis.rank == 0
            primary = primary and (not tensor.is_split_along(shape) or self._tensor_axis.rank == 0)
            yield self._kinds[shape], TensorShard(shard.name, logical, start, size, start, primary), view


def _row_chunks(shard: TensorShard) -> Iterator[tuple[TensorShard, slice]]:
    """Yields parts of a box along its first dimension, and their rows in it."""
    count = max(1, _BOX_ELEMENTS // max(1, math.prod(shard.shape[1:])))
    for begin in range(0, shard.shape[0], count):
        size = min(count, shard.shape[0] - begin)
        part = replace(
            shard,
            start=(shard.start[0] + begin, *shard.start[1:]),
            shape=(size, *shard.shape[1:]),
            local_start=(shard.local_start[0] + begin, *shard.local_start[1:]),
        )
        yield part, slice(begin, begin + size)
