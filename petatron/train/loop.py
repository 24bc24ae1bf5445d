"""The loop: step, report, evaluate, save, until the run is over or told to stop."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from petatron.base.device import DeviceFacts, DeviceKind, memory_in_use
from petatron.base.errors import CheckpointError, TrainError
from petatron.base.log import get_logger
from petatron.config.schema.moe_layer_freq import moe_layers
from petatron.data.batch_loader import BatchLoader
from petatron.estimate.flops import model_flops_per_token
from petatron.estimate.memory.forecast import memory_line
from petatron.models.batch import Batch
from petatron.optim.loss_scaler import DynamicScale, compute_dtype
from petatron.train.build import Loaders
from petatron.train.report.metrics import IntervalMeter, Record, Sink, StepMetrics, event_record, validation_record
from petatron.train.report.profiler import StepProfile
from petatron.train.signals import EvaluationWatch, Stopping
from petatron.train.state.train_state import TrainState
from petatron.train.train_step import train_step

_log = get_logger(__name__)


@dataclass(frozen=True, slots=True)
class Outcome:
    """How a run ended: at which iteration, why if it was early, and the last evaluation."""

    iteration: int
    stopped_early: str | None
    valid_loss: float | None


class Loop:
    """One run from wherever its state stands to its end."""

    def __init__(
        self,
        state: TrainState,
        loaders: Loaders,
        sinks: Sequence[Sink],
        device: DeviceFacts,
        *,
        started_s: float | None = None,
    ) -> None:
        """`started_s` is the process's start on the monotonic clock, from which a time limit counts."""
        self._state = state
        self._run = state.run
        self._loaders = loaders
        self._sinks = sinks
        self._length = state.length()
        self._started_s = started_s
        self._saved_at: int | None = None
        self._saving: int | None = None
        self._valid: tuple[int, float] | None = None
        self._profile = StepProfile(
            self._run,
            rank=state.mesh.rank,
            iterations=self._length.iterations,
            device=state.mesh.device,
            tell=self._event,
        )
        self._device_kind: DeviceKind = device.kind
        self._told_memory = False
        self._first_bad = torch.full((), -1, dtype=torch.int64, device=state.mesh.device)
        self._meter = IntervalMeter(
            train_iters=self._length.iterations,
            train_samples=self._run.train.train_samples,
            num_devices=state.mesh.world.size,
            flops_per_token=model_flops_per_token(
                self._run.model,
                self._run.moe,
                experts_in=moe_layers(self._run),
                tensor_parallel=self._run.parallel.tensor_model_parallel_size,
            ),
            peak_flops=device.peak(str(compute_dtype(self._run.precision))[6:]),
            consumed_tokens=state.progress.consumed_tokens,
            memory=lambda: memory_in_use(device.kind),
            router_layers=state.model.routers.layers,
        )

    def run(self) -> Outcome:
        """Train to the end. The last state is always saved (where there is a folder), and evaluated when it is the end."""
        try:
            return self._run_to_the_end()
        except Exception:
            self._keep_what_was_saved()
            raise

    def _keep_what_was_saved(self) -> None:
        """Finish the save that a failure came upon: it is what the next run begins with."""
        try:
            self._settle_save()
        except Exception:  # ranks may be gone; the failure that brought us here is the one to tell
            _log.exception("a checkpoint that was being written was lost")

    def _run_to_the_end(self) -> Outcome:
        state, config = self._state, self._run
        stopped: str | None = None
        began_at = state.progress.iteration
        if began_at >= self._length.iterations:
            self._event(f"nothing left to train: the run is at iteration {began_at} of {self._length.iterations}")
        saves = state.saver is not None
        stops = Stopping(config.train, state.mesh.control, saves=saves, started_s=self._started_s)
        with stops as stopping:
            with self._profile as traced:
                while state.progress.iteration < self._length.iterations and stopped is None:
                    traced.begin(state.progress.iteration + 1)
                    batches = self._next_batches()
                    metrics = train_step(state, batches)
                    traced.end(metrics.iteration)
                    self._watch(metrics)
                    iteration = metrics.iteration
                    last = iteration == self._length.iterations
                    if iteration == 1 or iteration % config.log.log_interval == 0 or last:
                        self._report()
                    if config.train.eval_interval and iteration % config.train.eval_interval == 0:
                        stopped = self._evaluate(self._loaders.valid, "valid", stopping, saves=saves)
                    if config.checkpoint.save_interval and iteration % config.checkpoint.save_interval == 0:
                        self._save()
                    self._watch_save()
                    stopped = stopped or stopping.reason(iteration)
                self._tell_stop(stopped)
                if state.progress.iteration > began_at:
                    self._save(last=True)
            for split, loader in (("valid", self._loaders.valid), ("test", self._loaders.test)):
                if stopped is None:
                    stopped = self._evaluate(loader, split, stopping, saves=False)
                    self._tell_stop(stopped)
        return Outcome(state.progress.iteration, stopped, self._valid[1] if self._valid else None)

    def _next_batches(self) -> list[Batch]:
        progress = self._state.progress
        size = self._state.batch_sizes.at(progress.consumed_samples)
        batches = self._loaders.train.next_step(size, progress.consumed_samples)
        if not batches:
            raise TrainError(
                f"The training data ends at sample {len(self._loaders.train.dataset):,}, but iteration {progress.iteration + 1} "
                f"needs samples {progress.consumed_samples:,} to {progress.consumed_samples + size:,}."
            )
        return [batch.to(self._state.mesh.device) for batch in batches]

    def _watch(self, metrics: StepMetrics) -> None:
        """Remember on the device which iteration first had a number that is not finite."""
        bad = torch.as_tensor(metrics.nan) | torch.as_tensor(metrics.skipped).bool()
        fresh = bad & (self._first_bad < 0)
        self._first_bad = torch.where(fresh, torch.full_like(self._first_bad, metrics.iteration), self._first_bad)
        self._meter.update(metrics)

    def _report(self) -> None:
        self._write(self._meter.report().as_record())
        self._check_finite()
        if not self._told_memory:
            self._told_memory = True
            kind, rank = self._device_kind, self._state.mesh.pp.rank
            self._event(memory_line(self._run, device=kind, pipeline_rank=rank, measured_bytes=memory_in_use(kind)))

    def _check_finite(self) -> None:
        if not self._run.train.check_for_nan_in_loss_and_grad or isinstance(self._state.scaler, DynamicScale):
            return
        first_bad = int(self._first_bad)
        if first_bad >= 0:
            raise TrainError(
                f"The loss or a gradient was not finite first at iteration {first_bad}. Weights were not updated "
                "with it. Look at the data and the learning rate around there; resume from the last checkpoint, or go on "
                "regardless with --no-check-for-nan-in-loss-and-grad."
            )

    def _tell_stop(self, why: str | None) -> None:
        if why is not None:
            self._event(f"stopping at iteration {self._state.progress.iteration}: {why}")

    def _evaluate(self, loader: BatchLoader | None, split: str, stopping: Stopping, *, saves: bool) -> str | None:
        """Report the loss of a split; why to stop, if that came first, and then nothing is reported."""
        iteration = self._state.progress.iteration
        if loader is None or (split == "valid" and self._valid is not None and self._valid[0] == iteration):
            return None
        self._meter.pause()
        with stopping.watch_evaluation(saves=saves) as watch:
            loss = evaluate(self._state, loader, watch)
        self._meter.resume()
        if isinstance(loss, Interrupted):
            batches = f"{loss.batches:,} of {self._run.train.eval_iters:,} batches"
            self._event(f"the evaluation ({split}) was interrupted after {batches} and reports no loss")
            return loss.why
        if split == "valid":
            self._valid = (iteration, loss)
        self._write(
            validation_record(
                iteration=iteration,
                lm_loss=loss,
                consumed_samples=self._state.progress.consumed_samples,
                split="test" if split == "test" else "valid",
            )
        )
        return None

    def _save(self, *, last: bool = False) -> None:
        """Publish this iteration, but never a state that the next log line would have refused.

        A save that fails costs a checkpoint, not the run: it is reported, earlier checkpoints are as they were, and the next
        save tries again. Only the last one must succeed.
        """
        self._check_finite()
        saver, iteration = self._state.saver, self._state.progress.iteration
        if saver is None:
            return
        self._meter.pause()
        self._settle_save()
        try:
            if self._saved_at != iteration:
                self._state.save(wait=not self._run.checkpoint.async_save)
                self._saving = iteration
            if last or not self._run.checkpoint.async_save:
                self._finish_save()
        except CheckpointError as error:
            if last:
                raise
            self._report_failed_save(error)
        self._meter.resume()

    def _watch_save(self) -> None:
        """Report a save in the background that has come to its end."""
        if self._saving is not None and self._state.saver is not None and not self._state.saver.writing:
            self._settle_save()

    def _settle_save(self) -> None:
        try:
            self._finish_save()
        except CheckpointError as error:
            self._report_failed_save(error)

    def _finish_save(self) -> None:
        """Wait for the save that was begun, if there is one."""
        saver, saving, self._saving = self._state.saver, self._saving, None
        if saver is None or saving is None:
            return
        saver.drain()
        self._saved_at = saving
        self._event(f"saved checkpoint of iteration {saving} to {self._run.checkpoint.save}")
        if saver.pruned:
            plural = "s" if len(saver.pruned) > 1 else ""
            self._event(f"removed the checkpoint{plural} of iteration{plural} {', '.join(map(str, saver.pruned))}")

    def _report_failed_save(self, error: CheckpointError) -> None:
        self._event(f"WARNING: a checkpoint was not saved; training goes on, and the next save tries again. {error}")

    def _event(self, message: str) -> None:
        self._write(event_record(message, iteration=self._state.progress.iteration))

    def _write(self, record: Record) -> None:
        for sink in self._sinks:
            sink.write(record)


@dataclass(frozen=True, slots=True)
class Interrupted:
    """An evaluation that was told to stop after so many batches."""

    why: str
    batches: int


def evaluate(state: TrainState, loader: BatchLoader, watch: EvaluationWatch | None = None) -> float | Interrupted:
    """Mean loss per token over the first `eval_iters` batches of a split; the same batches every time."""
    size = state.run.train.global_batch_size
    assert size is not None
    total = torch.zeros((), dtype=torch.float64, device=state.mesh.device)
    tokens = torch.zeros_like(total)
    for index in range(state.run.train.eval_iters):
        why = watch.reason(index) if watch is not None else None
        if why is not None:
            return Interrupted(why, index)
        batches = loader.next_step(size, index * size)
        loss, count = state.model.evaluate([batch.to(state.mesh.device) for batch in batches])
        total, tokens = total + loss, tokens + count
    return float(total / tokens)
