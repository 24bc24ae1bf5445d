"""Curves of runs: which metric over which axis, smoothed, and thinned out to what a drawing can show.

Every step is linear in the number of log points. Thinning keeps the lowest and the highest point of each column, so that a spike
of one step in a million stays visible.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np

from petatron.base.errors import Problem, raise_problems
from petatron.base.terminal_escape import printable
from petatron.config.schema.fields import closest_matches
from petatron.history.metrics_file import RunMetrics
from petatron.history.run_folder import RecordedRun

X_AXES = {"step": "step", "tokens": "tokens", "time": "training time"}
MAX_RUNS = 16
_CUT_FROM = 50
"""A curve of at least this many points is drawn without the first fall of the loss, or the remainder would look flat."""


@dataclass(frozen=True, slots=True)
class Metric:
    """A metric that can be drawn: `column` of the records times `factor`, in `unit`."""

    title: str
    column: str
    unit: str = ""
    factor: float = 1.0
    from_zero: bool = False
    falls: bool = False
    is_noisy: bool = True
    """Whether smoothing helps; a schedule or a peak would only be distorted."""


METRICS: Mapping[str, Metric] = {
    "loss": Metric("Training loss", "lm_loss", falls=True),
    "valid": Metric("Validation loss", "valid"),
    "lr": Metric("Learning rate", "lr", from_zero=True, is_noisy=False),
    "grad-norm": Metric("Gradient norm", "grad_norm", falls=True),
    "throughput": Metric("Throughput", "tokens_per_second", "tokens/s", from_zero=True),
    "memory": Metric("Peak memory", "memory_bytes", "GB", 1e-9, from_zero=True, is_noisy=False),
    "mfu": Metric("Model FLOP/s utilization", "mfu", "%", 100.0, from_zero=True),
    "step-time": Metric("Time per step", "elapsed_ms_per_iteration", "ms", from_zero=True),
    "loss-scale": Metric("Loss scale", "loss_scale", is_noisy=False),
}
DEFAULT_METRICS = ("loss", "valid", "lr", "grad-norm", "throughput", "memory")


@dataclass(frozen=True, slots=True)
class Curve:
    """The points of one run in a panel, finite and sorted by x. `raw` are those before smoothing, `lost_x` where it was not finite."""

    label: str
    color: int
    x: np.ndarray
    y: np.ndarray
    raw: tuple[np.ndarray, np.ndarray] | None = None
    lost_x: tuple[float, ...] = ()
    is_marks: bool = False


@dataclass(frozen=True, slots=True)
class Panel:
    """One metric of all runs. `limits` are x from and to, y from and to."""

    title: str
    unit: str
    x_axis: str
    curves: tuple[Curve, ...]
    limits: tuple[float, float, float, float]


MakeCurve = Callable[..., Curve]
"""Makes a curve from its label, color, x and y; smoothed and thinned out as the panels are."""


def check_metrics(names: Sequence[str]) -> None:
    """Raises for all names that are no metric."""
    problems = []
    for name in names:
        if name not in METRICS:
            close = closest_matches(name, METRICS)
            fix = f"Did you mean {close[0]}?" if close else f"Metrics: {', '.join(METRICS)}."
            problems.append(Problem("--metrics", name, "is not a metric", fix))
    raise_problems(problems)


def build_panels(
    runs: Sequence[RecordedRun],
    *,
    metrics: Sequence[str] = DEFAULT_METRICS,
    x_axis: str = "step",
    smooth: float = 0.0,
    num_columns: int = 400,
) -> list[Panel]:
    """Returns one panel per metric that some run has recorded."""
    axes = [x_values(run.metrics, x_axis) for run in runs]
    make_curve = partial(_curve, smooth=smooth, num_columns=num_columns)
    drawn: list[tuple[Metric, list[Curve]]] = []
    for name in metrics:
        curves = [
            curve
            for color, (run, x) in enumerate(zip(runs, axes))
            for curve in _run_curves(name, run, x, color, make_curve)
        ]
        if any(curve.x.size or curve.lost_x for curve in curves):
            drawn.append((METRICS[name], curves))
        if name == "loss":
            drawn += _objective_curves(runs, axes, make_curve)
    x_limits = _x_limits([curve for _, curves in drawn for curve in curves])
    return [
        Panel(metric.title, metric.unit, x_axis, tuple(curves), (*x_limits, *_y_limits(metric, curves)))
        for metric, curves in drawn
    ]


def loss_panel(train: Curve, valid: Curve) -> Panel:
    """Returns the panel of one run's loss, over its steps."""
    metric, curves = METRICS["loss"], (train, valid)
    return Panel(metric.title, metric.unit, "step", curves, (*_x_limits(curves), *_y_limits(metric, curves)))


