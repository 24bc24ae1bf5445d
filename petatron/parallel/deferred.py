"""Weight gradients that wait: the split backward of zero-bubble schedules.

A backward pass owes the stage before it the gradient of its input, and the optimizer the gradients of its weights; only the
first is urgent. The products here multiply like the ones they replace, but while a queue is collecting, their backward
computes the input's gradient alone and leaves the weight's in the queue, with the two matrices it will be made of. What is
not a matrix product (norms, biases, embeddings) costs little and is never deferred.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from petatron.kernels.moe import Counts, GroupedProduct, grouped_weight_grad
from petatron.layers.experts import GroupedLinear
from petatron.layers.linear import Linear
from petatron.layers.vocabulary import OutputHead
from petatron.parallel.tensor import ColumnProduct, RowProduct

Deliver = Callable[[nn.Parameter, Tensor], None]
Make = Callable[[], Tensor]


class WeightGradQueue:
    """Postponed weight gradients, by the backward pass they belong to."""

    def __init__(self) -> None:
        self._held: dict[Hashable, list[tuple[nn.Parameter, Make]]] = {}
        self._open: list[tuple[nn.Parameter, Make]] | None = None

    @contextmanager
    def collecting(self, key: Hashable) -> Iterator[None]:
        """Inside, backward passes leave their weight gradients here under a key."""
        assert self._open is None and key not in self._held
        self._open = self._held[key] = []
        try:
            yield
        finally:
            self._open = None

    def now_or_later(self, weight: nn.Parameter, make: Make) -> Tensor | None:
        """A weight's gradient; None when it has been kept for later."""
        if self._open is None:
            return make()
        self._open.append((weight, make))
        return None

    @torch.no_grad()
    def compute(self, key: Hashable, deliver: Deliver) -> None:
        """Make the gradients kept under a key, and deliver each; what one is made of is let go at once."""
        waiting = self._held.pop(key)
        while waiting:
            weight, make = waiting.pop()
            deliver(weight, make())


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
        later = ctx.queue.now_or_later(ctx.weight, lambda: grad.flatten(0, -2).t() @ x.flatten(0, -2))
        return grad @ ctx.weight, later, None


class _DeferredGrouped(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: nn.Parameter, counts: Counts, product: GroupedProduct, queue: WeightGradQueue
    ) -> Tensor:
        ctx.save_for_backward(x)
        ctx.weight, ctx.counts, ctx.product, ctx.queue = weight, counts, product, queue
        return product(x, weight, counts)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor | None, None, None, None]:
        (x,) = ctx.saved_tensors
        grad, counts = grads[0], ctx.counts
        later = ctx.queue.now_or_later(ctx.weight, lambda: grouped_weight_grad(x, grad, counts))
        return ctx.product(grad, ctx.weight.transpose(1, 2), counts), later, None, None, None


@dataclass(frozen=True, slots=True)
class DeferredProduct:
    """A `Product` whose weight gradient may wait in a queue."""

    queue: WeightGradQueue

    def __call__(self, x: Tensor, weight: Tensor) -> Tensor:
        return _Deferred.apply(x, weight, self.queue)  # pyright: ignore[reportReturnType]


@dataclass(frozen=True, slots=True)
class DeferredGroupedProduct:
    """A `GroupedProduct` (experts) whose weight gradients may wait in a queue."""

    queue: WeightGradQueue
    product: GroupedProduct

    def __call__(self, x_RD: Tensor, weight_EOD: Tensor, counts: Counts) -> Tensor:
        args = (x_RD, weight_EOD, counts, self.product, self.queue)
        return _DeferredGrouped.apply(*args)  # pyright: ignore[reportReturnType]


def defer_weight_gradients(model: nn.Module, queue: WeightGradQueue) -> None:
    """Let every product of a model leave its weight gradient in a queue.

    Comes after tensor parallelism, whose products keep their communication and multiply in another way, and before
    recompute, which wraps the products it finds; a `Linear` that is not split gets another product.
    """
    later = DeferredProduct(queue)
    for module in model.modules():
        if isinstance(module, GroupedLinear):
            module.product = DeferredGroupedProduct(queue, module.product)
        elif isinstance(module, Linear | OutputHead) and isinstance(module.product, ColumnProduct | RowProduct):
            module.product = replace(module.product, multiply=later)
        elif isinstance(module, Linear):
            module.product = later
