"""`petatron data fetch`: downloads a public dataset as JSON lines, its license shown first, and says what to do next."""

from __future__ import annotations

import argparse
import shlex
import sys
import time
from collections.abc import Callable
from dataclasses import fields
from typing import TYPE_CHECKING

from petatron.base.errors import Problem, raise_problems
from petatron.base.format_text import count_with_noun

if TYPE_CHECKING:
    from petatron.data.fetch.download_dataset import FetchProgress
    from petatron.data.fetch.plan_download import FetchPlan, SourceRecord

_SECONDS_BETWEEN_LINES = 5.0
_EXAMPLE_PRESET = "tiny-llama"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    parser.description = "Download a dataset of the Hugging Face hub and convert it to JSON lines (extra: fetch)."
    add("dataset", nargs="?", metavar="DATASET", help="a name of --list, or OWNER/NAME together with --files")
    add("--list", action="store_true", help="list the known datasets, with license and size")
    add("--output", metavar="DIR", help="folder for the shards and SOURCE.json; again into the same one resumes")
    add("--files", nargs="+", default=[], metavar="GLOB", help="files of OWNER/NAME: parquet, JSON lines or text")
    add("--text-key", metavar="KEY", help="column or key that holds the text (default: text)")
    add("--join", choices=("none", "articles", "file"), help="rows that make a document (default: each; of .txt: all)")
    add("--splits", nargs="+", default=[], metavar="SPLIT", help="of a known dataset (default: all)")
    add("--max-documents", type=int, metavar="N", help="stop after N documents of each split")
    add("--max-bytes", type=int, metavar="N", help="stop before a split's shards have more than N bytes")
    add("--max-line-bytes", type=int, metavar="N", help="skip longer documents (default: 256 MiB)")
    add("--revision", metavar="COMMIT", help="commit, tag or branch of the dataset (default: newest; recorded)")
    add("--hub", metavar="PLACE", help="a folder laid out as OWNER/NAME/files, or a mirror's address, for the hub")


def run(args: argparse.Namespace) -> int:
    """Lists the known datasets, or fetches one."""
    if args.list:
        _print_known()
        return 0
    name_dataset = _name_dataset_first(args) or "`petatron data fetch --list` lists the known ones."
    needed = (("DATASET", args.dataset, name_dataset), ("--output", args.output, "Name a folder for the shards."))
    raise_problems(Problem(flag, "", "is missing", fix) for flag, given, fix in needed if not given)

    from petatron.data.fetch.download_dataset import run_fetch
    from petatron.data.fetch.plan_download import FetchOptions, plan_fetch

    given = {field.name: getattr(args, field.name) for field in fields(FetchOptions)}
    given |= {"files": tuple(args.files), "splits": tuple(args.splits)}
    plan = plan_fetch(FetchOptions(**{name: value for name, value in given.items() if value is not None}))
    _print_plan(plan)
    _print_result(plan, run_fetch(plan, _progress_lines()))
    return 0


def _name_dataset_first(args: argparse.Namespace) -> str:
    """Returns what to do where a flag with several values may have taken the name of the dataset; empty if none has any."""
    for flag, values in (("--files", args.files), ("--splits", args.splits)):
        if values:
            command = shlex.join(("petatron", "data", "fetch", values[-1], flag, *values[:-1]))
            return f"{flag} takes every word up to the next flag. Name the dataset first: `{command}`."
    return ""


def _print_known() -> None:
    from petatron.data.fetch.known_datasets import KNOWN_DATASETS

    for name, known in KNOWN_DATASETS.items():
        print(f"{name:<19} {known.download:>7}  {', '.join(known.splits)}")
        print(f"{'':<4}{known.summary}")
        print(f"{'':<4}{known.repository}, license {known.license}")
    print("Any other: petatron data fetch OWNER/NAME --files 'data/*.parquet' --text-key text --output DIR")


def _print_plan(plan: FetchPlan) -> None:
    """Shown before anything is downloaded."""
    revision = f" at {plan.dataset.revision}" if plan.dataset.revision else ""
    print(f"{plan.dataset.repository}{revision}")
    print(f"source     {plan.dataset.page}")
    print(f"license    {plan.dataset.license or 'not stated in the dataset card: ask its owner before you use it'}")
    for split, names in plan.files.items():
        size = _size_text(sum(plan.sizes.get(name, 0) for name in names))
        print(f"{split:<10} {count_with_noun(len(names), 'file')}, {size}")
    sys.stdout.flush()


def _progress_lines() -> Callable[[FetchProgress], None]:
    """Prints when a file begins and ends, and every few seconds between."""
    printed = time.monotonic()

    def line(now: FetchProgress) -> None:
        nonlocal printed
        if now.rows is not None and not now.done and time.monotonic() - printed < _SECONDS_BETWEEN_LINES:
            return
        printed = time.monotonic()
        at = f"{now.split} {now.number + 1}/{now.of}"
        if now.rows is None:
            size = "" if now.file_bytes is None else f" ({_size_text(now.file_bytes)})"
            print(f"{at}: {now.file}{size}", file=sys.stderr)
        else:
            state = "kept" if now.reused else "done" if now.done else "converting"
            counts = f"{count_with_noun(now.rows, 'row')}, {count_with_noun(now.documents, 'document')}, {_size_text(now.bytes)}"
            print(f"{at}: {state}, {counts}", file=sys.stderr)

    return line


def _print_result(plan: FetchPlan, record: SourceRecord) -> None:
    from petatron.data.fetch.download_dataset import describe_skipped
    from petatron.data.fetch.plan_download import RECORD_FILE

    for split in plan.files:
        shards = record.shards[split]
        documents, size = sum(shard.documents for shard in shards), sum(shard.bytes for shard in shards)
        amount = f"{count_with_noun(documents, 'document')}, {_size_text(size)}"
        print(f"{split}: {amount} in {count_with_noun(len(shards), 'shard')}")
        if skipped := describe_skipped(shards):
            print(f"  {skipped}")
    print(f"{plan.folder / RECORD_FILE} records source, license and counts.\n\nnext:")
    for command in next_commands(str(plan.folder), list(plan.files)):
        print(f"  {command}")


def next_commands(folder: str, splits: list[str]) -> list[str]:
    """The commands that tokenize the shards and train on them.

    >>> print(next_commands("web", ["train"])[0])
    petatron data preprocess --input web/train-*.jsonl --output-prefix web/train --tokenizer-type ByteTokenizer --append-eod
    """
    place, tokenizer = shlex.quote(folder), "--tokenizer-type ByteTokenizer"
    commands = [
        f"petatron data preprocess --input {place}/{split}-*.jsonl --output-prefix {place}/{split} {tokenizer} --append-eod"
        for split in splits
    ]
    flags = {"train": "--train-data-path", "validation": "--valid-data-path", "test": "--test-data-path"}
    if "validation" in splits and "train" in splits:
        data = " ".join(f"{flags[split]} {place}/{split}_text_document" for split in splits)
    else:
        data = f"--data-path {place}/{splits[0]}_text_document"
    return [
        *commands,
        f"petatron train {_EXAMPLE_PRESET} {data} {tokenizer} --lr 1e-3 --global-batch-size 8 --train-iters 100",
    ]


def _size_text(count: int) -> str:
    """
    >>> _size_text(1234), _size_text(3_500_000), _size_text(28_000_000_000)
    ('1.2 kB', '3.5 MB', '28.0 GB')
    """
    unit, divisor = next(((unit, size) for unit, size in (("GB", 1e9), ("MB", 1e6)) if count >= size), ("kB", 1e3))
    return f"{count / divisor:,.1f} {unit}"
