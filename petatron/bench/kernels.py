"""`petatron bench kernels`: every operation of the registry, the chosen implementation beside the others.

The device's own speed is measured first, with a copy and a large product; what an operation reaches is said as a share of it.
The share of a copy can be above 100 %: what was just written may still be in a cache. Implementations alternate in both
orders, and medians count. A result that is too far from float64 is called WRONG, and one that fails says how; the rest goes on.
The optimizer has a bench of its own.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from petatron.base.log import get_logger
from petatron.bench.measure.arguments import add_device, device_of, too_small
from petatron.bench.measure.units import prefixed

if TYPE_CHECKING:
    import torch

    from petatron.bench.ops.cases import Case, Place
    from petatron.bench.result import BenchResult

NAMES = ("norm", "activation", "rotary", "loss", "embedding", "product", "fp8", "attention", "moe")
_REPEAT, _WARMUP_S = 10, 0.05
_LAYER_REPEAT, _LAYER_WARMUP_S = 6, 0.5
_PRODUCT_SIZE = {"cuda": 8192, "cpu": 128}
_BOUND = {"bfloat16": 1e-2, "float32": 1e-4}
_log = get_logger(__name__)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--only", nargs="+", choices=NAMES, metavar="NAME", help=f"some of: {', '.join(NAMES)}")
    add_device(parser)
    parser.add_argument("--no-compile", action="store_true", help="without torch.compile")
    parser.add_argument(
        "--repeat", type=int, default=_REPEAT, metavar="N", help=f"rounds, made even (default: {_REPEAT})"
    )


def run(args: argparse.Namespace) -> BenchResult:
    """All that is asked for, one operation and shape after the other."""
    from petatron.bench.measure.machine import choice_row, device_name
    from petatron.bench.ops.cases import Place
    from petatron.bench.result import BenchResult
    from petatron.kernels.registry import survey

    device = device_of(args.device, problems=too_small({"--repeat": (args.repeat, 1)}))
    place = Place.of(device, compiles=not args.no_compile)
    names = NAMES if args.only is None else [name for name in NAMES if name in args.only]
    choices = survey(place.situation)
    _log.info("measuring the device: a copy and a product")
    speed = Speed.measure(place, repeat=args.repeat)
    found, tables = [], []
    for number, name in enumerate(names, start=1):
        _log.info("measuring %s, %d of %d", name, number, len(names))
        if name in ("attention", "moe"):
            tables += _layer(name, device, repeat=min(args.repeat, _LAYER_REPEAT))
        else:
            found += _operations(name, place, repeat=args.repeat)
    rows = [*(choice_row(choice) for choice in choices), ("the device", str(speed))]
    rows += [(one.label, one.describe(speed)) for one in found]
    rows += [*tables, ("adamw", "is measured by `petatron bench optimizer`")]
    values = {
        "device": device_name(device),
        "dtype": str(place.dtype).removeprefix("torch."),
        "choices": [str(choice) for choice in choices],
        "copy_tb_per_s": speed.copy,
        "product_tflops": speed.product,
        "operations": [one.as_json(speed) for one in found],
        "layers": dict(tables),
    }
    return BenchResult(tuple(rows), values)


@dataclass(frozen=True, slots=True)
class Speed:
    """What the device does at best: TB/s read and written by a copy, TFLOP/s of a large product."""

    copy: float
    product: float

    @classmethod
    def measure(cls, place: Place, *, repeat: int) -> Speed:
        from petatron.bench.measure.machine import large_copy
        from petatron.bench.measure.timing import median_ms

        side = _PRODUCT_SIZE[place.device.type]
        (move, moved), a, b = large_copy(place.device), place.random(side, side), place.random(side, side)
        copy, product = median_ms([move, lambda: a @ b], place.device, repeat=repeat, warmup_s=_WARMUP_S)
        return cls(moved / copy / 1e9, 2 * side**3 / product / 1e9)

    def __str__(self) -> str:
        return f"copies {prefixed(self.copy * 1e12, 'B/s')}, multiplies {prefixed(self.product * 1e12, 'FLOP/s')}"


@dataclass(frozen=True, slots=True)
class Found:
    """What was measured of a case: milliseconds by implementation, ours first; `failed`: what went wrong instead."""

    label: str
    ms: Mapping[str, float]
    failed: Mapping[str, str]
    error: float | None
    bound: float
    bytes: float
    flops: float

    @property
    def ours(self) -> float | None:
        return next(iter(self.ms.values()), None)

    def rate(self, speed: Speed) -> tuple[float, float, str]:
        """TB/s or TFLOP/s, its share of the device's, and both in words."""
        assert self.ours is not None
        if self.flops:
            reached = self.flops / self.ours / 1e9
            share = reached / speed.product
            return reached, share, f"{prefixed(reached * 1e12, 'FLOP/s')}, {share:.0%} of a product"
        reached = self.bytes / self.ours / 1e9
        share = reached / speed.copy
        return reached, share, f"{prefixed(reached * 1e12, 'B/s')}, {share:.0%} of a copy"

    def describe(self, speed: Speed) -> str:
        parts = []
        if self.ours is not None:
            (name, ms), *others = self.ms.items()
            parts = [f"{name} {ms:.3f} ms, {self.rate(speed)[2]}"]
            parts += [f"{other} {theirs:.3f} ms: {theirs / ms:.2f}x" for other, theirs in others]
        if self.error is not None:
            parts.append(f"error {self.error:.1e}" if self.right else f"WRONG: error {self.error:.1e} > {self.bound:g}")
        return "; ".join([*parts, *(f"{name} failed: {why}" for name, why in self.failed.items())])

    @property
    def right(self) -> bool:
        return self.error is not None and self.error <= self.bound

    def as_json(self, speed: Speed) -> dict[str, object]:
        reached, share = (None, None) if self.ours is None else self.rate(speed)[:2]
        unit = "tflops" if self.flops else "tb_per_s"
        return {
            "label": self.label,
            "ms": dict(self.ms),
            "failed": dict(self.failed),
            "error": self.error,
            "right": self.right,
            "bytes": self.bytes,
            "flops": self.flops,
            unit: reached,
            "share": share,
        }


