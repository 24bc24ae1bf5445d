"""`petatron data preprocess` in steps: scripts for Slurm, parts one by one, and a trial of different numbers of workers."""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from petatron.base.errors import Problem
from petatron.base.format_text import align_columns, count_with_noun
from petatron.base.safe_files import write_atomic

if TYPE_CHECKING:
    from petatron.data.preprocess import PreprocessOptions


def step_problems(args: argparse.Namespace) -> Iterator[Problem]:
    """Yields what does not go together."""
    steps = {
        "--engine": args.engine == "slurm",
        "--part": args.part is not None,
        "--join": args.join,
        "--find-optimal-num-workers": args.find_optimal_num_workers,
    }
    given = [flag for flag, is_given in steps.items() if is_given]
    if len(given) > 1:
        yield Problem(given[1], "", f"does not go with {given[0]}", "Each is a step of its own: give one.")
    if args.address is not None and args.engine != "ray":
        yield Problem("--address", args.address, "needs --engine ray", "Add it, or leave the address out.")
    if any(count < 1 for count in args.workers_to_check or ()):
        counts = " ".join(map(str, args.workers_to_check))
        yield Problem("--workers-to-check", counts, "must be at least 1 each", "Give numbers of processes.")


def write_scripts(options: PreprocessOptions, argv: Sequence[str]) -> int:
    """Begins a job, writes scripts that do its parts, and prints how to submit them."""
    from petatron.data.parts.parts_folder import PartsFolder
    from petatron.data.parts.slurm_scripts import write_slurm_scripts
    from petatron.data.preprocess import begin_parts

    job = begin_parts(options)
    scripts = write_slurm_scripts(
        PartsFolder(options.output_prefix).path,
        [sys.executable, "-m", "petatron", "data", *_without_engine(argv)],
        parts=range(job.num_parts),
        workers=options.workers,
        working_folder=Path.cwd(),
    )
    print(f"{count_with_noun(job.num_parts, 'part')} in {scripts.array.parent}. Submit them and what joins them:")
    print(f"  {scripts.submit}")
    return 0


def _without_engine(argv: Sequence[str]) -> list[str]:
    """
    >>> _without_engine(["preprocess", "--engine", "slurm", "--input", "a", "--engine=slurm"])
    ['preprocess', '--input', 'a']
    """
    words = list(argv)
    while "--engine" in words:
        place = words.index("--engine")
        del words[place : place + 2]
    return [word for word in words if not word.startswith("--engine=")]


def run_parts(options: PreprocessOptions, parts: Sequence[int]) -> int:
    """Does some parts, and prints their counts."""
    from petatron.data.preprocess import preprocess_parts

    for part, report in sorted(preprocess_parts(options, parts).items()):
        counts = report.counts
        print(
            f"part {part}: {counts.lines:,} lines, {counts.documents:,} documents, {counts.tokens:,} tokens", flush=True
        )
    return 0


def print_worker_speeds(options: PreprocessOptions, counts: Sequence[int] | None, folder: str | None) -> int:
    """Measures numbers of workers and prints a table; writes the numbers to files where a folder is given."""
    from petatron.data.worker_speed import measure_workers, worker_counts

    speeds = []
    for speed in measure_workers(options, counts or worker_counts(os.cpu_count() or 1)):
        print(f"{count_with_noun(speed.workers, 'worker')}: {speed.documents_per_s:,.0f} documents/s", file=sys.stderr)
        speeds.append(speed)
    if folder is not None:
        Path(folder).mkdir(parents=True, exist_ok=True)
        for speed in speeds:
            content = json.dumps({speed.workers: [speed.documents_per_s]})
            write_atomic(Path(folder, f"{speed.workers}_workers.json"), content + "\n")
    rows = [("workers", "documents/s", "tokens/s", "seconds with the start")]
    rows += [
        (str(speed.workers), f"{speed.documents_per_s:,.0f}", f"{speed.tokens_per_s:,.0f}", f"{speed.seconds:.1f}")
        for speed in speeds
    ]
    print(align_columns(rows))
    best = max(speeds, key=lambda speed: speed.documents_per_s)
    print(f"fastest: --workers {best.workers}")
    return 0
