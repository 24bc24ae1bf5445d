"""Gradient accumulation and reduction.

Gradients of all micro-batches add up in the fp32 (or wider) flat buffers of `sharding/flat_buffer.py`. Products write there themselves
(`layers/ops/linear_op.py`), the rest comes through autograd; the first gradient of a step overwrites what the last step left, so
nothing is set to zero but what gets no gradient. Every use of a parameter brings one gradient per micro-batch; when a bucket
has got all of a step's, it is summed over the ranks that saw other tokens, while the backward pass goes on: an all-reduce, or
with sharded optimizer state a reduce-scatter that leaves each rank the part it owns. A stage's buckets are sent in one fixed
order on every rank, whatever order gradients arrive in, so ranks can never wait for each other crosswise. Losses are divided
by the global token count before the backward pass, so the sum is the gradient: nothing is averaged here.

Afterwards, gradients that several ranks of one replica hold as summands (see `Piece.sum_over`) are added up over those ranks.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from petatron.mesh import collectives
from petatron.mesh.collectives import Handle
from petatron.mesh.mesh import ParallelMesh
from petatron.sharding.flat_buffer import Bucket, FlatGroup, Slot
from petatron.sharding.flat_shard import ParameterGroup, group_pieces


@dataclass(slots=True)
class _Send:
    """A bucket, and how many gradients it still waits for in this step."""

    group: FlatGroup
    bucket: Bucket
    gradients: int
    turn: tuple[int, int]
    waiting: int = 0
    handles: list[Handle] = field(default_factory=list)


@dataclass(slots=True)
class _Main:
    """Where a parameter's gradients add up; `fresh` while it holds nothing of this step."""

    out: Tensor
    send: _Send
    queue: list[_Send]
    fresh: bool = True


