"""Communication between ranks that have one contiguous part of every sequence each: what a scan over the sequence needs.

A scan passes a state from part to part (`layers/ssm/context_parallel_recurrence.py`). A convolution takes a **halo**: each rank sends the
last tokens of its part, before the convolution, to the next one; gradients go the other way. The first rank gets zeros, the last one's
tokens go nowhere.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from petatron.mesh import collectives
from petatron.mesh.mesh import Axis


@dataclass(frozen=True, slots=True)
class AxisParts:
    """`SequenceParts` over an axis of the mesh."""

    axis: Axis

    @property
    def rank(self) -> int:
        return self.axis.rank

    def local(self, x: Tensor) -> Tensor:
        return collectives.local_slice(x, axis=self.axis)

    def from_previous(self, x: Tensor) -> Tensor:
        return _ShiftToNext.apply(x, self.axis)  # pyright: ignore[reportReturnType]

    def gather(self, x: Tensor) -> Tensor:
        return collectives.gather_from_region(x, self.axis)


class _ShiftToNext(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, axis: Axis) -> Tensor:
        ctx.axis = axis
        received = _ring_shift(x, axis, by=1)
        return received.zero_() if axis.rank == 0 else received

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        axis: Axis = ctx.axis
        received = _ring_shift(grads[0], axis, by=-1)
        return (received.zero_() if axis.rank == axis.size - 1 else received), None


def _ring_shift(x: Tensor, axis: Axis, *, by: int) -> Tensor:
    x = x.contiguous()
    received = torch.empty_like(x)
    for handle in collectives.start_ring_shift([received], [x], axis, by=by):
        handle.wait()
    return received
