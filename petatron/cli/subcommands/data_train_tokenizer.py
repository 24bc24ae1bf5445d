"""`petatron data train-tokenizer`: trains a tokenizer on a sample of files, and says how well it compresses held-out text."""

from __future__ import annotations

import argparse
import shlex
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from petatron.base.errors import Problem, raise_problems
from petatron.base.format_text import count_with_noun, format_bytes
from petatron.data.inputs.input_formats import INPUT_FORMATS, TEXT_FORMATS

if TYPE_CHECKING:
    from petatron.data.tokenizer import Tokenizer
    from petatron.data.tokenizer_training.text_sample import TextSample

_ALGORITHMS = ("bpe", "wordpiece", "unigram")
_DEFAULT_SIZE, _DEFAULT_BYTES, _DEFAULT_COVERAGE = 32_000, 200_000_000, 0.9995


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    parser.description = "Train a tokenizer on a sample of texts, and compare it on held-out ones."
    add(
        "--input",
        nargs="+",
        required=True,
        metavar="INPUT",
        help="what preprocess reads: files, patterns, folders or addresses",
    )
    add("--output", required=True, metavar="DIR", help="folder for tokenizer.json, or vocab.txt")
    text = "bpe: byte-level BPE (GPT-2); wordpiece: BERT's vocab.txt; unigram: of pieces (default: bpe)"
    add("--algorithm", choices=_ALGORITHMS, default="bpe", help=text)
    add(
        "--vocab-size",
        type=int,
        default=_DEFAULT_SIZE,
        metavar="N",
        help="ids, special tokens included (default: 32000)",
    )
    text = "a token for each byte, for characters without an id; makes BPE one of pieces (Llama 2)"
    add("--byte-fallback", action="store_true", help=text)
    add("--split-digits", action="store_true", help="make every digit a word (not wordpiece)")
    add("--special-tokens", nargs="+", default=[], metavar="TOKEN", help="special tokens beside the algorithm's own")
    add("--lowercase", action="store_true", help="lowercase texts and strip accents (wordpiece)")
    text = "share of the text whose characters have ids (default: 0.9995); bytes need none"
    add("--character-coverage", type=float, metavar="SHARE", help=text)
    text = "bytes of text to read at most, from the beginning of each file (default: 200000000)"
    add("--sample-bytes", type=int, default=_DEFAULT_BYTES, metavar="N", help=text)
    text = "other tokenizers to compare with: folders (GPT-2's vocab.json and merges.txt), or files"
    add("--compare", nargs="+", default=[], metavar="PATH", help=text)
    add(
        "--input-format",
        choices=INPUT_FORMATS,
        default="auto",
        help="as in preprocess (default: by name and content)",
    )
    add("--json-keys", nargs="+", default=["text"], metavar="KEY", help="keys to take text from (default: text)")
    add("--on-error", choices=("fail", "skip"), default="fail", help="what a malformed line does (default: fail)")
    add("--overwrite", action="store_true", help="replace a tokenizer that exists")


def run(args: argparse.Namespace) -> int:
    """Checks the flags, trains, and prints the report."""
    raise_problems(_problems(args))

    from petatron.data.tokenizer import open_tokenizer_files
    from petatron.data.tokenizer_training.text_sample import SampleOptions, TextSample
    from petatron.data.tokenizer_training.train_tokenizer import TokenizerTraining, train_tokenizer

    others = {path: open_tokenizer_files(Path(path)) for path in args.compare}
    training = TokenizerTraining(
        algorithm=args.algorithm,
        vocab_size=args.vocab_size,
        byte_fallback=args.byte_fallback,
        splits_digits=args.split_digits,
        special_tokens=tuple(args.special_tokens),
        lowercase=args.lowercase,
        character_coverage=args.character_coverage or _DEFAULT_COVERAGE,
    )
    sample = TextSample(
        SampleOptions(
            inputs=tuple(args.input),
            input_format=args.input_format,
            json_keys=tuple(args.json_keys),
            sample_bytes=args.sample_bytes,
            on_error=args.on_error,
        )
    )
    folder = Path(args.output)
    train_tokenizer(sample, training, folder)
    tokenizers = {args.output: open_tokenizer_files(folder), **others}
    _print_sample(sample)
    _print_compression(tokenizers, sample.held_out)
    size = tokenizers[args.output].vocab_size
    if size < args.vocab_size:
        print(f"{args.output} has {size:,} ids, not {args.vocab_size:,}: the sample has no further pairs to merge")
    print(f"use it: {_flags(args, folder)}")
    return 0


