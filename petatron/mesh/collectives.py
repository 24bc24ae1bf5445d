"""All communication of tensors: every collective is called here and recorded; `json_collectives.py` has those of JSON values.

Plain functions come first; over an axis of size 1 each is the identity and leaves no record. Gathers and scatters work on
dimension 0, where activations `[sequence, batch, hidden]` are contiguous. After them are the four differentiable pairs of tensor
and sequence parallelism, each named by what it does to an activation; the backward of each is the other half of its pair:

    copy     identity      / all-reduce         before a column-parallel linear, whole sequence on every rank
    reduce   all-reduce    / identity           after a row-parallel linear
    gather   all-gather    / reduce-scatter     before a column-parallel linear, sequence parallel
    scatter  reduce-scatter/ all-gather         after a row-parallel linear, sequence parallel

and one that is its own inverse: `differentiable_all_to_all` (expert dispatch, Ulysses). `overlapped_all_to_all.py` has the same in two
autograd nodes, between which other work overlaps the communication, forward and backward.

Point-to-point transfers from one rank to another run in the order in which they are started, so both ends must start them in
the same order. gloo sends only host memory, so a device tensor is staged through it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor

from petatron.mesh import gloo_collectives
from petatron.mesh.diagnose.failure_report import communication_error
from petatron.mesh.launch.rank_exit import is_echo
from petatron.mesh.mesh import Axis

ReduceOpName = Literal["sum", "max", "min"]
_REDUCE_OPS = {"sum": dist.ReduceOp.SUM, "max": dist.ReduceOp.MAX, "min": dist.ReduceOp.MIN}


# torch 2.13 renamed these two; 2.11 has only the old names.
all_gather_into = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


class RecordedCall:
    """One communication call as a context, entered while the host starts it, waits for it, or both.

    It is recorded, and a backend's error is raised as ours, with what the record knows.
    """

    __slots__ = ("_event", "_record")

    def __init__(
        self,
        axis: Axis,
        op: str,
        *,
        elements: int = 0,
        dtype: torch.dtype = torch.uint8,
        peer: int | None = None,
        batch: int | None = None,
    ) -> None:
        self._record = axis.record
        self._event = axis.record.add(axis, op, elements=elements, dtype=dtype, peer=peer, batch=batch)

    def __enter__(self) -> RecordedCall:
        self._event.host_in_call = True
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        self._event.host_in_call = False
        if error is not None and is_echo(error):
            raise communication_error(error, self._event, self._record) from error


class Handle:
    """A collective in flight; `wait` returns when its result may be used. `keep_alive` is memory that must live until then."""

    __slots__ = ("_call", "_keep_alive", "_on_complete", "_work")

    def __init__(
        self,
        work: dist.Work | None = None,
        call: RecordedCall | None = None,
        *,
        keep_alive: object = None,
        on_complete: Callable[[], object] | None = None,
    ) -> None:
        self._work, self._call, self._keep_alive, self._on_complete = work, call, keep_alive, on_complete

    def wait(self) -> None:
        """Waits for the result; a second call does nothing."""
        if self._work is not None:
            assert self._call is not None, "whatever is under way was recorded"
            with self._call:
                self._work.wait()
        if self._on_complete is not None:
            self._on_complete()
        self._work = self._call = self._keep_alive = self._on_complete = None

    def done(self) -> bool:
        """Whether it is complete, so that `wait` would not block."""
        return self._work is None or self._work.is_completed()


def all_reduce(x: Tensor, axis: Axis, *, op: ReduceOpName = "sum") -> Tensor:
    """Reduces in place over an axis and returns the tensor."""
    start_all_reduce(x, axis, op=op).wait()
    return x


def start_all_reduce(x: Tensor, axis: Axis, *, op: ReduceOpName = "sum") -> Handle:
    """Starts an in-place reduction; the caller may compute until it waits."""
    if axis.size == 1:
        return Handle()
    _count_change(x)
    with RecordedCall(axis, "all_reduce", elements=x.numel(), dtype=x.dtype) as call:
        if gloo_collectives.one_round(x, axis.group, copies=axis.size):
            work, finish = gloo_collectives.start_all_reduce(x, axis.group, axis.size, op)
            return Handle(work, call, on_complete=finish)
        return Handle(dist.all_reduce(x, op=_REDUCE_OPS[op], group=axis.group, async_op=True), call)


def _count_change(x: Tensor) -> None:
    """Counts a change in place in the tensor's version, by which autograd and the amax of FP8 casts know; backends do not."""
    if not x.is_inference():
        torch.autograd.graph.increment_version(x)


