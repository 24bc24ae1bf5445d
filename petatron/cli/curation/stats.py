"""`petatron data stats`: documents, lengths, tokens and duplicates of files and datasets."""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Sequence
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING

from petatron.base.errors import Problem, raise_problems
from petatron.base.format_text import align_columns, format_bytes
from petatron.base.safe_files import write_atomic
from petatron.base.version import __version__
from petatron.cli.curation.step_arguments import add_input_format, output_file_problems, step_progress
from petatron.cli.subcommands.tokenizer_arguments import add_tokenizer_arguments, tokenizer_settings

if TYPE_CHECKING:
    from petatron.data.curate.source_stats import SourceStats
    from petatron.data.tokenizer import Tokenizer
    from petatron.history.draw.histogram import Histogram

_PERCENTS = (5, 50, 95, 99)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    parser.description = "Describe texts and token files: documents, lengths, tokens, duplicates."
    text = "the prefix of a dataset, or what preprocess reads: files, patterns, folders or addresses"
    add("sources", nargs="+", metavar="SOURCE", help=text)
    add_input_format(parser)
    add("--json-key", default="text", metavar="KEY", help="key of the text (default: text)")
    add("--no-duplicates", action="store_true", help="do not look for duplicates, which reads all tokens of a dataset")
    add("--svg", metavar="FILE", help="draw the lengths of all sources")
    add("--theme", choices=("light", "dark"), default="light", help="colors of the picture (light)")
    add("--json", metavar="FILE", help="write all numbers")
    add_tokenizer_arguments(parser)


def run(args: argparse.Namespace) -> int:
    problems = [*output_file_problems("--svg", args.svg), *output_file_problems("--json", args.json)]
    config = tokenizer_settings(args, problems)
    raise_problems(problems)

    from petatron.data.curate.source_stats import joined_stats
    from petatron.data.tokenizer import build_tokenizer

    asked = any((args.tokenizer_type, args.tokenizer_model, args.vocab_file, args.merge_file, args.tiktoken_pattern))
    tokenizer = build_tokenizer(config, vocab_size=args.vocab_size) if asked else None
    sources = _read_sources(args, tokenizer)
    together = joined_stats(sources) if len(sources) > 1 else None
    shown = [*sources, *([together] if together is not None else [])]
    print(align_columns([_HEADINGS, *map(_row, shown)]))
    for source in sources:
        for reason, count in source.left_out.items():
            print(f"{source.name}: {count:,} {reason} {'line' if count == 1 else 'lines'} left out")
    for source in [together] if together is not None else sources:
        _print_lengths(source)
    if args.svg is not None:
        _draw(args, sources)
    if args.json is not None:
        content = {"petatron": __version__, "sources": [source.as_json() for source in sources]}
        write_atomic(Path(args.json), json.dumps(content, indent=1) + "\n")
        print(f"wrote {args.json}")
    return 0


def _read_sources(args: argparse.Namespace, tokenizer: Tokenizer | None) -> list[SourceStats]:
    from petatron.config.schema.data_blend import dataset_prefix
    from petatron.data.curate.files.step_files import StepFiles, check_step_files
    from petatron.data.curate.source_stats import dataset_stats, file_stats
    from petatron.data.indexed_dataset import IndexedDataset

    def is_dataset(word: str) -> bool:
        return os.path.isfile(f"{dataset_prefix(word)}.idx")

    duplicates = not args.no_duplicates
    datasets = {word: IndexedDataset(dataset_prefix(word)) for word in args.sources if is_dataset(word)}
    if tokenizer is not None:
        for dataset in datasets.values():
            dataset.check_token_ids()
    inputs = tuple(word for word in args.sources if word not in datasets)
    of_inputs: dict[str, list[SourceStats]] = {}
    if inputs:
        files = StepFiles(inputs=inputs, output=os.devnull, json_key=args.json_key, input_format=args.input_format)
        files = check_step_files(files, step="describe", parts=())
        with step_progress() as show:
            stats = iter(file_stats(files, tokenizer, duplicates=duplicates, on_progress=show))
        of_inputs = {word: list(islice(stats, len(named))) for word, named in zip(inputs, files.expanded)}
    sources: list[SourceStats] = []
    for word in args.sources:
        named = of_inputs.get(word)
        sources += [dataset_stats(datasets[word], tokenizer, duplicates=duplicates)] if named is None else named
    return sources


_HEADINGS = ("documents", "tokens", "text", "bytes/token", "mean", *(f"{percent}%" for percent in _PERCENTS), "max",
             "duplicates", "source")  # fmt: skip


def _row(source: SourceStats) -> tuple[str, ...]:
    percentiles = source.percentiles()
    mean = float(source.lengths.mean()) if source.num_documents else 0.0
    duplicates = source.num_duplicates
    return (
        f"{source.num_documents:,}",
        "-" if source.num_tokens is None else f"{source.num_tokens:,}",
        "-" if source.num_bytes is None else format_bytes(source.num_bytes),
        "-" if source.bytes_per_token is None else f"{source.bytes_per_token:.2f}",
        f"{mean:,.1f}",
        *(f"{percentiles[percent]:,}" for percent in _PERCENTS),
        f"{percentiles[100]:,}",
        "-" if duplicates is None else f"{duplicates / max(source.num_documents, 1):.1%}",
        source.name,
    )


def _print_lengths(source: SourceStats) -> None:
    from petatron.data.curate.source_stats import length_histogram
    from petatron.history.draw.histogram import histogram_text

    histogram = length_histogram(source.lengths)
    total = max(int(histogram.length.sum()), 1)
    notes = [f"{length / total:.1%} of the {source.unit}" for length in histogram.length.tolist()]
    print(f"\nlengths in {source.unit}: {source.name}")
    ascii_only = (sys.stdout.encoding or "").lower() not in ("utf-8", "utf8")
    print(histogram_text(_as_histogram(source, 0), notes, ascii_only=ascii_only))


def _as_histogram(source: SourceStats, longest: int) -> Histogram:
    from petatron.data.curate.source_stats import length_histogram
    from petatron.history.draw.histogram import Histogram

    histogram = length_histogram(source.lengths, last_start=longest)
    shares = histogram.documents / max(source.num_documents, 1)
    return Histogram(source.name, histogram.starts.tolist(), shares.tolist())


def _draw(args: argparse.Namespace, sources: Sequence[SourceStats]) -> None:
    from petatron.history.draw.histogram import histogram_svg
    from petatron.history.draw.theme import THEMES

    units = {source.unit for source in sources}
    if len(units) > 1:
        fix = "Name a tokenizer, so that the files are counted in tokens too."
        raise_problems([Problem("--svg", args.svg, "cannot draw lengths in tokens beside lengths in bytes", fix)])
    longest = max(int(source.lengths.max(initial=0)) for source in sources)
    histograms = [_as_histogram(source, longest) for source in sources]
    title = f"Lengths of {sources[0].name}" if len(sources) == 1 else f"Lengths of {len(sources)} sources"
    x_label = f"{units.pop()} of a document"
    picture = histogram_svg(histograms, title=title, x_label=x_label, theme=THEMES[args.theme])
    write_atomic(Path(args.svg), picture)
    print(f"wrote {args.svg}")
