"""`petatron data`: fetches public text, trains tokenizers, preprocesses text into token files, inspects and merges them."""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, fields
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from petatron.base.check_output_file import writable_problems
from petatron.base.errors import DataError, Problem, raise_problems
from petatron.base.format_text import count_with_noun
from petatron.base.log import configure_logging
from petatron.base.remote_address import is_remote
from petatron.base.safe_files import write_atomic
from petatron.base.terminal_escape import printable
from petatron.cli.curation import decontaminate, dedup, filter, mix, show, split, stats
from petatron.cli.subcommands import (
    data_build_index,
    data_fetch,
    data_preprocess_parts,
    data_teacher,
    data_trace,
    data_train_tokenizer,
    data_worker_speeds,
)
from petatron.cli.subcommands.command_parser import CommandParser
from petatron.cli.subcommands.stderr_progress import StderrProgress, progress_bar
from petatron.cli.subcommands.tokenizer_arguments import add_tokenizer_arguments, tokenizer_settings
from petatron.config.schema.sections.tokenizer_options import WORDPIECE_TYPES
from petatron.data.inputs.input_formats import INPUT_FORMATS

if TYPE_CHECKING:
    from petatron.data.indexed_dataset import IndexedDataset
    from petatron.data.preprocess_report import PreprocessProgress, PreprocessReport

_CURATION = {
    "dedup": (dedup, "drop documents that are there already, or nearly"),
    "filter": (filter, "drop documents by rules: lengths, Gopher, C4, language, perplexity"),
    "decontaminate": (decontaminate, "drop documents that share n-grams with evaluation files"),
    "split": (split, "hold a share of the documents out, by their text"),
    "mix": (mix, "weights of a blend from token counts, and its epochs"),
    "stats": (stats, "documents, lengths, tokens and duplicates of files and datasets"),
    "show": (show, "a sample as training sees it, token by token"),
}
"""Subcommands with a module of their own, and what they do."""
_OF_RUNS = {
    "build-index": (data_build_index, "build the sample indices of a run before it starts"),
    "teacher": (data_teacher, "store a teacher's likeliest tokens for the data of a run, for --objective distill"),
    "trace": (data_trace, "name the documents that an iteration of a run trains on"),
}
"""Subcommands that take the flags of `petatron train` too."""
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
    text = "folder for the index and tokens of a dataset behind an address (s3://...)"
    inspecting.add_argument("--object-storage-cache-path", metavar="FOLDER", help=text)
    text = "read every token and report ids beyond the vocabulary of the tokenizer, or --vocab-size (default: unless it is an address)"
    inspecting.add_argument("--check-ids", action=argparse.BooleanOptionalAction, help=text)
    add_tokenizer_arguments(inspecting)
    add = subcommands.add_parser("merge", help="join datasets into one").add_argument
    add("--input", nargs="+", required=True, metavar="PREFIX", help="datasets to join, in this order")
    add("--output-prefix", required=True, metavar="PREFIX", help="dataset to write")
    for name, (module, text) in (_CURATION | _OF_RUNS).items():
        module.add_arguments(subcommands.add_parser(name, help=text))
    return root


def main(argv: Sequence[str]) -> int:
    """Run one subcommand of `petatron data`."""
    if argv and argv[0] in _OF_RUNS:
        args, flags = parser().parse_known_args(argv)
        configure_logging()
        return _OF_RUNS[argv[0]][0].run(args, flags)
    args = parser().parse_args(argv)
    configure_logging()
    actions = {
        "fetch": data_fetch.run,
        "train-tokenizer": data_train_tokenizer.run,
        "preprocess": partial(_preprocess, argv=argv),
        "inspect": _inspect,
        "merge": _merge,
    }
    actions |= {name: module.run for name, (module, _) in _CURATION.items()}
    return actions[args.subcommand](args)


