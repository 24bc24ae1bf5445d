"""Tokenizes several parts at the same time, each in a process of its own that reads, tokenizes and writes."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from multiprocessing import get_context

from petatron.data.parts.encode_blocks import dead_worker_error, init_worker
from petatron.data.parts.part_report import PartReport
from petatron.data.parts.parts_folder import TokenizingJob
from petatron.data.preprocess_report import OnProgress, PartsProgress


def tokenize_in_groups(
    tokenize: Callable[[int], PartReport],
    groups: int,
    on_progress: OnProgress | None,
    job: TokenizingJob,
    parts: Sequence[int],
) -> Iterator[PartReport]:
    """Yields the reports of parts as they are finished. After an error, parts that are being tokenized are finished too."""
    progress = PartsProgress(job.num_bytes, job.num_bytes - sum(map(job.part_bytes, parts)), on_progress)
    pool = ProcessPoolExecutor(groups, get_context("spawn"), init_worker)
    try:
        for future in as_completed([pool.submit(tokenize, part) for part in parts]):
            report = future.result()
            progress.add(report, job.part_bytes(report.part))
            yield report
    except BrokenProcessPool as error:
        raise dead_worker_error() from error
    finally:
        pool.shutdown(wait=True, cancel_futures=True)
