"""Gradient accumulation and reduction.

Gradients of all micro-batches accumulate in the fp32 (or wider) buffers of `sharding/flat_buffer.py`. GEMMs write there directly
(`layers/ops/linear_op.py`), other gradients come from autograd; the first gradient of a step overwrites that of the last step, so
only parameters without a gradient are set to zero. Every use of a parameter that requires a gradient brings one per micro-batch;
when a bucket has got all of a step's, it is reduced over the ranks that had other tokens, overlapped with the backward pass: an
all-reduce, or with sharded optimizer state a reduce-scatter to the owned ranges. A stage's buckets are sent in one fixed order on
every rank, whatever order gradients arrive in, so ranks cannot deadlock. Losses are divided by the global token count before the
backward pass, so the sum is the gradient: nothing is averaged here. Parameters that were frozen when the model was built are in no bucket.

A step of one micro-batch needs activations and gradients at different times: when its activations are most, before the backward
pass, it has no gradients but the output head's. So it frees the memory of gradients when it starts, and allocates a bucket when the
first gradient of it comes, in memory of activations that the backward pass has released. With several micro-batches gradients are there
throughout, and stay where they are. A captured CUDA graph needs addresses that never change (`keep_grads_allocated`).

Afterwards, partial gradients that several ranks of one replica have (see `TensorShard.grad_reduce_axis`) are all-reduced over those ranks.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from petatron.base.errors import TrainError
from petatron.mesh import collectives
from petatron.mesh.collectives import Handle
from petatron.mesh.mesh import ParallelMesh
from petatron.sharding.bucket import Bucket, BucketGrads, BucketParam
from petatron.sharding.flat_buffer import FlatParamGroup
from petatron.sharding.flat_shard import ParameterGroup, group_tensor_shards


@dataclass(slots=True)
class _BucketReduction:
    """A bucket, and how many gradients it still waits for in this step."""

    group: FlatParamGroup
    bucket: Bucket
    grads: BucketGrads
    order: tuple[int, int]
    num_pending: int = 0
    handles: list[Handle] = field(default_factory=list)
    main_grads: list[_MainGrad] = field(default_factory=list)

    def grads_per_micro_batch(self) -> int:
        """Returns how many gradients it gets; none of parameters that require none now."""
        # A list: a generator is a call of Python per parameter, at every step.
        return sum([slot.grads_per_micro_batch for slot in self.bucket.params if slot.parameter.requires_grad])

    def zero_missing_grads(self) -> None:
        """Sets gradients to zero that nothing has written in this step."""
        for main in self.main_grads:
            if main.overwrite_next:
                self.grads.allocate()
                main.main_grad.zero_()


@dataclass(slots=True)
class _MainGrad:
    """The buffer in which a parameter's gradients accumulate; `overwrite_next` until it has one of this step."""

    parameter: Tensor
    main_grad: Tensor
    reduction: _BucketReduction
    queue: list[_BucketReduction]
    overwrite_next: bool = True