def _add_preprocess_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    text = "files, patterns, folders, or addresses (s3://, gs://, hf://, https://); plain, gz, zst, bz2 or xz"
    add("--input", nargs="+", required=True, metavar="INPUT", help=text)
    text = (
        "default: by name and content; text: paragraphs are documents, with blank lines between; text-file: files are"
    )
    add("--input-format", choices=INPUT_FORMATS, default="auto", help=text)
    add("--overwrite", action="store_true", help="replace an output that exists")
    add(
        "--output-prefix",
        required=True,
        metavar="PREFIX",
        help="writes PREFIX_<key>_document.bin and .idx, or _sentence",
    )
    add("--json-keys", nargs="+", default=["text"], metavar="KEY", help="keys to take text from (default: text)")
    add("--workers", type=int, default=os.cpu_count() or 1, metavar="N", help="processes (default: one per core)")
    add("--append-bod", action="store_true", help="begin each document with the begin-of-document token")
    add("--append-eod", action="store_true", help="end each document with the end-of-document token")
    add("--split-sentences", action="store_true", help="make a sequence of each sentence, as BERT's datasets read them")
    add("--keep-newlines", action="store_true", help="keep the white space after a sentence in its text")
    add("--lang", metavar="LANGUAGE", help="language of the sentences (default: english)")
    add("--on-error", choices=("fail", "skip"), default="fail", help="what a malformed line does (default: fail)")
    add("--max-documents", type=int, metavar="N", help="read at most N lines")
    text = "refuse longer lines (default: 256 MiB), also after decompression"
    add("--max-line-bytes", type=int, metavar="N", help=text)
    text = (
        "bytes of input per part; parts that are finished are not done again after an interruption (default: 256 MiB)"
    )
    add("--part-bytes", type=int, metavar="N", help=text)
    text = "the key whose value is noted as the id of a document (default: id)"
    add("--id-key", metavar="KEY", help=text)
    text = "write no PREFIX_<key>_document.sources, which has the file, line and id of every document"
    add("--no-document-sources", dest="document_sources", action="store_false", default=None, help=text)
    add("--json", metavar="FILE", help="write the summary to a file")
    data_preprocess_parts.add_part_arguments(parser)
    data_worker_speeds.add_worker_speed_arguments(parser)
    add("--log-interval", type=int, default=10_000, metavar="N", help="documents between plain progress lines")
    add_tokenizer_arguments(parser)
    # A flag of another tool, which changes nothing here: it is named and ignored.
    add("--keep-sequential-samples", action="store_true", help=argparse.SUPPRESS)


def _preprocess(args: argparse.Namespace, argv: Sequence[str]) -> int:
    """Checks the flags, tokenizes with a progress display, prints a report."""
    problems: list[Problem] = []
    tokenizer = tokenizer_settings(args, problems)
    if args.log_interval < 1:
        problems.append(Problem("--log-interval", str(args.log_interval), "must be at least 1", "Leave it out."))
    problems += [*data_preprocess_parts.part_problems(args), *data_worker_speeds.worker_speed_problems(args)]
    problems += writable_problems("--json", Path(args.json)) if args.json is not None else []
    raise_problems(problems)
    if args.keep_sequential_samples:
        print("note: --keep-sequential-samples is not needed: order is always kept.", file=sys.stderr)
    notes = [
        (args.split_sentences, "--split-sentences", {"--keep-newlines": args.keep_newlines, "--lang": args.lang}),
        (
            args.find_optimal_num_workers,
            "--find-optimal-num-workers",
            {"--workers-to-check": args.workers_to_check, "--performance-dir": args.performance_dir},
        ),
    ]
    for is_given, needed, flags in notes:
        for flag in (flag for flag, value in flags.items() if value and not is_given):
            print(f"note: {flag} has no effect without {needed}.", file=sys.stderr)
    if tokenizer.tokenizer_type in WORDPIECE_TYPES and not args.split_sentences:
        print("note: a document is one sequence; BERT's datasets read sentences: --split-sentences.", file=sys.stderr)

    from petatron.data.preprocess import PreprocessOptions, join_finished_parts, preprocess

    named = {field.name for field in fields(PreprocessOptions)} & vars(args).keys()
    given = {name: value for name in named if (value := getattr(args, name)) is not None}
    given |= {"inputs": tuple(args.input), "json_keys": tuple(args.json_keys)}
    given |= {"engine": "ray" if args.engine == "ray" else "local"}
    options = PreprocessOptions(tokenizer=tokenizer, **given)
    if args.find_optimal_num_workers:
        return data_worker_speeds.print_worker_speeds(options, args)
    if args.part is not None:
        return data_preprocess_parts.run_parts(options, args.part)
    if args.engine == "slurm":
        return data_preprocess_parts.write_scripts(options, argv)
    with _progress_display(args.log_interval) as show:
        report = join_finished_parts(options) if args.join else preprocess(options, show)
    _print_report(report, with_sources=options.document_sources, are_sentences=options.split_sentences)
    if args.json is not None:
        write_atomic(Path(args.json), json.dumps(asdict(report), indent=2) + "\n")
    return 0


