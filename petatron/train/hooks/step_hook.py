"""`StepHook`: what a run may do at fixed points of its steps. The loop calls every hook on all ranks, and knows none of them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from petatron.train.report.log_records import MetricRecord, StepMetrics


class StepHook:
    """A base whose methods do nothing. All ranks call each method at the same iterations, so that a hook may communicate.

    Nothing here may change a number of the training.
    """

    def before_step(self, iteration: int) -> None:
        """Called before the batches of an iteration are read."""

    def before_update(self, iteration: int) -> None:
        """Called when the gradients of an iteration are complete."""

    def after_step(self, metrics: StepMetrics) -> None:
        """Called after the update."""

    def around_evaluation(self) -> None:
        """Called before and after every evaluation."""

    def before_save(self, iteration: int) -> None:
        """Called before a checkpoint is written, and older ones are pruned."""

    def after_save(self, iteration: int) -> None:
        """Called when a checkpoint has been published."""

    def records(self, iteration: int) -> Iterator[MetricRecord]:
        """Yields what is written at a log point, after the log line."""
        return iter(())

    def close(self) -> None:
        """Called when the loop ends, also by an error."""


class StepHooks(StepHook):
    """Several hooks as one."""

    def __init__(self, hooks: Sequence[StepHook] = ()) -> None:
        self._hooks = tuple(hooks)

    def before_step(self, iteration: int) -> None:
        for hook in self._hooks:
            hook.before_step(iteration)

    def before_update(self, iteration: int) -> None:
        for hook in self._hooks:
            hook.before_update(iteration)

    def after_step(self, metrics: StepMetrics) -> None:
        for hook in self._hooks:
            hook.after_step(metrics)

    def around_evaluation(self) -> None:
        for hook in self._hooks:
            hook.around_evaluation()

    def before_save(self, iteration: int) -> None:
        for hook in self._hooks:
            hook.before_save(iteration)

    def after_save(self, iteration: int) -> None:
        for hook in self._hooks:
            hook.after_save(iteration)

    def records(self, iteration: int) -> Iterator[MetricRecord]:
        for hook in self._hooks:
            yield from hook.records(iteration)

    def close(self) -> None:
        for hook in self._hooks:
            hook.close()