class GradientReducer:
    """Accumulates gradients of GEMMs and autograd in the flat buffers, and reduces them over ranks."""

    def __init__(
        self,
        param_groups: Sequence[FlatParamGroup],
        mesh: ParallelMesh,
        *,
        overlap: bool,
        reduce_dtype: torch.dtype | None = None,
    ) -> None:
        """`reduce_dtype` is the precision gradients are reduced in; None means that of the buffers.

        With `overlap` buckets are reduced during the backward pass.
        """
        self._param_groups = [group for group in param_groups if group.spec.trainable]
        self._frozen_groups = [group for group in param_groups if not group.spec.trainable]
        self._mesh = mesh
        self.overlap = overlap
        self._reduce_dtype = reduce_dtype
        self._keeps_allocated = False
        self._reductions: list[_BucketReduction] = []
        self._partial_groups = groups_with_partial_grads(self._param_groups)
        self._main_grads: dict[int, _MainGrad] = {}
        """By the identity of the parameter: a tensor's hash is a call of Python."""
        self._build_queues()

    def _build_queues(self) -> None:
        """Builds one queue of buckets per stage, in the order in which its backward pass completes them."""
        queues: dict[int, list[_BucketReduction]] = {}
        for group in self._param_groups:
            for bucket, grads in zip(group.buckets, group.bucket_grads, strict=True):
                order = max(slot.grad_order for slot in bucket.params)
                queue = queues.setdefault(group.virtual_stage, [])
                queue.append(_BucketReduction(group, bucket, grads, (order, len(queue))))
        for queue in queues.values():
            queue.sort(key=lambda send: send.order)
            self._reductions += queue
            for send in queue:
                for slot in send.bucket.params:
                    self._register_grad_hook(slot, send, queue)

    def _register_grad_hook(
        self, param: BucketParam, reduction: _BucketReduction, queue: list[_BucketReduction]
    ) -> None:
        main = _MainGrad(param.parameter, reduction.group.param_grad(param), reduction, queue)
        self._main_grads[id(param.parameter)] = main
        reduction.main_grads.append(main)

        # The garbage collector cannot see a parameter's hook: a strong reference would keep all of this alive for ever,
        # process groups included.
        sync = weakref.ref(self)

        def arrived(parameter: nn.Parameter) -> None:
            grad, parameter.grad = parameter.grad, None
            owner = sync()
            if owner is not None and grad is not None:
                owner.add_grad(parameter, grad)

        param.parameter.register_post_accumulate_grad_hook(arrived)  # pyright: ignore[reportArgumentType]

    def start_step(self, micro_batches: int) -> None:
        """Starts a step: gradients of the last are lost, and every use of a parameter will bring one per micro-batch."""
        self._check_frozen()
        for main in self._main_grads.values():
            main.overwrite_next = True
        for send in self._reductions:
            send.num_pending = send.grads_per_micro_batch() * micro_batches
            if micro_batches == 1 and not self._keeps_allocated:
                send.grads.free()
            else:
                send.grads.allocate()

    def _check_frozen(self) -> None:
        buckets = [bucket for group in self._frozen_groups for bucket in group.buckets]
        thawed = [slot.name for bucket in buckets for slot in bucket.params if slot.parameter.requires_grad]
        if thawed:
            raise TrainError(
                f"{thawed[0]} requires a gradient, and has no memory for one: it was frozen when the model was built. Build the model "
                "without freezing it (--freeze, --train-only)."
            )

    def keep_grads_allocated(self) -> None:
        """Keeps gradients at the same addresses from now on; between steps, or before the first gradient of one."""
        for send in () if self._keeps_allocated else self._reductions:
            send.grads.allocate()
        self._keeps_allocated = True

    def let_grads_be_freed(self) -> None:
        """Lets later steps free the memory of gradients again."""
        self._keeps_allocated = False

    def add_grad(self, parameter: Tensor, grad: Tensor) -> None:
        """Accumulates a gradient tensor."""
        grad = grad.detach() if grad.requires_grad else grad
        self.write_grad(parameter, lambda out, accumulate: out.add_(grad) if accumulate else out.copy_(grad))

    def write_grad(self, parameter: Tensor, write: Callable[[Tensor, bool], object]) -> None:
        """Lets `write` accumulate one gradient of a parameter into its buffer; gradients are not enabled, as in a backward pass."""
        main = self._main_grads[id(parameter)]
        if main.reduction.grads.freed:
            main.reduction.grads.allocate()
        write(main.main_grad, not main.overwrite_next)
        main.overwrite_next = False
        send = main.reduction
        send.num_pending -= 1
        assert send.num_pending >= 0, "a parameter got more gradients than the step has micro-batches"
        if send.num_pending == 0 and self.overlap:
            self._start_ready_reductions(main.queue)

    def params_with_grad(self) -> frozenset[Tensor]:
        """Returns the parameters that have got a gradient in this step."""
        return frozenset(main.parameter for main in self._main_grads.values() if not main.overwrite_next)

    def mark_written(self, parameters: frozenset[Tensor]) -> None:
        """Marks these parameters' gradients of this step as written and not yet reduced.

        A replayed CUDA graph writes gradients of the same parameters as its captured step, without calling this object.
        """
        for main in self._main_grads.values():
            main.overwrite_next = main.parameter not in parameters
        for send in self._reductions:
            send.num_pending, send.handles = 0, []

    def _start_ready_reductions(self, queue: list[_BucketReduction]) -> None:
        for send in queue:
            if send.num_pending > 0:
                return
            if send.num_pending == 0:
                self._start_reduction(send)

    def _start_reduction(self, reduction: _BucketReduction) -> None:
        reduction.num_pending = -1
        reduction.zero_missing_grads()
        axes, bucket = reduction.group.axes, reduction.bucket
        grads = reduction.grads.flat
        sent = grads if self._reduce_dtype is None else grads.to(self._reduce_dtype)
        if not axes.sharded:
            copy_back = None if sent is grads else lambda: grads.copy_(sent)
            reduced = collectives.start_all_reduce(sent, axes.data_parallel)
            reduction.handles = [reduced, Handle(on_complete=copy_back)]
            return
        begin, end = reduction.group.owned_range(bucket)
        owned = grads[begin - bucket.begin : end - bucket.begin]
        part = torch.empty_like(owned, dtype=sent.dtype)
        scattered = collectives.start_reduce_scatter(part, sent, axes.shard)

        def over_replicas() -> None:
            collectives.all_reduce(part, axes.outer)
            owned.copy_(part)

        reduction.handles = [scattered, Handle(keep_alive=sent, on_complete=over_replicas)]

    @torch.no_grad()
    def finish_grad_sync(self) -> None:
        """Starts the remaining reductions, waits for all, and all-reduces partial gradients inside a replica."""
        for send in self._reductions:
            if send.num_pending >= 0:
                self._start_reduction(send)
        for send in self._reductions:
            for handle in send.handles:
                handle.wait()
            send.handles = []
        all_reduce_partial_grads(self._partial_groups, self._mesh)


def groups_with_partial_grads(param_groups: Sequence[ParameterGroup]) -> list[ParameterGroup]:
    """Returns the groups that have gradients to be all-reduced over the ranks of one replica."""

    def is_partial(group: ParameterGroup) -> bool:
        placements = (part.placement for shard in group.flat_shards for part in shard.param_ranges)
        return any(piece.grad_reduce_axis is not None for place in placements for piece in place.tensor_shards)

    return [group for group in param_groups if is_partial(group)]


@torch.no_grad()
def all_reduce_partial_grads(param_groups: Sequence[ParameterGroup], mesh: ParallelMesh) -> None:
    """All-reduces partial gradients over the ranks of one replica, one exchange per axis."""
    views: dict[tuple[str, torch.dtype], list[Tensor]] = {}
    for group in param_groups:
        for piece, view in group_tensor_shards(
            group, group.grads(), wanted=lambda piece: piece.grad_reduce_axis is not None
        ):
            assert piece.grad_reduce_axis is not None
            views.setdefault((piece.grad_reduce_axis, view.dtype), []).append(view)
    for (name, _), parts in sorted(views.items(), key=lambda item: item[0][0]):
        flat = torch.cat([part.reshape(-1) for part in parts])
        collectives.all_reduce(flat, mesh.axis(name))
        for part, summed in zip(parts, flat.split([part.numel() for part in parts])):
            part.copy_(summed.view(part.shape))