def _problems(args: argparse.Namespace) -> Iterator[Problem]:
    is_wordpiece = args.algorithm == "wordpiece"
    for flag, given in (("--byte-fallback", args.byte_fallback), ("--split-digits", args.split_digits)):
        if given and is_wordpiece:
            rule = "is not for wordpiece: a vocab.txt has no place for it, and BERT's rules divide texts"
            yield Problem(flag, "", rule, "Leave it out, or use --algorithm bpe or unigram.")
    if args.lowercase and not is_wordpiece:
        rule = f"is not for {args.algorithm}, whose tokens decode to the text as it was"
        yield Problem("--lowercase", "", rule, "Leave it out, or use --algorithm wordpiece.")
    for flag, value in (("--vocab-size", args.vocab_size), ("--sample-bytes", args.sample_bytes)):
        if value < 1:
            yield Problem(flag, str(value), "must be at least 1", "Leave it out for the default.")
    coverage = args.character_coverage
    if coverage is not None and not 0 < coverage <= 1:
        yield Problem(
            "--character-coverage", str(coverage), "must be above 0 and at most 1", "Use a share such as 0.9995."
        )
    elif coverage is not None and args.algorithm == "bpe" and not args.byte_fallback:
        print("note: --character-coverage has no effect: byte-level BPE has ids for all bytes.", file=sys.stderr)
    if "" in args.special_tokens:
        yield Problem("--special-tokens", "", "names an empty token", "Leave it out.")
    if args.input_format in TEXT_FORMATS and len(args.json_keys) > 1:
        rule = "are several, and a text has one"
        yield Problem("--json-keys", " ".join(args.json_keys), rule, "Name one, or use --input-format jsonl.")
    existing = [name for name in ("tokenizer.json", "vocab.txt") if (Path(args.output) / name).exists()]
    if existing and not args.overwrite:
        rule = f"has a {existing[0]} already"
        yield Problem("--output", args.output, rule, "Give another folder, or replace it with --overwrite.")


def _print_sample(sample: TextSample) -> None:
    texts = count_with_noun(sample.documents, "text")
    held_out = 0 if sample.from_training else len(sample.held_out)
    print(f"sample: {texts}, {format_bytes(sample.num_bytes)}; {held_out:,} of them held out")
    if sample.malformed:
        print(f"{count_with_noun(sample.malformed, 'malformed line')} skipped")
    if sample.from_training:
        print("note: too few texts to hold any out, so that the first ones of training are measured")


def _print_compression(tokenizers: Mapping[str, Tokenizer], texts: Sequence[str]) -> None:
    from petatron.data.tokenizer_training.compression import measure_compression

    width = max(map(len, tokenizers))
    print(f"{'':<{width}} {'ids':>9} {'tokens':>11} {'bytes per token':>16} {'unknown':>9}")
    for name, tokenizer in tokenizers.items():
        result = measure_compression(tokenizer, texts)
        unknown = f"{result.num_unknown / max(result.num_tokens, 1):.2%}"
        counts = f"{tokenizer.vocab_size:>9,} {result.num_tokens:>11,} {result.bytes_per_token:>16.3f} {unknown:>9}"
        print(f"{name:<{width}} {counts}")


def _flags(args: argparse.Namespace, folder: Path) -> str:
    """Returns the flags with which the tokenizer is used."""
    if args.algorithm != "wordpiece":
        return f"--tokenizer-model {shlex.quote(args.output)}"
    kind = "BertWordPieceLowerCase" if args.lowercase else "BertWordPieceCase"
    named = f" --tokenizer-special-tokens {shlex.join(args.special_tokens)}" if args.special_tokens else ""
    return f"--tokenizer-type {kind} --vocab-file {shlex.quote(str(folder / 'vocab.txt'))}{named}"
