"""A differentiable all-to-all that other work overlaps with, forward and backward.

Start and wait are two autograd nodes. In the backward pass the node of the wait comes first and starts the all-to-all of the
gradients, and the node of the start waits for it. Of the nodes that are ready, the autograd engine runs the one that was
created last. So what the forward pass computes between start and wait, the backward pass differentiates between its own
start and wait: both directions overlap with the same work, in reverse order.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from petatron.mesh.collectives import Handle, start_all_to_all
from petatron.mesh.mesh import Axis


class OverlappedAllToAll:
    """An all-to-all in flight; `wait` returns the received rows."""

    __slots__ = ("_output", "_state")

    def __init__(self, output: Tensor, state: _AllToAllState) -> None:
        self._output, self._state = output, state

    def wait(self) -> Tensor:
        return _WaitAllToAll.apply(self._output, self._state)  # pyright: ignore[reportReturnType]


class _AllToAllState:
    """What the two nodes of an exchange share: how many rows go where, and the all-to-all that has not been waited for."""

    __slots__ = ("_before_wait", "_handle", "axis", "grad", "receive", "send")

    def __init__(
        self, axis: Axis, send: Sequence[int], receive: Sequence[int], before_wait: Callable[[], None] | None
    ) -> None:
        self.axis, self.send, self.receive, self._before_wait = axis, send, receive, before_wait
        self._handle = Handle()
        self.grad: Tensor | None = None

    def start(self, x: Tensor, *, send: Sequence[int], receive: Sequence[int]) -> Tensor:
        out, self._handle = start_all_to_all(x, self.axis, send=send, receive=receive)
        return out

    def finish(self) -> None:
        if self._before_wait is not None:
            self._before_wait()
        self._handle.wait()


class _StartAllToAll(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, flight: _AllToAllState) -> Tensor:
        ctx.state = flight
        return flight.start(x, send=flight.send, receive=flight.receive)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, None]:
        ctx.state.finish()
        grad, ctx.state.grad = ctx.state.grad, None
        return grad, None


class _WaitAllToAll(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, output: Tensor, flight: _AllToAllState) -> Tensor:
        ctx.state = flight
        flight.finish()
        return output.view_as(output)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        flight = ctx.state
        flight.grad = flight.start(grads[0], send=flight.receive, receive=flight.send)
        return grads[0], None  # `_StartAllToAll` replaces it: what arrives may have another number of rows


def start_overlapped_all_to_all(
    x: Tensor,
    axis: Axis,
    *,
    send: Sequence[int],
    receive: Sequence[int],
    before_wait: Callable[[], None] | None = None,
) -> OverlappedAllToAll:
    """Starts a differentiable all-to-all. `before_wait` is called before each wait, in the forward and the backward pass."""
    flight = _AllToAllState(axis, send, receive, before_wait)
    return OverlappedAllToAll(_StartAllToAll.apply(x, flight), flight)  # pyright: ignore[reportArgumentType]
