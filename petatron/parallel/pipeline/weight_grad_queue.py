"""The weight-gradient queue: the split backward of zero-bubble schedules.

Backward owes the stage before it the gradient of its input, and the optimizer the gradients of its weights; only the first is
urgent. GEMMs submit their weight gradients as work to be done (`layers/ops/linear_op.py`). The queue does it at once, or, while it
defers, holds it with its two operands. Of an operand that must be all-gathered it holds the rank's shard, gathered while the
preceding gradient is computed. What is not a GEMM (norms, biases, embeddings) costs little and is never deferred.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager
from typing import NamedTuple

import torch
from torch import Tensor

from petatron.layers.ops.linear_op import WriteWeightGrad

AccumulateWeightGrad = Callable[[Tensor, WriteWeightGrad], None]
"""(weight, write): accumulates a gradient into the weight's `main_grad`."""


class _DeferredWeightGrad(NamedTuple):
    """A deferred weight gradient; `start_comm` starts the communication it waits for."""

    weight: Tensor
    write: WriteWeightGrad
    start_comm: Callable[[], None] | None


class WeightGradQueue:
    """Receives weight gradients, and defers them by the backward pass they belong to."""

    def __init__(self) -> None:
        self.accumulate: AccumulateWeightGrad = _no_gradient_buffers
        """Accumulates a gradient, once the gradient buffers exist; called without gradients enabled."""
        self._deferred: dict[Hashable, list[_DeferredWeightGrad]] = {}
        self._current: list[_DeferredWeightGrad] | None = None

    def start_step(self) -> None:
        """Drops what a failed step has left."""
        self._deferred.clear()
        self._current = None

    @contextmanager
    def deferring(self, key: Hashable) -> Iterator[None]:
        """Defers the weight gradients of backward passes inside, under a key."""
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
        """Writes a weight's gradient at once, or defers it with the others of its backward pass."""
        if self._current is None or now:
            self.accumulate(weight, write)
        else:
            self._current.append(_DeferredWeightGrad(weight, write, start_comm))

    @torch.no_grad()
    def compute_deferred(self, key: Hashable) -> None:
        """Writes the gradients deferred under a key; frees each one's operands at once."""
        deferred, current = self._deferred.pop(key), None
        while deferred or current is not None:
            following = deferred.pop() if deferred else None
            if following is not None and following.start_comm is not None:
                following.start_comm()
            if current is not None:
                self.accumulate(current.weight, current.write)
            current = following


def _no_gradient_buffers(weight: Tensor, write: WriteWeightGrad) -> None:
    raise AssertionError("no target accumulates weight gradients")