def start_all_gather(out: Tensor, x: Tensor, axis: Axis, *, on_complete: Callable[[], object] | None = None) -> Handle:
    """Starts to fill `out` with the ranks' tensors in axis order; `x` may be this rank's part of `out`.

    `on_complete` is called in `wait`, when `out` is complete.
    """
    if axis.size == 1:
        return _local_copy(out, x, on_complete=on_complete)
    with RecordedCall(axis, "all_gather", elements=out.numel(), dtype=x.dtype) as call:
        if gloo_collectives.one_round(x, axis.group, copies=axis.size):
            work, finish = gloo_collectives.start_all_gather(out, x, axis.group, axis.size)
            return Handle(work, call, on_complete=finish if on_complete is None else lambda: (finish(), on_complete()))
        work = all_gather_into(out, x, group=axis.group, async_op=True)
        return Handle(work, call, keep_alive=(out, x), on_complete=on_complete)


def start_reduce_scatter(out: Tensor, x: Tensor, axis: Axis) -> Handle:
    """Starts to fill `out` with this rank's part of the sum of the ranks' tensors."""
    if axis.size == 1:
        return _local_copy(out, x)
    with RecordedCall(axis, "reduce_scatter", elements=x.numel(), dtype=x.dtype) as call:
        if gloo_collectives.one_round(x, axis.group):
            work, finish = gloo_collectives.start_reduce_scatter(out, x, axis.group, axis.size)
            return Handle(work, call, on_complete=finish)
        return Handle(_reduce_scatter(out, x, group=axis.group, async_op=True), call)


def _local_copy(out: Tensor, x: Tensor, *, on_complete: Callable[[], object] | None = None) -> Handle:
    """Copies `x` to `out`, unless it is there already: the gather or scatter of a single rank."""
    if out.data_ptr() != x.data_ptr():
        out.copy_(x)
    return Handle(on_complete=on_complete)


def all_to_all(x: Tensor, axis: Axis, *, send: Sequence[int], receive: Sequence[int]) -> Tensor:
    """Exchanges rows with every rank of the axis, in axis order: `send[i]` rows go to rank i and `receive[i]` come from it."""
    if axis.size == 1:
        return x
    assert sum(send) == x.shape[0], f"{x.shape[0]} rows, but {sum(send)} are to be sent"
    out = x.new_empty((sum(receive), *x.shape[1:]))
    with RecordedCall(axis, "all_to_all", elements=x.numel(), dtype=x.dtype):
        dist.all_to_all_single(out, x.contiguous(), list(receive), list(send), group=axis.group)
    return out


def start_all_to_all(x: Tensor, axis: Axis, *, send: Sequence[int], receive: Sequence[int]) -> tuple[Tensor, Handle]:
    """Starts an all-to-all of rows; returns the output, which is defined once the handle has been waited for."""
    if axis.size == 1:
        return x, Handle()
    assert sum(send) == x.shape[0], f"{x.shape[0]} rows, but {sum(send)} are to be sent"
    x, out = x.contiguous(), x.new_empty((sum(receive), *x.shape[1:]))
    with RecordedCall(axis, "all_to_all", elements=x.numel(), dtype=x.dtype) as call:
        work = dist.all_to_all_single(out, x, list(receive), list(send), group=axis.group, async_op=True)
    return out, Handle(work, call, keep_alive=(out, x))


def start_send_recv(
    axis: Axis, *, sends: Sequence[tuple[Tensor, int]], receives: Sequence[tuple[Tensor, int]]
) -> tuple[list[Handle], list[Handle]]:
    """Starts to send tensors to ranks of the axis, and to receive into tensors.

    Each uses the channel of its two ranks and its direction, so a transfer waits for its peer and for earlier ones of the same
    channel, and for nothing else. A sent tensor must stay unchanged until its handle has been waited for.
    """
    sent, received = [], []
    for x, to in sends:
        channel = axis.channel(axis.rank, to)
        sent += _start_send_recv_batch(channel, sends=[(x, 1 - channel.rank)])[0]
    for out, source in receives:
        channel = axis.channel(source, axis.rank)
        received += _start_send_recv_batch(channel, receives=[(out, 1 - channel.rank)])[1]
    return sent, received


