"""`petatron bench kernels`: every operation of the registry, the selected implementation against the others.

The device's own speed is measured first, with a copy and a large GEMM; an operation's speed is reported as a share of it.
The share of a copy can be above 100 %: what was just written may still be in a cache. Implementations alternate in both
orders, and medians count. A result that is too far from float64 is called WRONG, and a failure is reported without stopping the
others. The optimizer has its own bench.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import torch

from petatron.base.log import get_logger
from petatron.bench import BenchResult
from petatron.bench.arguments import OPERATION_NAMES, count_problems
from petatron.bench.measure.check_arguments import resolve_device, select_names
from petatron.bench.measure.device_memory import free_cached_memory
from petatron.bench.measure.format_si_units import format_si
from petatron.bench.measure.hardware_and_versions import choice_row, device_name
from petatron.bench.measure.timing import large_copy, median_ms
from petatron.bench.ops import attention, moe
from petatron.bench.ops.kernel_case import SHAPES, SMALL_SHAPES, BenchContext, KernelCase
from petatron.bench.ops.peer_recurrences import peer_path_problems
from petatron.bench.ops.training_kernel_cases import CASES
from petatron.kernels.cpu_matmul import matmul
from petatron.kernels.registry import choose_all_kernels

_WITH_PEERS = ("scan", "delta", "channel-delta")
_LAYERS = {"attention": attention, "moe": moe}  # whole layers, which have their own tables
_REASON_LENGTH = 300
_WARMUP_S = 0.05
_LAYER_REPEAT, _LAYER_WARMUP_S = 6, 0.5
_GEMM_SIZE = {"cuda": 8192, "cpu": 128}
_TOLERANCE = {"bfloat16": 1e-2, "float32": 1e-4}
_log = get_logger(__name__)


def run(args: argparse.Namespace) -> BenchResult:
    """All that is asked for, one operation and shape after the other."""
    peer_paths = tuple(Path(path) for path in args.peer_path)
    problems = [*count_problems("kernels", args), *peer_path_problems(peer_paths)]
    device = resolve_device(args.device, problems=problems)
    place = BenchContext.from_device(device, allow_compile=not args.no_compile, peer_paths=peer_paths)
    names = select_names(args.only, OPERATION_NAMES)
    if peer_paths and not set(names) & set(_WITH_PEERS):
        _log.info("note: --peer-path has no effect: it is for %s", ", ".join(_WITH_PEERS))
    choices = choose_all_kernels(place.kernel_context)
    _log.info("measuring the device: a copy and a GEMM")
    speed = DeviceSpeed.measure(place, repeat=args.repeat)
    measured, tables = [], []
    for number, name in enumerate(names, start=1):
        _log.info("measuring %s, %d of %d", name, number, len(names))
        if name in _LAYERS:
            warmup_s = _LAYER_WARMUP_S if device.type == "cuda" else 0.0
            tables += _LAYERS[name].measure(device, repeat=min(args.repeat, _LAYER_REPEAT), warmup_s=warmup_s)
        else:
            measured += _measure_operation(name, place, repeat=args.repeat)
    rows = [*(choice_row(choice) for choice in choices), ("the device", str(speed))]
    rows += [(case.label, case.describe(speed)) for case in measured]
    rows += [*tables, ("adamw", "is measured by `petatron bench optimizer`")]
    values = {
        "device": device_name(device),
        "dtype": str(place.dtype).removeprefix("torch."),
        "choices": [str(choice) for choice in choices],
        "copy_tb_per_s": speed.copy_tb_per_s,
        "product_tflops": speed.gemm_tflops,
        "operations": [case.as_json(speed) for case in measured],
        "layers": dict(tables),
    }
    return BenchResult(tuple(rows), values)


@dataclass(frozen=True, slots=True)
class DeviceSpeed:
    """The device's peak speeds: TB/s read and written by a copy, TFLOP/s of a large GEMM."""

    copy_tb_per_s: float
    gemm_tflops: float

    @classmethod
    def measure(cls, context: BenchContext, *, repeat: int) -> DeviceSpeed:
        side = _GEMM_SIZE[context.device.type]
        (move, moved), a, b = large_copy(context.device), context.randn(side, side), context.randn(side, side)
        copy, gemm = median_ms([move, lambda: matmul(a, b)], context.device, repeat=repeat, warmup_s=_WARMUP_S)
        return cls(moved / copy / 1e9, 2 * side**3 / gemm / 1e9)

    def __str__(self) -> str:
        return f"copies {format_si(self.copy_tb_per_s * 1e12, 'B/s')}, GEMMs {format_si(self.gemm_tflops * 1e12, 'FLOP/s')}"


