"""Aggregates steps into a log record: sums stay on the device, and the host reads once per log point.

Reading one number from a GPU waits for everything queued before it, so a loop that reads the loss of every step runs
host and device in turns. `IntervalMeter.update` therefore only queues additions to a small vector on the loss's device,
and `report` reads that vector, together with the last step's norms, in one transfer.

The log line keeps the field names, order and number formats that scripts written for Megatron-LM parse, and adds
tokens/s/device, MFU, memory and the time left after them.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from datetime import timedelta
from typing import Any, Literal, Protocol

import torch
from torch import Tensor

from petatron.config.schema.objective_and_dataset_names import LM_LOSS
from petatron.evaluate.confidence_interval import perplexity
from petatron.evaluate.eval_task import TaskResult
from petatron.layers.moe.load_balancing import router_health

MetricRecord = Mapping[str, Any]


class MetricWriter(Protocol):
    """Receives records (`kind` is train, valid, eval, sample, event or summary) and cannot call back."""

    def write(self, record: MetricRecord) -> None: ...

    def close(self) -> None: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class StepMetrics:
    """Metrics of one optimizer step; values on the device stay there."""

    iteration: int
    consumed_samples: int
    tokens: int
    """Tokens of this step over all ranks."""
    loss: Tensor | float
    """What the run minimizes: the weighted sum where the objective has several losses."""
    lr: float
    global_batch_size: int
    decoupled_lr: float | None = None
    """Learning rate of embedding and output head, where they have one of their own."""
    named_losses: Mapping[str, Tensor | float] | None = None
    """The mean of each loss, where there are several or the only one is not the next token's."""
    objective_metrics: Mapping[str, Tensor | float] | None = None
    """The mean of each metric of the objective, if it has any."""
    grad_norm: Tensor | float | None = None
    loss_scale: Tensor | float = 1.0
    skipped: Tensor | bool = False
    """Whether the update was skipped because a gradient overflowed."""
    nan: Tensor | bool = False
    """Whether the loss of this step was NaN."""
    params_norm: Tensor | float | None = None
    num_zeros: Tensor | int | None = None
    router_statistics: Tensor | None = None
    """What the routers of all layers did in this step: one row of `layers.balance.router_report` per layer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LogRecord:
    """One log point: means over the interval since the last one, or the last step's value, as Python numbers."""

    time: float
    iteration: int
    train_iters: int
    consumed_samples: int
    consumed_tokens: int
    elapsed_ms_per_iteration: float
    tokens_per_second: float
    tokens_per_second_per_device: float
    tflops_per_device: float
    mfu: float | None
    lr: float
    global_batch_size: int
    lm_loss: float | None
    """What the run minimizes, whatever the objective: mean over the steps that were not skipped, of the weighted sum of several losses;
    None when all were."""
    loss_scale: float
    grad_norm: float | None
    params_norm: float | None
    num_zeros: int | None
    skipped: int
    nan: int
    memory_bytes: int
    eta_s: float | None
    """Until the run is complete, or until its time limit if that comes first."""
    decoupled_lr: float | None = None
    router_health: Mapping[str, Mapping[str, float]] | None = None
    """By layer index: load, entropy, dropped share, z and balance loss of its router, over the interval."""
    named_losses: Mapping[str, float | None] | None = None
    """Like `lm_loss`, of each loss by its name; a record of the next token's loss alone does not have the key."""
    objective_metrics: Mapping[str, float | None] | None = None
    """Like `lm_loss`, of each metric of the objective; a record of an objective without metrics does not have the key."""
    eta_is_time_limit: bool = False
    """Whether `--exit-duration-in-mins` ends before the run is complete; other records do not have the key."""

    def as_record(self) -> dict[str, Any]:
        values = {field.name: getattr(self, field.name) for field in fields(self)}
        for name in ("decoupled_lr", "named_losses", "objective_metrics", "eta_is_time_limit"):
            if values[name] is None or values[name] is False:
                del values[name]
        return {"kind": "train", **values}

    @classmethod
    def from_record(cls, record: MetricRecord) -> LogRecord:
        return cls(**{field.name: record[field.name] for field in fields(cls) if field.name in record})


