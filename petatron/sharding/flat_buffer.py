"""Flat buffers: all parameters of one kind in one contiguous tensor, with their gradients in another of the same layout.

A buffer is cut into buckets, the unit in which gradients are reduced while the backward pass goes on. Without sharding,
every rank keeps and updates the whole buffer. With the distributed optimizer (ZeRO-1), each rank of the `shard` axis owns
one part of every bucket: gradients are reduce-scattered, master weights and moments exist only for the owned parts, and
updated weights are gathered bucket by bucket. So buckets are padded to a multiple of the ranks that share them.

Weights that are multiplied in eight bits lie in buffers of their own where state is sharded, and may travel in eight bits
(`sharding/fp8_gather.py`). What this rank owns of them then lies apart, in the precision of the run, and the buffer that is computed
with holds what the bytes stand for.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from petatron.kernels.fp8.cast_and_gemm import Scaling
from petatron.mesh import collectives
from petatron.mesh.collectives import Handle
from petatron.mesh.mesh import Axis, ParallelMesh
from petatron.sharding.flat_shard import Part, Stretch, share_of
from petatron.sharding.fp8_gather import BucketWire, EightBitWeights
from petatron.sharding.shard_spec import Placement, Shape

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
        eight_bits: EightBitWeights | None = None,
    ) -> None:
        """`stage` counts the stages of this rank; `grad_dtype` None means at least float32.

        `eight_bits`: all these are weights that are multiplied so.
        """
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
        self._wire = self._build_wire(eight_bits) if eight_bits is not None else None
        self._scales: Tensor | None = None
        self._weights = self._owned(self.flat_weights)
        if self._wire is not None:
            self._weights = [weight.clone() for weight in self._weights]

    def _build_wire(self, eight_bits: EightBitWeights) -> BucketWire | None:
        """None where weights travel as they are, or not at all."""
        axis, scalings = self.axes.shard, eight_bits.scalings
        if eight_bits.kernels is None or not self.axes.sharded or axis.size == 1:
            return None
        matrices: list[list[tuple[int, Shape, Scaling]]] = [
            [(slot.start - bucket.begin, slot.placement.shape, scalings[slot.name]) for slot in bucket.slots]
            for bucket in self.buckets
        ]
        return BucketWire(matrices, axis, eight_bits.kernels)

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

    def _owned(self, flat: Tensor) -> list[Tensor]:
        return [flat[begin:end] for begin, end in self._owned_ranges()]

    def weights(self) -> list[Tensor]:
        return list(self._weights)

    def grads(self) -> list[Tensor]:
        return self._owned(self.flat_grads)

    def agree(self) -> None:
        """Find the scales of weights that travel in eight bits, over all ranks."""
        if self._wire is not None:
            self._scales = self._wire.scales(self._weights)

    def publish(self) -> None:
        """Begin to gather every bucket's weights, those the forward pass needs first in front."""
        if not self.axes.sharded:
            return
        self.wait()
        for index in reversed(range(len(self.buckets))):
            bucket, own = self.buckets[index], self._weights[index]
            out = self.flat_weights[bucket.begin : bucket.end]
            if self._wire is None:
                self._gathers[index] = collectives.start_all_gather(out, own, self.axes.shard)
            else:
                assert self._scales is not None, "nothing was agreed on"
                self._gathers[index] = self._wire.start(index, out, own, self._scales)
        self._scales = None
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
    eight_bits: which weights are multiplied in eight bits, and whether they travel so.
    """

    bucket_size: int
    sharded: bool = False
    overlap_gather: bool = False
    grad_dtype: torch.dtype | None = None
    eight_bits: EightBitWeights | None = None


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
    tied embedding) lies in a buffer of its own, so that both stages cut it alike. With sharding, so do weights that are
    multiplied in eight bits, whether they travel so or not: sums are then the same, in the same order.
    """
    members: dict[tuple, list[tuple[str, nn.Parameter, int, int]]] = {}
    uses = uses or Counter(parameter for stage in stages for parameter in stage.parameters())
    eight_bits = options.eight_bits if options.sharded else None
    seen: set[nn.Parameter] = set()
    for number, stage in enumerate(stages):
        for turn, (name, parameter) in enumerate(reversed(list(stage.named_parameters()))):
            if parameter in seen:
                continue
            seen.add(parameter)
            placement = placements[name]
            tied = any(piece.sum_over == "ends" for piece in placement.pieces)
            eight = eight_bits is not None and name in eight_bits.scalings
            key = (number, parameter.dtype, decays(name, parameter), placement.expert, tied, eight)
            members.setdefault(key, []).append((name, parameter, turn, uses[parameter]))
    groups = []
    for (number, _, decay, expert, _, eight), entries in members.items():
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
                eight_bits=eight_bits if eight else None,
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