@dataclass(frozen=True, slots=True)
class KernelMeasurement:
    """Measurements of a case: milliseconds by implementation, ours first; `failures`: errors instead."""

    label: str
    ms: Mapping[str, float]
    failures: Mapping[str, str]
    error: float | None
    tolerance: float
    moved_bytes: float
    flops: float
    peer_errors: Mapping[str, float] = field(default_factory=dict)
    """Errors of other libraries, against the same reference."""

    @property
    def our_ms(self) -> float | None:
        return next(iter(self.ms.values()), None)

    def rate(self, speed: DeviceSpeed) -> tuple[float, float, str]:
        """Returns TB/s or TFLOP/s, its share of the device's, and both as text."""
        assert self.our_ms is not None
        limits = (
            (self.flops, speed.gemm_tflops, "FLOP/s", "GEMM"),
            (self.moved_bytes, speed.copy_tb_per_s, "B/s", "copy"),
        )
        work, limit, unit, baseline = limits[0] if self.flops else limits[1]
        reached = work / self.our_ms / 1e9
        share = reached / limit
        return reached, share, f"{format_si(reached * 1e12, unit)}, {share:.0%} of a {baseline}"

    def describe(self, speed: DeviceSpeed) -> str:
        parts = []
        if self.our_ms is not None:
            (name, ms), *others = self.ms.items()
            parts = [f"{name} {ms:.3f} ms, {self.rate(speed)[2]}"]
            for other, theirs in others:
                error = self.peer_errors.get(other)
                text = "" if error is None else f", {self._error_text(error)}"
                parts.append(f"{other} {theirs:.3f} ms: {theirs / ms:.2f}x{text}")
        if self.error is not None:
            parts.append(self._error_text(self.error))
        return "; ".join([*parts, *(f"{name} failed: {why}" for name, why in self.failures.items())])

    def _error_text(self, error: float) -> str:
        return f"error {error:.1e}" if error <= self.tolerance else f"WRONG: error {error:.1e} > {self.tolerance:g}"

    @property
    def within_tolerance(self) -> bool:
        return self.error is not None and self.error <= self.tolerance

    def as_json(self, speed: DeviceSpeed) -> dict[str, object]:
        reached, share = (None, None) if self.our_ms is None else self.rate(speed)[:2]
        unit = "tflops" if self.flops else "tb_per_s"
        return {
            "label": self.label,
            "ms": dict(self.ms),
            "failed": dict(self.failures),
            "error": self.error,
            "peer_errors": dict(self.peer_errors),
            "right": self.within_tolerance,
            "bytes": self.moved_bytes,
            "flops": self.flops,
            unit: reached,
            "share": share,
        }


def _measure_operation(name: str, context: BenchContext, *, repeat: int) -> list[KernelMeasurement]:
    measured = []
    for number, shape in enumerate(SHAPES if context.device.type == "cuda" else SMALL_SHAPES):
        cases = CASES[name](context, shape, first=number == 0)
        measured += [measure_case(case, context, repeat=repeat) for case in cases]
        free_cached_memory(context.device)
    return measured


def measure_case(case: KernelCase, context: BenchContext, *, repeat: int = 1) -> KernelMeasurement:
    """Compares with float64, then times every implementation that runs."""
    bound = case.tolerance or _TOLERANCE[str(context.dtype).removeprefix("torch.")]
    ways, failed, errors = {**case.implementations, **case.peers}, dict[str, str](), dict[str, float]()
    ours = next(iter(case.implementations))
    for name, way in ways.items():
        # An implementation may fail in any way its compiler can; the others are still measured.
        try:
            if name == ours or name in case.peers:
                errors[name] = largest_error((case.checked_call or case.call)(way), case.reference())
            case.call(way)
        except Exception as problem:
            reason = (str(problem).strip() or "no reason").splitlines()[0][:_REASON_LENGTH]
            failed[name] = f"{type(problem).__name__}: {reason}"
    working = {name: way for name, way in ways.items() if name not in failed}
    runs: list[Callable[[], object]] = [partial(case.call, way) for way in working.values()]
    times = median_ms(runs, context.device, repeat=repeat, warmup_s=_WARMUP_S if context.device.type == "cuda" else 0.0)
    ms = dict(zip(working, times, strict=True))
    error = errors.pop(ours, None)
    return KernelMeasurement(case.label, ms, failed, error, bound, case.moved_bytes, case.flops, errors)


def largest_error(outputs: Sequence[torch.Tensor | None], reference: Sequence[torch.Tensor | None]) -> float:
    """Returns the largest error of an output, relative to the reference's norm, over its leading rows."""
    errors = []
    for output, exact in zip(outputs, reference, strict=True):
        if output is not None and exact is not None:
            distance = output[: exact.shape[0]].double() - exact
            errors.append(float(distance.norm() / exact.norm().clamp(min=1e-30)))
    return max(errors) if all(error == error for error in errors) else float("nan")
