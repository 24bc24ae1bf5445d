"""Updates sharded matrices by rules that need them whole (Muon, SOAP): gathers each on one rank, and sends the update back.

A logical matrix is sharded over tensor-parallel ranks, and of each shard the ranks that shard optimizer state own ranges. A step
runs in rounds, so that only some matrices are gathered at a time:

    every rank updates the moments of its elements; an all-to-all over the axis that shards state brings the update directions of
    each matrix to one rank (no communication where that rank owns it all); the tensor-parallel ranks all-gather its shards, and each
    computes the update of the whole and keeps its own shard; a second all-to-all returns the results to their owners, which update the
    master weights.

So the ranks that shard state divide the work on matrices, and no result depends on the layout. Plain data-parallel ranks do not shard
state: each updates all its matrices. State of a whole matrix (`RuleStateTensor.shape`) is where its update is computed: on one of the ranks
that shard state, and on all its tensor-parallel ranks. Matrices of one shape in one round are a batch, and so is their state.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from petatron.config.schema.optimizers.update_rule_spec import UpdateRuleSpec
from petatron.mesh import collectives
from petatron.mesh.mesh import ParallelMesh
from petatron.optim.state_segments import StateSegment
from petatron.optim.update_rules import MatrixBatch, MatrixRule, StepScalars
from petatron.sharding.flat_shard import FlatShard, OwnedRange, ParameterGroup, ParamRange
from petatron.sharding.logical_matrices import LogicalMatrix, assign_matrices, matrix_shape, split_into_matrices
from petatron.sharding.shard_spec import Placement, TensorShard

_ROUND_ELEMENTS = 1 << 25
"""Elements that a rank updates in one round, unless a single matrix has more: 64 MiB in bfloat16, with larger temporaries."""


@dataclass(frozen=True, slots=True)
class _OwnedBox:
    """A box of a matrix that this rank updates, as views of gradients and state; `weight` is None where the master is the model's.

    parameter: the placement of the parameter it is of. shape: that of the whole matrix.
    """

    parameter: Placement
    grad: Tensor
    moments: tuple[Tensor, ...]
    master: Tensor
    weight: Tensor | None
    shape: tuple[int, int]


@dataclass(frozen=True, slots=True)
class _ReceivedBox:
    """A box of the local shard of a matrix that this rank updates: indices of matrix and tensor, and its place in the message."""

    matrix: int
    tensor: int
    inside: tuple[slice, slice]
    shape: tuple[int, int]
    offset: int

    def view(self, message: Tensor) -> Tensor:
        return message[self.offset : self.offset + math.prod(self.shape)].view(self.shape)


@dataclass(frozen=True, slots=True)
class _StateBatch:
    """The state of a round's matrices of one shape, stacked; `indices` are those of the matrices in the round."""

    indices: list[int]
    state: dict[str, Tensor]


@dataclass(frozen=True, slots=True)
class _Round:
    """Matrices that are gathered at a time; messages are in the order of the ranks they are sent to and received from.

    exchanged: whether any of them, on any rank, is not owned by the rank that updates it.
    """

    owned: list[_OwnedBox]
    assigned: list[LogicalMatrix]
    batches: list[_StateBatch]
    received: list[_ReceivedBox]
    send_sizes: list[int]
    receive_sizes: list[int]
    exchanged: bool


