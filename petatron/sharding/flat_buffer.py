"""Flat buffers: all parameters of one kind in one contiguous tensor, with their gradients in one tensor per bucket.

A buffer is cut into buckets, the unit in which gradients are reduced during the backward pass, and in which their memory is
allocated and freed. Without sharding, every rank updates whole buckets. With the distributed optimizer (ZeRO-1), each rank of the
`shard` axis owns one part of every bucket: gradients are reduce-scattered, master weights and moments exist only for the owned
parts, and updated weights are gathered bucket by bucket. So buckets are padded to a multiple of the ranks that share them.

Where an update rule needs whole matrices (`GroupSpec.unit`), the parameters of a bucket are assigned to its shards, the largest first,
each to the shard that has least; all shards are as long as the fullest. A bucket takes more parameters until little of it is
padding. If that fails (few matrices for many ranks, or one stack of experts that is most of a bucket), it is sharded like any
other, and the rank that orthogonalizes a matrix receives the rest of it from the other owners (`optim/matrix_update.py`).

Weights of FP8 GEMMs have separate buffers where state is sharded, and may be all-gathered in FP8 (`sharding/fp8_gather.py`). The
owned part of such weights is then a separate tensor in the precision of the run, and the buffer that GEMMs read has dequantized
values.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from petatron.base.log import get_logger
from petatron.kernels.fp8.cast_and_gemm import Scaling
from petatron.mesh import collectives
from petatron.mesh.collectives import Handle
from petatron.mesh.mesh import Axis, ParallelMesh
from petatron.sharding.bucket import Bucket, BucketGrads, BucketParam
from petatron.sharding.flat_shard import ALIGNMENT, FlatShard, OwnedRange, ParamRange, assign_whole_blocks, rank_share
from petatron.sharding.fp8_gather import BucketFp8Gather, Fp8Weights
from petatron.sharding.optimizer_group_spec import GroupSpec
from petatron.sharding.shard_spec import Placement, Shape

_log = get_logger(__name__)

# Buckets of whole matrices: the largest share of padding, and how many bucket sizes of matrices to try for less.
_MAX_PADDING = 1 / 16
_MAX_BUCKET_SIZES = 4


@dataclass(frozen=True, slots=True)
class DataParallelAxes:
    """The ranks that hold the same weights: `data_parallel` = `outer` x `shard`; state is split over `shard` if `sharded`."""

    data_parallel: Axis
    outer: Axis
    shard: Axis
    sharded: bool

    @classmethod
    def from_mesh(cls, mesh: ParallelMesh, *, expert: bool, sharded: bool) -> DataParallelAxes:
        data_parallel, shard = ("edp", "edp_shard") if expert else ("dp_cp", "shard")
        return cls(mesh[data_parallel], mesh["dp_outer"], mesh[shard], sharded)


class FlatParamGroup:
    """Parameters that share a dtype, an update rule and the ranks they are reduced over, in the order of their gradients."""

    def __init__(
        self,
        buckets: Sequence[Bucket],
        axes: DataParallelAxes,
        *,
        spec: GroupSpec,
        virtual_stage: int,
        options: FlatBufferOptions,
    ) -> None:
        """`virtual_stage` counts the stages of this rank. With `options.fp8_weights`, all parameters are weights of FP8 GEMMs.

        The gradients of frozen ones are on the meta device.
        """
        first, size = buckets[0].params[0].parameter, buckets[-1].end
        self.buckets, self.axes, self.spec, self.virtual_stage = buckets, axes, spec, virtual_stage
        self.replica_axis = axes.outer if axes.sharded else axes.data_parallel
        self._shard_axis = axes.shard if axes.sharded else axes.shard.alone()
        self._places = {
            id(slot.placement): (index, slot) for index, bucket in enumerate(buckets) for slot in bucket.params
        }
        self.flat_weights = torch.zeros(size, dtype=first.dtype, device=first.device)
        grad_dtype = options.grad_dtype or torch.promote_types(first.dtype, torch.float32)
        device = first.device if spec.trainable else "meta"
        self.bucket_grads = [BucketGrads(bucket, grad_dtype, device) for bucket in buckets]
        self.flat_shards = [self._flat_shard(begin, end) for begin, end in self._owned_ranges()]
        self._overlap_param_gather = options.overlap_param_gather
        self._gather_handles: dict[int, Handle] = {}
        self._gather_due = self._gathers_in_step = False
        for slot in self.params:
            view = self.param_view(self.flat_weights, slot)
            view.copy_(slot.parameter.detach())
            slot.parameter.data = view
        self._fp8_gather = None if options.fp8_weights is None else self._build_fp8_gather(options.fp8_weights)
        self._scales: Tensor | None = None
        self._read_frozen: Callable[[nn.Parameter], Tensor] | None = None
        self._owned_weights = [self.flat_weights[begin:end] for begin, end in self._owned_ranges()]
        if self._fp8_gather is not None:
            self._owned_weights = [weight.clone() for weight in self._owned_weights]

    def _build_fp8_gather(self, fp8_weights: Fp8Weights) -> BucketFp8Gather | None:
        """Returns None where weights are gathered in their own precision, or not at all."""
        axis, scalings = self.axes.shard, fp8_weights.scalings
        if fp8_weights.kernels is None or not self.axes.sharded or axis.size == 1:
            return None
        matrices: list[list[tuple[int, Shape, Scaling]]] = [
            [(slot.start - bucket.begin, slot.placement.shape, scalings[slot.name]) for slot in bucket.params]
            for bucket in self.buckets
        ]
        return BucketFp8Gather(matrices, axis, fp8_weights.kernels)

    @property
    def params(self) -> Iterator[BucketParam]:
        return (slot for bucket in self.buckets for slot in bucket.params)

    def param_view(self, flat: Tensor, param: BucketParam) -> Tensor:
        """Returns a parameter-shaped view into a tensor of this group's layout."""
        return flat[param.start : param.end].view(param.placement.shape)

    def param_grad(self, param: BucketParam) -> Tensor:
        """Returns the parameter-shaped view of a parameter's gradient."""
        index, _ = self._places[id(param.placement)]
        begin = self.buckets[index].begin
        return self.bucket_grads[index].flat[param.start - begin : param.end - begin].view(param.placement.shape)

    def owned_range(self, bucket: Bucket) -> tuple[int, int]:
        """Returns the range of a bucket that this rank updates."""
        if not self.axes.sharded:
            return bucket.begin, bucket.end
        length = (bucket.end - bucket.begin) // self.axes.shard.size
        begin = bucket.begin + self.axes.shard.rank * length
        return begin, begin + length

    @property
    def placements(self) -> list[Placement]:
        return [slot.placement for slot in self.params]

    def frozen(self) -> list[Placement]:
        # Not through `params`, whose generator is a call per parameter, at every step.
        slots = [slot for bucket in self.buckets for slot in bucket.params]
        return [slot.placement for slot in slots if not slot.parameter.requires_grad]

    def shard_axis(self, placement: Placement) -> Axis:
        """Returns the ranks that shard optimizer state; this rank alone where it is not sharded."""
        return self._shard_axis

    def owned_ranges(self, placement: Placement) -> list[OwnedRange]:
        """Returns which elements of a parameter each rank of `shard_axis` owns."""
        index, slot = self._places[id(placement)]
        bucket = self.buckets[index]
        length = (bucket.end - bucket.begin) // self._shard_axis.size
        first, last = (slot.start - bucket.begin) // length, (slot.end - 1 - bucket.begin) // length
        ranges = []
        for rank in range(first, last + 1):
            begin = bucket.begin + rank * length
            low, high = max(begin, slot.start), min(begin + length, slot.end)
            ranges.append(OwnedRange(rank, low - slot.start, high - slot.start))
        return ranges

    def _owned_ranges(self) -> list[tuple[int, int]]:
        return [self.owned_range(bucket) for bucket in self.buckets]

    def _flat_shard(self, begin: int, end: int) -> FlatShard:
        parts = []
        for slot in self.params:
            low, high = max(begin, slot.start), min(end, slot.end)
            if low < high:
                parts.append(ParamRange(slot.placement, low - slot.start, high - slot.start, low - begin))
        return FlatShard(end - begin, tuple(parts), rank_share(end - begin, self.replica_axis))

    def free_buffer(self, read: Callable[[nn.Parameter], Tensor]) -> None:
        """Frees the buffer of frozen weights, which are elsewhere from now on: `read` returns them whenever somebody asks for `weights`."""
        assert not self.spec.trainable
        self.wait_for_params()
        for slot in self.params:
            if slot.parameter.untyped_storage().data_ptr() == self.flat_weights.untyped_storage().data_ptr():
                slot.parameter.data = slot.parameter.data.clone()
        self._size, self._read_frozen = self.flat_weights.numel(), read
        self.flat_weights, self._owned_weights = self.flat_weights.new_empty(0), []

    def weights(self) -> list[Tensor]:
        if self._read_frozen is None:
            return list(self._owned_weights)
        flat = self.flat_weights.new_zeros(self._size)
        for slot in self.params:
            self.param_view(flat, slot).copy_(self._read_frozen(slot.parameter))
        return [flat[begin:end] for begin, end in self._owned_ranges()]

    def grads(self) -> list[Tensor]:
        owned = zip(self.buckets, self.bucket_grads, self._owned_ranges(), strict=True)
        return [grads.flat[begin - bucket.begin : end - bucket.begin] for bucket, grads, (begin, end) in owned]

    def sync_fp8_scales(self) -> None:
        """Reduces the scales of weights that are gathered in FP8, over all ranks."""
        if self._fp8_gather is not None:
            self._scales = self._fp8_gather.compute_scales(self._owned_weights)

    def all_gather_params(self) -> None:
        """Starts the all-gather of every bucket's weights, or leaves that to the next step or use, see `gather_in_step`."""
        self._gather_due = self.axes.sharded and self._read_frozen is None
        if not self._gathers_in_step:
            self.start_due_gather()
        if not self._overlap_param_gather:
            self.wait_for_params()

    def start_due_gather(self) -> None:
        """Starts an all-gather that is due, in the order in which the forward pass needs the weights."""
        if not self._gather_due:
            return
        self._gather_due = False
        self.wait_for_params()
        for index in reversed(range(len(self.buckets))):
            bucket, owned = self.buckets[index], self._owned_weights[index]
            out = self.flat_weights[bucket.begin : bucket.end]
            if self._fp8_gather is None:
                self._gather_handles[index] = collectives.start_all_gather(out, owned, self.axes.shard)
            else:
                assert self._scales is not None, "nothing was agreed on"
                self._gather_handles[index] = self._fp8_gather.start_all_gather(index, out, owned, self._scales)
        self._scales = None

    def gather_in_step(self, *, captured: bool) -> None:
        """Leaves gathers that overlap a step to a CUDA graph of that step, which is captured now (or replayed)."""
        self._gathers_in_step = self.axes.sharded and self._overlap_param_gather and self._fp8_gather is None
        self._gather_due = self._gather_due and not self._gathers_in_step
        self.wait_for_params()
        self._gather_due = captured and self._gathers_in_step

    def gather_again(self) -> None:
        """Makes the all-gather due that a failed capture of a step has begun: the device has not run it."""
        self._gather_handles.clear()
        self._gather_due = self._gathers_in_step

    def wait_for_params(self, bucket_indices: Iterable[int] | None = None) -> None:
        """Waits until the weights of these buckets (None: all) may be used."""
        self.start_due_gather()
        for index in list(self._gather_handles) if bucket_indices is None else bucket_indices:
            handle = self._gather_handles.pop(index, None)
            if handle is not None:
                handle.wait()


