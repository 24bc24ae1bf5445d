"""Flat buffers: all parameters of one kind in one contiguous tensor, with their gradients in another of the same layout.

A buffer is cut into buckets, the unit in which gradients are reduced while the backward pass goes on. Without sharding,
every rank keeps and updates the whole buffer. With the distributed optimizer (ZeRO-1), each rank of the `shard` axis owns
one part of every bucket: gradients are reduce-scattered, master weights and moments exist only for the owned parts, and
updated weights are gathered bucket by bucket. So buckets are padded to a multiple of the ranks that share them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from petatron.mesh import collectives
from petatron.mesh.collectives import Handle
from petatron.mesh.mesh import Axis, ParallelMesh
from petatron.mesh.spec import Placement
from petatron.mesh.stretch import Part, Stretch, share_of

# Parts of a bucket start at multiples of this many elements: vector loads, and the widest message units of NCCL.
_ALIGNMENT = 64


@dataclass(frozen=True, slots=True)
class Slot:
    """One parameter's place in its group; `arrival` is its turn among the gradients of its stage's backward pass.

    `uses` is how many gradients it gets per micro-batch: 2 for a tied embedding with both its ends on one rank.
    """

    name: str
    parameter: nn.Parameter
    placement: Placement
    start: int
    arrival: int
    uses: int = 1

    @property
    def end(self) -> int:
        return self.start + self.parameter.numel()


@dataclass(frozen=True, slots=True)
class Bucket:
    """A range of a group's buffers, and the parameters in it."""

    begin: int
    end: int
    slots: tuple[Slot, ...]


@dataclass(frozen=True, slots=True)
class DataAxes:
    """The ranks that hold the same weights: `whole` = `outer` x `shard`; state is split over `shard` if `sharded`."""

    whole: Axis
    outer: Axis
    shard: Axis
    sharded: bool

    @classmethod
    def of(cls, mesh: ParallelMesh, *, expert: bool, sharded: bool) -> DataAxes:
        whole, shard = ("edp", "edp_shard") if expert else ("dp_cp", "shard")
        return cls(mesh[whole], mesh["dp_outer"], mesh[shard], sharded)


class FlatGroup:
    """Parameters that share a dtype, an update rule and the ranks they are reduced over, in the order of their gradients."""

    def __init__(
        self,
        buckets: Sequence[Bucket],
        axes: DataAxes,
        *,
        decay: bool,
        stage: int = 0,
        overlap_gather: bool = False,
        grad_dtype: torch.dtype | None = None,
    ) -> None:
        """`stage` counts the stages of this rank; `grad_dtype` None means at least float32."""
        first, size = buckets[0].slots[0].parameter, buckets[-1].end
        self.buckets = buckets
        self.axes = axes
        self.decay = decay
        self.stage = stage
        self.copies = axes.outer if axes.sharded else axes.whole
        self.flat_weights = torch.zeros(size, dtype=first.dtype, device=first.device)
        grad_dtype = grad_dtype or torch.promote_types(first.dtype, torch.float32)
        self.flat_grads = torch.zeros(size, dtype=grad_dtype, device=first.device)
        self.stretches = [self._stretch(begin, end) for begin, end in self._owned_ranges()]
        self._overlap_gather = overlap_gather
        self._gathers: dict[int, Handle] = {}
        for slot in self.slots:
            view = self.view(self.flat_weights, slot)
            view.copy_(slot.parameter.detach())
            slot.parameter.data = view

    @property
    def slots(self) -> Iterator[Slot]:
        return (slot for bucket in self.buckets for slot in bucket.slots)

    def view(self, flat: Tensor, slot: Slot) -> Tensor:
        """A parameter-shaped view into a tensor of this group's layout."""
        return flat[slot.start : slot.end].view(slot.placement.shape)

    def owned_part(self, bucket: Bucket) -> tuple[int, int]:
        """The range of a bucket that this rank updates."""
        if not self.axes.sharded:
            return bucket.begin, bucket.end
        length = (bucket.end - bucket.begin) // self.axes.shard.size
        begin = bucket.begin + self.axes.shard.rank * length
        return begin, begin + length

    def _owned_ranges(self) -> list[tuple[int, int]]:
        if not self.axes.sharded:
            return [(0, self.buckets[-1].end)]
        return [self.owned_part(bucket) for bucket in self.buckets]

    def _stretch(self, begin: int, end: int) -> Stretch:
        parts = []
        for slot in self.slots:
            low, high = max(begin, slot.start), min(end, slot.end)
            if low < high:
                parts.append(Part(slot.placement, low - slot.start, high - slot.start, low - begin))
        return Stretch(end - begin, tuple(parts), share_of(end - begin, self.copies))

    def weights(self) -> list[Tensor]:
        return [self.flat_weights[begin:end] for begin, end in self._owned_ranges()]

    def grads(self) -> list[Tensor]:
        return [self.flat_grads[begin:end] for begin, end in self._owned_ranges()]

    def publish(self) -> None:
        """Begin to gather every bucket's weights, those the forward pass needs first in front."""
        if not self.axes.sharded:
            return
        self.wait()
        for index in reversed(range(len(self.buckets))):
            bucket = self.buckets[index]
            begin, end = self.owned_part(bucket)
            out = self.flat_weights[bucket.begin : bucket.end]
            self._gathers[index] = collectives.start_all_gather(out, self.flat_weights[begin:end], self.axes.shard)
        if not self._overlap_gather:
            self.wait()

    def wait(self, indices: Iterable[int] | None = None) -> None:
        """Return when the weights of these buckets (None: all) may be used."""
        for index in list(self._gathers) if indices is None else indices:
            handle = self._gathers.pop(index, None)
            if handle is not None:
                handle.wait()


