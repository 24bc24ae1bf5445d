"""The flags of a tokenizer, for subcommands that tokenize and train nothing; they are those of a run."""

from __future__ import annotations

import argparse
import sys
from typing import TYPE_CHECKING, Any

from petatron.base.errors import Problem
from petatron.config.schema.fields import all_fields, fields_by_name

if TYPE_CHECKING:
    from petatron.config.schema.data import TokenizerConfig

_IMPLYING = ("tokenizer_model", "vocab_file", "merge_file", "tiktoken_pattern")


def add_tokenizer_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--tokenizer-type", metavar="TYPE", help=f"{', '.join(_types())} (default: from the files given)")
    text = "tokenizer.json or its folder; a tiktoken vocabulary; a SentencePiece .model"
    add("--tokenizer-model", metavar="PATH", help=text)
    add("--vocab-file", metavar="FILE", help="GPT-2 vocab.json, or BERT's vocab.txt")
    add("--merge-file", metavar="FILE", help="GPT-2 merges.txt")
    text = "number of ids of the NullTokenizer; of a TikTokenizer, where its vocabulary is cut"
    add("--vocab-size", type=int, metavar="N", help=text)
    text = "how a TikTokenizer divides text into words (default: v2)"
    add("--tiktoken-pattern", choices=fields_by_name()["tiktoken_pattern"].choices, help=text)
    text = "ids before the vocabulary of a TikTokenizer (default: 1000)"
    add("--tiktoken-num-special-tokens", type=int, metavar="N", help=text)
    text = "special tokens of a TikTokenizer or of WordPiece, or of --tokenizer-sentencepiece-legacy"
    add("--tokenizer-special-tokens", "--tiktoken-special-tokens", nargs="+", metavar="TOKEN", help=text)
    text = "find --tokenizer-special-tokens in a text before SentencePiece divides the rest"
    add("--tokenizer-sentencepiece-legacy", action="store_true", default=None, help=text)
    name = "tokenizer-sentencepiece-ignore-extra-whitespaces"
    text = "give ids to spaces that a SentencePiece model would join"
    add(f"--no-{name}", dest=name.replace("-", "_"), action="store_false", default=None, help=text)
    add("--vocab-extra-ids", type=int, metavar="N", help="sentinels after the vocabulary of WordPiece or SentencePiece")
    text = "divide texts into words as BERT's tokenizer in Python does (WordPiece)"
    add("--tokenizer-hf-no-use-fast", action="store_true", default=None, help=text)
    add("--tokenizer-prompt-format", metavar="FORMAT", help="prompt format of a MultimodalTokenizer")
    choices = fields_by_name()["image_tag_type"].choices
    add("--image-tag-type", choices=choices, help="tags around the images of a MultimodalTokenizer")
    text = "tokens that a MultimodalTokenizer adds (default: <image>)"
    add("--special-tokens", nargs="+", metavar="TOKEN", help=text)
    add("--extra-vocab-size", type=int, metavar="N", help=argparse.SUPPRESS)


def _types() -> tuple[str, ...]:
    return fields_by_name()["tokenizer_type"].choices


def tokenizer_settings(args: argparse.Namespace, problems: list[Problem]) -> TokenizerConfig:
    """Returns the settings of a tokenizer; adds what is wrong with them, and tells which have no effect."""
    from petatron.config.schema.data import TokenizerConfig
    from petatron.config.schema.run import RawRunConfig
    from petatron.config.schema.sections.tokenizer_options import infer_tokenizer_type
    from petatron.config.setting_bounds_and_conflicts import number_problems, out_of_bounds
    from petatron.validate.tokenizer_settings import check_tokenizer

    values: dict[str, Any] = {
        info.name: getattr(args, info.name, None) for info in all_fields() if info.section == "tokenizer"
    }
    given = {name: _as_setting(value) for name, value in values.items() if value is not None}
    if args.tokenizer_type is not None and args.tokenizer_type not in _types():
        fix = f"Use one of {', '.join(_types())}."
        problems.append(Problem("--tokenizer-type", args.tokenizer_type, "is not in this version", fix))
        return TokenizerConfig()
    implied = infer_tokenizer_type(**{name: values[name] for name in _IMPLYING})
    if implied is not None:
        given.setdefault("tokenizer_type", implied[0])
    config = TokenizerConfig(**given)
    run, infos = RawRunConfig(tokenizer=config), [fields_by_name()[name] for name in given]
    flags = {info.flag for info in infos}
    numbers = [problem for problem in number_problems(run) if problem.where in flags]
    reported = {problem.where for problem in numbers}
    beyond = [problem for problem in out_of_bounds(run, reported=reported) if problem.where in flags]
    problems += [*numbers, *beyond, *check_tokenizer(config)]
    if args.extra_vocab_size is not None:
        print("note: --extra-vocab-size has no effect: token files have the ids of texts alone.", file=sys.stderr)
    for info in infos:
        if why := info.unused_reason(run):
            print(f"note: {info.flag} has no effect: {why}.", file=sys.stderr)
    return config


def _as_setting(value: Any) -> Any:
    return tuple(value) if isinstance(value, list) else value