class MatrixUpdate:
    """Updates the dense matrices of a group, or its experts: those whose state one axis shards."""

    def __init__(
        self,
        group: ParameterGroup,
        placements: Sequence[Placement],
        segments: Mapping[int, StateSegment],
        rule: MatrixRule,
        rule_spec: UpdateRuleSpec,
        mesh: ParallelMesh,
    ) -> None:
        """`segments` are those of the group's flat shards, by their index in it."""
        self._rule, self._rule_spec = rule, rule_spec
        self._shard_axis = group.shard_axis(placements[0])
        self._tensor_axis = mesh["etp" if placements[0].expert else "tp"]
        weight = group.weights()[0]
        self._device = weight.device
        self._main_dtype = torch.promote_types(weight.dtype, torch.float32)
        self._dtype = rule.exchange_dtype(self._main_dtype)
        matrices = [matrix for placement in placements for matrix in split_into_matrices(placement, group.spec.unit)]
        owners = assign_matrices(matrices, group, self._shard_axis.size, rule_spec.matrix_flops)
        boxes_of = _owned_boxes(group, segments)
        self._rounds = [self._plan_round(chosen, group, boxes_of) for chosen in plan_rounds(matrices, owners)]

    def _plan_round(
        self,
        chosen: Sequence[tuple[int, LogicalMatrix]],
        group: ParameterGroup,
        boxes_of: Callable[[LogicalMatrix], Iterator[_OwnedBox]],
    ) -> _Round:
        size = self._shard_axis.size
        send: list[list[_OwnedBox]] = [[] for _ in range(size)]
        incoming: list[list[tuple[int, LogicalMatrix, TensorShard]]] = [[] for _ in range(size)]
        assigned, exchanged = [], False
        for owner, matrix in chosen:
            send[owner] += boxes_of(matrix)
            ranges = group.owned_ranges(matrix.parameter)
            exchanged = exchanged or matrix.owners(ranges) != {owner}
            if owner == self._shard_axis.rank:
                for owned in ranges:
                    incoming[owned.rank] += [(len(assigned), matrix, box) for box in _boxes_in_range(matrix, owned)]
                assigned.append(matrix)
        received, at = [], 0
        for index, matrix, box in (entry for entries in incoming for entry in entries):
            tensor = [shard.name for shard in matrix.shards].index(box.name)
            received.append(_received_box(index, tensor, matrix.shards[tensor], box, at))
            at += math.prod(box.shape)
        return _Round(
            [box for destination in send for box in destination],
            assigned,
            self._allocate_state(assigned),
            received,
            [sum(box.grad.numel() for box in destination) for destination in send],
            [sum(math.prod(box.shape) for _, _, box in entries) for entries in incoming],
            exchanged,
        )

    def _allocate_state(self, matrices: Sequence[LogicalMatrix]) -> list[_StateBatch]:
        """Allocates what the rule declares for whole matrices, as zeros; a square of rows or columns begins as the identity."""
        by_shape: dict[tuple[int, int], list[int]] = {}
        for index, matrix in enumerate(matrices):
            by_shape.setdefault(matrix.shape, []).append(index)
        batches = []
        for shape, indices in by_shape.items():
            state = {}
            for tensor in self._rule_spec.state(shape):
                if tensor.shape != "element":
                    dtype = self._main_dtype if tensor.dtype == "main" else torch.bfloat16
                    dims = (len(indices), *tensor.dims(*shape))
                    state[tensor.kind] = torch.zeros(dims, dtype=dtype, device=self._device)
                    if tensor.initial == "identity":
                        state[tensor.kind].diagonal(dim1=-2, dim2=-1).fill_(1.0)
            batches.append(_StateBatch(indices, state))
        return batches

    def matrix_state(self) -> Iterator[tuple[str, TensorShard, Tensor]]:
        """Yields the state of the whole matrices that this rank updates: kind, box of a logical tensor, and view."""
        for planned in self._rounds:
            for batch in planned.batches:
                for kind, stacked in batch.state.items():
                    for index, view in zip(batch.indices, stacked):
                        yield kind, *self._state_shard(planned.assigned[index], view)

    def _state_shard(self, matrix: LogicalMatrix, view: Tensor) -> tuple[TensorShard, Tensor]:
        """Returns a matrix's state as a box: of itself, or, for an expert, of that of the whole stack."""
        assert len(matrix.shards) == 1, "a fused matrix has no name for its state"
        shard, shape = matrix.shards[0], tuple(view.shape)
        stack = shard.logical_shape[:-2]
        start = (*shard.start[: len(stack)], *(0 for _ in shape))
        boxed = view.view(*(1 for _ in stack), *shape)
        primary = self._tensor_axis.rank == 0
        return TensorShard(shard.name, (*stack, *shape), start, tuple(boxed.shape), start, primary), boxed

    @torch.no_grad()
    def run(self, step: StepScalars, *, frozen: Collection[int] = ()) -> None:
        """Updates all matrices but those of parameters in `frozen`, the identities of placements; `step` has the rates of their group."""
        for planned in self._rounds:
            sizes = [box.grad.numel() for box in planned.owned]
            size = (sum(planned.send_sizes), self._rule.num_inputs)
            message = torch.zeros(size, dtype=self._dtype, device=self._device)
            for box, part in zip(planned.owned, message.split(sizes)):
                if id(box.parameter) not in frozen:
                    directions = self._rule.directions(box.grad, box.moments, step)
                    for column, direction in zip(part.unbind(-1), directions, strict=True):
                        column.view(direction.shape).copy_(direction)
            updates = self._exchange_and_transform(planned, message, step, frozen)
            for box, part in zip(planned.owned, updates.split(sizes)):
                if id(box.parameter) in frozen:
                    continue
                self._rule.apply(box.master, part.view(box.master.shape), step, shape=box.shape)
                if box.weight is not None:
                    box.weight.copy_(box.master)

    def _exchange_and_transform(
        self, planned: _Round, message: Tensor, step: StepScalars, frozen: Collection[int]
    ) -> Tensor:
        """Exchanges update directions, computes the updates of whole matrices, and returns those of this rank's elements."""
        axis, send, receive = self._shard_axis, planned.send_sizes, planned.receive_sizes
        if planned.exchanged:
            message = collectives.all_to_all(message, axis, send=send, receive=receive)
        inputs = [self._whole_matrices(planned, column) for column in message.unbind(-1)]
        updates = self._transform(planned, inputs, step, frozen)
        results = [_local_parts(matrix, update) for matrix, update in zip(planned.assigned, updates)]
        message = message.new_empty(message.shape[0])
        for box in planned.received:
            box.view(message).copy_(results[box.matrix][box.tensor][box.inside])
        return collectives.all_to_all(message, axis, send=receive, receive=send) if planned.exchanged else message

    def _whole_matrices(self, planned: _Round, message: Tensor) -> list[Tensor]:
        """Returns one of the inputs of all matrices that this rank updates in a round."""
        local = [
            [message.new_empty(matrix_shape(shard.shape)) for shard in matrix.shards] for matrix in planned.assigned
        ]
        for box in planned.received:
            local[box.matrix][box.tensor][box.inside].copy_(box.view(message))
        return self._gather_over_tensor_parallel(planned.assigned, local)

    def _transform(
        self, planned: _Round, inputs: Sequence[Sequence[Tensor]], step: StepScalars, frozen: Collection[int]
    ) -> list[Tensor]:
        """Returns the updates of whole matrices, those of one shape computed as a batch."""
        updates: dict[int, Tensor] = {}
        for batch in planned.batches:
            stacked = tuple(torch.stack([matrices[index] for index in batch.indices]) for matrices in inputs)
            kept = step.kept(self._main_dtype).expand(len(batch.indices), 1, 1)
            is_frozen = [id(planned.assigned[index].parameter) in frozen for index in batch.indices]
            if any(is_frozen):
                trained = [0.0 if stays else 1.0 for stays in is_frozen]
                kept = kept * torch.tensor(trained, dtype=kept.dtype, device=kept.device).view(-1, 1, 1)
            updates |= dict(zip(batch.indices, self._rule.transform(MatrixBatch(stacked, batch.state, kept))))
        return [updates[index] for index in range(len(planned.assigned))]

    def _gather_over_tensor_parallel(
        self, matrices: Sequence[LogicalMatrix], local: Sequence[Sequence[Tensor]]
    ) -> list[Tensor]:
        """All-gathers whole matrices from the shards of tensor-parallel ranks, in one message for all."""
        axis = self._tensor_axis
        shards = [shard for matrix in matrices for shard in matrix.shards]
        parts = [part for matrix in local for part in matrix]
        cut = [part.reshape(-1) for shard, part in zip(shards, parts) if _cut_dim(shard) is not None]
        gathered = collectives.all_gather(torch.cat(cut), axis).view(axis.size, -1) if cut else None
        wholes, at = [], 0
        for shard, part in zip(shards, parts):
            dim = _cut_dim(shard)
            if dim is not None:
                assert gathered is not None
                # Ranks that hold the same kv heads are neighbors; one of them is enough.
                copies = axis.size * part.shape[dim] // matrix_shape(shard.logical_shape)[dim]
                pieces = gathered[::copies, at : at + part.numel()]
                at += part.numel()
                part = torch.cat([piece.view(part.shape) for piece in pieces], dim=dim)
            wholes.append(part)
        stacked = iter(wholes)
        return [torch.cat([next(stacked) for _ in matrix.shards]) for matrix in matrices]


