"""Runs the evaluations of a run: of its validation sets, its test set and its tasks, and reports them."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Literal

from petatron.data.batch_loader import StepLoader
from petatron.train.build_run import DataLoaders
from petatron.train.evaluate_loss import InterruptedEvaluation, evaluate, evaluated_batches, evaluation_record
from petatron.train.hooks.build_hooks import StepInstruments
from petatron.train.report.closing_summary import Activity, RunTotals
from petatron.train.report.log_records import MetricRecord, event_record, task_record
from petatron.train.report.task_evaluation import IterationEvaluator
from petatron.train.state.train_state import TrainState
from petatron.train.stop_monitor import StopMonitor


class RunEvaluations:
    """Evaluates the weights that a run has, and remembers the last loss of the validation set that stands for it."""

    def __init__(
        self,
        state: TrainState,
        loaders: DataLoaders,
        instruments: StepInstruments,
        totals: RunTotals,
        *,
        not_training: Callable[[Activity], AbstractContextManager[None]],
        write_record: Callable[[MetricRecord], None],
        task_evaluator: IterationEvaluator | None = None,
    ) -> None:
        """`not_training` keeps the time inside out of the time per iteration."""
        self._state, self._loaders, self._totals = state, loaders, totals
        self._hooks, self._timers = instruments.hooks, instruments.timers
        self._not_training, self._write_record = not_training, write_record
        self._task_evaluator = task_evaluator
        self._last_validation: tuple[int, float] | None = None

    @property
    def last_loss(self) -> float | None:
        return self._last_validation[1] if self._last_validation else None

    def evaluate_complete_run(self, stopping: StopMonitor) -> str | None:
        stopped = self.validate(stopping, will_save=False)
        if stopped is None and self._loaders.test is not None:
            result = self._evaluate(self._loaders.test, "test", stopping, will_save=False)
            if isinstance(result, str):
                return result
            self._totals.test_loss = result
        return stopped or self.evaluate_tasks(stopping, will_save=False, last=True)

    def validate(self, stopping: StopMonitor, *, will_save: bool) -> str | None:
        """Reports the loss of every validation set, the first of which stands for the run; returns why to stop, if a stop came first."""
        iteration = self._state.progress.iteration
        if self._last_validation is not None and self._last_validation[0] == iteration:
            return None
        losses: list[float] = []
        for dataset, loader in self._loaders.valid.items():
            result = self._evaluate(loader, "valid", stopping, will_save=will_save, dataset=dataset)
            if isinstance(result, str):
                return result
            losses.append(result)
        if losses:
            self._last_validation = (iteration, losses[0])
            self._totals.validations.append(self._last_validation)
        return None

    def _evaluate(
        self,
        loader: StepLoader,
        split: Literal["valid", "test"],
        stopping: StopMonitor,
        *,
        will_save: bool,
        dataset: str | None = None,
    ) -> float | str:
        """Reports and returns the loss of a split; returns why to stop, if a stop came first, and then reports nothing."""
        all_samples = split == "valid" and self._state.run.train.full_validation
        batches = evaluated_batches(self._state.run, loader.num_samples, all_samples=all_samples)
        self._hooks.around_evaluation()
        with (
            self._not_training("evaluation"),
            self._timers.phase("evaluate"),
            stopping.evaluation_stop_check(will_save=will_save) as watch,
        ):
            result = evaluate(self._state, loader, watch, batches=batches)
        self._hooks.around_evaluation()
        if isinstance(result, InterruptedEvaluation):
            total = len(batches) * (1 + len(self._state.alternative_weights()))
            done = f"{result.completed_batches:,} of {total:,} batches"
            self._log_event(f"the evaluation ({dataset or split}) was interrupted after {done} and reports no loss")
            return result.reason
        self._write_record(evaluation_record(self._state, result, split=split, dataset=dataset))
        return result.loss

    def evaluate_tasks(self, stopping: StopMonitor, *, will_save: bool, last: bool = False) -> str | None:
        """Reports the tasks that are due; returns why to stop, if a stop came first."""
        iteration, evaluator = self._state.progress.iteration, self._task_evaluator
        if evaluator is None or not evaluator.due(iteration, last=last):
            return None
        with self._not_training("evaluation"), stopping.evaluation_stop_check(will_save=will_save) as watch:
            evaluation = evaluator.evaluate(iteration, watch, last=last)
        for task, result in evaluation.results.items():
            self._write_record(task_record(task, result, iteration=iteration))
        if evaluation.interrupted is not None:
            self._log_event(f"the task {evaluation.interrupted} was interrupted and reports nothing")
        return evaluation.stop_reason

    def _log_event(self, message: str) -> None:
        self._write_record(event_record(message, iteration=self._state.progress.iteration))
