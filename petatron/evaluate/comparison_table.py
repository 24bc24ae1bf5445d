"""Results as text: one checkpoint's metrics, or those of several side by side."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from petatron.base.format_text import align_columns
from petatron.evaluate.confidence_interval import Estimate
from petatron.evaluate.eval_task import TaskResult


def format_estimate(estimate: Estimate) -> str:
    """Formats a value and its interval.

    >>> format_estimate(Estimate(0.5, 0.25, 0.75)), format_estimate(Estimate(31.25))
    ('0.5000 [0.2500, 0.7500]', '31.25')
    """
    value = _number(estimate.value)
    if estimate.low is None or estimate.high is None:
        return value
    return f"{value} [{_number(estimate.low)}, {_number(estimate.high)}]"


def result_table(results: Mapping[str, Mapping[str, TaskResult]]) -> str:
    """Returns a table of all metrics with 95 % intervals: a row for each task's metric, a column for each checkpoint.

    `results` are by checkpoint, then by task.
    """
    checkpoints = list(results)
    tasks = list(dict.fromkeys(task for by_task in results.values() for task in by_task))
    rows: list[Sequence[str]] = [("task", "metric", *checkpoints)]
    for task in tasks:
        of_task = [by_task.get(task) for by_task in results.values()]
        for name in dict.fromkeys(name for result in of_task if result is not None for name in result.metrics):
            cells = [
                "" if result is None or name not in result.metrics else format_estimate(result.metrics[name])
                for result in of_task
            ]
            rows.append((task, name, *cells))
    return align_columns(rows)


def _number(value: float) -> str:
    return f"{value:.4f}" if abs(value) < 10 else f"{value:.5g}"