def _owned_boxes(
    group: ParameterGroup, segments: Mapping[int, StateSegment]
) -> Callable[[LogicalMatrix], Iterator[_OwnedBox]]:
    """Returns a function that yields a matrix's boxes that this rank owns, in the order of the parameter's elements.

    Views are made once: gradients and state never move in memory.
    """
    grads, weights = group.grads(), group.weights()
    parts: dict[int, list[tuple[ParamRange, int]]] = {}
    for index, flat_shard in enumerate(group.flat_shards):
        for part in flat_shard.param_ranges:
            parts.setdefault(id(part.placement), []).append((part, index))

    def boxes_of(matrix: LogicalMatrix) -> Iterator[_OwnedBox]:
        for part, index in sorted(parts.get(id(matrix.parameter), []), key=lambda entry: entry[0].begin):
            segment = segments[index]
            alone = FlatShard(segment.range.length, (replace(part, placement=matrix.placement),), (0, 0))
            quantities = (grads[index], segment.master, weights[index], *segment.moments)
            for views in zip(*(alone.tensor_shards(flat) for flat in quantities)):
                grad, master, weight, *moments = (view for _, view in views)
                model_weight = weight if segment.has_master_weights else None
                yield _OwnedBox(matrix.parameter, grad, tuple(moments), master, model_weight, matrix.shape)

    return boxes_of


