"""Tokenizes several parts at the same time in a process pool: each process reads, tokenizes and writes a part."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from multiprocessing import get_context
from multiprocessing.synchronize import Event

from petatron.data.preprocess_parts.encode_blocks import dead_worker_error, init_worker
from petatron.data.preprocess_parts.part_report import PartReport
from petatron.data.preprocess_parts.parts_folder import TokenizingJob
from petatron.data.preprocess_report import OnProgress, PartsProgress


def tokenize_in_groups(
    tokenize: Callable[[int], PartReport],
    groups: int,
    on_progress: OnProgress | None,
    job: TokenizingJob,
    parts: Sequence[int],
) -> Iterator[PartReport]:
    """Yields the reports of parts as they are finished. An error, or Ctrl-C, ends the parts that are being tokenized."""
    progress = PartsProgress(job, parts, on_progress)
    context = get_context("spawn")
    ends = context.Event()
    pool = ProcessPoolExecutor(groups, context, _init_group, (ends,))
    try:
        for future in as_completed([pool.submit(tokenize, part) for part in parts]):
            report = future.result()
            progress.add(report)
            yield report
    except BrokenProcessPool as error:
        raise dead_worker_error() from error
    except BaseException:
        ends.set()
        raise
    finally:
        pool.shutdown(wait=True, cancel_futures=True)


def _init_group(ends: Event) -> None:
    init_worker()
    threading.Thread(target=_exit_at, args=(ends,), daemon=True).start()


def _exit_at(ends: Event) -> None:
    ends.wait()
    os._exit(1)
