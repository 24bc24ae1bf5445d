"""`EvalTask`: what a model is measured on. A task is read and tokenized once, and run as often as one likes.

Most are a `ScoredTask`: sequences to score token by token, and metrics of their scores.
"""

from __future__ import annotations

import math
import time
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from petatron.base.errors import DataError
from petatron.evaluate.confidence_interval import Estimate
from petatron.evaluate.score_sequences import OnProgress, SequenceScore, score_sequences
from petatron.parallel.forward_sequences import BATCH_TOKENS
from petatron.parallel.parallel_model import ParallelModel
from petatron.validate.layer_capabilities import why_reading_only

BITS_PER_NAT = 1 / math.log(2)


@dataclass(frozen=True, slots=True)
class ContextLimits:
    """What a model reads at once: tokens of one sequence at most, and inputs of a window over longer texts."""

    max_tokens: int
    window: int


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskResult:
    """What a task found: metrics with intervals, and counts of what they are made of."""

    metrics: Mapping[str, Estimate]
    counts: Mapping[str, int]
    notes: tuple[str, ...] = ()
    seconds: float = 0.0

    def values(self) -> dict[str, float]:
        return {name: estimate.value for name, estimate in self.metrics.items()}

    def as_json(self) -> dict[str, Any]:
        """Returns plain values; what is not finite becomes text, since JSON has no such numbers."""
        metrics = {
            name: {key: v if v is None or math.isfinite(v) else str(v) for key, v in asdict(estimate).items()}
            for name, estimate in self.metrics.items()
        }
        return {
            "metrics": metrics,
            "counts": dict(self.counts),
            "notes": list(self.notes),
            "seconds": round(self.seconds, 3),
        }


@dataclass(slots=True)
class EvalTask(ABC):
    """What a model is asked, and how its answers become metrics."""

    notes: list[str] = field(default_factory=list)

    @abstractmethod
    def measure(
        self, model: ParallelModel, *, batch_tokens: int, on_progress: OnProgress | None
    ) -> tuple[dict[str, Estimate], dict[str, int]]:
        """Returns metrics and counts; every rank calls it, and all get the same result."""

    def run(
        self, model: ParallelModel, *, batch_tokens: int | None = None, on_progress: OnProgress | None = None
    ) -> TaskResult:
        """Returns what the model's answers are worth; every rank calls it."""
        started = time.perf_counter()
        tokens = BATCH_TOKENS if batch_tokens is None else batch_tokens
        metrics, counts = self.measure(model, batch_tokens=tokens, on_progress=on_progress)
        seconds = time.perf_counter() - started
        return TaskResult(metrics=metrics, counts=counts, notes=tuple(self.notes), seconds=seconds)


@dataclass(slots=True)
class ScoredTask(EvalTask):
    """Sequences of token ids, and how their scores become metrics."""

    sequences: list[list[int]] = field(default_factory=list)

    @abstractmethod
    def metrics(self, scores: Sequence[SequenceScore]) -> tuple[dict[str, Estimate], dict[str, int]]:
        """Returns metrics and counts."""

    def score(
        self, model: ParallelModel, *, batch_tokens: int, on_progress: OnProgress | None
    ) -> Sequence[SequenceScore]:
        """Scores the sequences token by token, each from those before it; `DataError` if the model does not predict so."""
        if why_reading_only(model.spec) is not None:
            raise DataError(
                "This task scores next tokens, and the model predicts none. Use --task masked for an encoder."
            )
        if model.spec.source_length is not None:
            raise DataError(
                "This task scores texts from left to right, and an encoder-decoder predicts one text from another. Evaluate it by the loss "
                "of span-corrupted validation data (--valid-data-path)."
            )
        return score_sequences(model, self.sequences, batch_tokens=batch_tokens, on_progress=on_progress)

    def measure(
        self, model: ParallelModel, *, batch_tokens: int, on_progress: OnProgress | None
    ) -> tuple[dict[str, Estimate], dict[str, int]]:
        return self.metrics(self.score(model, batch_tokens=batch_tokens, on_progress=on_progress))


def truncate_left(ids: list[int], max_tokens: int) -> tuple[list[int], bool]:
    """Returns the last `max_tokens` ids, and whether there were more."""
    return ids[-max_tokens:], len(ids) > max_tokens