class GradientSync:
    """Takes gradients from products and autograd into the flat buffers and over the wire."""

    def __init__(
        self, groups: Sequence[FlatGroup], mesh: ParallelMesh, *, overlap: bool, wire_dtype: torch.dtype | None = None
    ) -> None:
        """`wire_dtype` is the precision gradients are reduced in; None means that of the buffers."""
        self._groups = groups
        self._mesh = mesh
        self._overlap = overlap
        self._wire_dtype = wire_dtype
        self._queues: list[list[_Send]] = []
        self._main: dict[Tensor, _Main] = {}
        self._make_queues()

    def _make_queues(self) -> None:
        """One queue of buckets per stage, in the order in which its backward pass completes them."""
        queues: dict[int, list[_Send]] = {}
        for group in self._groups:
            for bucket in group.buckets:
                turn = max(slot.arrival for slot in bucket.slots)
                gradients = sum(slot.uses for slot in bucket.slots)
                queue = queues.setdefault(group.stage, [])
                queue.append(_Send(group, bucket, gradients, (turn, len(queue))))
        for queue in queues.values():
            queue.sort(key=lambda send: send.turn)
            self._queues.append(queue)
            for send in queue:
                for slot in send.bucket.slots:
                    self._watch(slot, send, queue)

    def _watch(self, slot: Slot, send: _Send, queue: list[_Send]) -> None:
        self._main[slot.parameter] = _Main(send.group.view(send.group.flat_grads, slot), send, queue)

        # The parameter's hook lies where the garbage collector cannot see it: a strong reference would keep all of this,
        # process groups included, for ever.
        sync = weakref.ref(self)

        def arrived(parameter: nn.Parameter) -> None:
            grad, parameter.grad = parameter.grad, None
            owner = sync()
            if owner is not None and grad is not None:
                owner.add(parameter, grad)

        slot.parameter.register_post_accumulate_grad_hook(arrived)  # pyright: ignore[reportArgumentType]

    def begin(self, micro_batches: int) -> None:
        """Forget the last step's gradients; every use of a parameter will bring one per micro-batch."""
        for main in self._main.values():
            main.fresh = True
        for queue in self._queues:
            for send in queue:
                send.waiting = send.gradients * micro_batches

    def add(self, parameter: Tensor, grad: Tensor) -> None:
        """Take a gradient that exists."""
        self.write(parameter, lambda out, accumulate: out.add_(grad) if accumulate else out.copy_(grad))

    @torch.no_grad()
    def write(self, parameter: Tensor, write: Callable[[Tensor, bool], object]) -> None:
        """Have one gradient of a parameter written where its gradients add up."""
        main = self._main[parameter]
        write(main.out, not main.fresh)
        main.fresh = False
        send = main.send
        send.waiting -= 1
        assert send.waiting >= 0, "a parameter got more gradients than the step has micro-batches"
        if send.waiting == 0 and self._overlap:
            self._send_ready(main.queue)

    def written(self) -> frozenset[Tensor]:
        """The parameters that have got a gradient in this step."""
        return frozenset(parameter for parameter, main in self._main.items() if not main.fresh)

    def assume_written(self, parameters: frozenset[Tensor]) -> None:
        """Go on as if all of this step's gradients had just come, and nothing had been sent.

        Whoever replays the kernels of an earlier step writes gradients of the same parameters, past this object.
        """
        for parameter, main in self._main.items():
            main.fresh = parameter not in parameters
        for queue in self._queues:
            for send in queue:
                send.waiting, send.handles = 0, []

    def _send_ready(self, queue: list[_Send]) -> None:
        for send in queue:
            if send.waiting > 0:
                return
            if send.waiting == 0:
                self._send(send)

    def _send(self, send: _Send) -> None:
        send.waiting = -1
        axes, bucket = send.group.axes, send.bucket
        grads = send.group.flat_grads[bucket.begin : bucket.end]
        wire = grads if self._wire_dtype is None else grads.to(self._wire_dtype)
        if not axes.sharded:
            send.handles = [collectives.start_all_reduce(wire, axes.whole), Handle(after=_copy_back(grads, wire))]
            return
        begin, end = send.group.owned_part(bucket)
        own = send.group.flat_grads[begin:end]
        part = torch.empty_like(own, dtype=wire.dtype)
        scattered = collectives.start_reduce_scatter(part, wire, axes.shard)

        def over_replicas() -> None:
            collectives.all_reduce(part, axes.outer)
            own.copy_(part)

        send.handles = [scattered, Handle(keep=wire, after=over_replicas)]

    @torch.no_grad()
    def finish(self) -> None:
        """Send what has not gone yet, wait for all of it, and add up the summands inside a replica."""
        for main in self._main.values():
            if main.fresh:  # what got no gradient has one of zero; its bucket cannot have gone
                main.out.zero_()
        for queue in self._queues:
            for send in queue:
                if send.waiting >= 0:
                    self._send(send)
        for queue in self._queues:
            for send in queue:
                for handle in send.handles:
                    handle.wait()
                send.handles = []
        sum_inside_replica(self._groups, self._mesh)


def _copy_back(grads: Tensor, wire: Tensor):
    return None if wire is grads else lambda: grads.copy_(wire)


@torch.no_grad()
def sum_inside_replica(groups: Sequence[ParameterGroup], mesh: ParallelMesh) -> None:
    """Add up the gradient pieces that ranks of one replica hold as summands, one exchange per axis."""
    views: dict[tuple[str, torch.dtype], list[Tensor]] = {}
    for group in groups:
        for piece, view in group_pieces(group, group.grads(), wanted=lambda piece: piece.sum_over is not None):
            assert piece.sum_over is not None
            views.setdefault((piece.sum_over, view.dtype), []).append(view)
    for (name, _), parts in sorted(views.items(), key=lambda item: item[0][0]):
        flat = torch.cat([part.reshape(-1) for part in parts])
        collectives.all_reduce(flat, mesh.axis(name))
        for part, summed in zip(parts, flat.split([part.numel() for part in parts])):
            part.copy_(summed.view(part.shape))
