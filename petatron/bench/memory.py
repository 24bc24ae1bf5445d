"""`petatron bench memory`: the peak that `petatron plan memory` predicts against the one that is measured, for configurations of all kinds.

On a GPU a configuration trains two steps, of which the second is measured, and the next begins with its memory free. What the device
cannot hold, as predicted, is left out. On a CPU shapes are tiny, and there is no allocator to ask: what is predicted and measured is
state with all gradients and the tensors saved for backward (`measure/peak_memory_breakdown.py`), without workspace; what that does not see
(FP8 weights, recompute, offload, a second micro-batch) is left out there. Labels say which forms are tiny.
"""

from __future__ import annotations

import argparse
from dataclasses import dataclass

import torch

from petatron.base.device import DeviceInfo, detect_device
from petatron.base.log import get_logger
from petatron.bench import BenchResult
from petatron.bench.measure.check_arguments import resolve_device, select_names
from petatron.bench.measure.device_memory import allocated_bytes, free_cached_memory, peak_bytes_of_step
from petatron.bench.measure.hardware_and_versions import versions
from petatron.bench.measure.memory_cases import CASES, MemoryCase
from petatron.bench.measure.peak_memory_breakdown import snapshot_step
from petatron.bench.peers import BenchSpec
from petatron.bench.peers.bench_workload import bench_spec, make_batches
from petatron.bench.peers.petatron_step import PetatronContender
from petatron.estimate.memory.forecast import largest_forecast, recompute_plans, state_bytes_per_rank

_TOLERANCE = 0.03
_log = get_logger(__name__)


@dataclass(frozen=True, slots=True)
class MeasuredCase:
    """Bytes of one configuration; `measured` None: it was left out, for `reason`."""

    predicted: int
    measured: int | None
    reason: str = ""

    @property
    def ratio(self) -> float | None:
        return None if self.measured is None else self.predicted / self.measured

    def describe(self) -> str:
        if self.measured is None or self.ratio is None:
            return f"predicted {self.predicted / 1e9:8.3f} GB, {self.reason}"
        apart = "" if abs(self.ratio - 1.0) <= _TOLERANCE else f"  more than {_TOLERANCE:.0%} apart"
        sizes = f"predicted {self.predicted / 1e9:8.3f} GB, measured {self.measured / 1e9:8.3f} GB"
        return f"{sizes}, {self.ratio - 1.0:+.1%}{apart}"


def run(args: argparse.Namespace) -> BenchResult:
    """Measures one configuration after the other."""
    device, info = resolve_device(args.device), detect_device(args.device)
    measured: dict[str, MeasuredCase] = {}
    for name in select_names(args.only, tuple(CASES)):
        case = CASES[name]
        _log.info("%s: %s", name, case.flags if device.type == "cuda" else case.tiny_flags or case.flags)
        measured[name] = _measure(case, device, info)
        free_cached_memory(device)
    return _result(measured, info)


def _measure(case: MemoryCase, device: torch.device, info: DeviceInfo) -> MeasuredCase:
    if device.type == "cuda":
        return measure_on_gpu(_spec(case.flags, device), info)
    if case.tiny_flags is None:
        return MeasuredCase(_forecast(_spec(case.flags, device)), None, "not measured on a CPU")
    tiny = _spec(case.tiny_flags, device)
    snapshot = snapshot_step(PetatronContender(tiny), make_batches(tiny)[0], tiny.device)
    # What a snapshot on a CPU sees: all state, and what one micro-batch saves.
    [plan], [state] = recompute_plans(tiny.run, device="cpu"), state_bytes_per_rank(tiny.run)
    return MeasuredCase(state.total + plan.saved_bytes, snapshot.total)


def measure_on_gpu(spec: BenchSpec, info: DeviceInfo) -> MeasuredCase:
    """Measures a configuration, unless it is predicted to need more than the device has."""
    predicted = _forecast(spec)
    if predicted > info.memory_bytes:
        return MeasuredCase(predicted, None, f"more than the {info.memory_bytes / 1e9:.0f} GB of this device")
    return MeasuredCase(predicted, _peak_bytes(spec))


def _spec(flags: str, device: torch.device) -> BenchSpec:
    return bench_spec(f"--preset {flags} --device {device.type}".split())


def _forecast(spec: BenchSpec) -> int:
    return largest_forecast(spec.run, device="cuda").total


def _peak_bytes(spec: BenchSpec) -> int:
    """Returns the peak of the second step, besides what was allocated before anything was built."""
    before = allocated_bytes(spec.device)
    batch, contender = make_batches(spec)[0], PetatronContender(spec)
    contender.step(batch)
    return peak_bytes_of_step(spec.device, lambda: contender.step(batch)) - before


def _result(measured: dict[str, MeasuredCase], info: DeviceInfo) -> BenchResult:
    ratios = {name: case.ratio for name, case in measured.items() if case.ratio is not None}
    rows = [("device", f"{info.name}; " + ", ".join(f"{name} {value}" for name, value in versions().items() if value))]
    for name, case in measured.items():
        tiny = info.kind == "cpu" and case.measured is not None
        rows.append((f"{name}, a tiny form" if tiny else name, case.describe()))
    within = sum(abs(ratio - 1.0) <= _TOLERANCE for ratio in ratios.values())
    rows.append((f"within {_TOLERANCE:.0%}", f"{within} of {len(ratios)} that were measured"))
    cases = {
        name: {"predicted_bytes": case.predicted, "measured_bytes": case.measured, "ratio": case.ratio}
        for name, case in measured.items()
    }
    return BenchResult(tuple(rows), {"device": info.name, "versions": versions(), "cases": cases, "within": within})
