"""`petatron verify --matrix`: runs the proof matrix, or a sample of it, on local ranks."""

from __future__ import annotations

import argparse
import json
import signal
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

from petatron.base.check_output_file import writable_problems
from petatron.base.errors import Problem, raise_problems
from petatron.cli.subcommands.command_parser import CommandParser
from petatron.mesh.launch.environment import read_environment
from petatron.mesh.launch.rank_exit import run_rank_main

if TYPE_CHECKING:
    from petatron.verify.proof_matrix import MatrixEntry
    from petatron.verify.run_proof_matrix import CaseResult, MatrixCase

_COULD_NOT_RUN = 2  # 1: a layout failed
_SIGNAL_EXIT_CODES = {128 + signal.SIGINT, 128 + signal.SIGTERM, 128 + signal.SIGHUP}
_DEFAULT_SEED = 1234
_MATRIX_ONLY_FLAGS = ("--sample", "--random-model", "--only", "--nproc", "--list")
_HEAD = f"{'layout':<46} {'ranks':>5} {'loss':>8} {'gradient':>8} {'weights':>8} {'time':>7}"


def _parser() -> argparse.ArgumentParser:
    parser = CommandParser(
        prog="petatron verify --matrix",
        description="Trains small models in every layout of the proof matrix, on ranks of this machine, and holds each "
        "against one process: the largest relative differences of loss, gradients and weights over all steps. Exits with 1 "
        "if any layout departs, and says where it does so first.",
    )
    add = parser.add_argument
    add("--matrix", action="store_true", help="this mode")
    add("--sample", type=_positive, metavar="N", help="only N layouts, drawn at random")
    add("--seed", type=int, help=f"what the sample and random models are drawn with ({_DEFAULT_SEED})")
    add("--random-model", action="store_true", help="draw another small model of odd shape for every layout")
    add("--dtype", choices=("float32", "float64"), default="float64", help="precision of all runs (float64)")
    add("--steps", type=_positive, default=5, help="optimizer steps to train (5)")
    add("--only", metavar="PATTERN", help="only layouts with such a name, for instance 'moe:*pp2*'")
    add("--nproc", type=_positive, default=8, help="leave out layouts of more ranks than this (8)")
    add("--list", action="store_true", help="print names and flags, run nothing")
    add("--json", metavar="FILE", type=Path, help="write all results as JSON too")
    add("--inject", metavar="TENSOR[@STEP]", help="spoil one gradient in every layout: tests the check itself")
    add("--rank-of", type=Path, help=argparse.SUPPRESS)
    return parser


def main(argv: list[str]) -> int:
    options = _parser().parse_args(argv)
    if options.rank_of is not None:
        return run_rank_main(lambda: _run_rank(options.rank_of))
    raise_problems(_contradictions(options))
    if options.seed is None:
        options.seed = _DEFAULT_SEED
    from petatron.verify.proof_matrix import select_entries

    entries = select_entries(pattern=options.only, sample=options.sample, seed=options.seed, max_ranks=options.nproc)
    if options.list:
        for entry in entries:
            print(f"{entry.name:<46} {entry.flags}")
        return 0
    if left_out := sum(entry.world_size > options.nproc for entry in select_entries(pattern=options.only)):
        print(f"{left_out} layouts need more than {options.nproc} ranks and are left out.")
    return _run(_cases(entries, options), options)


def _contradictions(options: argparse.Namespace) -> Iterator[Problem]:
    """Yields problems of options that have no effect together, and of a report that could not be written."""
    if options.list:
        given = {"--json": options.json, "--inject": options.inject, "--random-model": options.random_model or None}
        for flag in (flag for flag, value in given.items() if value is not None):
            yield Problem(flag, "", "is for running layouts, and --list runs none", "Leave one of the two out.")
    elif options.json:
        yield from writable_problems("--json", options.json)
    if options.seed is not None and options.sample is None and not options.random_model:
        rule = "is for drawing layouts or models, and nothing is drawn"
        yield Problem("--seed", str(options.seed), rule, "Add --sample or --random-model, or leave it out.")


def problems_without_matrix(flags: list[str]) -> list[Problem]:
    """Returns problems of matrix options in the verification of one layout."""
    return [
        Problem(name, "", "chooses from the matrix of layouts, but --matrix is not given", "Add --matrix.")
        for name in (flag.partition("=")[0] for flag in flags)
        if name in _MATRIX_ONLY_FLAGS
    ]