def _print_report(report: PreprocessReport, *, with_sources: bool, are_sentences: bool) -> None:
    rate = (report.tokens - report.resumed_tokens) / max(report.seconds, 1e-9)
    sentences = f", {report.sequences:,} sentences" if are_sentences else ""
    print(
        f"{report.documents:,} documents{sentences}, {report.tokens:,} tokens in {report.seconds:.1f} s ({rate:,.0f} tokens/s)"
    )
    if report.resumed_parts:
        print(
            f"{report.resumed_parts:,} of {report.parts:,} parts, {report.resumed_tokens:,} tokens, were finished before"
        )
    other_lines = {
        "without text": report.without_text,
        "blank": report.blank,
        "malformed": report.malformed,
        "too long": report.too_long,
    }
    counted = "".join(f", {count:,} {name}" for name, count in other_lines.items() if count)
    print(f"{count_with_noun(report.lines, 'line')} read: {report.documents:,} written{counted}")
    if report.empty:
        print(f"{report.empty:,} empty {'text' if report.empty == 1 else 'texts'} left out")
    if report.skipped:
        shown = len(report.problems)
        first = f", the first {shown} of them" if shown < report.skipped else ""
        kind = "malformed" if not report.too_long else "too long" if not report.malformed else "malformed or too long"
        print(f"{report.skipped:,} {kind} {'line' if report.skipped == 1 else 'lines'} skipped{first}:")
        print("\n".join(f"  {problem}" for problem in report.problems))
    for output in report.outputs:
        print(f"{output}.bin, {output}.idx" + (f", {output}.sources" if with_sources else ""))


@contextmanager
def _progress_display(log_interval: int) -> Iterator[Callable[[PreprocessProgress], None]]:
    """Shows a bar on a terminal when rich is installed, else a line every `log_interval` documents."""
    printed = 0

    def line(now: PreprocessProgress) -> None:
        nonlocal printed
        if now.documents >= printed + log_interval:
            printed = now.documents - now.documents % log_interval
            share = f", {now.bytes_read / now.bytes_total:.0%}" if now.bytes_total else ""
            print(f"{_progress_text(now)}{share}{_time_left(now)}", file=sys.stderr)

    with progress_bar("starting") as update:
        if update is None:
            yield line
        else:  # by bytes, because the number of documents is unknown before the end
            yield lambda now: update(description=_progress_text(now), completed=now.bytes_read, total=now.bytes_total)


def _time_left(now: PreprocessProgress) -> str:
    """Says when the rest is done at the speed of this run; nothing where the sizes of the inputs are not known."""
    done = now.bytes_read - now.bytes_before
    if done <= 0:
        return ""
    return f", {timedelta(seconds=int(now.seconds * max(now.bytes_total - now.bytes_read, 0) / done))} left"


def _progress_text(now: PreprocessProgress) -> str:
    seconds = max(now.seconds, 1e-9)
    megabytes = (now.bytes_read - now.bytes_before) / seconds / 1e6
    return f"{now.documents:,} documents, {now.tokens / seconds:,.0f} tokens/s, {megabytes:.1f} MB/s"


