"""A differentiable all-to-all that other work overlaps with, forward and backward.

Start and wait are two autograd nodes. In backward the node of the wait runs first and starts the all-to-all of the gradients, and
the node of the start waits for it. Of the nodes that are ready, the autograd engine runs the one that was created last. So what
forward computes between start and wait, backward differentiates between its own start and wait: both directions overlap the same
work, in reverse order.
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
    """The state that both nodes share: row counts, and the all-to-all in flight."""

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
    def forward(ctx: Any, x: Tensor, state: _AllToAllState) -> Tensor:
        ctx.state = state
        return state.start(x, send=state.send, receive=state.receive)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, None]:
        ctx.state.finish()
        grad, ctx.state.grad = ctx.state.grad, None
        return grad, None


class _WaitAllToAll(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, output: Tensor, state: _AllToAllState) -> Tensor:
        ctx.state = state
        state.finish()
        return output.view_as(output)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        state = ctx.state
        state.grad = state.start(grads[0], send=state.receive, receive=state.send)
        return grads[0], None  # a placeholder that `_StartAllToAll` replaces: the row counts may differ


def start_overlapped_all_to_all(
    x: Tensor,
    axis: Axis,
    *,
    send: Sequence[int],
    receive: Sequence[int],
    before_wait: Callable[[], None] | None = None,
) -> OverlappedAllToAll:
    """Starts a differentiable all-to-all. `before_wait` is called before each wait, in the forward and the backward pass."""
    state = _AllToAllState(axis, send, receive, before_wait)
    return OverlappedAllToAll(_StartAllToAll.apply(x, state), state)  # pyright: ignore[reportArgumentType]
