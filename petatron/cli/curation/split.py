"""`petatron data split`: holds a share of the documents out."""

from __future__ import annotations

import argparse

from petatron.cli.curation.step_arguments import add_step_arguments, print_summary, step_files, step_progress


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    parser.description = "Write FOLDER/train and FOLDER/held-out; which a document is in depends on its text alone."
    add_step_arguments(parser)
    add("--held-out", type=float, default=0.01, metavar="SHARE", help="of the documents (0.01)")
    add("--seed", type=int, default=1, metavar="N", help="another seed holds others out (1)")


def run(args: argparse.Namespace) -> int:
    from petatron.data.curate.split_documents import HELD_OUT, split_documents

    with step_progress() as show:
        summary = split_documents(step_files(args), held_out=args.held_out, seed=args.seed, on_progress=show)
    print_summary(summary, args.output)
    if summary.lines and not summary.kept[HELD_OUT]:
        print(f"note: no document is held out; {summary.num_kept:,} are too few for --held-out {args.held_out:g}.")
    return 0