@dataclass(frozen=True, slots=True, kw_only=True)
class FlatBufferOptions:
    """How buffers are cut: bucket size in elements, whether optimizer state is sharded, whether gathers overlap.

    grad_dtype: the dtype in which gradients accumulate; None means at least float32.
    fp8_weights: the weights of FP8 GEMMs, and whether they are all-gathered in FP8.
    """

    bucket_size: int
    sharded: bool = False
    overlap_param_gather: bool = False
    grad_dtype: torch.dtype | None = None
    fp8_weights: Fp8Weights | None = None


def flatten_parameters(
    stages: Sequence[nn.Module],
    placements: Mapping[str, Placement],
    group_specs: Mapping[str, GroupSpec],
    mesh: ParallelMesh,
    options: FlatBufferOptions,
    *,
    grads_per_micro_batch: Mapping[nn.Parameter, int] | None = None,
) -> list[FlatParamGroup]:
    """Moves the parameters of a rank's stages into flat buffers.

    `grads_per_micro_batch` is how many gradients each gets per micro-batch; by default the number of stages that have it.

    A buffer holds one dtype, one of the `group_specs`, one stage, and dense or expert
    parameters. The order inside is that of the backward pass, last layer first. A parameter whose gradient is summed
    with another stage's (a tied embedding) has a separate buffer, so that both stages shard it alike. With sharding, so have weights of
    FP8 GEMMs, whether they are gathered in FP8 or not: sums are then the same, in the same order. Frozen parameters have buffers of
    weights alone. Tables of which each rank has other rows are in no buffer (`row_sharded_group.py`).
    """
    members: dict[tuple, list[BucketParam]] = {}
    uses = grads_per_micro_batch or Counter(parameter for stage in stages for parameter in stage.parameters())
    eight_bits = options.fp8_weights if options.sharded else None
    seen: set[nn.Parameter] = set()
    for number, stage in enumerate(stages):
        for grad_order, (name, parameter) in enumerate(reversed(list(stage.named_parameters()))):
            placement = placements[name]
            if parameter in seen or placement.row_sharded:
                continue
            seen.add(parameter)
            tied = any(piece.grad_reduce_axis == "ends" for piece in placement.tensor_shards)
            eight = eight_bits is not None and name in eight_bits.scalings and group_specs[name].trainable
            key = (number, parameter.dtype, group_specs[name], placement.expert, tied, eight)
            members.setdefault(key, []).append(BucketParam(name, parameter, placement, 0, grad_order, uses[parameter]))
    groups = []
    for (number, _, spec, expert, _, eight), entries in members.items():
        # Frozen weights have no state to shard: every rank has them, and they are never gathered.
        sharded = options.sharded and spec.trainable
        axes = DataParallelAxes.from_mesh(mesh, expert=expert, sharded=sharded)
        num_shards = axes.shard.size if sharded else 1
        if spec.needs_whole_matrices and num_shards > 1:
            buckets = _build_matrix_buckets(entries, options.bucket_size, num_shards)
        else:
            buckets = _build_buckets(entries, options.bucket_size, num_shards)
        group_options = replace(options, fp8_weights=eight_bits if eight else None)
        groups.append(FlatParamGroup(buckets, axes, spec=spec, virtual_stage=number, options=group_options))
    return groups


