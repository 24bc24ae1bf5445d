"""Measures the host time of a training step: how long Python takes until all of its work is queued, and how many calls that is.

A device of short kernels waits for the host, so a small model's step is as long as Python needs for it. Two models that differ in depth
alone tell what a layer costs from what a step costs anyway; with t the cost of a step,

    per layer = (t(2 L) - t(L)) / L,        elsewhere = 2 t(L) - t(2 L)

The forward pass is the call of the stage, and what a layer costs besides is its backward pass, with its share of the optimizer. On a
CPU, kernels are part of the time; with tiny shapes they are the smaller part. Times depend on the machine and what else it does;
calls of Python functions do not, and follow from the code alone.
"""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from types import FrameType
from typing import Any

import torch

from petatron.bench.measure.timing import alternating_orders, gc_disabled, synchronize
from petatron.bench.peers.bench_workload import bench_spec, make_batches
from petatron.bench.peers.petatron_step import PetatronContender
from petatron.models.batch import Batch

DEPTHS = (2, 4)
_WARMUP_STEPS, _TIMED_STEPS = 5, 30
_SILENCED = ("--num-layers", "--no-cuda-graphs")


@dataclass(frozen=True, slots=True)
class HostCost:
    """Of one layer, forward and backward, and of a step besides its layers."""

    forward: float
    backward: float
    elsewhere: float

    @classmethod
    def of(cls, shallow: tuple[float, float], deep: tuple[float, float]) -> HostCost:
        """Takes the cost of the forward pass, and of the whole step, of both depths.

        >>> HostCost.of((30.0, 100.0), (50.0, 160.0))
        HostCost(forward=10.0, backward=20.0, elsewhere=40.0)
        """
        few, many = DEPTHS
        forward, layer = ((more - less) / (many - few) for less, more in zip(shallow, deep))
        return cls(forward, layer - forward, shallow[1] - few * layer)


def measure_host(flags: Sequence[str], *, steps: int = _TIMED_STEPS) -> dict[str, Any]:
    """Returns microseconds, and calls of Python functions, of our own step of a model that a run's flags name, without CUDA graphs."""
    steppers = [_Stepper.build(flags, depth) for depth in DEPTHS]
    times: dict[_Stepper, list[tuple[float, float]]] = {stepper: [] for stepper in steppers}
    with gc_disabled():
        for order in alternating_orders(steppers, rounds=steps):
            for stepper in order:
                times[stepper].append(stepper.measure(time.perf_counter))
    medians = [tuple(statistics.median(seconds) * 1e6 for seconds in zip(*times[stepper])) for stepper in steppers]
    calls = HostCost.of(*map(count_calls, steppers))
    return {"depths": list(DEPTHS), "us": asdict(HostCost.of(*medians)), "calls": asdict(calls)}


class _Stepper:
    """Our step on one batch, with a clock that is read where a step and its forward pass begin and end."""

    def __init__(self, contender: PetatronContender, batch: Batch, device: torch.device) -> None:
        self._contender, self._batch, self._device = contender, batch, device
        self._clock: Callable[[], float] = time.perf_counter
        self._forward = self._entered = 0.0
        for stage in contender.state.model.stages.values():
            stage.register_forward_pre_hook(self._enter)
            stage.register_forward_hook(self._leave)

    @classmethod
    def build(cls, flags: Sequence[str], depth: int) -> _Stepper:
        """Builds a model of this depth, and takes as many steps as things may be built or compiled in."""
        spec = bench_spec([*flags, "--num-layers", str(depth), "--no-cuda-graphs"], silenced_flags=_SILENCED)
        stepper = cls(PetatronContender(spec), make_batches(spec)[0], spec.device)
        for _ in range(_WARMUP_STEPS):
            stepper.measure(time.perf_counter)
        return stepper

    def _enter(self, module: object, args: object) -> None:
        self._entered = self._clock()

    def _leave(self, module: object, args: object, output: object) -> None:
        self._forward += self._clock() - self._entered

    def measure(self, clock: Callable[[], float]) -> tuple[float, float]:
        """Runs a step; returns the clock's advance in the forward pass, and in all, until the last work was queued."""
        self._clock, self._forward = clock, 0.0
        synchronize(self._device)
        started = clock()
        self._contender.step(self._batch)
        return self._forward, clock() - started


def count_calls(stepper: _Stepper) -> tuple[float, float]:
    """Counts the calls of Python functions in the forward pass of a step, and in all of it."""
    calls = 0

    def count(frame: FrameType, event: str, argument: object) -> None:
        nonlocal calls
        calls += event == "call"

    before = sys.getprofile()
    # Backward on a device has a thread of its own, which a profile function does not see.
    with gc_disabled(), torch.autograd.set_multithreading_enabled(False):
        sys.setprofile(count)
        try:
            return stepper.measure(lambda: calls)
        finally:
            sys.setprofile(before)