def _operations(name: str, place: Place, *, repeat: int) -> list[Found]:
    from petatron.bench.measure.timing import release
    from petatron.bench.ops.cases import SHAPES, SMALL_SHAPES
    from petatron.bench.ops.operations import CASES

    found = []
    for number, shape in enumerate(SHAPES if place.device.type == "cuda" else SMALL_SHAPES):
        found += [measure(case, place, repeat=repeat) for case in CASES[name](place, shape, first=number == 0)]
        release(place.device)
    return found


def measure(case: Case, place: Place, *, repeat: int = 1) -> Found:
    """Compare with float64, then time whatever runs."""
    from petatron.bench.measure.timing import median_ms

    bound = case.bound or _BOUND[str(place.dtype).removeprefix("torch.")]
    failed: dict[str, str] = {}
    error = None
    for name, way in case.ways.items():
        first = name == next(iter(case.ways))
        # An implementation may fail in any way its compiler likes; the others are still worth knowing.
        try:
            if first:
                error = largest_error((case.once or case.call)(way), case.true())
            case.call(way)
        except Exception as problem:
            failed[name] = f"{type(problem).__name__}: {(str(problem).strip() or 'no reason').splitlines()[0][:120]}"
    working = {name: way for name, way in case.ways.items() if name not in failed}
    runs = [_bound(case.call, way) for way in working.values()]
    times = median_ms(runs, place.device, repeat=repeat, warmup_s=_WARMUP_S if place.device.type == "cuda" else 0.0)
    ms = dict(zip(working, times, strict=True))
    return Found(case.label, ms, failed, error, bound, case.bytes, case.flops)


def _bound(call: Callable[[Any], object], way: Any) -> Callable[[], object]:
    return lambda: call(way)


def largest_error(found: Sequence[torch.Tensor | None], true: Sequence[torch.Tensor | None]) -> float:
    """The largest distance of an output from the truth, relative to the norm of that, over its leading rows."""
    errors = []
    for output, exact in zip(found, true, strict=True):
        if output is not None and exact is not None:
            distance = output[: exact.shape[0]].double() - exact
            errors.append(float(distance.norm() / exact.norm().clamp(min=1e-30)))
    return max(errors) if all(error == error for error in errors) else float("nan")


def _layer(name: str, device: torch.device, *, repeat: int) -> list[tuple[str, str]]:
    """Whole layers, which have tables of their own."""
    from petatron.bench.ops import attention, moe

    layer = attention if name == "attention" else moe
    warmup_s = _LAYER_WARMUP_S if device.type == "cuda" else 0.0
    return layer.measure(device, repeat=repeat, warmup_s=warmup_s)
