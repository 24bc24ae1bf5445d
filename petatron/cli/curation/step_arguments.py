"""The arguments that the curation subcommands share: the flags of their files, their progress, and the summary that they print."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from petatron.base.check_output_file import writable_problems
from petatron.base.errors import Problem, raise_problems
from petatron.base.format_text import count_with_noun, format_bytes
from petatron.cli.subcommands.stderr_progress import StderrProgress
from petatron.data.inputs.input_formats import INPUT_FORMATS

if TYPE_CHECKING:
    from petatron.data.curate.files.pass_progress import OnProgress, StepProgress
    from petatron.data.curate.files.step_files import StepFiles
    from petatron.data.curate.files.step_summary import StepSummary


def add_step_arguments(parser: argparse.ArgumentParser, *, required: bool = True) -> None:
    """Adds the flags that name inputs and output."""
    add = parser.add_argument
    text = "what preprocess reads: files, patterns, folders or addresses"
    add("--input", nargs="+", required=required, metavar="INPUT", help=text)
    add_input_format(parser)
    text = "folder to write: JSON lines for each file, and summary.json"
    add("--output", required=required, metavar="FOLDER", help=text)
    add("--json-key", default="text", metavar="KEY", help="key of the text (default: text)")
    add("--workers", type=int, default=os.cpu_count() or 1, metavar="N", help="processes (default: one per core)")
    add("--on-error", choices=("fail", "skip"), default="fail", help="what a malformed line does (default: fail)")
    text = "compress each output like its input, or not at all (default: same)"
    add("--compression", choices=("same", "none"), default="same", help=text)
    add("--overwrite", action="store_true", help="replace the output of an earlier step")
    add("--max-line-bytes", type=int, metavar="N", help="refuse longer lines (default: 256 MiB)")


def add_input_format(parser: argparse.ArgumentParser) -> None:
    text = "as in preprocess (default: by name and content)"
    parser.add_argument("--input-format", choices=INPUT_FORMATS, default="auto", help=text)


def step_files(args: argparse.Namespace) -> StepFiles:
    from petatron.data.curate.files.step_files import StepFiles

    limit = {} if args.max_line_bytes is None else {"max_line_bytes": args.max_line_bytes}
    return StepFiles(
        inputs=tuple(args.input),
        input_format=args.input_format,
        output=args.output,
        json_key=args.json_key,
        workers=args.workers,
        on_error=args.on_error,
        compression=args.compression,
        overwrite=args.overwrite,
        **limit,
    )


def output_file_problems(flag: str, path: str | None) -> list[Problem]:
    """Returns the problem of a flag that names a file to write, if it is given."""
    return [] if path is None else writable_problems(flag, Path(path))


def ignored_flags(args: argparse.Namespace, names: tuple[str, ...], *, without: str) -> None:
    """Raises for flags that have no effect without another."""
    given = [name for name in names if getattr(args, name) not in (None, False)]
    raise_problems(
        Problem(f"--{name.replace('_', '-')}", "", f"has no effect without {without}", f"Add {without}.")
        for name in given
    )


@contextmanager
def step_progress() -> Iterator[OnProgress]:
    """Shows how far a step is, now and then."""

    def describe(now: StepProgress) -> str:
        lines = f"{now.part} {count_with_noun(now.lines, 'line')}"
        if now.bytes_total is None:
            return f"{lines}, {format_bytes(now.bytes_read)}"
        share = min(now.bytes_read / max(now.bytes_total, 1), 1.0)
        return f"{lines}, {share:.0%} of {format_bytes(now.bytes_total)}"

    with StderrProgress(describe) as show:
        yield show


def print_summary(summary: StepSummary, output: str) -> None:
    """Prints the counts of a step, which account for every line."""
    total = max(summary.lines, 1)
    print(f"read     {count_with_noun(summary.lines, 'line')} of {count_with_noun(len(summary.inputs), 'file')}")
    for part, count in sorted(summary.kept.items()):
        print(f"{part or 'kept':<8} {count:,} ({count / total:.1%})")
    for reason, count in summary.as_json()["dropped"].items():
        print(f"dropped  {count:,} ({count / total:.1%}): {reason}")
    if summary.problems:
        print("malformed, the first of them:" if len(summary.problems) > 1 else "malformed:", file=sys.stderr)
        print("\n".join(f"  {problem}" for problem in summary.problems), file=sys.stderr)
    print(f"{output}/summary.json has these counts and the settings.")