def _build_buckets(params: Sequence[BucketParam], bucket_size: int, num_shards: int, begin: int = 0) -> list[Bucket]:
    """Builds buckets of at least `bucket_size` elements; sharded ones are padded so that they divide into aligned shards."""
    multiple = num_shards * ALIGNMENT if num_shards > 1 else 1
    buckets: list[Bucket] = []
    at, slots = begin, []
    for index, param in enumerate(params):
        slots.append(replace(param, start=at))
        at = slots[-1].end
        if at - begin >= bucket_size or index == len(params) - 1:
            at = begin + -(-(at - begin) // multiple) * multiple
            buckets.append(Bucket(begin, at, tuple(slots)))
            begin, slots = at, []
    return buckets


def _build_matrix_buckets(params: Sequence[BucketParam], bucket_size: int, num_shards: int) -> list[Bucket]:
    """Builds buckets whose shards are whole parameters, where that needs little padding."""
    buckets: list[Bucket] = []
    rest, num_whole = list(params), 0
    while rest:
        begin = buckets[-1].end if buckets else 0
        count, starts, length = _whole_param_shards(rest, bucket_size, num_shards)
        if length:
            slots = (replace(param, start=begin + start) for param, start in zip(rest[:count], starts))
            buckets.append(Bucket(begin, begin + length, tuple(slots)))
            num_whole += 1
        else:
            buckets += _build_buckets(rest[:count], bucket_size, num_shards, begin)
        rest = rest[count:]
    held = sum(param.parameter.numel() for param in params)
    text = "matrices are whole on one of %d ranks in %d of %d buckets; %.1f %% of these buckets is padding"
    _log.debug(text, num_shards, num_whole, len(buckets), 100 * (1 - held / buckets[-1].end))
    return buckets


def _whole_param_shards(params: Sequence[BucketParam], bucket_size: int, num_shards: int) -> tuple[int, list[int], int]:
    """Returns the parameter count of the next bucket, where each starts, and its length: 0 if no shards of whole parameters fit."""
    sizes = [param.parameter.numel() for param in params]
    first, total = 0, 0
    for count, size in enumerate(sizes, start=1):
        total += size
        if total < bucket_size and count < len(sizes):
            continue
        first = first or count
        starts, length = assign_whole_blocks(sizes[:count], num_shards)
        if length - total <= _MAX_PADDING * total:
            return count, starts, length
        if total >= _MAX_BUCKET_SIZES * bucket_size:
            break
    return first, [], 0
