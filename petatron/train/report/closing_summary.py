"""The closing summary: what a start of a run did and cost, where its results are, and what to do next.

It is one record of kind `summary`, the last of a start in `metrics.jsonl`; the text for people is made of that record alone.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from petatron.base.format_text import count_with_noun
from petatron.checkpoint.files.step_list import step_name
from petatron.config import RunConfig
from petatron.train.report.log_records import LogRecord, MetricRecord, format_duration, format_percent

Activity = Literal["evaluation", "saving", "sampling"]
Validation = tuple[int, float]
"""Iteration and loss."""


@dataclass(slots=True)
class _Speed:
    """Sums over log points."""

    seconds: float = 0.0
    tokens: int = 0
    mfu_seconds: float | None = 0.0
    """MFU times seconds; None where the peak is not known."""

    def add(self, record: LogRecord, tokens: int) -> None:
        seconds = tokens / record.tokens_per_second
        self.seconds, self.tokens = self.seconds + seconds, self.tokens + tokens
        known = self.mfu_seconds is not None and record.mfu is not None
        self.mfu_seconds = self.mfu_seconds + record.mfu * seconds if known else None  # pyright: ignore[reportOptionalOperand]

    @property
    def tokens_per_second(self) -> float | None:
        return self.tokens / self.seconds if self.seconds else None

    @property
    def mfu(self) -> float | None:
        return self.mfu_seconds / self.seconds if self.seconds and self.mfu_seconds is not None else None


@dataclass(slots=True, kw_only=True)
class RunTotals:
    """Adds up one start of a run: its log points, evaluations and saves.

    first_iteration, first_tokens: what was done before this start. first_loss, last_loss: of the first and the last log point.
    loss_name: what they are, `total loss` of several losses. validation_set: the name of the set of `validations`, if it has one.
    """

    first_iteration: int
    first_tokens: int
    loss_name: str = "loss"
    validation_set: str | None = None
    first_loss: float | None = None
    last_loss: float | None = None
    validations: list[Validation] = field(default_factory=list)
    test_loss: float | None = None
    saved_iteration: int | None = None
    seconds: dict[Activity, float] = field(default_factory=dict)
    _last: LogRecord | None = None
    all_points: _Speed = field(default_factory=_Speed)
    _after_first: _Speed = field(default_factory=_Speed)

    def add_log_point(self, record: LogRecord) -> None:
        tokens = record.consumed_tokens - self.consumed_tokens
        self.all_points.add(record, tokens)
        if self._last is not None:  # the first one has compilation and allocation in it
            self._after_first.add(record, tokens)
        self._last = record
        self.first_loss = record.lm_loss if self.first_loss is None else self.first_loss
        self.last_loss = self.last_loss if record.lm_loss is None else record.lm_loss

    @contextmanager
    def timed(self, activity: Activity) -> Iterator[None]:
        """Adds the time inside to an activity other than training."""
        started_s = time.perf_counter()
        try:
            yield
        finally:
            self.seconds[activity] = self.seconds.get(activity, 0.0) + time.perf_counter() - started_s

    @property
    def iteration(self) -> int:
        return self.first_iteration if self._last is None else self._last.iteration

    @property
    def consumed_tokens(self) -> int:
        return self.first_tokens if self._last is None else self._last.consumed_tokens

    @property
    def speed(self) -> _Speed:
        """The speed after the first log point, if there was another."""
        return self._after_first if self._after_first.tokens else self.all_points


def summary_record(
    totals: RunTotals,
    run: RunConfig,
    *,
    outcome: str,
    train_iters: int,
    duration_s: float,
    log_dir: Path,
    earlier_validations: Sequence[Validation] = (),
    next_commands: Sequence[tuple[str, str]] = (),
) -> dict[str, Any]:
    """Returns what a start did. `outcome` is `complete`, or why the run ended early; each next command comes with its purpose."""
    best = min((*earlier_validations, *totals.validations), key=lambda point: point[1], default=None)
    saved, save = totals.saved_iteration, run.checkpoint.save
    return {
        "kind": "summary",
        "time": time.time(),
        "iteration": totals.iteration,
        "train_iters": train_iters,
        "outcome": outcome,
        "steps": totals.iteration - totals.first_iteration,
        "tokens": totals.consumed_tokens - totals.first_tokens,
        "consumed_tokens": totals.consumed_tokens,
        "duration_s": duration_s,
        "training_s": totals.all_points.seconds,
        "evaluation_s": totals.seconds.get("evaluation", 0.0),
        "saving_s": totals.seconds.get("saving", 0.0),
        "sampling_s": totals.seconds.get("sampling", 0.0),
        "loss_name": totals.loss_name,
        "validation_set": totals.validation_set,
        "first_loss": totals.first_loss,
        "last_loss": totals.last_loss,
        "best_validation_loss": None if best is None else best[1],
        "best_validation_iteration": None if best is None else best[0],
        "test_loss": totals.test_loss,
        "tokens_per_second": totals.speed.tokens_per_second,
        "mfu": totals.speed.mfu,
        "checkpoint": None if saved is None or save is None else str(Path(save) / step_name(saved)),
        "log_dir": str(log_dir),
        "next_commands": [{"command": command, "purpose": purpose} for command, purpose in next_commands],
    }


def summary_lines(record: MetricRecord) -> str:
    """Formats a summary for people; what the run does not have is left out."""
    ended = "complete" if record["outcome"] == "complete" else f"ended early: {record['outcome']}"
    losses = (record["first_loss"], record["last_loss"])
    texts = {
        "run": f"{ended}, at iteration {record['iteration']:,} of {record['train_iters']:,}",
        "duration": f"{format_duration(record['duration_s'])}{_activities(record)}",
        "steps": _steps(record),
        record["loss_name"]: "" if None in losses else "{:.4f} -> {:.4f}".format(*losses),
        "validation": _validation(record),
        "speed": _speed(record),
        "checkpoint": record["checkpoint"] or "none was saved in this start",
        "metrics": f"{record['log_dir']}/metrics.jsonl, config.yaml",
    }
    width = max(map(len, texts))
    lines = ["summary", *(f"  {name:<{width}}  {text}" for name, text in texts.items() if text)]
    if record["next_commands"]:
        lines.append("next")
        for entry in record["next_commands"]:
            lines += [f"  # {entry['purpose']}", f"  {entry['command']}"]
    return "\n".join(lines)


def _activities(record: MetricRecord) -> str:
    spent = {name: record[f"{name}_s"] for name in ("training", "evaluation", "saving", "sampling")}
    parts = [f"{name} {_seconds(seconds)}" for name, seconds in spent.items() if seconds > 0]
    return f" ({', '.join(parts)})" if parts else ""


def _seconds(seconds: float) -> str:
    return f"{seconds:.1f} s" if seconds < 60 else format_duration(seconds)


def _steps(record: MetricRecord) -> str:
    text = f"{count_with_noun(record['steps'], 'step')}, {count_with_noun(record['tokens'], 'token')}"
    if record["steps"] == record["iteration"]:
        return text
    return f"{text} in this start; {record['consumed_tokens']:,} tokens since iteration 0"


def _validation(record: MetricRecord) -> str:
    best, test = record["best_validation_loss"], record["test_loss"]
    loss, dataset = record["loss_name"], record["validation_set"]
    of_set = "" if dataset is None else f" on {dataset}"
    at = f"at iteration {record['best_validation_iteration']:,}" if best is not None else ""
    parts = [] if best is None else [f"best {loss}{of_set} {best:.4f} {at}"]
    return ", ".join([*parts, *([] if test is None else [f"test {loss} {test:.4f}"])])


def _speed(record: MetricRecord) -> str:
    if record["tokens_per_second"] is None:
        return ""
    mfu = "" if record["mfu"] is None else f", MFU {format_percent(record['mfu'])}"
    return f"{record['tokens_per_second']:,.0f} tokens/s{mfu}"


def forced_end_text(run: RunConfig, totals: RunTotals, iteration: int, reason: str) -> str:
    """Says that a run ends within a step, and what is lost."""
    saved = totals.saved_iteration
    folder = run.checkpoint.load if saved is None else run.checkpoint.save
    last = totals.first_iteration if saved is None else saved
    lost = count_with_noun(iteration - last, "finished step")
    where = f"The last checkpoint is that of iteration {last} in {folder}" if last else "No checkpoint was saved"
    return (
        f"stopping at iteration {iteration}: {reason}, and iteration {iteration + 1} is not finished. {where}: {lost} and the one under "
        "way are lost"
    )