def start_ring_shift(out: Sequence[Tensor], x: Sequence[Tensor], axis: Axis, *, by: int = 1) -> list[Handle]:
    """Starts to send tensors to the rank `by` positions ahead in the ring, and to receive those of the rank as far behind.

    All of it is one batch: two ranks that both send first would deadlock.
    """
    to, source = (axis.rank + by) % axis.size, (axis.rank - by) % axis.size
    sent, received = _start_send_recv_batch(
        axis, sends=[(tensor, to) for tensor in x], receives=[(tensor, source) for tensor in out]
    )
    return [*sent, *received]


def _start_send_recv_batch(
    axis: Axis, *, sends: Sequence[tuple[Tensor, int]] = (), receives: Sequence[tuple[Tensor, int]] = ()
) -> tuple[list[Handle], list[Handle]]:
    """Starts transfers as one batch on the axis's group, also a single one.

    Outside a batch NCCL would use a communicator of the pair of ranks, created on demand, which never matches a batched peer.
    """
    group, batch = axis.group, axis.record.count
    calls, operations, receive_buffers = [], [], []
    for x, to in sends:
        peer = axis.ranks[to]
        calls.append(RecordedCall(axis, "send", elements=x.numel(), dtype=x.dtype, peer=peer, batch=batch))
        operations.append(dist.P2POp(dist.isend, _host_buffer(x.contiguous(), group), peer, group=group))
    for out, source in receives:
        peer = axis.ranks[source]
        calls.append(RecordedCall(axis, "receive", elements=out.numel(), dtype=out.dtype, peer=peer, batch=batch))
        receive_buffers.append(_host_buffer(out, group, copy=False))
        operations.append(dist.P2POp(dist.irecv, receive_buffers[-1], peer, group=group))
    with calls[0]:
        works = dist.batch_isend_irecv(operations)
    if len(works) != len(calls):  # a backend may return one work for the whole batch
        works = [works[0]] * len(calls)
    sent = [
        Handle(work, call, keep_alive=started.tensor)
        for work, call, started in zip(works, calls, operations[: len(sends)])
    ]
    received = [
        Handle(work, call, on_complete=None if host is out else partial(out.copy_, host))
        for work, call, host, (out, _) in zip(works[len(sends) :], calls[len(sends) :], receive_buffers, receives)
    ]
    return sent, received


def _host_buffer(x: Tensor, group: dist.ProcessGroup | None, *, copy: bool = True) -> Tensor:
    """Returns the tensor itself, or a host buffer where the backend cannot send from the device."""
    if x.device.type == "cpu" or dist.get_backend(group) != "gloo":
        return x
    return x.cpu() if copy else torch.empty(x.shape, dtype=x.dtype)


def all_gather(x: Tensor, axis: Axis) -> Tensor:
    """Concatenates the ranks' tensors along dimension 0."""
    if axis.size == 1:
        return x
    out = x.new_empty((x.shape[0] * axis.size, *x.shape[1:]))
    if x.device.type == "cpu":
        start_all_gather(out, x.contiguous(), axis).wait()
        return out
    with RecordedCall(axis, "all_gather", elements=out.numel(), dtype=x.dtype):
        all_gather_into(out, x.contiguous(), group=axis.group)
    return out