def plan_rounds(
    matrices: Sequence[LogicalMatrix], owners: Sequence[int], limit: int = _ROUND_ELEMENTS
) -> Iterator[list[tuple[int, LogicalMatrix]]]:
    """Yields rounds of (rank, matrix): every rank has at most `limit` elements in a round, or one larger matrix."""
    queues: dict[int, list[LogicalMatrix]] = {}
    for owner, matrix in zip(owners, matrices):
        queues.setdefault(owner, []).append(matrix)
    queues = dict(sorted(queues.items()))
    while any(queues.values()):
        chosen: list[tuple[int, LogicalMatrix]] = []
        for owner, queue in queues.items():
            taken = 0
            while queue and (taken == 0 or taken + queue[0].num_elements <= limit):
                taken += queue[0].num_elements
                chosen.append((owner, queue.pop(0)))
        yield chosen


def _boxes_in_range(matrix: LogicalMatrix, owned: OwnedRange) -> list[TensorShard]:
    """Returns the boxes of a matrix in a range of its parameter, in the order in which their owner sends them."""
    length = owned.end - owned.begin
    alone = FlatShard(length, (ParamRange(matrix.placement, owned.begin, owned.end, 0),), (0, 0))
    return [box for box, _ in alone.tensor_shards(torch.empty(length, device="meta"))]


def _received_box(matrix: int, tensor: int, shard: TensorShard, box: TensorShard, offset: int) -> _ReceivedBox:
    rows, columns = (
        slice(at - base, at - base + size)
        for at, base, size in zip(box.local_start[-2:], shard.local_start[-2:], box.shape[-2:])
    )
    return _ReceivedBox(matrix, tensor, (rows, columns), matrix_shape(box.shape), offset)


def _cut_dim(shard: TensorShard) -> int | None:
    """Returns the dimension along which tensor-parallel ranks shard a matrix."""
    here, logical = matrix_shape(shard.shape), matrix_shape(shard.logical_shape)
    return next((dim for dim in (0, 1) if here[dim] != logical[dim]), None)


def _local_parts(matrix: LogicalMatrix, update: Tensor) -> list[Tensor]:
    """Returns this rank's shard of each tensor of a whole matrix."""
    rows = [matrix_shape(shard.logical_shape)[0] for shard in matrix.shards]
    return [
        part[tuple(slice(at, at + size) for at, size in zip(shard.start[-2:], shard.shape[-2:]))]
        for shard, part in zip(matrix.shards, update.split(rows))
    ]
