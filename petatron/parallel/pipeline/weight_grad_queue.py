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

from petatron.layers.ops.linear_op import WriteWeightGrad

AccumulateWeightGrad = Callable[[Tensor, WriteWeightGrad], None]
"""(weight, write): have a gradient written, or added, where the weight's gradients are accumulated."""


@dataclass(frozen=True, slots=True)
class _DeferredWeightGrad:
    """A gradient to be written; `start_comm` starts the communication it waits for."""

    weight: Tensor
    write: WriteWeightGrad
    start_comm: Callable[[], None] | None


class WeightGradQueue:
    """Takes weight gradients, and postpones them by the backward pass they belong to."""

    def __init__(self) -> None:
        self.accumulate: AccumulateWeightGrad | None = None
        """Who accumulates them; there is nobody before the buffers exist."""
        self._deferred: dict[Hashable, list[_DeferredWeightGrad]] = {}
        self._current: list[_DeferredWeightGrad] | None = None

    def start_step(self) -> None:
        """A step begins: what a step that failed has left is forgotten."""
        self._deferred.clear()
        self._current = None

    @contextmanager
    def deferring(self, key: Hashable) -> Iterator[None]:
        """Inside, backward passes leave their weight gradients here under a key."""
        assert self._current is None and key not in self._deferred
        self._current = self._deferred[key] = []
        try:
            yield
        finally:
            self._current = None

    @property
    def defers(self) -> bool:
        return self._current is not None

    def submit(
        self, weight: Tensor, write: WriteWeightGrad, *, now: bool = False, start_comm: Callable[[], None] | None = None
    ) -> None:
        """Have a weight's gradient written: at once, or with the others of its backward pass."""
        if self._current is None or now:
            self._write(weight, write)
        else:
            self._current.append(_DeferredWeightGrad(weight, write, start_comm))

    def compute_deferred(self, key: Hashable) -> None:
        """WriteWeightGrad the gradients kept under a key; what one is made of is let go at once."""
        waiting = self._deferred.pop(key)
        if waiting:
            _start_comm(waiting[-1])
        while waiting:
            postponed = waiting.pop()
            if waiting:
                _start_comm(waiting[-1])
            self._write(postponed.weight, postponed.write)

    @torch.no_grad()
    def _write(self, weight: Tensor, write: WriteWeightGrad) -> None:
        assert self.accumulate is not None, "nobody accumulates weight gradients"
        self.accumulate(weight, write)


def _start_comm(deferred: _DeferredWeightGrad) -> None:
    if deferred.start_comm is not None:
        deferred.start_comm()
