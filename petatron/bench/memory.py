"""`petatron bench memory`: the peak that `petatron plan memory` predicts against the one that is measured, for configurations of all kinds.

On a GPU a configuration trains two steps, of which the second is measured, and the next begins with its memory free. What the device
cannot hold, as predicted, is left out. On a CPU shapes are tiny, and there is no allocator to ask: what is predicted and measured is
state with all gradients and the tensors saved for backward (`measure/memory_snapshot.py`), without workspace; what that does not see
(FP8 weights, recompute, offload, a second micro-batch) is left out there. Labels say which forms are tiny.
"""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from typing import TYPE_CHECKING

from petatron.bench.measure.arguments import add_device_argument, add_only_argument, select_names

if TYPE_CHECKING:
    import torch

    from petatron.base.device import DeviceInfo
    from petatron.bench.peers import BenchSpec
    from petatron.bench.result import BenchResult

_TOLERANCE = 0.03
_FULL = "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1"
_1B, _1B_SHAPE = "llama-1b", "--seq-length 4096 --micro-batch-size 8"
_1B_WIDE = "--seq-length 4096 --micro-batch-size 32"
_8B, _8B_SHAPE = "llama-8b-8layer", "--seq-length 8192 --micro-batch-size 2"
_TINY_HEADS = "--num-attention-heads 8 --kv-channels 16 --vocab-size 512"
_TINY_1B = f"--num-layers 2 --hidden-size 128 --ffn-hidden-size 256 {_TINY_HEADS} --seq-length 128 --micro-batch-size 2"
_TINY_16_LAYERS = _TINY_1B.replace("--num-layers 2", "--num-layers 16")
_TINY_8B = f"--num-layers 3 --hidden-size 256 --ffn-hidden-size 896 {_TINY_HEADS} --seq-length 256 --micro-batch-size 1"


@dataclass(frozen=True, slots=True)
class MemoryCase:
    """A configuration: a preset, its shape, a smaller one for a CPU (None where that cannot measure it), and what is special of it."""

    preset: str
    shape: str
    tiny_shape: str | None
    features: str = ""

    @property
    def flags(self) -> str:
        return f"{self.preset} {self.shape} {self.features}".strip()

    @property
    def tiny_flags(self) -> str | None:
        return None if self.tiny_shape is None else f"{self.preset} {self.tiny_shape} {self.features}".strip()


CASES = {
    "1b": MemoryCase(_1B, _1B_SHAPE, _TINY_1B),
    "1b-bf16-moments": MemoryCase(_1B, _1B_SHAPE, _TINY_1B, "--exp-avg-dtype bf16 --exp-avg-sq-dtype bf16"),
    "1b-optimizer-offload": MemoryCase(
        _1B, _1B_SHAPE, None, "--optimizer-cpu-offload --optimizer-offload-fraction 0.5"
    ),
    "1b-last-two-layers": MemoryCase(
        _1B, _1B_WIDE, _TINY_16_LAYERS, "--train-only layers.14.* layers.15.* --overlap-grad-reduce"
    ),
    "1b-frozen-below": MemoryCase(
        _1B, _1B_WIDE, _TINY_16_LAYERS, "--freeze embedding.* layers.[0-9].* layers.1[0-3].* --overlap-grad-reduce"
    ),
    "1b-mtp": MemoryCase(_1B, "--seq-length 4096 --micro-batch-size 4", _TINY_1B, "--mtp-num-layers 1"),
    "8b": MemoryCase(_8B, _8B_SHAPE, _TINY_8B),
    "8b-two-micro-batches": MemoryCase(_8B, _8B_SHAPE, None, "--global-batch-size 4"),
    "8b-fp8-tensorwise": MemoryCase(_8B, _8B_SHAPE, None, "--fp8-format hybrid --fp8-recipe tensorwise"),
    "8b-fp8-output-head-backward": MemoryCase(_8B, _8B_SHAPE, None, "--fp8-format hybrid --fp8-output-head-backward"),
    "8b-fp8-blockwise": MemoryCase(_8B, _8B_SHAPE, None, "--fp8-format hybrid --fp8-recipe blockwise"),
    "8b-recompute-mlp": MemoryCase(_8B, _8B_SHAPE, None, "--recompute-granularity selective --recompute-modules mlp"),
    "8b-recompute-full": MemoryCase(_8B, _8B_SHAPE, None, _FULL),
    "8b-activation-offload": MemoryCase(_8B, _8B_SHAPE, None, "--cpu-offloading-num-layers 4"),
    "mixtral": MemoryCase("mixtral-slice", "--seq-length 4096 --micro-batch-size 1", _TINY_1B),
    "hybrid": MemoryCase(
        "nemotron-h-8b",
        "--seq-length 4096 --micro-batch-size 2",
        None,
        "--num-layers 13 --hybrid-layer-pattern M-M-M-M*-M-M-",
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
    add_only_argument(parser, tuple(CASES))


def run(args: argparse.Namespace) -> BenchResult:
    """Measures one configuration after the other."""
    from petatron.base.device import detect_device
    from petatron.base.log import get_logger
    from petatron.bench.measure.arguments import resolve_device
    from petatron.bench.measure.timing import free_cached_memory

    device, info = resolve_device(args.device), detect_device(args.device)
    names = select_names(args.only, tuple(CASES))
    found: dict[str, MeasuredCase] = {}
    for name in names:
        case = CASES[name]
        get_logger(__name__).info(
            "%s: %s", name, case.flags if device.type == "cuda" else case.tiny_flags or case.flags
        )
        found[name] = _measure(case, device, info)
        free_cached_memory(device)
    return _result(found, info)


def _measure(case: MemoryCase, device: torch.device, info: DeviceInfo) -> MeasuredCase:
    if device.type == "cuda":
        return measure_on_gpu(_spec(case.flags, device), info)
    if case.tiny_flags is None:
        return MeasuredCase(_forecast(_spec(case.flags, device)), None, "not measured on a CPU")
    tiny = _spec(case.tiny_flags, device)
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

    from petatron.bench.measure.timing import allocated_bytes, peak_allocated_bytes, synchronize
    from petatron.bench.peers.bench_model import make_batches
    from petatron.bench.peers.ours import PetatronContender

    before = allocated_bytes(spec.device)
    batch, contender = make_batches(spec)[0], PetatronContender(spec)
    for _ in range(2):
        torch.cuda.reset_peak_memory_stats(spec.device)
        contender.step(batch)
        synchronize(spec.device)
    return peak_allocated_bytes(spec.device) - before


def _label(name: str, case: MeasuredCase, info: DeviceInfo) -> str:
    return f"{name}, a tiny form" if info.kind == "cpu" and case.measured is not None else name


def _result(found: dict[str, MeasuredCase], info: DeviceInfo) -> BenchResult:
    from petatron.bench.measure.machine import versions
    from petatron.bench.result import BenchResult

    ratios = {name: case.ratio for name, case in found.items() if case.ratio is not None}
    rows = [("device", f"{info.name}; " + ", ".join(f"{name} {value}" for name, value in versions().items() if value))]
    rows += [(_label(name, case, info), case.describe()) for name, case in found.items()]
    within = sum(abs(ratio - 1.0) <= _TOLERANCE for ratio in ratios.values())
    rows.append((f"within {_TOLERANCE:.0%}", f"{within} of {len(ratios)} that were measured"))
    cases = {
        name: {"predicted_bytes": case.predicted, "measured_bytes": case.measured, "ratio": case.ratio}
        for name, case in found.items()
    }
    return BenchResult(tuple(rows), {"device": info.name, "versions": versions(), "cases": cases, "within": within})
