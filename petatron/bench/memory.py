"""`petatron bench memory`: the peak that `petatron plan memory` predicts against the one that is measured, for configurations of all kinds.

On a GPU a configuration trains two steps, of which the second is measured, and the next begins with its memory free. What the device
cannot hold, as predicted, is left out. On a CPU shapes are tiny, and there is no allocator to ask: what is predicted and measured is
state with all gradients and the tensors saved for backward (`measure/memory_snapshot.py`), without workspace; what that does not see
(FP8 weights, recompute, offload) is left out there.
"""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from typing import TYPE_CHECKING

from petatron.bench.measure.arguments import add_device_argument

if TYPE_CHECKING:
    import torch

    from petatron.base.device import DeviceInfo
    from petatron.bench.peers import BenchSpec
    from petatron.bench.result import BenchResult

_TOLERANCE = 0.03
_1B = "llama-1b --seq-length 4096 --micro-batch-size 8"
_8B = "llama-8b-8layer --seq-length 8192 --micro-batch-size 2"
_FULL = "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1"
_TINY = "--num-layers 2 --hidden-size 128 --ffn-hidden-size 256 --num-attention-heads 8 --kv-channels 16 --seq-length 128 --vocab-size 512"


@dataclass(frozen=True, slots=True)
class MemoryCase:
    """A configuration: a run's flags, and those that make it tiny; None where a CPU cannot measure it."""

    flags: str
    tiny: str | None = _TINY


CASES = {
    "1b": MemoryCase(_1B, f"{_TINY} --micro-batch-size 2"),
    "1b-bf16-moments": MemoryCase(f"{_1B} --exp-avg-dtype bf16 --exp-avg-sq-dtype bf16"),
    "1b-optimizer-offload": MemoryCase(f"{_1B} --optimizer-cpu-offload --optimizer-offload-fraction 0.5", None),
    "1b-mtp": MemoryCase(f"{_1B} --mtp-num-layers 1 --micro-batch-size 4"),
    "8b": MemoryCase(_8B),
    "8b-two-micro-batches": MemoryCase(f"{_8B} --global-batch-size 4"),
    "8b-fp8-tensorwise": MemoryCase(f"{_8B} --fp8-format hybrid --fp8-recipe tensorwise", None),
    "8b-fp8-blockwise": MemoryCase(f"{_8B} --fp8-format hybrid --fp8-recipe blockwise", None),
    "8b-recompute-mlp": MemoryCase(f"{_8B} --recompute-granularity selective --recompute-modules mlp", None),
    "8b-recompute-full": MemoryCase(f"{_8B} {_FULL}", None),
    "8b-activation-offload": MemoryCase(f"{_8B} --cpu-offloading-num-layers 4", None),
    "mixtral": MemoryCase("mixtral-slice --seq-length 4096 --micro-batch-size 1"),
    "hybrid": MemoryCase(
        "nemotron-h-8b --num-layers 13 --hybrid-layer-pattern M-M-M-M*-M-M- --seq-length 4096 --micro-batch-size 2",
        None,
    ),
}


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


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_device_argument(parser)
    parser.add_argument("--only", nargs="+", choices=tuple(CASES), metavar="NAME", help=f"some of {', '.join(CASES)}")


def run(args: argparse.Namespace) -> BenchResult:
    """Measures one configuration after the other."""
    from petatron.base.device import detect_device
    from petatron.base.log import get_logger
    from petatron.bench.measure.arguments import resolve_device
    from petatron.bench.measure.timing import free_cached_memory

    device, info = resolve_device(args.device), detect_device(args.device)
    found: dict[str, MeasuredCase] = {}
    for name in args.only or CASES:
        get_logger(__name__).info("%s: %s", name, CASES[name].flags)
        found[name] = _measure(CASES[name], device, info)
        free_cached_memory(device)
    return _result(found, info)


def _measure(case: MemoryCase, device: torch.device, info: DeviceInfo) -> MeasuredCase:
    if device.type == "cuda":
        return measure_on_gpu(_spec(case.flags, device), info)
    if case.tiny is None:
        return MeasuredCase(_forecast(_spec(case.flags, device)), None, "not measured on a CPU")
    tiny = _spec(f"{case.flags} {case.tiny}", device)
    return MeasuredCase(_saved_and_state_bytes(tiny), _snapshot_bytes(tiny))


def measure_on_gpu(spec: BenchSpec, info: DeviceInfo) -> MeasuredCase:
    """Measures a configuration, unless it is predicted to need more than the device has."""
    predicted = _forecast(spec)
    if predicted > info.memory_bytes:
        return MeasuredCase(predicted, None, f"more than the {info.memory_bytes / 1e9:.0f} GB of this device")
    return MeasuredCase(predicted, _peak_bytes(spec))


def _spec(words: str, device: torch.device) -> BenchSpec:
    from petatron.bench.peers.bench_model import bench_spec

    return bench_spec(f"--preset {words} --device {device.type}".split())


def _forecast(spec: BenchSpec) -> int:
    from petatron.estimate.memory.forecast import largest_forecast

    return largest_forecast(spec.run, device="cuda").total


def _saved_and_state_bytes(spec: BenchSpec) -> int:
    """Returns what a snapshot on a CPU sees, as predicted: all state, and what one micro-batch saves."""
    from petatron.estimate.memory.forecast import recompute_plans, state_bytes_per_rank

    [plan], [state] = recompute_plans(spec.run, device="cpu"), state_bytes_per_rank(spec.run)
    return state.total + plan.saved_bytes


def _snapshot_bytes(spec: BenchSpec) -> int:
    from petatron.bench.measure.memory_snapshot import snapshot_step
    from petatron.bench.peers.bench_model import make_batches
    from petatron.bench.peers.ours import PetatronContender

    return snapshot_step(PetatronContender(spec), make_batches(spec)[0], spec.device).total


def _peak_bytes(spec: BenchSpec) -> int:
    """Returns the peak of the second step, besides what was allocated before anything was built."""
    import torch

    from petatron.bench.measure.timing import allocated_bytes, synchronize
    from petatron.bench.peers.bench_model import make_batches
    from petatron.bench.peers.ours import PetatronContender

    before = allocated_bytes(spec.device)
    batch, contender = make_batches(spec)[0], PetatronContender(spec)
    for _ in range(2):
        torch.cuda.reset_peak_memory_stats(spec.device)
        contender.step(batch)
        synchronize(spec.device)
    return torch.cuda.max_memory_allocated(spec.device) - before


def _result(found: dict[str, MeasuredCase], info: DeviceInfo) -> BenchResult:
    from petatron.bench.measure.machine import versions
    from petatron.bench.result import BenchResult

    ratios = {name: case.ratio for name, case in found.items() if case.ratio is not None}
    rows = [("device", f"{info.name}; " + ", ".join(f"{name} {value}" for name, value in versions().items() if value))]
    rows += [(name, case.describe()) for name, case in found.items()]
    within = sum(abs(ratio - 1.0) <= _TOLERANCE for ratio in ratios.values())
    rows.append((f"within {_TOLERANCE:.0%}", f"{within} of {len(ratios)} that were measured"))
    cases = {
        name: {"predicted_bytes": case.predicted, "measured_bytes": case.measured, "ratio": case.ratio}
        for name, case in found.items()
    }
    return BenchResult(tuple(rows), {"device": info.name, "versions": versions(), "cases": cases, "within": within})
