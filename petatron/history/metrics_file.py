"""Reads `metrics.jsonl` of a run in one pass: columns of numbers for the curves, and the few records that are read one by one.

A run may have a million log points, so a train record becomes one number in each column and nothing else of it is stored. The
file may come from others or from a machine that lost power: a line that is no record is skipped and counted.

A resumed run repeats iterations that were logged but not saved, and the later record wins. Iterations grow within one start, so
a train record supersedes all earlier ones of its iteration and above, and columns are used as a stack: each record is appended
once and removed at most once. The event of a resume supersedes what is above its iteration, as soon as a train record follows.

In a column, NaN means that nothing was recorded; a recorded nan or infinity is stored as an infinity.
"""

from __future__ import annotations

import json
import math
from array import array
from collections import deque
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from petatron.base.untrusted_files import is_count, open_regular_file

METRICS_FILE = "metrics.jsonl"
COLUMNS = (
    "iteration", "time", "train_iters", "consumed_tokens", "elapsed_ms_per_iteration", "tokens_per_second", "mfu", "lr", "lm_loss",
    "grad_norm", "loss_scale", "memory_bytes",
)  # fmt: skip
RESUMED = "resumed at iteration"
"""How the event of a resume begins."""
MAX_LINE_BYTES = 1 << 22
MAX_EVENTS = 5000
MAX_SAMPLES = 200
MAX_NAMES = 16
_MAX_TEXT_CHARS = 20_000
_MAX_NAME_CHARS = 200
_NOT_FINITE = {"nan": math.inf, "inf": math.inf, "-inf": -math.inf}
_TRAIN_MARK = b'"kind": "train"'
_LAST_LINES = 8
_MAX_SKIPPED_READS = 16


@dataclass(frozen=True, slots=True)
class Evaluation:
    """One evaluation of a split, or of a validation set with a name (`dataset`); `loss` is infinite where it was not finite."""

    split: str
    iteration: int
    time: float
    loss: float
    named_losses: Mapping[str, float] = field(default_factory=dict)
    objective_metrics: Mapping[str, float] = field(default_factory=dict)
    dataset: str | None = None

    @property
    def label(self) -> str:
        """The split, and the name of its dataset if there is one: `valid: code`."""
        return self.split if self.dataset is None else f"{self.split}: {self.dataset}"


@dataclass(frozen=True, slots=True)
class TaskMetrics:
    """The metrics of one task of `--eval-tasks`; a value is infinite where it was not finite."""

    task: str
    iteration: int
    values: Mapping[str, float]


@dataclass(frozen=True, slots=True)
class Event:
    """A message of a run, with the other keys of its record."""

    iteration: int
    time: float
    message: str
    metadata: Mapping[str, Any] = field(default_factory=dict)


@dataclass(slots=True)
class RunMetrics:
    """What a run has recorded. `columns` have one number per log point that stands, by `COLUMNS` and the name of a loss or metric."""

    columns: dict[str, np.ndarray]
    named_losses: tuple[str, ...] = ()
    objective_metrics: tuple[str, ...] = ()
    evaluations: list[Evaluation] = field(default_factory=list)
    tasks: list[TaskMetrics] = field(default_factory=list)
    events: list[Event] = field(default_factory=list)
    samples: list[Mapping[str, Any]] = field(default_factory=list)
    summary: Mapping[str, Any] | None = None
    resumed_at: list[int] = field(default_factory=list)
    damaged_lines: int = 0
    superseded: int = 0
    other_kinds: dict[str, int] = field(default_factory=dict)
    last_time: float = math.nan

    def finite(self, name: str) -> np.ndarray:
        """Returns the finite numbers of a column."""
        return self.columns[name][np.isfinite(self.columns[name])]

    def last(self, name: str) -> float | None:
        """Returns the last finite number of a column."""
        return float(finite[-1]) if (finite := self.finite(name)).size else None

    @property
    def iteration(self) -> int:
        """The last iteration that any record names."""
        known = self.columns["iteration"][-1:].astype(int).tolist()
        return max([*known, *(evaluation.iteration for evaluation in self.evaluations)], default=0)

    def split_evaluations(self, split: str = "valid") -> list[Evaluation]:
        """Returns the evaluations of a split; of several validation sets those of the first, which stands for the run."""
        of_split = [evaluation for evaluation in self.evaluations if evaluation.split == split]
        return [evaluation for evaluation in of_split if evaluation.dataset == of_split[0].dataset]

    def best_evaluation(self) -> Evaluation | None:
        """Returns that of the validation set with the lowest loss."""
        finite = [evaluation for evaluation in self.split_evaluations() if math.isfinite(evaluation.loss)]
        return min(finite, key=lambda evaluation: evaluation.loss, default=None)

    def start_metadata(self, name: str) -> Mapping[str, Any]:
        """Returns what the last start of the run has recorded under a name; empty in records of earlier versions."""
        recorded = [event.metadata[name] for event in self.events if isinstance(event.metadata.get(name), Mapping)]
        return recorded[-1] if recorded else {}