def _positive(text: str) -> int:
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"{number} is not a positive number")
    return number


def _cases(entries: tuple[MatrixEntry, ...], options: argparse.Namespace) -> list[MatrixCase]:
    from petatron.verify.random_model_shapes import random_model_flags
    from petatron.verify.run_proof_matrix import make_case

    return [
        make_case(
            entry,
            model_flags=random_model_flags(entry, seed=options.seed) if options.random_model else entry.model_flags,
            steps=options.steps,
            dtype=options.dtype,
            inject=options.inject,
        )
        for entry in entries
    ]


def _run(cases: list[MatrixCase], options: argparse.Namespace) -> int:
    """Starts ranks until every case has a result; each successful start completes at least one case."""
    from petatron.mesh.launch.local_launcher import run_ranks
    from petatron.verify.run_proof_matrix import STARTED_FILE, read_result, record_failure, write_cases

    if options.random_model:
        print(f"seed {options.seed}: a model per layout")
    print(f"{len(cases)} layouts, {options.steps} steps in {options.dtype}, each against one process\n\n{_HEAD}")
    with tempfile.TemporaryDirectory(prefix="petatron-matrix-") as scratch:
        folder = Path(scratch)
        write_cases(cases, folder)
        while None in (results := [read_result(folder, number) for number in range(len(cases))]):
            at = results.index(None)
            sys.stdout.flush()
            nproc = max(case.world_size for case in cases[at:])
            command = [sys.executable, "-m", "petatron", "verify", "--matrix", "--rank-of", str(folder)]
            code = run_ranks(command, nproc=nproc)
            if code in _SIGNAL_EXIT_CODES:
                return code
            if not (folder / STARTED_FILE).exists():
                return _COULD_NOT_RUN  # the launcher has reported why
            (folder / STARTED_FILE).unlink()
            if code == 0:
                break
            # The case that ended the ranks is the first that failed, or has no result.
            for number, case in enumerate(cases[at:], start=at):
                outcome = read_result(folder, number)
                if outcome is None or outcome.error is not None:
                    why = f"ranks ended with code {code}"
                    print(row(case, outcome or record_failure(folder, number, case.name, why)))
                    break
        outcomes = [result for number in range(len(cases)) if (result := read_result(folder, number)) is not None]
    if options.json:
        options.json.write_text(json.dumps([asdict(outcome) for outcome in outcomes], indent=1))
    print(summary(cases, outcomes, options.dtype))
    return 0 if len(outcomes) == len(cases) and all(outcome.agrees for outcome in outcomes) else 1


def _run_rank(folder: Path) -> int:
    from petatron.base.log import configure_logging
    from petatron.verify.run_proof_matrix import run_cases

    environment = read_environment()
    configure_logging(rank=max(1, environment.rank))  # quiet on every rank: the table is what the user came for
    run_cases(folder, environment, lambda case, outcome: print(row(case, outcome), flush=True))
    return 0


def row(case: MatrixCase, result: CaseResult) -> str:
    """Formats one line of the table, and one with the model where it was drawn at random."""
    from petatron.verify.proof_matrix import parse_entry

    numbers = [result.loss, result.gradient, result.parameter]
    cells = " ".join(f"{'' if number is None else f'{number:.1e}':>8}" for number in numbers)
    verdict = "same" if result.agrees else "FAILED" if result.error else "DIFFERENT"
    drawn = "" if case.model_flags == parse_entry(case.name).model_flags else f"\n    {case.model_flags}"
    return f"{case.name:<46} {case.world_size:5d} {cells} {result.seconds:5.1f} s  {verdict}{drawn}"


def summary(cases: list[MatrixCase], results: list[CaseResult], dtype: str) -> str:
    """Reports what diverged and how to reproduce it, then the count."""
    from petatron.verify.proof_matrix import MATRIX_TOLERANCES

    commands = {case.name: case.command for case in cases}
    lines = [""]
    for outcome in results:
        if not outcome.agrees:
            lines += [f"{outcome.name}: {outcome.departure or outcome.error}", f"  {commands[outcome.name]}", ""]
    agreeing, bounds = sum(outcome.agrees for outcome in results), MATRIX_TOLERANCES[dtype]
    lines.append(
        f"{agreeing} of {len(cases)} layouts train the same model as one process (bounds: loss {bounds.loss:.0e}, "
        f"gradients {bounds.gradient:.0e}, weights {bounds.parameter:.0e})"
    )
    return "\n".join(lines)
