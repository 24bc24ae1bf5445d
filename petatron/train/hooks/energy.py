"""`--log-energy`: the energy that the GPUs use, by the counters of NVML."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator

import torch

from petatron.base.errors import ConfigError, Problem
from petatron.mesh.json_collectives import all_gather_json
from petatron.mesh.mesh import Axis
from petatron.train.hooks.step_hook import StepHook
from petatron.train.report.log_records import MetricRecord, StepMetrics, event_record


def open_energy_counter(device: torch.device) -> Callable[[], float]:
    """Returns a function that reads the joules that a GPU has used so far."""
    try:
        import pynvml
    except ImportError as error:
        rule = "needs pynvml, which is not installed"
        raise ConfigError([Problem("--log-energy", "", rule, "Install it: pip install nvidia-ml-py.")]) from error
    pynvml.nvmlInit()
    handle = pynvml.nvmlDeviceGetHandleByUUID(f"GPU-{torch.cuda.get_device_properties(device).uuid}")
    return lambda: pynvml.nvmlDeviceGetTotalEnergyConsumption(handle) / 1000


class EnergyMeter(StepHook):
    """Reports the mean over the ranks' GPUs, since the last log point."""

    def __init__(
        self, read_joules: Callable[[], float], world: Axis, *, clock: Callable[[], float] = time.perf_counter
    ) -> None:
        self._read, self._world, self._clock = read_joules, world, clock
        self._steps, self._joules, self._started_s = 0, read_joules(), clock()

    def after_step(self, metrics: StepMetrics) -> None:
        self._steps += 1

    def records(self, iteration: int) -> Iterator[MetricRecord]:
        if self._steps == 0:
            return
        joules, now_s = self._read(), self._clock()
        used = all_gather_json(joules - self._joules, self._world)
        mean, elapsed_s = sum(used) / len(used), max(now_s - self._started_s, 1e-9)
        per_iteration, watts = mean / self._steps, mean / elapsed_s
        self._steps, self._joules, self._started_s = 0, joules, now_s
        yield event_record(
            f"energy per GPU (J/iter/GPU): {per_iteration:.1f} | power per GPU (W/GPU): {watts:.1f}",
            iteration=iteration,
            scalars={"iter-energy/gpu": per_iteration, "power/gpu": watts},
        )
