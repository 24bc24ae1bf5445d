"""Evaluates tasks during training (`--eval-tasks`): the model as it is now is measured on files every so often.

The tasks are imported where they are used: most runs have none and start without them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from petatron.config import RunConfig
from petatron.data.tokenizer import Tokenizer
from petatron.evaluate.eval_task import TaskResult
from petatron.parallel.parallel_model import ParallelModel
from petatron.train.stop_monitor import EvaluationStopCheck

if TYPE_CHECKING:
    from petatron.evaluate.task_list import TaskSettings


class _Stopped(Exception):
    """The run is to stop; all ranks raise it at the same batch."""


@dataclass(slots=True)
class TaskEvaluation:
    """Results by the task's label; `stop_reason` tells why the task `interrupted` was not finished."""

    results: dict[str, TaskResult] = field(default_factory=dict)
    interrupted: str | None = None
    stop_reason: str | None = None


class IterationEvaluator(Protocol):
    """What measures the model as it is now, every so often. Every rank calls it, and all get the same results."""

    def due(self, iteration: int, *, last: bool = False) -> list[str]: ...

    def evaluate(
        self, iteration: int, stop_check: EvaluationStopCheck | None = None, *, last: bool = False
    ) -> TaskEvaluation: ...


def read_eval_tasks(run: RunConfig) -> list[TaskSettings]:
    """Reads `--eval-tasks`; raises with every problem of the list, before anything is built."""
    if run.train.eval_tasks is None:
        return []
    from petatron.evaluate.task_list import read_task_list

    return read_task_list(Path(run.train.eval_tasks))


class TaskEvaluator:
    """Runs tasks with the model as it is now. Every rank calls it, and all get the same results.

    Which are due follows from the iteration alone, so a resumed run measures where it would have measured.
    """

    def __init__(
        self, model: ParallelModel, tokenizer: Tokenizer, settings: Sequence[TaskSettings], *, interval: int
    ) -> None:
        from petatron.evaluate.task_list import build_tasks, context_limits

        self._model, self._settings, self._interval = model, settings, interval
        self._tasks = build_tasks(settings, tokenizer, context_limits(model))
        self._done: set[tuple[int, str]] = set()

    def due(self, iteration: int, *, last: bool = False) -> list[str]:
        """Returns the tasks to run after an iteration: after the last one all that have not run there."""
        number, left = divmod(iteration, self._interval)
        return [
            task.label
            for task in self._settings
            if (last or (left == 0 and number % task.every == 0)) and (iteration, task.label) not in self._done
        ]

    def evaluate(
        self, iteration: int, stop_check: EvaluationStopCheck | None = None, *, last: bool = False
    ) -> TaskEvaluation:
        evaluation, due, batches = TaskEvaluation(), self.due(iteration, last=last), count()

        def check_stop(*_: int) -> None:
            reason = None if stop_check is None else stop_check.stop_reason(next(batches))
            if reason is not None:
                evaluation.stop_reason = reason
                raise _Stopped

        for settings, task in zip(self._settings, self._tasks, strict=True):
            if settings.label not in due:
                continue
            try:
                check_stop()
                evaluation.results[settings.label] = task.run(self._model, on_progress=check_stop)
            except _Stopped:
                evaluation.interrupted = settings.label
                return evaluation
            self._done = {done for done in self._done if done[0] == iteration} | {(iteration, settings.label)}
        return evaluation
