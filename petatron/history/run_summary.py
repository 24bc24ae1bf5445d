"""The numbers that sum up a run, for lists, comparisons and reports: one name and one meaning for each."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from petatron.config.format_config import format_value
from petatron.history.draw.axis_ticks import compact, x_text
from petatron.history.metric_curves import x_values
from petatron.history.run_folder import RecordedRun


@dataclass(frozen=True, slots=True)
class RunSummary:
    """The results of a run; None where nothing was recorded."""

    state: str
    iteration: int
    train_iters: int | None
    consumed_tokens: int | None
    training_s: float | None
    first_loss: float | None
    last_loss: float | None
    best_validation_loss: float | None
    best_validation_iteration: int | None
    last_validation_loss: float | None
    test_loss: float | None
    tokens_per_second: float | None
    """The median over log points."""
    mfu: float | None
    peak_memory_bytes: int | None
    checkpoints: int


def summarize_run(run: RecordedRun) -> RunSummary:
    metrics = run.metrics
    best = metrics.best_evaluation()
    elapsed, losses = x_values(metrics, "time"), metrics.finite("lm_loss")
    tokens, memory = metrics.last("consumed_tokens"), metrics.finite("memory_bytes")
    planned = metrics.last("train_iters")
    return RunSummary(
        state=run.state,
        iteration=metrics.iteration,
        train_iters=None if planned is None else int(planned),
        consumed_tokens=None if tokens is None else int(tokens),
        training_s=float(elapsed[-1]) if elapsed.size else None,
        first_loss=float(losses[0]) if losses.size else None,
        last_loss=metrics.last("lm_loss"),
        best_validation_loss=None if best is None else best.loss,
        best_validation_iteration=None if best is None else best.iteration,
        last_validation_loss=_last_evaluation(run, "valid"),
        test_loss=_last_evaluation(run, "test"),
        tokens_per_second=_median(metrics.finite("tokens_per_second")),
        mfu=_median(metrics.finite("mfu")),
        peak_memory_bytes=int(memory.max()) if memory.size else None,
        checkpoints=len(run.checkpoints),
    )


def _last_evaluation(run: RecordedRun, split: str) -> float | None:
    losses = [evaluation.loss for evaluation in run.metrics.split_evaluations(split)]
    return losses[-1] if losses and math.isfinite(losses[-1]) else None


def _median(values: np.ndarray) -> float | None:
    return float(np.median(values)) if values.size else None


def summary_texts(summary: RunSummary) -> dict[str, str]:
    """Returns each result as a title and a text."""
    best = summary.best_validation_iteration
    planned = "" if summary.train_iters is None else f" of {summary.train_iters:,}"
    memory = summary.peak_memory_bytes
    return {
        "state": summary.state,
        "steps": f"{summary.iteration:,}{planned}",
        "tokens": _text(summary.consumed_tokens),
        "training time": "-" if summary.training_s is None else x_text(summary.training_s, "time"),
        "first loss": _text(summary.first_loss),
        "last loss": _text(summary.last_loss),
        "best validation": _text(summary.best_validation_loss) + ("" if best is None else f" (step {best:,})"),
        "last validation": _text(summary.last_validation_loss),
        "test loss": _text(summary.test_loss),
        "tokens/s": _text(summary.tokens_per_second),
        "MFU": "-" if summary.mfu is None else f"{100 * summary.mfu:.1f} %",
        "peak memory": "-" if memory is None else f"{memory / 1e9:.2f} GB",
        "checkpoints": f"{summary.checkpoints:,}",
    }


def _text(value: float | None) -> str:
    return "-" if value is None else compact(value)


@dataclass(frozen=True, slots=True)
class Difference:
    """A setting or a result of two runs as text; origins are of settings."""

    name: str
    first: str
    second: str
    first_origin: str = ""
    second_origin: str = ""


def setting_differences(first: RecordedRun, second: RecordedRun) -> list[Difference]:
    """Returns the settings that differ, paths included, since they may name another dataset."""
    differences: list[Difference] = []
    for path in dict.fromkeys((*first.settings.values, *second.settings.values)):
        a, b = first.settings.values.get(path), second.settings.values.get(path)
        if a is None or b is None or a.value != b.value:
            texts = [
                ("unknown", "") if setting is None else (format_value(setting.value), setting.origin)
                for setting in (a, b)
            ]
            differences.append(Difference(path, texts[0][0], texts[1][0], texts[0][1], texts[1][1]))
    return differences


def result_differences(first: RecordedRun, second: RecordedRun) -> list[Difference]:
    """Returns all results, and the loss at the last step that both have reached."""
    texts = [summary_texts(summarize_run(run)) for run in (first, second)]
    differences = [Difference("layout", first.layout, second.layout)]
    differences += [Difference(name, text, texts[1][name]) for name, text in texts[0].items()]
    if (common := common_step_losses([first, second])) is not None:
        step, losses = common
        differences.append(Difference(f"loss at step {step:,}", *map(compact, losses)))
    return differences


def common_step_losses(runs: Sequence[RecordedRun]) -> tuple[int, list[float]] | None:
    """Returns the last step that all runs have logged a loss up to, and the loss of each there, from a line between log points."""
    curves = []
    for run in runs:
        steps, losses = run.metrics.columns["iteration"], run.metrics.columns["lm_loss"]
        known = np.isfinite(losses)
        if not known.any():
            return None
        curves.append((steps[known], losses[known]))
    step = min(float(steps[-1]) for steps, _ in curves)
    if any(step < steps[0] for steps, _ in curves):
        return None
    return int(step), [float(np.interp(step, *curve)) for curve in curves]


def summary_values(run: RecordedRun) -> dict[str, Any]:
    """Returns a run as JSON values."""
    values = asdict(summarize_run(run))
    return {
        "run": str(run.folder), "label": run.label, **values, "state_reason": run.state_reason, "layout": run.layout,
        "changed_s": run.changed_s, "notes": list(run.notes),
    }  # fmt: skip
