"""Schedules of learning rate and weight decay, as pure functions of progress: nothing to step, nothing to save.

Progress is counted in iterations when the run's length is given in iterations, and in samples when it is given in
samples, so a batch-size ramp cannot skew an iteration-based schedule. `at(iterations, samples)` takes what the applied
updates have consumed so far: the first update uses `at(0, 0)`, which with a warm-up is the warm-up's first value. An
update skipped because of overflow does not count.

With t the progress, W the warm-up, N the decay length and r = (t - W) / (N - W):

    t <= W                 initial + (peak - initial) t / W
    t > N                  minimum (the constant style keeps the peak)
    linear                 minimum + (peak - minimum) (1 - r)
    cosine                 minimum + (peak - minimum) (1 + cos(pi r)) / 2
    inverse-square-root    peak sqrt(W / t), at least minimum; a warm-up below one sample, or t = 0, counts as one, as in Megatron
    WSD                    peak until D before N; then from peak to minimum over the last D in a shape of its own
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any

from petatron.config.required_settings import required
from petatron.config.schema.run import RunConfig


def _counts_samples(run: RunConfig) -> bool:
    return run.train.train_samples is not None


@dataclass(frozen=True, slots=True, kw_only=True)
class LearningRateSchedule:
    """The learning rate at any point of a run; lengths are in samples if `in_samples`, else in iterations.

    >>> schedule = LearningRateSchedule(peak=1.0, style="linear", warmup=10, decay=110)
    >>> [schedule.at(iterations, 0) for iterations in (0, 5, 10, 60, 110, 200)]
    [0.0, 0.5, 1.0, 0.5, 0.0, 0.0]
    """

    peak: float
    style: str
    decay: int
    warmup: float = 0
    minimum: float = 0.0
    initial: float = 0.0
    final_decay: int = 0
    final_style: str = "exponential"
    in_samples: bool = False
    samples_per_iteration: int = 1
    """Only inverse-square-root with a warm-up below one sample depends on it, where progress is in iterations."""

    @classmethod
    def from_config(cls, run: RunConfig) -> LearningRateSchedule:
        """The schedule of a config that trains."""
        schedule, in_samples = run.schedule, _counts_samples(run)
        if in_samples:
            decay = required("lr_decay_samples", schedule.lr_decay_samples)
        else:
            decay = required("lr_decay_iters", schedule.lr_decay_iters)
        final_decay = schedule.lr_wsd_decay_samples if in_samples else schedule.lr_wsd_decay_iters
        warmup: float = schedule.lr_warmup_samples if in_samples else schedule.lr_warmup_iters
        if schedule.lr_warmup_fraction is not None:
            warmup = schedule.lr_warmup_fraction * decay
        short = warmup * run.train.global_batch_size < 1
        depends_on_batch = schedule.lr_decay_style == "inverse-square-root" and not in_samples and short
        return cls(
            peak=required("lr", run.optim.lr),
            style=schedule.lr_decay_style,
            decay=decay,
            warmup=warmup,
            minimum=schedule.min_lr,
            initial=schedule.lr_warmup_init,
            final_decay=final_decay or 0,
            final_style=schedule.lr_wsd_decay_style,
            in_samples=in_samples,
            samples_per_iteration=run.train.global_batch_size if depends_on_batch else 1,
        )

    @classmethod
    def decoupled_from_config(cls, run: RunConfig) -> LearningRateSchedule | None:
        """Returns the schedule of embedding and output head, with a peak and a minimum of its own; None if they have no other rate."""
        if run.optim.decoupled_lr is None:
            return None
        minimum = run.schedule.min_lr if run.schedule.decoupled_min_lr is None else run.schedule.decoupled_min_lr
        return replace(cls.from_config(run), peak=run.optim.decoupled_lr, minimum=minimum)

    def at(self, iterations: int, samples: int) -> float:
        """The learning rate of the next update, after updates that consumed this much."""
        step = samples if self.in_samples else iterations
        if self.warmup > 0 and step <= self.warmup:
            return self.initial + (self.peak - self.initial) * step / self.warmup
        if self.style == "constant":
            return self.peak
        if step > self.decay:
            return self.minimum
        if self.style == "inverse-square-root":
            warmup, progress = (max(length * self.samples_per_iteration, 1) for length in (self.warmup, step))
            return max(self.minimum, self.peak * math.sqrt(warmup / progress))
        return self.minimum + self._decay_fraction(step) * (self.peak - self.minimum)

    def _decay_fraction(self, step: int) -> float:
        """Returns the learning rate's position between minimum (0) and peak (1)."""
        if self.style != "WSD":
            return _decay_curve(self.style, (step - self.warmup) / (self.decay - self.warmup))
        into_decay = step - (self.decay - self.final_decay)
        return 1.0 if into_decay <= 0 else _decay_curve(self.final_style, into_decay / self.final_decay)


