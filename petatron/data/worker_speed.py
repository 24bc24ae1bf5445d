"""How fast a number of workers preprocesses a sample of the inputs, by the steady speed between its first and its last block."""

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
    """What a number of workers does in a second; the start of the processes does not count."""

    workers: int
    documents_per_s: float
    tokens_per_s: float
    seconds: float
    """Of the whole job, with the start."""


def worker_counts(cores: int) -> list[int]:
    """Returns the numbers of workers that are worth trying.

    >>> worker_counts(1), worker_counts(6)
    ([1], [1, 2, 4, 6])
    """
    return sorted({cores, *(1 << power for power in range(cores.bit_length()) if 1 << power <= cores)})


def measure_workers(options: PreprocessOptions, counts: Sequence[int]) -> Iterator[WorkerSpeed]:
    """Preprocesses the first documents of the inputs with each number of workers, into a folder that is removed."""
    sample = options.max_documents or SAMPLE_DOCUMENTS
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
