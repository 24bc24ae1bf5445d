"""Gradient accumulation and reduction.

Gradients of all micro-batches add up in the fp32 (or wider) flat buffers of `mesh/flat.py`. During the last micro-batch's
backward pass a bucket, a contiguous range of a buffer, is summed over the ranks that saw other tokens as soon as its last
gradient arrives, while the backward pass goes on. Buckets are sent in one fixed order on every rank, whatever order
gradients arrive in, so ranks can never wait for each other crosswise. Losses are divided by the global token count before
the backward pass, so the sum is the gradient: nothing is averaged here.

Afterwards, gradients that tensor-parallel ranks hold as summands (see `Piece.partial`) are added up over those ranks.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from petatron.mesh import collectives
from petatron.mesh.collectives import Handle
from petatron.mesh.flat import FlatGroup, Slot
from petatron.mesh.mesh import Axis, ParallelMesh


@dataclass(slots=True)
class _Bucket:
    """A range of one gradient buffer and the parameters it still waits for."""

    grads: Tensor
    slots: list[Slot]
    waiting: int = 0
    handle: Handle | None = None


@dataclass(slots=True)
class _PartialSum:
    """Gradient pieces to be added up over one axis, copied through one buffer."""

    axis: Axis
    views: list[Tensor] = field(default_factory=list)


class GradientSync:
    """Hooks that move gradients from autograd into the flat buffers and over the wire."""

    def __init__(self, groups: Sequence[FlatGroup], mesh: ParallelMesh, *, bucket_size: int, overlap: bool) -> None:
        self._axis = mesh.dp_cp
        self._groups = groups
        self._overlap = overlap
        self._sending = False
        self._next = 0
        self._buckets = self._make_buckets(bucket_size)
        self._partial = self._make_partial_sums(mesh)
        for bucket in self._buckets:
            for slot in bucket.slots:
                self._watch(slot, bucket)

    def _make_buckets(self, bucket_size: int) -> list[_Bucket]:
        """Cut each buffer into buckets, in the order in which the backward pass completes them."""
        buckets: list[_Bucket] = []
        for group in self._groups:
            slots: list[Slot] = []
            for slot in group.slots:
                slots.append(slot)
                if slot.end - slots[0].start >= bucket_size or slot is group.slots[-1]:
                    grads = group.grads[slots[0].start : slot.end]
                    buckets.append(_Bucket(grads, slots))
                    slots = []
        return sorted(buckets, key=lambda bucket: max(slot.arrival for slot in bucket.slots))

    def _make_partial_sums(self, mesh: ParallelMesh) -> list[_PartialSum]:
        by_replicas: dict[int, _PartialSum] = {}
        for group in self._groups:
            for piece, view in group.pieces(group.grads):
                if piece.partial:
                    if piece.replicas not in by_replicas:
                        by_replicas[piece.replicas] = _PartialSum(mesh.blocks("tp", piece.replicas))
                    by_replicas[piece.replicas].views.append(view)
        return list(by_replicas.values())

    def _watch(self, slot: Slot, bucket: _Bucket) -> None:
        main = bucket.grads[slot.start - bucket.slots[0].start : slot.end - bucket.slots[0].start].view(
            slot.placement.shape
        )

        def arrived(parameter: nn.Parameter) -> None:
            assert parameter.grad is not None
            main.add_(parameter.grad)
            parameter.grad = None
            if self._sending:
                bucket.waiting -= 1
                assert bucket.waiting >= 0, f"the gradient of {slot.name} arrived twice in one backward pass"
                self._send_ready()

        slot.parameter.register_post_accumulate_grad_hook(arrived)  # pyright: ignore[reportArgumentType]

    def _send_ready(self) -> None:
        while self._next < len(self._buckets) and self._buckets[self._next].waiting == 0:
            bucket = self._buckets[self._next]
            bucket.handle = collectives.start_all_reduce(bucket.grads, self._axis)
            self._next += 1

    def zero(self) -> None:
        for group in self._groups:
            group.grads.zero_()

    @contextmanager
    def last_micro_batch(self):
        """Inside, gradients are final when they arrive, and buckets may go."""
        for bucket in self._buckets:
            bucket.waiting = len(bucket.slots)
        self._next = 0
        self._sending = self._overlap
        try:
            yield
        finally:
            self._sending = False

    @torch.no_grad()
    def finish(self) -> None:
        """Send what has not gone yet, wait for all of it, and add up the tensor-parallel summands."""
        for bucket in self._buckets[self._next :]:
            bucket.handle = collectives.start_all_reduce(bucket.grads, self._axis)
        for bucket in self._buckets:
            if bucket.handle is not None:
                bucket.handle.wait()
                bucket.handle = None
        for part in self._partial:
            flat = torch.cat([view.reshape(-1) for view in part.views])
            collectives.all_reduce(flat, part.axis)
            for view, summed in zip(part.views, flat.split([view.numel() for view in part.views])):
                view.copy_(summed.view(view.shape))
