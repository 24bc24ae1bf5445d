"""Measures the speed of preprocessing a sample of the inputs with different numbers of workers."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from petatron.data.preprocess import PreprocessOptions, preprocess
from petatron.data.preprocess_report import PreprocessProgress

SAMPLE_DOCUMENTS = 100_000


@dataclass(frozen=True, slots=True)
class WorkerSpeed:
    """What a number of workers tokenizes in a second; the start of the processes does not count."""

    workers: int
    documents_per_s: float
    tokens_per_s: float
    seconds: float
    """Duration of the job, with the start of its processes."""


def worker_counts(cores: int) -> list[int]:
    """Returns the numbers of workers to measure: powers of two, and all cores.

    >>> worker_counts(1), worker_counts(6)
    ([1], [1, 2, 4, 6])
    """
    return sorted({cores, *(1 << power for power in range(cores.bit_length()) if 1 << power <= cores)})


def measure_workers(options: PreprocessOptions, counts: Sequence[int]) -> Iterator[WorkerSpeed]:
    """Preprocesses the first documents of the inputs with each number of workers, into a temporary folder beside the output."""
    sample = SAMPLE_DOCUMENTS if options.max_documents is None else options.max_documents
    parent = Path(options.output_prefix).parent
    parent.mkdir(parents=True, exist_ok=True)
    for workers in counts:
        seen: list[PreprocessProgress] = []
        with tempfile.TemporaryDirectory(dir=parent, prefix=".workers-") as folder:
            trial = replace(
                options,
                workers=workers,
                partitions=1,
                engine="local",
                max_documents=sample,
                output_prefix=str(Path(folder, "sample")),
            )
            report = preprocess(trial, seen.append)
        first, last = seen[0], seen[-1]
        seconds = last.seconds - first.seconds
        steady = seconds > 0 and last.documents > first.documents
        documents = (last.documents - first.documents) / seconds if steady else report.documents / report.seconds
        tokens = (last.tokens - first.tokens) / seconds if steady else report.tokens / report.seconds
        yield WorkerSpeed(workers, documents, tokens, report.seconds)
