"""`petatron data dedup`: drops documents that are there already, or nearly."""

from __future__ import annotations

import argparse

from petatron.base.errors import raise_problems
from petatron.cli.curation.step_arguments import (
    add_step_arguments,
    ignored_flags,
    output_file_problems,
    print_summary,
    step_files,
    step_progress,
)

_NEAR_NUMBERS = ("bands", "rows", "ngram", "seed", "threshold")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    parser.description = (
        "Keep the first of documents with the same text and, with --near, of those that share most of it."
    )
    add_step_arguments(parser)
    add("--near", action="store_true", help="drop near duplicates too (MinHash of word n-grams, bands)")
    add("--threshold", type=float, metavar="J", help="Jaccard similarity of near duplicates (default: 0.8)")
    add("--bands", type=int, metavar="N", help="bands of a signature: documents that share one are compared (40)")
    add("--rows", type=int, metavar="N", help="hashes of a band (8)")
    add("--ngram", type=int, metavar="N", help="words of a shingle (5)")
    add("--seed", type=int, metavar="N", help="of the hashes (1)")
    add("--exact-jaccard", action="store_true", help="compare all shingles, not signatures: one more pass")
    add("--report-pairs", metavar="FILE", help="write the pairs, with places and similarity, as JSON lines")


def run(args: argparse.Namespace) -> int:
    if not args.near:
        ignored_flags(args, (*_NEAR_NUMBERS, "exact_jaccard"), without="--near")
    raise_problems(output_file_problems("--report-pairs", args.report_pairs))

    from petatron.data.curate.dedup.dedup_documents import DedupOptions, dedup_documents
    from petatron.data.curate.dedup.min_hash import MinHashOptions

    given = {name: value for name in _NEAR_NUMBERS if (value := getattr(args, name)) is not None}
    options = DedupOptions(
        near=MinHashOptions(**given) if args.near else None,
        exact_jaccard=args.exact_jaccard,
        report_pairs=args.report_pairs,
    )
    with step_progress() as show:
        summary = dedup_documents(step_files(args), options, show)
    print_summary(summary, args.output)
    details = summary.details
    print(f"clusters {details['clusters']:,}, the largest of {details['largest_cluster']:,} documents")
    if details["uncompared"]:
        print(f"{details['uncompared']:,} comparisons left out in very large groups: more --rows make groups smaller")
    return 0