def _objective_curves(
    runs: Sequence[RecordedRun], axes: Sequence[np.ndarray], make_curve: MakeCurve
) -> Iterator[tuple[Metric, list[Curve]]]:
    """Yields what the objectives of the runs measured besides losses, each metric in a panel of its own."""
    for name in dict.fromkeys(name for run in runs for name in run.metrics.objective_metrics):
        curves = [
            make_curve(run.label, color, x, run.metrics.columns[name])
            for color, (run, x) in enumerate(zip(runs, axes))
            if name in run.metrics.columns
        ]
        yield Metric(printable(name), name), curves


def _run_curves(name: str, run: RecordedRun, x: np.ndarray, color: int, make_curve: MakeCurve) -> list[Curve]:
    metric = METRICS[name]
    if name == "valid":
        return _evaluation_curves(run, x, color, as_marks=False)
    make_curve = make_curve if metric.is_noisy else partial(make_curve, smooth=0.0)
    curves = [make_curve(run.label, color, x, run.metrics.columns[metric.column] * metric.factor)]
    if name == "loss":
        losses = run.metrics.named_losses if len(run.metrics.named_losses) > 1 else ()  # a single one is the loss
        curves += [make_curve(f"{run.label}: {loss}", color, x, run.metrics.columns[loss]) for loss in losses]
        curves += _evaluation_curves(run, x, color, as_marks=True)
    return curves


def _curve(label: str, color: int, x: np.ndarray, y: np.ndarray, *, smooth: float, num_columns: int) -> Curve:
    recorded = ~np.isnan(y) & np.isfinite(x)
    finite = recorded & np.isfinite(y)
    lost = x[recorded & ~np.isfinite(y)]
    x, y = x[finite], y[finite]
    raw = thin(x, y, num_columns) if smooth > 0 and x.size > 1 else None
    x, y = thin(x, moving_average(y, smooth), num_columns)
    if lost.size > num_columns:
        lost = lost[np.linspace(0, lost.size - 1, num_columns).astype(np.int64)]
    return Curve(label, color, x, y, raw, tuple(lost.tolist()))


def _evaluation_curves(run: RecordedRun, x: np.ndarray, color: int, *, as_marks: bool) -> list[Curve]:
    """Returns a curve for each validation set."""
    sets = dict.fromkeys(evaluation.dataset for evaluation in run.metrics.evaluations if evaluation.split == "valid")
    return [_evaluation_curve(run, x, color, name, as_marks=as_marks) for name in sets]


def _evaluation_curve(run: RecordedRun, x: np.ndarray, color: int, dataset: str | None, *, as_marks: bool) -> Curve:
    """Evaluations have an iteration only; tokens and time between two log points are taken from a straight line."""
    steps = run.metrics.columns["iteration"]
    every = (evaluation for evaluation in run.metrics.evaluations if evaluation.split == "valid")
    evaluations = [evaluation for evaluation in every if evaluation.dataset == dataset]
    at = np.array([evaluation.iteration for evaluation in evaluations], dtype=np.float64)
    if steps.size:
        known = np.isfinite(x)
        at = np.interp(at, steps[known], x[known]) if known.any() else np.full_like(at, math.nan)
    y = np.array([evaluation.loss for evaluation in evaluations])
    finite = np.isfinite(at) & np.isfinite(y)
    lost = tuple(at[np.isfinite(at) & ~np.isfinite(y)].tolist())
    label = f"{run.label}: validation" if as_marks else run.label
    label += "" if dataset is None else f" ({dataset})" if as_marks else f": {dataset}"
    return Curve(label, color, at[finite], y[finite], lost_x=() if as_marks else lost, is_marks=as_marks)


