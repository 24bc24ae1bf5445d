"""The parts of `petatron data preprocess` on other machines: flags of the engines, scripts for Slurm, and parts one by one."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from petatron.base.errors import Problem
from petatron.base.format_text import count_with_noun

if TYPE_CHECKING:
    from petatron.data.preprocess import PreprocessOptions


def add_part_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    text = "parts that are tokenized at the same time, each with its share of --workers (default: 1)"
    add("--partitions", type=int, metavar="N", help=text)
    text = "who tokenizes the parts: this machine, tasks of Ray, or jobs of Slurm, whose scripts are written (default: local)"
    add("--engine", choices=("local", "ray", "slurm"), default="local", help=text)
    text = "address of the Ray cluster (default: that of RAY_ADDRESS, or the one of this machine)"
    add("--address", metavar="ADDRESS", help=text)
    text = "tokenize these parts of a job that --engine slurm has begun, and no others"
    add("--part", type=int, nargs="+", metavar="K", help=text)
    add("--join", action="store_true", help="join the parts of that job, all of which are finished")


def part_problems(args: argparse.Namespace) -> Iterator[Problem]:
    """Yields the flags that contradict each other."""
    actions = {
        "--engine": args.engine != "local",
        "--part": args.part is not None,
        "--join": args.join,
        "--find-optimal-num-workers": args.find_optimal_num_workers,
    }
    given = [flag for flag, is_given in actions.items() if is_given]
    if len(given) > 1:
        yield Problem(given[1], "", f"does not go with {given[0]}", "Give one of them.")
    if given and args.partitions not in (None, 1):
        fix = "Partitions share the cores of one machine; --part-bytes sets the size of parts."
        yield Problem("--partitions", str(args.partitions), f"does not go with {given[0]}", fix)
    if args.address is not None and args.engine != "ray":
        yield Problem("--address", args.address, "needs --engine ray", "Add it, or leave the address out.")


def write_scripts(options: PreprocessOptions, argv: Sequence[str]) -> int:
    """Cuts the inputs into parts, writes the scripts that tokenize them, and prints how to submit these."""
    from petatron.data.preprocess import begin_parts
    from petatron.data.preprocess_parts.parts_folder import PartsFolder
    from petatron.data.preprocess_parts.slurm_scripts import write_slurm_scripts

    job = begin_parts(options)
    # The last --engine counts.
    command = [sys.executable, "-m", "petatron", "data", *argv, "--engine", "local", "--workers", str(options.workers)]
    scripts = write_slurm_scripts(
        PartsFolder(options.output_prefix).path,
        command,
        num_parts=job.num_parts,
        workers=options.workers,
        working_folder=Path.cwd(),
    )
    print(f"{count_with_noun(job.num_parts, 'part')} in {scripts.array.parent}. Tokenize and join them:")
    print(f"  {scripts.submit}")
    return 0


def run_parts(options: PreprocessOptions, parts: Sequence[int]) -> int:
    """Tokenizes some parts, and prints their counts."""
    from petatron.data.preprocess import preprocess_parts

    for part, report in preprocess_parts(options, parts).items():
        counts = report.counts
        print(f"part {part}: {counts.lines:,} lines, {counts.documents:,} documents, {counts.tokens:,} tokens")
    return 0
