"""The one door for communication: every collective of the package is called here and recorded.

Plain functions come first; over an axis of size 1 each is the identity and leaves no record. Gathers and scatters work on
dimension 0, where activations `[sequence, batch, hidden]` are contiguous. Below them stand the four differentiable pairs
of tensor and sequence parallelism, each named by what it does to an activation; the backward of each is the other half of
its pair:

    copy     identity      / all-reduce         into a column-split matrix, whole sequence on every rank
    reduce   all-reduce    / identity           out of a row-split matrix
    gather   all-gather    / reduce-scatter     into a column-split matrix, sequence split
    scatter  reduce-scatter/ all-gather         out of a row-split matrix, sequence split
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor

from petatron.mesh.mesh import Axis

Op = Literal["sum", "max", "min"]
_OPS = {"sum": dist.ReduceOp.SUM, "max": dist.ReduceOp.MAX, "min": dist.ReduceOp.MIN}


# torch 2.13 renamed these two; 2.11 has only the old names.
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


class Handle:
    """A collective under way; `wait` returns when its result may be used."""

    __slots__ = ("_work",)

    def __init__(self, work: dist.Work | None = None) -> None:
        self._work = work

    def wait(self) -> None:
        if self._work is not None:
            self._work.wait()


def all_reduce(x: Tensor, axis: Axis, *, op: Op = "sum") -> Tensor:
    """Reduce in place over an axis and return the tensor."""
    start_all_reduce(x, axis, op=op).wait()
    return x


def start_all_reduce(x: Tensor, axis: Axis, *, op: Op = "sum") -> Handle:
    """Begin an in-place reduction; the caller may compute until it waits."""
    if axis.size == 1:
        return Handle()
    axis.record.add(axis.name, "all_reduce", elements=x.numel(), dtype=x.dtype)
    return Handle(dist.all_reduce(x, op=_OPS[op], group=axis.group, async_op=True))


def all_gather(x: Tensor, axis: Axis) -> Tensor:
    """Concatenate the ranks' tensors along dimension 0."""
    if axis.size == 1:
        return x
    out = x.new_empty((x.shape[0] * axis.size, *x.shape[1:]))
    axis.record.add(axis.name, "all_gather", elements=out.numel(), dtype=x.dtype)
    _all_gather(out, x.contiguous(), group=axis.group)
    return out


def reduce_scatter(x: Tensor, axis: Axis) -> Tensor:
    """Sum over the ranks, and keep this rank's part of dimension 0."""
    if axis.size == 1:
        return x
    assert x.shape[0] % axis.size == 0, f"{x.shape[0]} rows cannot be scattered over {axis.size} ranks"
    out = x.new_empty((x.shape[0] // axis.size, *x.shape[1:]))
    axis.record.add(axis.name, "reduce_scatter", elements=x.numel(), dtype=x.dtype)
    _reduce_scatter(out, x.contiguous(), group=axis.group)
    return out


def broadcast(x: Tensor, axis: Axis, *, source: int = 0) -> Tensor:
    """Overwrite the tensor on every rank with that of the axis's rank `source`."""
    if axis.size == 1:
        return x
    axis.record.add(axis.name, "broadcast", elements=x.numel(), dtype=x.dtype)
    dist.broadcast(x, axis.ranks[source], group=axis.group)
    return x


def gather_objects(value: Any, axis: Axis) -> list[Any]:
    """Every rank's small picklable value, in axis order; for control, not for tensors."""
    if axis.size == 1:
        return [value]
    axis.record.add(axis.name, "gather_objects", elements=0, dtype=torch.uint8)
    out: list[Any] = [None] * axis.size
    dist.all_gather_object(out, value, group=axis.group)
    return out


def gather_objects_to_first(value: Any, axis: Axis) -> list[Any] | None:
    """Every rank's value on the axis's first rank, None on the others: for what may be large and only one needs."""
    if axis.size == 1:
        return [value]
    axis.record.add(axis.name, "gather_objects_to_first", elements=0, dtype=torch.uint8)
    out: list[Any] | None = [None] * axis.size if axis.rank == 0 else None
    dist.gather_object(value, out, dst=axis.ranks[0], group=axis.group)
    return out


def barrier(axis: Axis) -> None:
    if axis.size > 1:
        axis.record.add(axis.name, "barrier", elements=0, dtype=torch.uint8)
        dist.barrier(group=axis.group)


def local_part(x: Tensor, axis: Axis) -> Tensor:
    """This rank's part of dimension 0 of a tensor that every rank holds whole; no communication."""
    rows = x.shape[0] // axis.size
    return x.narrow(0, axis.rank * rows, rows)


class _Paired(torch.autograd.Function):
    """Apply one communication forward and its partner backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, axis: Axis, ahead: Callable, back: Callable) -> Tensor:
        ctx.axis, ctx.back = axis, back
        return ahead(x, axis)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None, None]:
        return ctx.back(grads[0], ctx.axis), None, None, None


def _identity(x: Tensor, axis: Axis) -> Tensor:
    return x.view_as(x)


def _reduced(x: Tensor, axis: Axis) -> Tensor:
    # Autograd may share the incoming tensor with other consumers, so the in-place reduction gets a copy of its own.
    return all_reduce(x.clone(memory_format=torch.contiguous_format), axis)


def copy(x: Tensor, axis: Axis) -> Tensor:
    return _Paired.apply(x, axis, _identity, _reduced) if axis.size > 1 else x  # pyright: ignore[reportReturnType]


def reduce(x: Tensor, axis: Axis) -> Tensor:
    return _Paired.apply(x, axis, _reduced, _identity) if axis.size > 1 else x  # pyright: ignore[reportReturnType]


def gather(x: Tensor, axis: Axis) -> Tensor:
    return _Paired.apply(x, axis, all_gather, reduce_scatter) if axis.size > 1 else x  # pyright: ignore[reportReturnType]


def scatter(x: Tensor, axis: Axis) -> Tensor:
    return _Paired.apply(x, axis, reduce_scatter, all_gather) if axis.size > 1 else x  # pyright: ignore[reportReturnType]