@dataclass(kw_only=True)
class IntervalMeter:
    """Accumulates steps between two log points."""

    train_iters: int
    num_devices: int
    flops_per_token: float
    peak_flops: float | None = None
    train_samples: int | None = None
    consumed_tokens: int = 0
    read_memory_bytes: Callable[[], int] = lambda: 0
    router_layers: Sequence[int] = ()
    time_limit_left_s: Callable[[], float | None] = lambda: None
    clock: Callable[[], float] = time.perf_counter

    def __post_init__(self) -> None:
        self._reset()

    def _reset(self) -> None:
        self._last_step: StepMetrics | None = None
        self._sums: Tensor | None = None
        self._router_statistics: Tensor | None = None
        self._steps = self._tokens = self._samples = 0
        self._elapsed_s = 0.0
        self._resumed_at_s: float | None = self.clock()

    def pause(self) -> None:
        """Stops the clock for work that is not training (evaluation, saving)."""
        if self._resumed_at_s is not None:
            self._elapsed_s += self.clock() - self._resumed_at_s
            self._resumed_at_s = None

    def resume(self) -> None:
        if self._resumed_at_s is None:
            self._resumed_at_s = self.clock()

    @property
    def has_steps(self) -> bool:
        """Whether there were steps since the last report."""
        return self._steps > 0

    def update(self, step: StepMetrics) -> None:
        """Adds a step without waiting for the device."""
        device = torch.device("cpu") if isinstance(step.loss, int | float) else step.loss.device
        named = [*(step.named_losses or {}).values(), *(step.objective_metrics or {}).values()]
        skipped, nan, *means = (_on_device(value, device) for value in (step.skipped, step.nan, step.loss, *named))
        counted = 1.0 - skipped
        # where, not a multiplication: the loss of a skipped step may be inf or nan, and 0 x nan is nan.
        losses = [torch.where(counted > 0, mean, torch.zeros_like(mean)) for mean in means]
        added = torch.stack([losses[0], counted, skipped, nan, *losses[1:]])
        self._sums = added if self._sums is None else self._sums + added
        if step.router_statistics is not None:
            total = self._router_statistics
            self._router_statistics = step.router_statistics if total is None else total + step.router_statistics
        self._last_step = step
        self._steps += 1
        self._tokens += step.tokens
        self._samples += step.global_batch_size
        self.consumed_tokens += step.tokens

    def report(self) -> LogRecord:
        """Reads the device once, and starts the next interval."""
        step, sums = self._last_step, self._sums
        assert step is not None and sums is not None, "report() needs a step since the last report"
        last = [step.grad_norm, step.loss_scale, step.params_norm, step.num_zeros]
        on_device = [_on_device(math.nan if value is None else value, sums.device) for value in last]
        values = torch.cat([torch.stack(on_device), sums]).tolist()  # the one synchronization
        grad_norm, loss_scale, params_norm, num_zeros, loss_sum, counted, skipped, nan, *named_sums = values
        means = iter([total / counted if counted else None for total in named_sums])
        named_losses, objective_metrics = (
            {name: next(means) for name in named} if named else None
            for named in (step.named_losses, step.objective_metrics)
        )
        self.pause()
        elapsed_s = max(self._elapsed_s, 1e-9)
        tokens_per_second = self._tokens / elapsed_s
        flops_per_device = tokens_per_second * self.flops_per_token / self.num_devices
        eta_s, time_limit_s = self._eta_s(step, elapsed_s), self.time_limit_left_s()
        is_time_limit = time_limit_s is not None and time_limit_s < eta_s
        record = LogRecord(
            time=time.time(),
            iteration=step.iteration,
            train_iters=self.train_iters,
            consumed_samples=step.consumed_samples,
            consumed_tokens=self.consumed_tokens,
            elapsed_ms_per_iteration=elapsed_s * 1000 / self._steps,
            tokens_per_second=tokens_per_second,
            tokens_per_second_per_device=tokens_per_second / self.num_devices,
            tflops_per_device=flops_per_device / 1e12,
            mfu=flops_per_device / self.peak_flops if self.peak_flops else None,
            lr=step.lr,
            global_batch_size=step.global_batch_size,
            lm_loss=loss_sum / counted if counted else None,
            loss_scale=loss_scale,
            grad_norm=None if step.grad_norm is None else grad_norm,
            params_norm=None if step.params_norm is None else params_norm,
            num_zeros=None if step.num_zeros is None else int(num_zeros),
            skipped=int(skipped),
            nan=int(nan),
            memory_bytes=self.read_memory_bytes(),
            eta_s=max(0.0, time_limit_s) if time_limit_s is not None and is_time_limit else eta_s,
            eta_is_time_limit=is_time_limit,
            decoupled_lr=step.decoupled_lr,
            router_health=self._router_health(),
            named_losses=named_losses,
            objective_metrics=objective_metrics,
        )
        self._reset()
        return record

    def _router_health(self) -> dict[str, dict[str, float]] | None:
        if self._router_statistics is None:
            return None
        rows = self._router_statistics.cpu()
        return {str(layer): asdict(router_health(row)) for layer, row in zip(self.router_layers, rows, strict=True)}

    def _eta_s(self, step: StepMetrics, elapsed_s: float) -> float:
        """Counts samples where the run is measured in samples: as the batch grows, iterations get longer."""
        if self.train_samples is not None:
            return max(0, self.train_samples - step.consumed_samples) * elapsed_s / max(1, self._samples)
        return max(0, self.train_iters - step.iteration) * elapsed_s / self._steps


