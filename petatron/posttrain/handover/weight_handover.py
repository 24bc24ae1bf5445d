"""`WeightHandover`: copies the weights of a model into those of another one, which has them in another layout of the same ranks.

Boxes of logical tensors are sent, as where a checkpoint is loaded in another layout, but from memory to memory: in all-to-alls over all
ranks, of which the next is packed while one is under way. A rank copies what it has itself. Weights are sent in the precision of the copy,
in which it computes.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from petatron.mesh.collectives import Handle, start_all_to_all
from petatron.mesh.mesh import ParallelMesh
from petatron.parallel.parallel_model import ParallelModel
from petatron.posttrain.handover.plan_handover import ROUND_BYTES, HandoverRound, HeldBox, Transfer, plan_handover
from petatron.sharding.boxes import Box
from petatron.sharding.flat_buffer import FlatParamGroup
from petatron.sharding.flat_shard import group_tensor_shards

_ALIGNMENT_BYTES = 16


class _HeldTensor(NamedTuple):
    """A box of a logical tensor, and the tensor here that has it."""

    name: str
    logical_shape: tuple[int, ...]
    box: Box
    tensor: Tensor


class _InFlight(NamedTuple):
    """A round that has been sent."""

    round: HandoverRound
    received: Tensor
    handle: Handle


class WeightHandover:
    """From one model to another, as often as the first one changes. Every rank of both calls its methods."""

    def __init__(
        self,
        source: ParallelModel | None,
        target: ParallelModel | None,
        mesh: ParallelMesh,
        *,
        ranks_per_node: int = 1,
        round_bytes: int = ROUND_BYTES,
    ) -> None:
        """`mesh` has the ranks of both models; a rank may have a part of one alone."""
        self._source, self._target, self._mesh = source, target, mesh
        available = [HeldBox(held.name, held.logical_shape, held.box, at) for at, held in _numbered(source)]
        needed = [
            HeldBox(held.name, held.logical_shape, held.box, at, held.tensor.dtype) for at, held in _numbered(target)
        ]
        limits = {"ranks_per_node": ranks_per_node, "round_bytes": round_bytes}
        self._plan = plan_handover(available, needed, mesh.control, **limits)

    @torch.no_grad()
    def run(self, *, skipped: Collection[str] = ()) -> None:
        """Fills the weights of the target; `skipped` are the names of tensors that it still has, the same ones on every rank."""
        for group in () if self._source is None else self._source.param_groups:
            if isinstance(group, FlatParamGroup):
                group.wait_for_params()
        sources, targets = ([held for _, held in _numbered(model)] for model in (self._source, self._target))
        for source, target, box in self._plan.copies:
            if sources[source].name not in skipped:
                _part(targets[target], box).copy_(_part(sources[source], box))
        in_flight: _InFlight | None = None
        for planned in self._plan.rounds:
            wanted = HandoverRound(
                *([x for x in transfers if x.name not in skipped] for transfers in (planned.sends, planned.receives))
            )
            started = self._start(wanted, sources)
            if in_flight is not None:
                self._unpack(in_flight, targets)
            in_flight = started
        if in_flight is not None:
            self._unpack(in_flight, targets)

    def _start(self, planned: HandoverRound, sources: Sequence[_HeldTensor]) -> _InFlight:
        sent, received = ([0] * self._mesh.world.size for _ in range(2))
        for transfers, counts in ((planned.sends, sent), (planned.receives, received)):
            for transfer in transfers:
                counts[transfer.peer] += self._num_bytes(transfer)
        buffer = torch.empty(sum(sent), dtype=torch.uint8, device=self._mesh.device)
        for transfer, packed in self._views(buffer, planned.sends):
            packed.copy_(_part(sources[transfer.place], transfer.box))
        return _InFlight(planned, *start_all_to_all(buffer, self._mesh.world, send=sent, receive=received))

    def _unpack(self, in_flight: _InFlight, targets: Sequence[_HeldTensor]) -> None:
        in_flight.handle.wait()
        for transfer, packed in self._views(in_flight.received, in_flight.round.receives):
            _part(targets[transfer.place], transfer.box).copy_(packed)

    def _views(self, buffer: Tensor, transfers: Sequence[Transfer]) -> Iterator[tuple[Transfer, Tensor]]:
        """Yields each transfer with its place in a packed buffer, one behind another."""
        at = 0
        for transfer in transfers:
            dtype = self._plan.dtypes[transfer.name]
            size = transfer.box.volume * dtype.itemsize
            yield transfer, buffer[at : at + size].view(dtype).view(transfer.box.shape)
            at += self._num_bytes(transfer)

    def _num_bytes(self, transfer: Transfer) -> int:
        size = transfer.box.volume * self._plan.dtypes[transfer.name].itemsize
        return -(-size // _ALIGNMENT_BYTES) * _ALIGNMENT_BYTES


def _part(held: _HeldTensor, box: Box) -> Tensor:
    return held.tensor[box.slices_in(held.box)]


def _numbered(model: ParallelModel | None) -> Iterator[tuple[int, _HeldTensor]]:
    return enumerate(() if model is None else _held_tensors(model))


def _held_tensors(model: ParallelModel) -> Iterator[_HeldTensor]:
    """Yields what this rank has of the weights that a model computes with, and of expert biases; always in one order."""
    for group in model.param_groups:
        if isinstance(group, FlatParamGroup):
            # What is gathered in FP8 is rounded; the owner has it in the precision of the run, but nothing computes with that.
            views = ((slot, group.param_view(group.flat_weights, slot)) for slot in group.params)
            shards = ((shard, x[shard.local_slices()]) for slot, x in views for shard in slot.placement.tensor_shards)
        else:
            shards = group_tensor_shards(group, group.weights())
        for shard, x in shards:
            yield _HeldTensor(shard.name, shard.logical_shape, Box(shard.start, shard.shape), x)
    for name, bias in model.router_statistics.expert_biases():
        shape = tuple(bias.shape)
        yield _HeldTensor(name, shape, Box((0,) * len(shape), shape), bias)
