"""`petatron data`: fetches public text, trains tokenizers, preprocesses text into token files, inspects and merges them."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import fields
from datetime import timedelta
from typing import TYPE_CHECKING

from petatron.base.errors import Problem, raise_problems
from petatron.base.format_text import count_with_noun
from petatron.base.log import configure_logging
from petatron.cli.subcommands import data_fetch, data_train_tokenizer
from petatron.cli.subcommands.command_parser import CommandParser
from petatron.cli.subcommands.progress import progress_bar
from petatron.cli.subcommands.tokenizer_arguments import add_tokenizer_arguments, tokenizer_settings
from petatron.config.schema.sections.tokenizer_files import WORDPIECE_TYPES
from petatron.validate.preflight import parquet_problem

if TYPE_CHECKING:
    from petatron.data.indexed_dataset import IndexedDataset
    from petatron.data.preprocess import PreprocessProgress, PreprocessReport

SHOWN_TOKENS = 24
SHOWN_CHARACTERS = 400


def parser() -> argparse.ArgumentParser:
    """Returns the parser of all subcommands."""
    root = CommandParser(
        prog="petatron data",
        description="Fetch public text; train tokenizers; make, inspect and join token files (.bin/.idx).",
    )
    subcommands = root.add_subparsers(dest="subcommand", required=True, metavar="SUBCOMMAND")
    data_fetch.add_arguments(subcommands.add_parser("fetch", help="download a public dataset as JSON lines"))
    _add_preprocess_arguments(subcommands.add_parser("preprocess", help="tokenize JSON lines or text"))
    text = "train a tokenizer on texts, and compare it"
    data_train_tokenizer.add_arguments(subcommands.add_parser("train-tokenizer", help=text))
    inspecting = subcommands.add_parser("inspect", help="describe a dataset and show a sample")
    inspecting.add_argument("prefix", help="dataset prefix, or its .bin or .idx")
    inspecting.add_argument("--document", type=int, default=0, metavar="N", help="document to show (default: 0)")
    add_tokenizer_arguments(inspecting)
    add = subcommands.add_parser("merge", help="join datasets into one").add_argument
    add("--input", nargs="+", required=True, metavar="PREFIX", help="datasets to join, in this order")
    add("--output-prefix", required=True, metavar="PREFIX", help="dataset to write")
    return root


def main(argv: Sequence[str]) -> int:
    """Run one subcommand of `petatron data`."""
    args = parser().parse_args(argv)
    configure_logging()
    actions = {
        "fetch": data_fetch.run,
        "train-tokenizer": data_train_tokenizer.run,
        "preprocess": _preprocess,
        "inspect": _inspect,
        "merge": _merge,
    }
    return actions[args.subcommand](args)


def _add_preprocess_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--input", nargs="+", required=True, metavar="FILE", help="JSON lines or text: plain, gzip or zstd")
    text = "JSON lines; text whose paragraphs are documents, with blank lines between; text whose files are (default: jsonl)"
    add("--input-format", choices=("jsonl", "text", "text-file"), default="jsonl", help=text)
    add("--overwrite", action="store_true", help="replace an output that exists")
    add(
        "--output-prefix",
        required=True,
        metavar="PREFIX",
        help="writes PREFIX_<key>_document.bin and .idx, or _sentence",
    )
    add("--json-keys", nargs="+", default=["text"], metavar="KEY", help="keys to take text from (default: text)")
    add("--workers", type=int, default=os.cpu_count() or 1, metavar="N", help="processes (default: one per core)")
    add("--append-eod", action="store_true", help="end each document with the end-of-document token")
    add("--split-sentences", action="store_true", help="make a sequence of each sentence, as BERT's datasets read them")
    add("--keep-newlines", action="store_true", help="keep the white space after a sentence in its text")
    add("--lang", metavar="LANGUAGE", help="language of the sentences (default: english)")
    add("--on-error", choices=("fail", "skip"), default="fail", help="what a malformed line does (default: fail)")
    add("--max-documents", type=int, metavar="N", help="read at most N lines")
    text = "refuse longer lines (default: 256 MiB), also after decompression"
    add("--max-line-bytes", type=int, metavar="N", help=text)
    add("--log-interval", type=int, default=10_000, metavar="N", help="documents between plain progress lines")
    add_tokenizer_arguments(parser)
    # Flags of other tools, which change nothing here: they are named and ignored.
    add("--partitions", type=int, help=argparse.SUPPRESS)
    add("--keep-sequential-samples", action="store_true", help=argparse.SUPPRESS)


def _preprocess(args: argparse.Namespace) -> int:
    """Checks the flags, tokenizes with a progress display, prints a report."""
    problems = [problem for path in args.input if (problem := parquet_problem("--input", path)) is not None]
    tokenizer = tokenizer_settings(args, problems)
    if args.log_interval < 1:
        problems.append(Problem("--log-interval", str(args.log_interval), "must be at least 1", "Leave it out."))
    raise_problems(problems)
    for flag, given in (("--partitions", args.partitions), ("--keep-sequential-samples", args.keep_sequential_samples)):
        if given:
            print(f"note: {flag} is not needed: order is always kept, at any number of --workers.", file=sys.stderr)
    for flag, given in (("--keep-newlines", args.keep_newlines), ("--lang", args.lang)):
        if given and not args.split_sentences:
            print(f"note: {flag} has no effect without --split-sentences.", file=sys.stderr)
    if tokenizer.tokenizer_type in WORDPIECE_TYPES and not args.split_sentences:
        print("note: a document is one sequence; BERT's datasets read sentences: --split-sentences.", file=sys.stderr)

    from petatron.data.preprocess import PreprocessOptions, preprocess

    named = {field.name for field in fields(PreprocessOptions)} & vars(args).keys()
    given = {name: value for name in named if (value := getattr(args, name)) is not None}
    given |= {"inputs": tuple(args.input), "json_keys": tuple(args.json_keys)}
    options = PreprocessOptions(tokenizer=tokenizer, **given)
    with _progress_display(args.log_interval) as show:
        report = preprocess(options, show)
    _print_report(report, are_sentences=options.split_sentences)
    return 0


def _print_report(report: PreprocessReport, *, are_sentences: bool) -> None:
    rate = report.tokens / max(report.seconds, 1e-9)
    sentences = f", {report.sequences:,} sentences" if are_sentences else ""
    print(
        f"{report.documents:,} documents{sentences}, {report.tokens:,} tokens in {report.seconds:.1f} s ({rate:,.0f} tokens/s)"
    )
    if report.empty:
        print(f"{report.empty:,} empty {'text' if report.empty == 1 else 'texts'} left out")
    if report.malformed:
        shown = len(report.problems)
        first = f", the first {shown} of them" if shown < report.malformed else ""
        print(f"{report.malformed:,} malformed {'line' if report.malformed == 1 else 'lines'} skipped{first}:")
        print("\n".join(f"  {problem}" for problem in report.problems))
    for output in report.outputs:
        print(f"{output}.bin, {output}.idx")


@contextmanager
def _progress_display(log_interval: int) -> Iterator[Callable[[PreprocessProgress], None]]:
    """Shows a bar on a terminal when rich is installed, else a line every `log_interval` documents."""
    printed = 0

    def line(now: PreprocessProgress) -> None:
        nonlocal printed
        if now.documents >= printed + log_interval:
            printed = now.documents - now.documents % log_interval
            left = timedelta(seconds=int(now.seconds * (now.bytes_total / max(now.bytes_read, 1) - 1)))
            print(f"{_progress_text(now)}, {now.bytes_read / now.bytes_total:.0%}, {left} left", file=sys.stderr)

    with progress_bar("starting") as update:
        if update is None:
            yield line
        else:  # by bytes, because the number of documents is unknown before the end
            yield lambda now: update(description=_progress_text(now), completed=now.bytes_read, total=now.bytes_total)


def _progress_text(now: PreprocessProgress) -> str:
    seconds = max(now.seconds, 1e-9)
    megabytes = now.bytes_read / seconds / 1e6
    return f"{now.documents:,} documents, {now.tokens / seconds:,.0f} tokens/s, {megabytes:.1f} MB/s"


def _inspect(args: argparse.Namespace) -> int:
    problems: list[Problem] = []
    config = tokenizer_settings(args, problems)

    from petatron.config.schema.data_blend import dataset_prefix
    from petatron.data.indexed_dataset import IndexedDataset
    from petatron.data.tokenizer import build_tokenizer

    dataset = IndexedDataset(dataset_prefix(args.prefix))
    if not 0 <= args.document < dataset.num_documents:
        rule = f"is not a document of {args.prefix}, which has {dataset.num_documents:,}"
        problems.append(Problem("--document", str(args.document), rule, "They are counted from 0."))
    raise_problems(problems)
    asked = any((args.tokenizer_type, args.tokenizer_model, args.vocab_file, args.merge_file))
    tokenizer = build_tokenizer(config, vocab_size=args.vocab_size) if asked else None
    if tokenizer is not None:
        dataset.check_token_ids()
    for name, value in _dataset_summary(dataset):
        print(f"{name:<18} {value}")
    tokens = dataset.get_document(args.document)
    print(f"\ndocument {args.document} ({len(tokens):,} tokens)")
    print(" ".join(map(str, tokens[:SHOWN_TOKENS])) + (" ..." if len(tokens) > SHOWN_TOKENS else ""))
    if tokenizer is None:
        print("(give --tokenizer-model, or another tokenizer, to see its text)")
    else:
        text = tokenizer.decode(tokens[:SHOWN_CHARACTERS].tolist())
        is_cut = len(tokens) > SHOWN_CHARACTERS or len(text) > SHOWN_CHARACTERS
        print(text[:SHOWN_CHARACTERS] + (" ..." if is_cut else ""))
    return 0


def _dataset_summary(dataset: IndexedDataset) -> Iterator[tuple[str, str]]:
    import numpy as np

    lengths = dataset.document_lengths
    yield "documents", f"{dataset.num_documents:,}"
    yield "sequences", f"{dataset.num_sequences:,}"
    yield "tokens", f"{dataset.num_tokens:,}"
    yield "token type", str(dataset.dtype)
    yield "size", f"{dataset.bin.stat().st_size / 1e6:,.1f} MB tokens, {dataset.idx.stat().st_size / 1e6:,.1f} MB index"
    quantiles = np.quantile(lengths, [0, 0.05, 0.5, 0.95, 1]).astype(np.int64).tolist()
    yield "document length", "min {:,}, 5% {:,}, median {:,}, 95% {:,}, max {:,}".format(*quantiles)
    yield "mean length", f"{dataset.num_tokens / dataset.num_documents:,.1f}"
    yield "default split", _split_text(dataset)
    if dataset.modes is not None:
        yield "modes", f"{int((dataset.modes != 0).sum()):,} sequences are not text"


def _split_text(dataset: IndexedDataset) -> str:
    """Describes what `--split` gives each split by default, which of a small dataset may be one document, or none."""
    from petatron.config.schema.training import DataConfig
    from petatron.data.split_units import split_units

    split = DataConfig().split
    ranges = zip(("train", "validation", "test"), split_units(split, dataset.num_sequences))
    unit = dataset.unit.removesuffix("s")
    return f"{', '.join(f'{name} {count_with_noun(len(part), unit)}' for name, part in ranges)} (--split {split})"


def _merge(args: argparse.Namespace) -> int:
    from petatron.config.schema.data_blend import dataset_prefix
    from petatron.data.indexed_writer import merge_datasets

    merged = merge_datasets([dataset_prefix(prefix) for prefix in args.input], args.output_prefix)
    print(f"{merged.num_documents:,} documents, {merged.num_tokens:,} tokens from {len(args.input)} datasets")
    print(f"{merged.bin}, {merged.idx}")
    return 0