def x_values(metrics: RunMetrics, x_axis: str) -> np.ndarray:
    """Returns the place of each log point: its iteration, tokens so far, or seconds of all starts together without the gaps between."""
    steps = metrics.columns["iteration"]
    if x_axis == "step":
        return steps
    if x_axis == "tokens":
        return metrics.columns["consumed_tokens"]
    if not steps.size:
        return steps
    step_s = np.nan_to_num(metrics.columns["elapsed_ms_per_iteration"], posinf=0) / 1000
    trained_s = np.diff(steps, prepend=steps[0] - 1) * step_s
    elapsed_s = np.diff(metrics.columns["time"], prepend=math.nan)
    same_start = np.diff(metrics.columns["start"], prepend=-1) == 0
    return np.cumsum(np.where(same_start & np.isfinite(elapsed_s) & (elapsed_s >= 0), elapsed_s, trained_s))


def moving_average(y: np.ndarray, weight: float) -> np.ndarray:
    """Exponential moving average, without the bias to its first value.

    >>> moving_average(np.array([1.0, 1.0, 4.0]), 0.5).round(3).tolist()
    [1.0, 1.0, 2.714]
    """
    if weight <= 0 or y.size < 2:
        return y
    total, mass, averaged = 0.0, 0.0, []
    for value in y.tolist():
        total, mass = weight * total + (1 - weight) * value, weight * mass + (1 - weight)
        averaged.append(total / mass)
    return np.array(averaged)


def thin(x: np.ndarray, y: np.ndarray, num_columns: int) -> tuple[np.ndarray, np.ndarray]:
    """Keeps the lowest and the highest point of each column; all where there are fewer than two per column."""
    if x.size <= 2 * num_columns:
        return x, y
    span = max(float(x[-1] - x[0]), 1e-300)
    column = np.minimum((x - x[0]) / span * num_columns, num_columns - 1).astype(np.int64)
    first = np.flatnonzero(np.diff(column, prepend=-1))
    counts = np.diff(np.append(first, x.size))
    kept = np.zeros(x.size, dtype=bool)
    for extreme in (np.minimum, np.maximum):
        places = np.flatnonzero(y == np.repeat(extreme.reduceat(y, first), counts))
        kept[places[np.flatnonzero(np.diff(column[places], prepend=-1))]] = True
    kept[[0, -1]] = True
    return x[kept], y[kept]


def _x_limits(curves: Sequence[Curve]) -> tuple[float, float]:
    """All panels have one x axis, so that they can be compared."""
    xs = [x for curve in curves for x in (*curve.x[:1].tolist(), *curve.x[-1:].tolist(), *curve.lost_x)]
    low, high = min(xs, default=0.0), max(xs, default=1.0)
    if high > low:
        return low, high
    return low - max(1.0, abs(low)) * 0.5, high + max(1.0, abs(high)) * 0.5  # one point is in the middle


def _y_limits(metric: Metric, curves: Sequence[Curve]) -> tuple[float, float]:
    ys = [curve.y[_cut(metric, curve) :] for curve in curves]
    ys += [curve.raw[1][_cut(metric, curve) :] for curve in curves if curve.raw is not None]
    shown = np.concatenate(ys) if ys else np.zeros(0)
    low, high = (float(shown.min()), float(shown.max())) if shown.size else (0.0, 1.0)
    if metric.from_zero:
        low = min(0.0, low)
    margin = (high - low) * 0.05 if high > low else max(abs(high) * 0.05, 1e-3)
    return low if metric.from_zero and low == 0 else low - margin, high + margin


def _cut(metric: Metric, curve: Curve) -> int:
    return curve.y.size // 50 if metric.falls and curve.y.size >= _CUT_FROM and not curve.is_marks else 0
