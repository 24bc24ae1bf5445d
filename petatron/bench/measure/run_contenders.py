"""Runs contenders that train the same model against each other on one device.

A device that has just been idle is cold and fast; one at its power cap is slow. So nothing is timed before a warm-up of real
steps, and contenders alternate in short blocks, in both orders. Each block of ours and the peer's of the same round give a ratio,
and the median of the ratios counts. Inside a block the host never waits: events are queued between steps and read at its end.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from petatron.base.log import get_logger
from petatron.bench.measure.device_memory import allocated_bytes, peak_bytes_of_step
from petatron.bench.measure.timing import ProgressLog, elapsed_seconds, gc_disabled, run_rounds, synchronize
from petatron.bench.peers import Contender
from petatron.models.batch import Batch

COMPILE_STEPS, PEAK_STEPS = 3, 2
_log = get_logger(__name__)


@dataclass(slots=True)
class BenchRunner:
    """A contender on the shared batches, with everything measured so far."""

    name: str
    contender: Contender
    batches: Sequence[Batch]
    device: torch.device
    build_s: float = 0.0
    first_steps_s: float = 0.0
    peak_bytes: int | None = None
    """Peak memory of a step, weights and optimizer state included; None where it cannot be measured."""
    held_bytes: int = 0
    """Memory held between steps."""
    blocks_ms: list[list[float]] = field(default_factory=list)
    losses: list[Tensor] = field(default_factory=list)

    def run(self, steps: int) -> None:
        for _ in range(steps):
            self.losses.append(self.contender.step(self.batches[len(self.losses) % len(self.batches)]).detach())

    def time_steps(self, steps: int) -> list[float]:
        """Returns milliseconds of each step of a block."""
        synchronize(self.device)
        if self.device.type != "cuda":
            return [elapsed_seconds(lambda: self.run(1)) * 1e3 for _ in range(steps)]
        marks = [torch.cuda.Event(enable_timing=True) for _ in range(steps + 1)]
        marks[0].record()
        for mark in marks[1:]:
            self.run(1)
            mark.record()
        synchronize(self.device)
        return [before.elapsed_time(after) for before, after in pairwise(marks)]

    def as_json(self) -> dict[str, Any]:
        """Returns everything measured, as JSON values."""
        return {
            "blocks_ms": [list(block) for block in self.blocks_ms],
            "losses": [float(loss) for loss in self.losses],
            "peak_bytes": self.peak_bytes,
            "held_bytes": self.held_bytes,
            "build_s": self.build_s,
            "first_steps_s": self.first_steps_s,
        }

    def snapshot_memory(self) -> dict[str, Any] | None:
        """Returns what holds the memory of one more step at its peak, as JSON; None for a peer, whose tensors are not known."""
        from petatron.bench.measure.peak_memory_breakdown import snapshot_step
        from petatron.bench.peers.petatron_step import PetatronContender

        if not isinstance(self.contender, PetatronContender):
            return None
        return snapshot_step(self.contender, self.batches[0], self.device).as_json()

    def compile_and_measure_memory(self, *, allocated_before: int) -> None:
        """Compiles, and then measures how much memory a step takes beyond what was allocated before this was built."""
        self.first_steps_s = elapsed_seconds(lambda: (self.run(COMPILE_STEPS), synchronize(self.device)))
        if self.device.type == "cuda":
            peaks = [peak_bytes_of_step(self.device, partial(self.run, 1)) for _ in range(PEAK_STEPS)]
            self.peak_bytes = max(peaks) - allocated_before
            self.held_bytes = allocated_bytes(self.device) - allocated_before


def time_alternating(runners: Sequence[BenchRunner], *, steps: int, block: int, warmup_s: float) -> None:
    """Warms up, then times at least `steps` steps of each, in blocks that alternate in both orders."""
    names, news = ", ".join(runner.name for runner in runners), ProgressLog()
    with gc_disabled():
        _log.info("warming up for %.0f s: %s", warmup_s, names)
        started = time.perf_counter()
        while (passed := time.perf_counter() - started) < warmup_s:
            news(f"warming up, {passed:.0f} of {warmup_s:.0f} s")
            for runner in runners:
                runner.run(block)
                synchronize(runner.device)
        sides = {runner.name: partial(runner.time_steps, min(block, steps)) for runner in runners}
        blocks_ms = run_rounds(sides, rounds=-(-steps // block), work=f"{min(block, steps)} steps")
        for runner in runners:
            runner.blocks_ms += blocks_ms[runner.name]
