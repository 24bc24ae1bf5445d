"""`petatron data filter`: keeps the documents that no rule drops."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

from petatron.base.errors import Problem, raise_problems
from petatron.base.format_text import align_columns
from petatron.cli.curation.step_arguments import (
    add_step_arguments,
    ignored_flags,
    print_summary,
    step_files,
    step_progress,
)

if TYPE_CHECKING:
    from petatron.data.curate.filter.filter_documents import Perplexities


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    parser.description = "Keep the documents that no rule drops, and count those that each rule drops."
    add_step_arguments(parser, required=False)  # --list-rules needs none
    add("--min-chars", type=int, metavar="N", help="drop shorter texts")
    add("--max-chars", type=int, metavar="N", help="drop longer texts")
    add("--min-words", type=int, metavar="N", help="drop texts of fewer words")
    add("--regex-drop", nargs="+", default=[], metavar="PATTERN", help="drop texts in which one of them matches")
    add("--regex-keep", nargs="+", default=[], metavar="PATTERN", help="drop texts in which none of them matches")
    add("--gopher", action="store_true", help="the quality and repetition rules of Gopher (English)")
    add("--stop-words", nargs="+", metavar="WORD", help="of --gopher, two of which must occur (the be to of ...)")
    add("--c4", action="store_true", help="the rules of C4: lines that are no sentences are removed first")
    add("--language", nargs="+", default=[], metavar="CODE", help="drop texts in other languages (en de fr ...)")
    add("--language-threshold", type=float, metavar="SHARE", help="of the text in these languages, at least (0.5)")
    add("--perplexity", metavar="CHECKPOINT", help="the model that --max-perplexity is by")
    add("--max-perplexity", type=float, metavar="P", help="drop texts of a higher perplexity per token")
    add("--perplexity-tokens", type=int, metavar="N", help="measure the first N tokens of each text (all)")
    add("--perplexity-device", choices=("cpu", "cuda"), help="where the model is (cuda if there is one)")
    add("--limit", nargs="+", default=[], metavar="RULE=N", help="other bounds, for example gopher_few_words=20")
    add("--without", nargs="+", default=[], metavar="RULE", help="rules to leave out")
    add("--list-rules", action="store_true", help="print the rules that are chosen, with their bounds, and stop")
    add("--save-dropped", action="store_true", help="write dropped texts too, to FOLDER/dropped, with the rule")


def run(args: argparse.Namespace) -> int:
    raise_problems(_problems(args))
    if not args.gopher:
        ignored_flags(args, ("stop_words",), without="--gopher")
    if not args.language:
        ignored_flags(args, ("language_threshold",), without="--language")
    if args.perplexity is None:
        ignored_flags(args, ("perplexity_tokens", "perplexity_device"), without="--perplexity")

    from petatron.data.curate.filter.filter_documents import FilterOptions, filter_documents, parse_bounds, rule_table

    names = (
        "min_chars",
        "max_chars",
        "min_words",
        "gopher",
        "c4",
        "language_threshold",
        "max_perplexity",
        "save_dropped",
    )
    given = {name: value for name in names if (value := getattr(args, name)) is not None}
    lists = ("regex_drop", "regex_keep", "stop_words", "without")
    given |= {name: tuple(value) for name in lists if (value := getattr(args, name)) is not None}
    options = FilterOptions(**given, languages=tuple(args.language), bounds=parse_bounds(args.limit))
    rules = rule_table(options)
    if args.list_rules:
        print(align_columns(rules) if rules else "no rules are chosen: --gopher, --c4, --min-chars ...")
        return 0
    if not rules and options.max_perplexity is None:
        fix = "Choose some: --gopher, --c4, --language en, --min-chars 200, ..."
        raise_problems([Problem("petatron data filter", "", "has no rules", fix)])
    perplexities = None if args.perplexity is None else _open_model(args)
    with step_progress() as show:
        summary = filter_documents(step_files(args), options, perplexities, show)
    print_summary(summary, args.output)
    for name in ("languages", "removed_lines"):
        if counts := summary.details.get(name):
            shown = ", ".join(f"{key} {count:,}" for key, count in list(counts.items())[:8])
            print(f"{name.replace('_', ' ')}: {shown}")
    return 0


def _problems(args: argparse.Namespace) -> list[Problem]:
    problems: list[Problem] = []
    needed = () if args.list_rules else (("--input", args.input), ("--output", args.output))
    problems += [Problem(flag, "", "is missing", "Name the files and a folder.") for flag, given in needed if not given]
    if (args.perplexity is None) != (args.max_perplexity is None):
        missing = "--max-perplexity" if args.max_perplexity is None else "--perplexity"
        problems.append(Problem(missing, "", "is missing", "--perplexity CHECKPOINT goes with --max-perplexity P."))
    if args.max_perplexity is not None and not args.max_perplexity >= 1:
        problems.append(Problem("--max-perplexity", f"{args.max_perplexity:g}", "is below 1", "Give 1 or more."))
    if args.perplexity_tokens is not None and args.perplexity_tokens < 1:
        problems.append(Problem("--perplexity-tokens", str(args.perplexity_tokens), "is below 1", "Give a count."))
    return problems


def _open_model(args: argparse.Namespace) -> Perplexities:
    from petatron.evaluate.text_perplexity import TextPerplexity
    from petatron.pretrained.from_pretrained import from_pretrained
    from petatron.serve.open_engine import model_settings

    flags = [] if args.perplexity_device is None else ["--device", args.perplexity_device]
    settings = model_settings(args.perplexity, flags)
    tokenizer = settings.required_tokenizer()
    model = from_pretrained(settings.folder, flags=flags, gradients=False)
    seq_length = settings.loaded.config.model.seq_length
    return TextPerplexity.of(model, tokenizer, seq_length=seq_length, max_tokens=args.perplexity_tokens)