def read_metrics(path: Path, *, every_point: bool = True) -> RunMetrics:
    """Reads the whole file; OSError if it is not a regular file.

    every_point: without, only the first and the last log point are decoded, which is enough for a list of runs and much faster.
    """
    reader = _Reader(every_point=every_point)
    with open_regular_file(path, follow_links=False, buffering=1 << 20) as file:
        for line in _lines(file):
            reader.add_line(line)
    return reader.finish()


def _lines(file: BinaryIO) -> Iterator[bytes | None]:
    """Yields lines; None for one that is too long to be a record.

    Its remainder is skipped. A hole of a damaged file may have terabytes, so reading ends if the line does not.
    """
    while line := file.readline(MAX_LINE_BYTES):
        if len(line) < MAX_LINE_BYTES or line.endswith(b"\n"):
            yield line
            continue
        yield None
        for _ in range(_MAX_SKIPPED_READS):
            line = file.readline(MAX_LINE_BYTES)
            if not line or line.endswith(b"\n"):
                break
        else:
            return


class _Reader:
    """The state of one pass over the lines."""

    def __init__(self, *, every_point: bool) -> None:
        self._every_point = every_point
        self._columns = {name: array("d") for name in (*COLUMNS, "start")}
        self._recorded = [(name, self._columns[name]) for name in COLUMNS]
        self._named: dict[str, array[float]] = {}
        self._metric_names: list[str] = []
        self._undecoded: deque[bytes] = deque(maxlen=_LAST_LINES)
        self._rewind_to: int | None = None
        self._supersedes = True
        self._starts = 0
        self._events: deque[Event] = deque(maxlen=MAX_EVENTS)
        self._samples: deque[Mapping[str, Any]] = deque(maxlen=MAX_SAMPLES)
        self._tasks: dict[tuple[str, int], TaskMetrics] = {}
        self._metrics = RunMetrics({})

    def add_line(self, line: bytes | None) -> None:
        if line is None:
            self._metrics.damaged_lines += 1
        elif not self._every_point and _TRAIN_MARK in line[:40]:
            self._add_undecoded(line)
        elif line.strip():
            try:
                self._add(json.loads(line))
            except (ValueError, RecursionError, TypeError, KeyError):
                self._metrics.damaged_lines += 1

    def _add_undecoded(self, line: bytes) -> None:
        if len(self._columns["iteration"]) == 0 or self._rewind_to is not None:
            self._undecoded.clear()
            decoded, self._every_point = self._every_point, True
            self.add_line(line)
            self._every_point = decoded
        else:
            self._undecoded.append(line)

    def _add(self, record: Any) -> None:
        kind = record["kind"]
        iteration = record["iteration"] if kind in ("train", "valid") else record.get("iteration", 0)
        if not isinstance(kind, str) or not is_count(iteration):
            raise ValueError("no record")
        time = _number(record.get("time"))
        if math.isfinite(time):
            self._metrics.last_time = time
        if kind == "train":
            self._add_train(record, iteration)
        elif kind == "valid":
            self._add_evaluation(record, iteration, time)
        elif kind == "eval":
            self._add_task(record, iteration)
        elif kind == "event":
            self._add_event(record, iteration, time)
        elif kind == "summary":
            self._metrics.summary = record
        elif kind == "sample":
            self._samples.append(record)
        elif kind in self._metrics.other_kinds or len(self._metrics.other_kinds) < MAX_NAMES:
            self._metrics.other_kinds[kind] = self._metrics.other_kinds.get(kind, 0) + 1

    def _add_train(self, record: Mapping[str, Any], iteration: int) -> None:
        if self._supersedes:
            self._metrics.summary = None  # it was of an earlier start
        rewind_to = iteration - 1 if self._rewind_to is None else min(iteration - 1, self._rewind_to)
        self._rewind_to = None
        iterations = self._columns["iteration"]
        evaluations = self._metrics.evaluations
        removed = 0
        while self._supersedes and iterations and iterations[-1] > rewind_to:
            for column in (*self._columns.values(), *self._named.values()):
                column.pop()
            removed += 1
        while self._supersedes and evaluations and evaluations[-1].iteration > rewind_to:
            evaluations.pop()
        if removed:
            self._metrics.superseded += removed
            self._starts += 1
        for name, column in self._recorded:
            value = record.get(name)
            column.append(value if type(value) is float and value == value else _number(value))
        self._columns["start"].append(self._starts)
        losses, metrics = record.get("named_losses"), record.get("objective_metrics")
        if losses is not None or metrics is not None or self._named:
            self._add_named(losses, metrics)

    def _add_named(self, losses: Any, metrics: Any) -> None:
        losses, metrics = (values if isinstance(values, Mapping) else {} for values in (losses, metrics))
        named = {**metrics, **losses}
        before = len(self._columns["iteration"]) - 1
        for name in (*losses, *metrics):
            if name not in self._named and name not in self._columns and len(self._named) < MAX_NAMES:
                self._named[name] = array("d", [math.nan]) * before
                if name not in losses:
                    self._metric_names.append(name)
        for name, column in self._named.items():
            column.append(_number(named.get(name)))

    def _add_evaluation(self, record: Mapping[str, Any], iteration: int, time: float) -> None:
        loss, split = _number(record.get("lm_loss")), record.get("split", "valid")
        if math.isnan(loss) or not isinstance(split, str):
            raise ValueError("no evaluation")
        dataset = record.get("dataset")
        dataset = dataset[:_MAX_NAME_CHARS] if isinstance(dataset, str) else None
        losses, metrics = (_numbers(record.get(name)) for name in ("named_losses", "objective_metrics"))
        evaluation = Evaluation(split, iteration, time, loss, losses, metrics, dataset)
        # A finished run that is started again evaluates once more.
        for earlier in self._metrics.evaluations[-MAX_NAMES:]:
            if (earlier.label, earlier.iteration) == (evaluation.label, iteration):
                self._metrics.evaluations.remove(earlier)
        self._metrics.evaluations.append(evaluation)

    def _add_task(self, record: Mapping[str, Any], iteration: int) -> None:
        task, metrics = record["task"], record["metrics"]
        if not isinstance(task, str) or not isinstance(metrics, Mapping):
            raise ValueError("no result of a task")
        values = {name: _number(metrics[name]["value"]) for name in list(metrics)[:MAX_NAMES]}
        self._tasks.pop((task, iteration), None)  # a resumed run repeats it
        if len(self._tasks) >= MAX_EVENTS:
            del self._tasks[next(iter(self._tasks))]
        self._tasks[task, iteration] = TaskMetrics(task[:_MAX_TEXT_CHARS], iteration, values)

    def _add_event(self, record: Mapping[str, Any], iteration: int, time: float) -> None:
        message = record.get("message")
        if not isinstance(message, str):
            raise ValueError("no event")
        known = ("schema", "kind", "time", "iteration", "message")
        metadata = {name: value for name, value in record.items() if name not in known}
        self._events.append(Event(iteration, time, message[:_MAX_TEXT_CHARS], metadata))
        if message.startswith(RESUMED):
            self._metrics.resumed_at.append(iteration)
            self._starts += 1
        iterations = self._columns["iteration"]
        if iterations and (iterations[-1] > iteration or self._undecoded):
            self._rewind_to = iteration if self._rewind_to is None else min(self._rewind_to, iteration)

    def finish(self) -> RunMetrics:
        self._every_point, self._supersedes = True, False  # evaluations of the same start may have followed
        while self._undecoded:  # the last one that can be decoded
            before = len(self._columns["iteration"])
            self.add_line(self._undecoded.pop())
            if len(self._columns["iteration"]) > before:
                break
        metrics = self._metrics
        columns = {**self._columns, **self._named}
        metrics.columns = {name: np.array(column, dtype=np.float64) for name, column in columns.items()}
        metrics.named_losses = tuple(name for name in self._named if name not in self._metric_names)
        metrics.objective_metrics = tuple(self._metric_names)
        metrics.events, metrics.samples = list(self._events), list(self._samples)
        metrics.tasks = list(self._tasks.values())
        return metrics


def _numbers(values: Any) -> dict[str, float]:
    return {name: _number(value) for name, value in values.items()} if isinstance(values, Mapping) else {}


def _number(value: Any) -> float:
    """Returns NaN for what is no number, and an infinity for a recorded nan."""
    if isinstance(value, str):
        return _NOT_FINITE.get(value, math.nan)
    if isinstance(value, bool) or not isinstance(value, int | float):
        return math.nan
    try:
        number = float(value)
    except OverflowError:
        return math.inf
    return math.inf if math.isnan(number) else number
