"""Weight gradients that wait: the split backward of zero-bubble schedules.

A backward pass owes the stage before it the gradient of its input, and the optimizer the gradients of its weights; only the
first is urgent. Products give their weight gradients away as work to be done (`layers/ops/linear_op.py`). What takes them does it
at once, or, while it is collecting, keeps it with the two matrices it will be made of. Of a matrix that must be gathered a rank
keeps its own part; it is gathered while the gradient before it is computed. What is not a matrix product (norms, biases,
embeddings) costs little and is never deferred.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor

from petatron.layers.ops.linear_op import Write

Deliver = Callable[[Tensor, Write], None]
"""(weight, write): have a gradient written, or added, where the weight's gradients are accumulated."""


@dataclass(frozen=True, slots=True)
class _Postponed:
    """A gradient to be written; `begin` starts the communication it waits for."""

    weight: Tensor
    write: Write
    begin: Callable[[], None] | None


class WeightGradQueue:
    """Takes weight gradients, and postpones them by the backward pass they belong to."""

    def __init__(self) -> None:
        self.deliver: Deliver | None = None
        """Who accumulates them; there is nobody before the buffers exist."""
        self._held: dict[Hashable, list[_Postponed]] = {}
        self._open: list[_Postponed] | None = None

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

    @property
    def postpones(self) -> bool:
        return self._open is not None

    def take(self, weight: Tensor, write: Write, *, now: bool = False, begin: Callable[[], None] | None = None) -> None:
        """Have a weight's gradient written: at once, or with the others of its backward pass."""
        if self._open is None or now:
            self._write(weight, write)
        else:
            self._open.append(_Postponed(weight, write, begin))

    def compute(self, key: Hashable) -> None:
        """Write the gradients kept under a key; what one is made of is let go at once."""
        waiting = self._held.pop(key)
        if waiting:
            _begin(waiting[-1])
        while waiting:
            postponed = waiting.pop()
            if waiting:
                _begin(waiting[-1])
            self._write(postponed.weight, postponed.write)

    @torch.no_grad()
    def _write(self, weight: Tensor, write: Write) -> None:
        assert self.deliver is not None, "nobody accumulates weight gradients"
        self.deliver(weight, write)


def _begin(postponed: _Postponed) -> None:
    if postponed.begin is not None:
        postponed.begin()