def _inspect(args: argparse.Namespace) -> int:
    problems: list[Problem] = []
    config = tokenizer_settings(args, problems)

    from petatron.config.schema.data_blend import dataset_prefix
    from petatron.data.check_token_ids import scan_ids
    from petatron.data.indexed_dataset import IndexedDataset
    from petatron.data.object_storage.storage_cache import ObjectStorageCache
    from petatron.data.recorded_tokenizer import check_recorded_tokenizer, read_recorded_tokenizer
    from petatron.data.tokenizer import build_tokenizer

    folder = args.object_storage_cache_path
    storage = None if folder is None else ObjectStorageCache(folder)
    dataset = IndexedDataset(dataset_prefix(args.prefix), object_storage=storage)
    if not 0 <= args.document < dataset.num_documents:
        rule = f"is not a document of {args.prefix}, which has {dataset.num_documents:,}"
        problems.append(Problem("--document", str(args.document), rule, "They are counted from 0."))
    raise_problems(problems)
    asked = any((args.tokenizer_type, args.tokenizer_model, args.vocab_file, args.merge_file))
    tokenizer = build_tokenizer(config, vocab_size=args.vocab_size) if asked else None
    recorded = read_recorded_tokenizer(dataset.prefix)
    if tokenizer is not None:
        dataset.check_token_ids()
        check_recorded_tokenizer(dataset.prefix, tokenizer, force=False)
    for name, value in _dataset_summary(dataset):
        print(f"{name:<18} {value}")
    if recorded is not None:
        print(
            f"{'tokenizer':<18} {printable(recorded.name)}, {recorded.vocab_size:,} ids, fingerprint {recorded.fingerprint}"
        )
    vocab_size = args.vocab_size if tokenizer is None else tokenizer.vocab_size
    if dataset.dtype.kind != "f" and args.check_ids is not False and (args.check_ids or not is_remote(dataset.prefix)):
        with StderrProgress(lambda done, total: f"{done:,} of {total:,} tokens checked") as show:
            ids = scan_ids(dataset, vocab_size, show)
        print(f"{'token ids':<18} {ids.low:,} to {ids.high:,}")
        if vocab_size is not None and (problem := ids.problem(dataset.prefix, vocab_size)) is not None:
            raise DataError(problem)
    tokens = dataset.get_document(args.document)
    print(f"\ndocument {args.document} ({len(tokens):,} tokens)")
    if (source := _source_text(dataset, args.document)) is not None:
        print(f"from {source}")
    print(" ".join(map(str, tokens[:SHOWN_TOKENS])) + (" ..." if len(tokens) > SHOWN_TOKENS else ""))
    if tokenizer is None:
        print("(give --tokenizer-model, or another tokenizer, to see its text)")
    else:
        text = tokenizer.decode(tokens[:SHOWN_CHARACTERS].tolist())
        is_cut = len(tokens) > SHOWN_CHARACTERS or len(text) > SHOWN_CHARACTERS
        print(text[:SHOWN_CHARACTERS] + (" ..." if is_cut else ""))
    return 0


def _source_text(dataset: IndexedDataset, document: int) -> str | None:
    from petatron.data.document_provenance import provenance_of

    sources = provenance_of(dataset)
    return None if sources is None else printable(str(sources[document]))


def _dataset_summary(dataset: IndexedDataset) -> Iterator[tuple[str, str]]:
    import numpy as np

    lengths = dataset.document_lengths
    yield "documents", f"{dataset.num_documents:,}"
    yield "sequences", f"{dataset.num_sequences:,}"
    yield "tokens", f"{dataset.num_tokens:,}"
    yield "token type", str(dataset.dtype)
    yield "size", f"{dataset.bin_bytes / 1e6:,.1f} MB tokens, {dataset.idx.stat().st_size / 1e6:,.1f} MB index"
    quantiles = np.quantile(lengths, [0, 0.05, 0.5, 0.95, 1]).astype(np.int64).tolist()
    yield "document length", "min {:,}, 5% {:,}, median {:,}, 95% {:,}, max {:,}".format(*quantiles)
    yield "mean length", f"{dataset.num_tokens / dataset.num_documents:,.1f}"
    yield "default split", _split_text(dataset)
    if dataset.modes is not None:
        yield "modes", f"{int((dataset.modes != 0).sum()):,} sequences are not text"


def _split_text(dataset: IndexedDataset) -> str:
    """Describes what `--split` gives each split by default, which of a small dataset may be one document, or none."""
    from petatron.config.schema.data import DataConfig
    from petatron.data.train_valid_test_split import split_units

    split = DataConfig().split
    ranges = zip(("train", "validation", "test"), split_units(split, dataset.num_sequences))
    unit = dataset.unit.removesuffix("s")
    return f"{', '.join(f'{name} {count_with_noun(len(part), unit)}' for name, part in ranges)} (--split {split})"


def _merge(args: argparse.Namespace) -> int:
    from petatron.config.schema.data_blend import dataset_prefix
    from petatron.data.document_provenance import sources_path
    from petatron.data.indexed_writer import merge_datasets

    merged = merge_datasets([dataset_prefix(prefix) for prefix in args.input], args.output_prefix)
    print(f"{merged.num_documents:,} documents, {merged.num_tokens:,} tokens from {len(args.input)} datasets")
    sources = sources_path(merged.prefix)
    print(f"{merged.bin}, {merged.idx}" + (f", {sources}" if sources.exists() else ""))
    return 0
