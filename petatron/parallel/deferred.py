"""Weight gradients that wait: the split backward of zero-bubble schedules.

A backward pass owes the stage before it the gradient of its input, and the optimizer the gradients of its weights; only the
first is urgent. Products give their weight gradients away as work to be done (`layers/product.py`). What takes them does it
at once, or, while it is collecting, keeps it with the two matrices it will be made of. What is not a matrix product (norms,
biases, embeddings) costs little and is never deferred.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from petatron.layers.product import Write

Deliver = Callable[[Tensor, Write], None]
"""(weight, write): have a gradient written, or added, where the weight's gradients are accumulated."""


class WeightGradQueue:
    """Takes weight gradients, and postpones them by the backward pass they belong to."""

    def __init__(self) -> None:
        self.deliver: Deliver | None = None
        """Who accumulates them; there is nobody before the buffers exist."""
        self._held: dict[Hashable, list[tuple[Tensor, Write]]] = {}
        self._open: list[tuple[Tensor, Write]] | None = None

    def begin(self) -> None:
        """A step begins: what a step that failed has left is forgotten."""
        self._held.clear()
        self._open = None

    @contextmanager
    def collecting(self, key: Hashable) -> Iterator[None]:
        """Inside, backward passes leave their weight gradients here under a key."""
        assert self._open is None and key not in self._held
        self._open = self._held[key] = []
        try:
            yield
        finally:
            self._open = None

    def take(self, weight: Tensor, write: Write, *, now: bool = False) -> None:
        """Have a weight's gradient written: at once, or with the others of its backward pass."""
        if self._open is None or now:
            self._write(weight, write)
        else:
            self._open.append((weight, write))

    def compute(self, key: Hashable) -> None:
        """Write the gradients kept under a key; what one is made of is let go at once."""
        waiting = self._held.pop(key)
        while waiting:
            self._write(*waiting.pop())

    @torch.no_grad()
    def _write(self, weight: Tensor, write: Write) -> None:
        assert self.deliver is not None, "nobody accumulates weight gradients"
        self.deliver(weight, write)
