"""Measures how long the device may have been idle in a step: the host's lead over it, from events at the layers' boundaries.

The host marks its way through a step: at the end of each layer, forward and backward, it notes the time and records an event on the
stream. Take the segment between two marks. If the event of its first mark is not complete when the host reaches the second, the
device had work of earlier layers all along, and was not idle in between. In all other segments the device has caught up with the
host, and waits for each kernel until the host has launched it. Their share of the step is an upper bound of the idle time, and a
close one where it matters: a host that is ahead of the device is ahead by hundreds of kernels, many layers, and one that is behind
is behind everywhere.

That needs no profiler, costs an event per layer, and knows nothing of kernels. It does not depend on how long a step is: the launch
queue bounds the host's lead, so the time from the last launch to the end of the step says little about a step of many micro-batches.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle


class CudaEvents:
    """Events on the current stream of a CUDA device."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def record_event(self) -> torch.cuda.Event:
        return torch.cuda.current_stream(self._device).record_event()

    def synchronize(self) -> None:
        torch.cuda.synchronize(self._device)


@dataclass(slots=True)
class StepTime:
    """A step's time, from and to an idle device, and for how long the device may have been idle in it."""

    step_s: float = 0.0
    idle_s: float = 0.0


class IdleMeter:
    """Measures steps; between marks it does nothing."""

    def __init__(
        self, layers: Iterable[nn.Module], device: CudaEvents, *, clock: Callable[[], float] = time.perf_counter
    ) -> None:
        self._layers, self._device, self._clock = list(layers), device, clock

    @contextmanager
    def measure(self) -> Iterator[StepTime]:
        """Measures a step that runs inside; the result is complete afterwards."""
        with self.time() as step:
            marks = _Marks(self._device, self._clock)
            hooks = [layer.register_forward_hook(marks.after_forward) for layer in self._layers]
            try:
                yield step
            finally:
                for hook in hooks:
                    hook.remove()
                marks.remove()
            marks.add()
        step.idle_s = marks.idle_s

    @contextmanager
    def time(self) -> Iterator[StepTime]:
        """Times a step that runs inside."""
        step = StepTime()
        self._device.synchronize()
        start = self._clock()
        yield step
        self._device.synchronize()
        step.step_s = self._clock() - start


class _Marks:
    def __init__(self, device: CudaEvents, clock: Callable[[], float]) -> None:
        self._device, self._clock = device, clock
        self._last_s, self._last_event = clock(), device.record_event()
        self._hooks: list[RemovableHandle] = []
        self.idle_s = 0.0

    def add(self) -> None:
        """Ends a segment."""
        now = self._clock()
        if self._last_event.query():
            self.idle_s += now - self._last_s
        self._last_s, self._last_event = now, self._device.record_event()

    def after_forward(self, layer: nn.Module, args: object, output: Any) -> None:
        self.add()
        first = output[0] if isinstance(output, tuple) else output
        if isinstance(first, Tensor) and first.requires_grad:
            # The backward pass of the next layer ends where it has the gradient of this one's output.
            self._hooks.append(first.register_hook(lambda grad: self.add()))

    def remove(self) -> None:
        for hook in self._hooks:
            hook.remove()
