"""`petatron data decontaminate`: drops documents that share n-grams with evaluation texts."""

from __future__ import annotations

import argparse

from petatron.base.errors import raise_problems
from petatron.cli.curation.step_arguments import (
    add_step_arguments,
    output_file_problems,
    print_summary,
    step_files,
    step_progress,
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    parser.description = "Drop documents that share an n-gram of words with evaluation texts, and say which."
    add_step_arguments(parser)
    text = "evaluation files: JSON lines or another format, of which all strings count, or plain text"
    add("--against", nargs="+", required=True, metavar="FILE", help=text)
    add("--ngram", type=int, default=13, metavar="N", help="words of an n-gram (13)")
    add("--mark", action="store_true", help='keep such documents, with the matches under "contamination"')
    add("--report", metavar="FILE", help="write the matches, with both places, as JSON lines")


def run(args: argparse.Namespace) -> int:
    raise_problems(output_file_problems("--report", args.report))

    from petatron.data.curate.contamination.decontaminate import DecontaminateOptions, decontaminate_documents

    options = DecontaminateOptions(against=tuple(args.against), ngram=args.ngram, mark=args.mark, report=args.report)
    with step_progress() as show:
        summary = decontaminate_documents(step_files(args), options, show)
    print_summary(summary, args.output)
    details = summary.details
    counts = ", ".join(f"{number:,} {name}" for name, number in details["evaluation"].items())
    print(f"evaluation files: {counts}")
    if "marked" in details:
        print(f"marked: {sum(details['marked'].values()):,} documents")
    for path, number in details.get("documents_by_evaluation_file", {}).items():
        print(f"  {path}: shares n-grams with {number:,} documents")
    return 0
