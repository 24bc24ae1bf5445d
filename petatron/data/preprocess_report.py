"""Progress and final report of preprocessing."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field

from petatron.data.preprocess_parts.part_report import MAX_SHOWN_PROBLEMS, LineCounts, PartReport
from petatron.data.preprocess_parts.parts_folder import TokenizingJob


@dataclass(frozen=True, slots=True)
class PreprocessProgress:
    """The progress of a running job: what this run has written, and bytes of the input files on disk."""

    documents: int
    tokens: int
    bytes_read: int
    bytes_total: int
    seconds: float
    bytes_before: int = 0
    """Those of parts that an earlier run had finished."""


@dataclass(slots=True, kw_only=True)
class PreprocessReport(LineCounts):
    """The result of a job: what all its parts have read and written, also those of earlier runs."""

    outputs: tuple[str, ...]
    problems: list[str] = field(default_factory=list)
    bytes_read: int = 0
    seconds: float = 0.0
    parts: int = 1
    resumed_parts: int = 0
    """Parts that an earlier run had finished, and their tokens."""
    resumed_tokens: int = 0

    @staticmethod
    def of_parts(
        parts: Sequence[PartReport],
        *,
        outputs: tuple[str, ...],
        resumed: Collection[int],
        bytes_read: int,
        seconds: float,
    ) -> PreprocessReport:
        report = PreprocessReport(
            outputs=outputs, bytes_read=bytes_read, seconds=seconds, parts=len(parts), resumed_parts=len(resumed)
        )
        for part in parts:
            report.add(part.counts)
            report.resumed_tokens += part.counts.tokens if part.part in resumed else 0
            report.problems += part.problems[: MAX_SHOWN_PROBLEMS - len(report.problems)]
        return report


OnProgress = Callable[[PreprocessProgress], None]


class PartsProgress:
    """Reports the progress of a job of which other processes finish some parts, in any order."""

    def __init__(self, job: TokenizingJob, parts: Sequence[int], on_progress: OnProgress | None) -> None:
        self._job, self._on_progress = job, on_progress
        self._bytes_before = self._bytes_done = job.num_bytes - sum(map(job.part_bytes, parts))
        self._done, self._started = LineCounts(), time.monotonic()

    def add(self, report: PartReport) -> None:
        self._done.add(report.counts)
        self._bytes_done += self._job.part_bytes(report.part)
        if self._on_progress is not None:
            progress = PreprocessProgress(
                documents=self._done.documents,
                tokens=self._done.tokens,
                bytes_read=self._bytes_done,
                bytes_total=self._job.num_bytes,
                seconds=time.monotonic() - self._started,
                bytes_before=self._bytes_before,
            )
            self._on_progress(progress)
