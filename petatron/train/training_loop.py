"""The training loop: steps, logs, evaluates and saves until the run ends or is stopped."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace

import torch

from petatron.base.device import DeviceInfo, DeviceKind, peak_memory_bytes
from petatron.base.errors import CheckpointError, TrainError
from petatron.base.log import get_logger
from petatron.config.schema.run import RunConfig
from petatron.estimate.flops import model_flops_per_token
from petatron.estimate.memory.forecast import memory_log_line
from petatron.models.batch import Batch
from petatron.models.frozen_params import frozen_params
from petatron.optim.loss_scaler import DynamicLossScaler, compute_dtype
from petatron.train.build_run import DataLoaders
from petatron.train.evaluate_loss import evaluation_is_due
from petatron.train.hooks.build_hooks import build_instruments
from petatron.train.report.closing_summary import Activity, RunTotals, forced_end_text
from petatron.train.report.log_records import (
    IntervalMeter,
    MetricRecord,
    MetricWriter,
    StepMetrics,
    event_record,
    sample_record,
)
from petatron.train.report.profiler import StepProfiler
from petatron.train.report.task_evaluation import IterationEvaluator
from petatron.train.report.text_samples import TextSampler
from petatron.train.run_evaluations import RunEvaluations
from petatron.train.state.train_state import TrainState
from petatron.train.stop_monitor import StopMonitor, time_limit_left_s
from petatron.train.train_step import train_step

_log = get_logger(__name__)


@dataclass(frozen=True, slots=True)
class TrainingResult:
    """How a run ended: at which iteration, why if it was early, and the last evaluation."""

    iteration: int
    stop_reason: str | None
    valid_loss: float | None


class TrainLoop:
    """Runs training from the current state to the end."""

    def __init__(
        self,
        state: TrainState,
        loaders: DataLoaders,
        writers: Sequence[MetricWriter],
        device: DeviceInfo,
        *,
        started_s: float | None = None,
        sampler: TextSampler | None = None,
        task_evaluator: IterationEvaluator | None = None,
    ) -> None:
        """`started_s` is the process's start on the monotonic clock, from which a time limit counts."""
        self._state = state
        self._run = state.run
        self._loaders = loaders
        self._writers = writers
        self._run_length = state.run_length()
        self._started_s = time.monotonic() if started_s is None else started_s
        self._sampler = sampler
        self.totals = RunTotals(
            first_iteration=state.progress.iteration,
            first_tokens=state.progress.consumed_tokens,
            loss_name="total loss" if len(state.model.objective.losses) > 1 else "loss",
            validation_set=next(iter(loaders.valid), None),
        )
        self._last_saved_iteration: int | None = None
        self._saving = False
        self._pending_save_iteration: int | None = None
        self._profiler = StepProfiler(
            self._run,
            rank=state.mesh.rank,
            iterations=self._run_length.iterations,
            device=state.mesh.device,
            log_event=self._log_event,
        )
        self._device_kind: DeviceKind = device.kind
        self._memory_logged = False
        self._first_nonfinite_iteration = torch.full((), -1, dtype=torch.int64, device=state.mesh.device)
        flops_per_token = model_flops_per_token(
            state.model.spec, tp_size=self._run.parallel.tensor_model_parallel_size, frozen=frozen_params(self._run)
        )
        self._instruments = build_instruments(state, flops_per_token=flops_per_token)
        self._hooks, self._timers = self._instruments.hooks, self._instruments.timers
        self._evaluations = RunEvaluations(
            state,
            loaders,
            self._instruments,
            self.totals,
            not_training=self._not_training,
            write_record=self._write_record,
            task_evaluator=task_evaluator,
        )
        self._meter = IntervalMeter(
            train_iters=self._run_length.iterations,
            train_samples=self._run.train.train_samples,
            num_devices=state.mesh.world.size,
            flops_per_token=flops_per_token,
            peak_flops=device.peak(str(compute_dtype(self._run.precision))[6:]),
            consumed_tokens=state.progress.consumed_tokens,
            read_memory_bytes=lambda: peak_memory_bytes(device.kind),
            router_layers=state.model.router_statistics.layers,
            time_limit_left_s=lambda: time_limit_left_s(self._run.train, self._started_s),
        )

    @property
    def train_iters(self) -> int:
        return self._run_length.iterations

    @property
    def _last_iteration(self) -> int:
        return self._state.progress.iteration if self._run.train.skip_train else self._run_length.iterations

    def run(self) -> TrainingResult:
        """Trains to the end. The last state is always saved (if there is a folder), and evaluated if the run is complete."""
        try:
            return self._train()
        except Exception:
            try:  # the next run resumes from an async save that the failure interrupted
                self._finish_save_or_log()
            except Exception:  # ranks may be gone; the original failure is the one to report
                _log.exception("a checkpoint that was being written was lost")
            raise
        finally:
            self.close()

    def close(self) -> None:
        self._hooks.close()

    def train_interval(self, last_iteration: int) -> str | None:
        """Trains to the next log point, at most to an iteration, for a caller that iterates; returns why to stop early, if so.

        The clock stands still between two calls. Signals stop training only while it runs. Where the run ends, it is saved.
        """
        self._meter.resume()
        stopped: str | None = None
        progress = self._state.progress
        with self._stop_monitor() as stopping:
            while progress.iteration < last_iteration and stopped is None:
                stopped = self._run_iteration(stopping)
                if not self._meter.has_steps:
                    break
        if self._meter.has_steps:
            self._log_metrics()
        self._log_stop(stopped)
        if stopped is not None or progress.iteration == self._run_length.iterations:
            self._save(last=True)
        self._meter.pause()
        return stopped

    def _stop_monitor(self) -> StopMonitor:
        saver = self._state.checkpoint_manager
        return StopMonitor(
            self._run.train,
            self._state.mesh.control,
            will_save=saver is not None,
            started_s=self._started_s,
            is_saving=lambda: self._saving or (saver is not None and saver.is_saving),
            on_forced_end=self._log_forced_end,
        )

    def _log_forced_end(self, reason: str) -> None:
        """Says, from another thread, that the run ends within a step; the state is that of the last finished one."""
        self._log_event(forced_end_text(self._run, self.totals, self._state.progress.iteration, reason))

    def _run_iteration(self, stopping: StopMonitor) -> str | None:
        """Runs one step, and what is due after it: log line, evaluation, samples, checkpoint. Returns why to stop early, if so."""
        state, config = self._state, self._run
        self._profiler.begin(state.progress.iteration + 1)
        self._hooks.before_step(state.progress.iteration + 1)
        with self._timers.phase("batch-generator"):
            batches = self._next_batches()
        size = None if self._loaders.train.rows_are_samples else self._next_size()
        metrics = train_step(state, batches, self._instruments, num_samples=size)
        if of_data := self._loaders.train.step_metrics:
            metrics = replace(metrics, objective_metrics={**(metrics.objective_metrics or {}), **of_data})
        self._hooks.after_step(metrics)
        self._profiler.end(metrics.iteration)
        self._record_step(metrics)
        iteration, stopped = metrics.iteration, None
        if iteration == 1 or iteration % config.log.log_interval == 0 or iteration == self._run_length.iterations:
            self._log_metrics()
        saves = state.checkpoint_manager is not None
        if evaluation_is_due(config.train, iteration):
            stopped = self._evaluations.validate(stopping, will_save=saves)
        stopped = stopped or self._evaluations.evaluate_tasks(stopping, will_save=saves)
        if self._sampler is not None and self._sampler.is_due(iteration):
            with self._not_training("sampling"):
                samples = self._sampler.sample()
            self._write_record(sample_record(samples, iteration=iteration))
        if config.checkpoint.save_interval and iteration % config.checkpoint.save_interval == 0:
            self._save()
        self._poll_async_save()
        return stopped or stopping.stop_reason(iteration)

    def _train(self) -> TrainingResult:
        state = self._state
        stopped: str | None = None
        began_at = state.progress.iteration
        if self._run.train.skip_train:
            self._log_event(f"--skip-train: evaluates the weights of iteration {began_at}, and trains nothing")
        elif began_at >= self._run_length.iterations:
            end = self._run_length.iterations
            self._log_event(f"nothing left to train: the run is at iteration {began_at} of {end}")
        with self._stop_monitor() as stopping:
            with self._profiler:
                while state.progress.iteration < self._last_iteration and stopped is None:
                    stopped = self._run_iteration(stopping)
                if self._meter.has_steps:
                    self._log_metrics()
                self._log_stop(stopped)
                if state.progress.iteration > began_at:
                    self._save(last=True)
                if stopped is not None:
                    stopping.lift_deadline()
            if stopped is None:
                stopped = self._evaluations.evaluate_complete_run(stopping)
                self._log_stop(stopped)
        return TrainingResult(state.progress.iteration, stopped, self._evaluations.last_loss)

    def _next_batches(self) -> list[Batch]:
        progress, size = self._state.progress, self._next_size()
        batches = self._loaders.train.next_step(size, progress.consumed_samples)
        if not batches:
            raise TrainError(
                f"The training data ends at sample {self._loaders.train.num_samples or 0:,}, but iteration {progress.iteration + 1} "
                f"needs samples {progress.consumed_samples:,} to {progress.consumed_samples + size:,}."
            )
        return [batch.to(self._state.mesh.device) for batch in batches]

    def _next_size(self) -> int:
        return self._state.batch_size_schedule.at(self._state.progress.consumed_samples)

    def _record_step(self, metrics: StepMetrics) -> None:
        """Records on the device which iteration first had a non-finite value."""
        bad = torch.as_tensor(metrics.nan) | torch.as_tensor(metrics.skipped).bool()
        fresh = bad & (self._first_nonfinite_iteration < 0)
        self._first_nonfinite_iteration = torch.where(
            fresh, torch.full_like(self._first_nonfinite_iteration, metrics.iteration), self._first_nonfinite_iteration
        )
        self._meter.update(metrics)

    def _log_metrics(self) -> None:
        record = self._meter.report()
        self.totals.add_log_point(record)
        self._write_record(record.as_record())
        for hook_record in self._hooks.records(record.iteration):
            self._write_record(hook_record)
        self._check_finite()
        if not self._memory_logged:
            self._memory_logged = True
            kind, rank = self._device_kind, self._state.mesh.pp.rank
            line = memory_log_line(self._run, device=kind, pipeline_rank=rank, measured_bytes=peak_memory_bytes(kind))
            # On a CPU the peak is that of Python and its libraries too, which is nothing to compare a forecast with.
            self._log_event(line, detail=kind == "cpu")

    def _check_finite(self) -> None:
        if not self._run.train.check_for_nan_in_loss_and_grad or isinstance(self._state.scaler, DynamicLossScaler):
            return
        first_bad = int(self._first_nonfinite_iteration)
        if first_bad >= 0:
            raise TrainError(
                f"The loss or a gradient was not finite first at iteration {first_bad}. Weights were not updated "
                f"with it. Look at {_usual_causes(self._run)} around there; resume from the last checkpoint, or go on "
                "regardless with --no-check-for-nan-in-loss-and-grad."
            )

    def _log_stop(self, reason: str | None) -> None:
        if reason is not None:
            self._log_event(f"stopping at iteration {self._state.progress.iteration}: {reason}")

    @contextmanager
    def _not_training(self, activity: Activity) -> Iterator[None]:
        """Keeps the time inside out of the time per iteration."""
        self._meter.pause()
        with self.totals.timed(activity):
            yield
        self._meter.resume()

    def _save(self, *, last: bool = False) -> None:
        """Publishes this iteration, but never a state that the next log line would have refused.

        A failed save costs a checkpoint, not the run: it is reported, earlier checkpoints are untouched, and the next save tries again.
        Only the last one must succeed.
        """
        self._check_finite()
        saver, iteration = self._state.checkpoint_manager, self._state.progress.iteration
        if saver is None:
            return
        with self._not_training("saving"):
            self._saving = True
            try:
                self._finish_save_or_log()
                if self._last_saved_iteration != iteration:
                    self._hooks.before_save(iteration)
                    with self._timers.phase("save-checkpoint"):
                        self._state.save(wait=not self._run.checkpoint.async_save)
                    self._pending_save_iteration = iteration
                if last or not self._run.checkpoint.async_save:
                    self._wait_for_save()
            except CheckpointError as error:
                if last:
                    raise
                self._log_failed_save(error)
            finally:
                self._saving = False

    def _poll_async_save(self) -> None:
        """Reports an async save that has finished."""
        saver = self._state.checkpoint_manager
        if self._pending_save_iteration is not None and saver is not None and not saver.is_saving:
            self._finish_save_or_log()

    def _finish_save_or_log(self) -> None:
        try:
            self._wait_for_save()
        except CheckpointError as error:
            self._log_failed_save(error)

    def _wait_for_save(self) -> None:
        """Waits for a pending async save, if there is one."""
        saver, saving, self._pending_save_iteration = self._state.checkpoint_manager, self._pending_save_iteration, None
        if saver is None or saving is None:
            return
        saver.drain()
        self._last_saved_iteration = self.totals.saved_iteration = saving
        self._log_event(f"saved checkpoint of iteration {saving} to {self._run.checkpoint.save}")
        self._hooks.after_save(saving)
        if saver.pruned:
            plural = "s" if len(saver.pruned) > 1 else ""
            self._log_event(f"removed the checkpoint{plural} of iteration{plural} {', '.join(map(str, saver.pruned))}")

    def _log_failed_save(self, error: CheckpointError) -> None:
        self._log_event(
            f"WARNING: a checkpoint was not saved; training goes on, and the next save tries again. {error}"
        )

    def _log_event(self, message: str, *, detail: bool = False) -> None:
        fields = {"detail": True} if detail else {}
        self._write_record(event_record(message, iteration=self._state.progress.iteration, **fields))

    def _write_record(self, record: MetricRecord) -> None:
        for writer in self._writers:
            writer.write(record)


def _usual_causes(run: RunConfig) -> str:
    """What makes a loss infinite or NaN: an objective of one's own is the first to look at."""
    if run.train.objective is None:
        return "the data and the learning rate"
    return f"the loss of --objective {run.train.objective} (log 0, 0 / 0, exp of a large number), the data and the learning rate"
