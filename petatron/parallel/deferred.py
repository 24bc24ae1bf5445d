"""Weight gradients that wait: the split backward of zero-bubble schedules.

A backward pass owes the stage before it the gradient of its input, and the optimizer the gradients of its weights; only the
first is urgent. `DeferredProduct` multiplies like `F.linear`, but while a queue is collecting, its backward computes the input's
gradient alone and leaves the weight's in the queue, as the two matrices it will be made of. What is not a matrix product
(norms, biases, embeddings, experts) costs little and is never deferred.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

Deliver = Callable[[nn.Parameter, Tensor], None]


class WeightGradQueue:
    """Postponed weight gradients, by the backward pass they belong to."""

    def __init__(self) -> None:
        self._held: dict[Hashable, list[tuple[nn.Parameter, Tensor, Tensor]]] = {}
        self._open: list[tuple[nn.Parameter, Tensor, Tensor]] | None = None

    @contextmanager
    def collecting(self, key: Hashable) -> Iterator[None]:
        """Inside, backward passes leave their weight gradients here under a key."""
        assert self._open is None and key not in self._held
        self._open = self._held[key] = []
        try:
            yield
        finally:
            self._open = None

    def postpone(self, weight: nn.Parameter, x: Tensor, grad: Tensor) -> bool:
        """Keep what a weight gradient is made of; False when nothing is being collected."""
        if self._open is None:
            return False
        self._open.append((weight, x, grad))
        return True

    @torch.no_grad()
    def compute(self, key: Hashable, deliver: Deliver) -> None:
        """Make the gradients kept under a key, and deliver each."""
        for weight, x, grad in self._held.pop(key):
            deliver(weight, _weight_grad(x, grad))


def _weight_grad(x: Tensor, grad: Tensor) -> Tensor:
    return grad.flatten(0, -2).t() @ x.flatten(0, -2)


class _Deferred(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: nn.Parameter, queue: WeightGradQueue) -> Tensor:
        ctx.save_for_backward(x)
        ctx.weight, ctx.queue = weight, queue
        return F.linear(x, weight)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor | None, None]:
        (x,) = ctx.saved_tensors
        grad = grads[0]
        postponed = ctx.queue.postpone(ctx.weight, x, grad)
        return grad @ ctx.weight, None if postponed else _weight_grad(x, grad), None


class DeferredProduct:
    """A `Product` whose weight gradient may wait in a queue."""

    def __init__(self, queue: WeightGradQueue) -> None:
        self._queue = queue

    def __call__(self, x: Tensor, weight: Tensor) -> Tensor:
        return _Deferred.apply(x, weight, self._queue)  # pyright: ignore[reportReturnType]
