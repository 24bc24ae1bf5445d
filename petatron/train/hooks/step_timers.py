"""`--timing-log-level` and `--log-straggler`: how long the phases of a step take on every rank.

A phase is timed between two waits for the device, so its time is that of its own work. Level 1 has the phases of a step; level 2 also
sums the forward and backward passes of its micro-batches. Times are means per iteration since the last log point.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager

import torch

from petatron.config.schema.log import LogConfig
from petatron.mesh.json_collectives import all_gather_json
from petatron.mesh.mesh import ParallelMesh
from petatron.schedule.actions import COMPUTE_KINDS, ActionKind, TimedAction
from petatron.train.hooks.step_hook import StepHook
from petatron.train.report.log_records import MetricRecord, StepMetrics, event_record

_NAME_WIDTH = 48
_HEADINGS = {"max": "max time", "minmax": "(min, max) time", "all": "times"}


class StepTimers(StepHook):
    """Times phases, and reports them at log points."""

    def __init__(
        self, config: LogConfig, mesh: ParallelMesh, *, clock: Callable[[], float] = time.perf_counter
    ) -> None:
        self._config, self._mesh, self._clock = config, mesh, clock
        self._times_s: dict[str, float] = {}
        self._passes_s: dict[str, float] = {}
        self._steps = 0

    @property
    def is_on(self) -> bool:
        return self._config.timing_log_level > 0 or self._config.log_straggler

    @property
    def times_passes(self) -> bool:
        """Whether every pass is timed by itself."""
        return self._config.timing_log_level > 1 or self._config.log_straggler

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Times what runs inside, if phases are timed."""
        if self._config.timing_log_level == 0:
            yield
            return
        self._wait()
        started_s = self._clock()
        yield
        self._wait()
        self._times_s[name] = self._times_s.get(name, 0.0) + self._clock() - started_s

    def add_passes(self, actions: Sequence[TimedAction]) -> None:
        """Adds the passes of one step."""
        for timed in actions:
            if timed.action.kind in COMPUTE_KINDS:
                name = "forward-compute" if timed.action.kind is ActionKind.FORWARD else "backward-compute"
                self._passes_s[name] = self._passes_s.get(name, 0.0) + timed.end - timed.start

    def after_step(self, metrics: StepMetrics) -> None:
        self._steps += 1

    def records(self, iteration: int) -> Iterator[MetricRecord]:
        if not self.is_on or self._steps == 0:
            return
        times_s, passes_s, steps = self._times_s, self._passes_s, self._steps
        self._times_s, self._passes_s, self._steps = {}, {}, 0
        if self._config.timing_log_level > 1:
            times_s = times_s | passes_s
        mine = {name: 1000 * seconds / steps for name, seconds in times_s.items()}
        compute_ms = 1000 * sum(passes_s.values()) / steps
        ranks = all_gather_json([mine, compute_ms], self._mesh.control)
        if self._config.timing_log_level > 0:
            yield self._timer_record([times for times, _ in ranks], iteration)
        if self._config.log_straggler:
            yield self._straggler_record([compute for _, compute in ranks], iteration)

    def _timer_record(self, ranks: Sequence[Mapping[str, float]], iteration: int) -> MetricRecord:
        option = self._config.timing_log_option
        lines = [f"{_HEADINGS[option]} across ranks (ms):"]
        largest: dict[str, float] = {}
        for name in dict.fromkeys(name for times in ranks for name in times):
            values = [times[name] for times in ranks if name in times]
            largest[name] = max(values)
            title = f"    {name} ".ljust(_NAME_WIDTH, ".")
            if option == "all":
                lines.append(f"    {name}:")
                lines += [
                    f"     rank {rank:2d}: {times[name]:.2f}" for rank, times in enumerate(ranks) if name in times
                ]
            elif option == "max":
                lines.append(f"{title}: {largest[name]:.2f}")
            else:
                lines.append(f"{title}: ({min(values):.2f}, {largest[name]:.2f})")
        tagged = self._config.log_timers_to_tensorboard
        scalars = {f"{name}-time": value / 1000 for name, value in largest.items()} if tagged else {}
        return event_record("\n".join(lines), iteration=iteration, times_ms=largest, scalars=scalars)

    def _straggler_record(self, compute_ms: Sequence[float], iteration: int) -> MetricRecord:
        order = sorted(range(len(compute_ms)), key=lambda rank: compute_ms[rank])
        count = min(self._config.straggler_minmax_count, len(order))
        fastest, slowest = order[:count], order[::-1][:count]
        texts = [
            ", ".join(f"rank {rank} ({compute_ms[rank]:.2f} ms)" for rank in ranks) for ranks in (slowest, fastest)
        ]
        message = f"compute time per iteration: slowest {texts[0]}; fastest {texts[1]}"
        return event_record(message, iteration=iteration, compute_ms=list(compute_ms))

    def _wait(self) -> None:
        if self._mesh.device.type == "cuda":
            torch.cuda.synchronize(self._mesh.device)