def _decay_curve(style: str, ratio: float) -> float:
    """From 1 at ratio 0 to 0 at ratio 1."""
    match style:
        case "linear":
            return 1.0 - ratio
        case "cosine":
            return 0.5 * (1.0 + math.cos(math.pi * ratio))
        case "exponential":  # one halving, scaled so that it ends at 0 instead of 1/2
            return 2.0 * 0.5**ratio - 1.0
        case "minus_sqrt":
            return 1.0 - math.sqrt(ratio)
    raise AssertionError(f"unknown decay style {style}")


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightDecaySchedule:
    """Weight decay at any point of a run: from `start` to `end` over `length`, then `end`.

    >>> WeightDecaySchedule(start=0.0, end=0.1, length=100, style="linear").at(50, 0)
    0.05
    """

    start: float
    end: float
    length: int
    style: str = "constant"
    in_samples: bool = False

    @classmethod
    def from_config(cls, run: RunConfig) -> WeightDecaySchedule:
        """The schedule of a config that trains; the increase lasts the whole run."""
        optim, in_samples = run.optim, _counts_samples(run)
        if in_samples:
            length = required("train_samples", run.train.train_samples)
        else:
            length = required("train_iters", run.train.train_iters)
        constant = optim.weight_decay_incr_style == "constant"
        start = optim.weight_decay if constant else required("start_weight_decay", optim.start_weight_decay)
        end = optim.weight_decay if constant else required("end_weight_decay", optim.end_weight_decay)
        return cls(start=start, end=end, length=length, style=optim.weight_decay_incr_style, in_samples=in_samples)

    def at(self, iterations: int, samples: int) -> float:
        """The weight decay of the next update, after updates that consumed this much."""
        step = samples if self.in_samples else iterations
        if self.style == "constant" or step >= self.length:
            return self.end
        return self.end - _decay_curve(self.style, step / self.length) * (self.end - self.start)


@dataclass(frozen=True, slots=True)
class RunSchedules:
    """The schedules of a run."""

    lr: LearningRateSchedule
    decoupled_lr: LearningRateSchedule | None
    weight_decay: WeightDecaySchedule

    @classmethod
    def from_config(cls, run: RunConfig) -> RunSchedules:
        return cls(
            LearningRateSchedule.from_config(run),
            LearningRateSchedule.decoupled_from_config(run),
            WeightDecaySchedule.from_config(run),
        )

    @classmethod
    def from_settings(cls, settings: Mapping[str, Any]) -> RunSchedules:
        """Returns the schedules that a checkpoint recorded; any error means that it is damaged."""
        rates, decoupled, decays = (
            {key.partition(".")[2]: value for key, value in settings.items() if key.startswith(f"{section}.")}
            for section in ("lr", "decoupled_lr", "weight_decay")
        )
        return cls(
            LearningRateSchedule(**rates),
            LearningRateSchedule(**decoupled) if decoupled else None,
            WeightDecaySchedule(**{"length": 0, **decays}),
        )

    def as_settings(self) -> dict[str, Any]:
        """Returns the settings that would change the course of a run on resume."""
        rates, decays = asdict(self.lr), asdict(self.weight_decay)
        decoupled = {} if self.decoupled_lr is None else asdict(self.decoupled_lr)
        for values in (rates, decoupled):
            if values.get("samples_per_iteration") == 1:  # checkpoints of earlier releases do not have it
                del values["samples_per_iteration"]
        if self.weight_decay.start == self.weight_decay.end:  # without a ramp its length does not matter
            del decays["length"]
        sections = {"lr": rates, "decoupled_lr": decoupled, "weight_decay": decays}
        return {f"{section}.{key}": value for section, values in sections.items() for key, value in values.items()}


def schedule_settings(run: RunConfig) -> dict[str, Any]:
    """Returns the schedules of a config as a checkpoint records them."""
    return RunSchedules.from_config(run).as_settings()
