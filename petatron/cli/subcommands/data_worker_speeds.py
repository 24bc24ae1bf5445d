"""`petatron data preprocess --find-optimal-num-workers`: measures numbers of workers on a sample, and prints a table."""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from petatron.base.errors import Problem, raise_problems
from petatron.base.format_text import align_columns, count_with_noun
from petatron.base.safe_files import write_atomic

if TYPE_CHECKING:
    from petatron.data.preprocess import PreprocessOptions


def add_worker_speed_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    text = "measure different numbers of workers on a sample, --max-documents lines at most (default: 100000), and write nothing"
    add("--find-optimal-num-workers", action="store_true", help=text)
    text = "numbers of workers to measure (default: 1, 2, 4 and so on, up to all cores)"
    add("--workers-to-check", type=int, nargs="+", metavar="N", help=text)
    add("--performance-dir", metavar="FOLDER", help="write what was measured to FOLDER/N_workers.json")


def worker_speed_problems(args: argparse.Namespace) -> Iterator[Problem]:
    if any(count < 1 for count in args.workers_to_check or ()):
        counts = " ".join(map(str, args.workers_to_check))
        yield Problem("--workers-to-check", counts, "must be at least 1 each", "Give numbers of processes.")


def print_worker_speeds(options: PreprocessOptions, args: argparse.Namespace) -> int:
    """Measures numbers of workers and prints a table; writes the speeds to files where a folder is given."""
    from petatron.data.worker_speed import measure_workers, worker_counts

    folder = None if args.performance_dir is None else _make_folder(Path(args.performance_dir))
    speeds = []
    for speed in measure_workers(options, args.workers_to_check or worker_counts(os.cpu_count() or 1)):
        print(f"{count_with_noun(speed.workers, 'worker')}: {speed.documents_per_s:,.0f} documents/s", file=sys.stderr)
        speeds.append(speed)
        if folder is not None:
            content = json.dumps({speed.workers: [speed.documents_per_s]})
            write_atomic(folder / f"{speed.workers}_workers.json", content + "\n")
    rows = [("workers", "documents/s", "tokens/s", "seconds with the start")]
    rows += [
        (str(speed.workers), f"{speed.documents_per_s:,.0f}", f"{speed.tokens_per_s:,.0f}", f"{speed.seconds:.1f}")
        for speed in speeds
    ]
    print(align_columns(rows))
    print(f"fastest: --workers {max(speeds, key=lambda speed: speed.documents_per_s).workers}")
    return 0


def _make_folder(path: Path) -> Path:
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        rule = f"cannot be made: {error.strerror or error}"
        raise_problems([Problem("--performance-dir", str(path), rule, "Choose a folder that you can write to.")])
    return path