def reduce_scatter(x: Tensor, axis: Axis) -> Tensor:
    """Sums over the ranks, and returns this rank's part of dimension 0."""
    if axis.size == 1:
        return x
    assert x.shape[0] % axis.size == 0, f"{x.shape[0]} rows cannot be scattered over {axis.size} ranks"
    out = x.new_empty((x.shape[0] // axis.size, *x.shape[1:]))
    if x.device.type == "cpu":
        start_reduce_scatter(out, x.contiguous(), axis).wait()
        return out
    with RecordedCall(axis, "reduce_scatter", elements=x.numel(), dtype=x.dtype):
        _reduce_scatter(out, x.contiguous(), group=axis.group)
    return out


def broadcast(x: Tensor, axis: Axis, *, source: int = 0) -> Tensor:
    """Overwrites the tensor on every rank with that of the axis's rank `source`."""
    if axis.size == 1:
        return x
    _count_change(x)
    with RecordedCall(axis, "broadcast", elements=x.numel(), dtype=x.dtype):
        dist.broadcast(x, axis.ranks[source], group=axis.group)
    return x


def recursive_doubling_max(x: Tensor, axis: Axis) -> Tensor:
    """Returns the element-wise maximum over the ranks of a small host tensor, in log2(size) rounds.

    In each round a rank receives the maximum of twice as many ranks; gloo's all-reduce is a ring, whose steps grow with the axis.
    """
    step = 1
    while step < axis.size:
        received = torch.empty_like(x)
        for handle in start_ring_shift([received], [x], axis, by=step):
            handle.wait()
        x, step = torch.maximum(x, received), 2 * step
    return x


def barrier(axis: Axis) -> None:
    if axis.size > 1:
        with RecordedCall(axis, "barrier"):
            dist.barrier(group=axis.group)


def local_slice(x: Tensor, axis: Axis) -> Tensor:
    """Returns this rank's part of dimension 0 of a tensor that every rank has whole; no communication."""
    rows = x.shape[0] // axis.size
    return x.narrow(0, axis.rank * rows, rows)


class _CollectivePair(torch.autograd.Function):
    """Applies one collective in forward and its counterpart in backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, axis: Axis, forward_op: Callable, backward_op: Callable) -> Tensor:
        ctx.axis, ctx.backward_op = axis, backward_op
        return forward_op(x, axis)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None, None]:
        return ctx.backward_op(grads[0], ctx.axis), None, None, None


def _identity(x: Tensor, axis: Axis) -> Tensor:
    return x.view_as(x)


def _all_reduced_copy(x: Tensor, axis: Axis) -> Tensor:
    # Autograd may share the incoming tensor with other consumers, so the in-place reduction works on a copy.
    return all_reduce(x.clone(memory_format=torch.contiguous_format), axis)


def copy_to_region(x: Tensor, axis: Axis) -> Tensor:
    return _CollectivePair.apply(x, axis, _identity, _all_reduced_copy) if axis.size > 1 else x  # pyright: ignore[reportReturnType]


def reduce_from_region(x: Tensor, axis: Axis) -> Tensor:
    return _CollectivePair.apply(x, axis, _all_reduced_copy, _identity) if axis.size > 1 else x  # pyright: ignore[reportReturnType]


def all_reduce_in_region(x: Tensor, axis: Axis) -> Tensor:
    """Sums over ranks of which each uses the sum for something of its own, so that the gradients of all its uses are summed too."""
    return _CollectivePair.apply(x, axis, _all_reduced_copy, _all_reduced_copy) if axis.size > 1 else x  # pyright: ignore[reportReturnType]


def gather_from_region(x: Tensor, axis: Axis) -> Tensor:
    return _CollectivePair.apply(x, axis, all_gather, reduce_scatter) if axis.size > 1 else x  # pyright: ignore[reportReturnType]


def slice_to_region(x: Tensor, axis: Axis) -> Tensor:
    """Returns this rank's part of dimension 0 of what all ranks computed alike, of which each uses its own part for something else."""
    return _CollectivePair.apply(x, axis, local_slice, all_gather) if axis.size > 1 else x  # pyright: ignore[reportReturnType]


def reduce_scatter_to_region(x: Tensor, axis: Axis) -> Tensor:
    return _CollectivePair.apply(x, axis, reduce_scatter, all_gather) if axis.size > 1 else x  # pyright: ignore[reportReturnType]


def differentiable_all_to_all(x: Tensor, axis: Axis, *, send: Sequence[int], receive: Sequence[int]) -> Tensor:
    """Differentiable `all_to_all`: backward exchanges gradients in the opposite direction."""
    if axis.size == 1:
        return x
    there, back = partial(all_to_all, send=send, receive=receive), partial(all_to_all, send=receive, receive=send)
    return _CollectivePair.apply(x, axis, there, back)  # pyright: ignore[reportReturnType]