def _on_device(value: Tensor | float, device: torch.device) -> Tensor:
    if isinstance(value, int | float):
        # full() is a kernel with a constant; tensor() would copy from the host and wait for it.
        return torch.full((), float(value), dtype=torch.float64, device=device)
    return value.detach().to(device=device, dtype=torch.float64, non_blocking=True).reshape(())


def format_percent(fraction: float | None) -> str:
    return "n/a" if fraction is None else f"{100 * fraction:.1f}%"


def format_duration(seconds: float | None) -> str:
    """H:MM:SS, with days in front where there are any."""
    return "n/a" if seconds is None or not math.isfinite(seconds) else str(timedelta(seconds=round(seconds)))


def validation_record(
    *,
    iteration: int,
    lm_loss: float,
    consumed_samples: int,
    split: Literal["valid", "test"] = "valid",
    dataset: str | None = None,
    named_losses: Mapping[str, float] | None = None,
    objective_metrics: Mapping[str, float] | None = None,
    loss_by_weights: Mapping[str, float] | None = None,
) -> dict[str, Any]:
    """Returns the record of an evaluation: `dataset` is the name of a validation set that has one.

    `named_losses` and `objective_metrics` as in a `LogRecord`; `loss_by_weights` has the loss with other weights of the run, by their
    title. `lm_loss` is what the run minimizes; its perplexity means something only if the loss of the next token is part of it.
    """
    optional = {
        "lm_loss_ppl": perplexity(lm_loss) if named_losses is None or LM_LOSS in named_losses else None,
        "dataset": dataset,
        "named_losses": named_losses,
        "objective_metrics": objective_metrics,
        "loss_by_weights": loss_by_weights,
    }
    return {
        "kind": "valid",
        "time": time.time(),
        "split": split,
        "iteration": iteration,
        "consumed_samples": consumed_samples,
        "lm_loss": lm_loss,
        **{name: value for name, value in optional.items() if value},
    }


def sample_record(samples: Sequence[Mapping[str, str]], *, iteration: int) -> dict[str, Any]:
    """Returns the record of text samples: for each its `prompt` and the model's `text` after it."""
    return {
        "kind": "sample",
        "time": time.time(),
        "iteration": iteration,
        "samples": [dict(sample) for sample in samples],
    }


def task_record(task: str, result: TaskResult, *, iteration: int) -> dict[str, Any]:
    """Returns the record of a task of `--eval-tasks`: its metrics with intervals, and counts."""
    return {"kind": "eval", "time": time.time(), "iteration": iteration, "task": task, **result.as_json()}


def event_record(message: str, *, iteration: int, **fields: Any) -> dict[str, Any]:
    """Returns the record of a single event: resumed, saved, stopped by a signal. Consoles leave out one with `detail=True`."""
    return {"kind": "event", "time": time.time(), "iteration": iteration, "message": message, **fields}