@dataclass(frozen=True, slots=True, kw_only=True)
class FlatOptions:
    """How buffers are cut: bucket size in elements, whether optimizer state is sharded, whether gathers overlap.

    grad_dtype: what gradients add up in; None means at least float32.
    """

    bucket_size: int
    sharded: bool = False
    overlap_gather: bool = False
    grad_dtype: torch.dtype | None = None


def flatten_parameters(
    stages: Sequence[nn.Module],
    placements: Mapping[str, Placement],
    decays: Callable[[str, nn.Parameter], bool],
    mesh: ParallelMesh,
    options: FlatOptions,
    *,
    uses: Mapping[nn.Parameter, int] | None = None,
) -> list[FlatGroup]:
    """Move the parameters of a rank's stages into flat buffers.

    `uses` is how many gradients each gets per micro-batch; by default as many as there are stages that have it.

    A buffer holds one dtype, one answer of `decays` (does weight decay touch it?), one stage, and dense or expert
    parameters. The order inside is that of the backward pass, last layer first. What is added up with another stage (a
    tied embedding) lies in a buffer of its own, so that both stages cut it alike.
    """
    members: dict[tuple, list[tuple[str, nn.Parameter, int, int]]] = {}
    uses = uses or Counter(parameter for stage in stages for parameter in stage.parameters())
    seen: set[nn.Parameter] = set()
    for number, stage in enumerate(stages):
        for turn, (name, parameter) in enumerate(reversed(list(stage.named_parameters()))):
            if parameter in seen:
                continue
            seen.add(parameter)
            placement = placements[name]
            tied = any(piece.sum_over == "ends" for piece in placement.pieces)
            key = (number, parameter.dtype, decays(name, parameter), placement.expert, tied)
            members.setdefault(key, []).append((name, parameter, turn, uses[parameter]))
    groups = []
    for (number, _, decay, expert, _), entries in members.items():
        axes = DataAxes.of(mesh, expert=expert, sharded=options.sharded)
        buckets = _cut(entries, placements, options.bucket_size, axes.shard.size if options.sharded else 1)
        groups.append(
            FlatGroup(
                buckets,
                axes,
                decay=decay,
                stage=number,
                overlap_gather=options.overlap_gather,
                grad_dtype=options.grad_dtype,
            )
        )
    return groups


def _cut(
    entries: Sequence[tuple[str, nn.Parameter, int, int]], placements: Mapping[str, Placement], size: int, parts: int
) -> list[Bucket]:
    """Buckets of at least `size` elements; what is shared is padded so that it divides into aligned parts."""
    multiple = parts * _ALIGNMENT if parts > 1 else 1
    buckets: list[Bucket] = []
    begin, at, slots = 0, 0, []
    for index, (name, parameter, turn, uses) in enumerate(entries):
        slots.append(Slot(name, parameter, placements[name], at, turn, uses))
        at = slots[-1].end
        if at - begin >= size or index == len(entries) - 1:
            at = begin + -(-(at - begin) // multiple) * multiple
            buckets.append(Bucket(begin, at, tuple(slots)))
            begin, slots = at, []
    return buckets
