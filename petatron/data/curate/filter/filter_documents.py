"""Keeps the documents that no rule drops. A document is counted under the first rule that drops it.

The rules are asked in this order: those of C4, which first remove lines from the text, then lengths, patterns, Gopher's, the language, and
last the perplexity, which a model gives in the process that has it.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import Any

from petatron.base.errors import ConfigError, Problem, raise_problems
from petatron.data.curate.files.document_blocks import Document, parse_block, record_line, with_key
from petatron.data.curate.files.pass_progress import OnProgress
from petatron.data.curate.files.per_line_step import SAVED, JudgedBlock, run_line_step
from petatron.data.curate.files.step_files import StepFiles, check_step_files
from petatron.data.curate.files.step_summary import StepSummary
from petatron.data.curate.filter.c4_rules import c4_line_rules, c4_rules
from petatron.data.curate.filter.gopher_rules import STOP_WORDS, gopher_rules
from petatron.data.curate.filter.rule import LineRule, Rule, adjust_rules
from petatron.data.curate.filter.text_view import TextView
from petatron.data.curate.language.language_identification import LANGUAGES
from petatron.data.inputs.line_blocks import LineBlock

MAX_PERPLEXITY, NO_LINES_LEFT = "max_perplexity", "c4_no_lines_left"
LANGUAGE_THRESHOLD = 0.5
DROPPED_KEY = "dropped_by"

Perplexities = Callable[[Sequence[str]], Sequence[float]]
"""Returns the perplexity of each text."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FilterOptions:
    """Which rules there are. `bounds` replaces those of rules by name, `without` names rules that are left out."""

    min_chars: int | None = None
    max_chars: int | None = None
    min_words: int | None = None
    regex_drop: tuple[str, ...] = ()
    """Patterns that no kept document has anywhere."""
    regex_keep: tuple[str, ...] = ()
    """Patterns of which a kept document has at least one."""
    gopher: bool = False
    stop_words: tuple[str, ...] = STOP_WORDS
    c4: bool = False
    languages: tuple[str, ...] = ()
    language_threshold: float = LANGUAGE_THRESHOLD
    max_perplexity: float | None = None
    bounds: tuple[tuple[str, float], ...] = ()
    without: tuple[str, ...] = ()
    save_dropped: bool = False
    """Write dropped documents too, with the rule that dropped them."""


def filter_documents(
    files: StepFiles,
    options: FilterOptions,
    perplexities: Perplexities | None = None,
    on_progress: OnProgress | None = None,
) -> StepSummary:
    """Writes what the rules keep, and the summary; `perplexities` is a model's, where there is a bound for them."""
    parts = ("", SAVED) if options.save_dropped else ("",)
    files = check_step_files(files, step="filter", parts=parts)
    rules, line_rules = build_rules(options)
    settings: dict[str, Any] = {rule.name: rule.bound for rule in rules}
    settings |= {rule.name: "removes lines" for rule in line_rules}
    settings |= {"regex_drop": options.regex_drop} if options.regex_drop else {}
    settings |= {"regex_keep": options.regex_keep} if options.regex_keep else {}
    settings |= {"languages": options.languages} if options.languages else {}
    judge_again = None
    if options.max_perplexity is not None:
        assert perplexities is not None
        settings[MAX_PERPLEXITY] = options.max_perplexity
        judge_again = partial(_judge_perplexity, files.json_key, options, perplexities)
    summary = StepSummary("filter", settings)
    run_line_step(
        files,
        summary,
        partial(_judge_block, options, files.json_key),
        parts=parts,
        judge_again=judge_again,
        on_progress=on_progress,
    )
    return summary


def build_rules(options: FilterOptions) -> tuple[tuple[Rule, ...], tuple[LineRule, ...]]:
    """Returns the rules in their order; raises `ConfigError` with every problem of the options."""
    problems = list(_language_problems(options))
    rules: list[Rule] = list(c4_rules()) if options.c4 else []
    for name, count, number in (
        ("min_chars", _num_chars, options.min_chars),
        ("max_chars", _num_chars, options.max_chars),
        ("min_words", _num_tokens, options.min_words),
    ):
        if number is not None:
            if number < 0:
                problems.append(Problem(f"--{name.replace('_', '-')}", str(number), "is below 0", "Give a count."))
            limit = {"most" if name == "max_chars" else "least": number}
            rules.append(Rule(name, count, **limit))
    for flag, patterns in (("--regex-drop", options.regex_drop), ("--regex-keep", options.regex_keep)):
        compiled = [pattern for text in patterns if (pattern := _compiled(flag, text, problems)) is not None]
        limit = {"most": 0} if flag == "--regex-drop" else {"least": 1}
        if compiled:
            rules.append(Rule(flag[2:].replace("-", "_"), partial(_num_matching, compiled), **limit))
    rules += gopher_rules(options.stop_words) if options.gopher else ()
    if options.languages:
        rules.append(Rule("language", partial(_language_share, options.languages), least=options.language_threshold))
    line_rules = c4_line_rules() if options.c4 else ()
    adjusted, adjusted_lines, unknown = adjust_rules(rules, dict(options.bounds), options.without, line_rules)
    raise_problems([*problems, *unknown])
    return adjusted, adjusted_lines


def _language_problems(options: FilterOptions) -> list[Problem]:
    unknown = [name for name in options.languages if name not in LANGUAGES]
    problems = [
        Problem("--language", name, "is not in the model", f"It has {', '.join(LANGUAGES)}.") for name in unknown
    ]
    if not 0 < options.language_threshold <= 1:
        rule = "is not above 0 and at most 1"
        problems.append(Problem("--language-threshold", f"{options.language_threshold:g}", rule, "Use 0.5."))
    return problems


def _compiled(flag: str, text: str, problems: list[Problem]) -> re.Pattern[str] | None:
    try:
        return re.compile(text)
    except (re.error, RecursionError, OverflowError) as error:
        problems.append(Problem(flag, text, f"is no regular expression: {error}", "Correct it."))
        return None


def _num_chars(view: TextView) -> float:
    return len(view.text)


def _num_tokens(view: TextView) -> float:
    return len(view.tokens)


def _num_matching(patterns: Sequence[re.Pattern[str]], view: TextView) -> float:
    return sum(pattern.search(view.text) is not None for pattern in patterns)


def _language_share(languages: Sequence[str], view: TextView) -> float:
    return sum(view.language_shares.get(name, 0.0) for name in languages)


def _judge_block(options: FilterOptions, json_key: str, block: LineBlock) -> JudgedBlock:
    rules, line_rules = _cached_rules(options)
    parsed = parse_block(block, json_key)
    result = JudgedBlock.of(parsed)
    for document in parsed.documents:
        line, view = document.raw, TextView(document.text)
        if line_rules:
            view = _without_lines(view, line_rules, result)
            if not view.text:
                _drop(result, document, NO_LINES_LEFT, options)
                continue
            if view.text != document.text:
                line = record_line({**document.record, json_key: view.text})
        if options.languages:
            result.tally("languages", next(iter(view.language_shares)))
        reason = next((rule.name for rule in rules if rule.drops(view)), None)
        if reason is None:
            result.keep(line)
        else:
            _drop(result, document, reason, options)
    return result


_cached_rules = lru_cache(maxsize=1)(build_rules)
"""A worker builds them with its first block."""


def _without_lines(view: TextView, rules: Sequence[LineRule], result: JudgedBlock) -> TextView:
    """Returns the text of the lines that all rules keep, and counts the others by the first rule that removes them."""
    kept: list[str] = []
    for line in view.lines:
        reason = next((rule.name for rule in rules if not rule.keeps(line)), None)
        if reason is None:
            kept.append(line)
        else:
            result.tally("removed_lines", reason)
    return view if len(kept) == len(view.lines) and kept else TextView("\n".join(kept))


def _drop(result: JudgedBlock, document: Document, reason: str, options: FilterOptions) -> None:
    result.drop(reason, with_key(document, DROPPED_KEY, reason) if options.save_dropped else None)


def _judge_perplexity(
    json_key: str, options: FilterOptions, perplexities: Perplexities, result: JudgedBlock
) -> JudgedBlock:
    """Drops what the other rules have kept where its perplexity is above the bound."""
    kept = result.lines.pop("", [])
    documents = [_reparsed(line, json_key) for line in kept]
    for document, perplexity in zip(documents, perplexities([document.text for document in documents]), strict=True):
        assert options.max_perplexity is not None
        if perplexity <= options.max_perplexity:
            result.keep(document.raw)
        else:
            saved = {**document.record, DROPPED_KEY: MAX_PERPLEXITY, "perplexity": round(perplexity, 3)}
            result.drop(MAX_PERPLEXITY, record_line(saved) if options.save_dropped else None)
    return result


def _reparsed(line: bytes, json_key: str) -> Document:
    record: Mapping[str, Any] = json.loads(line)
    value = record[json_key]
    return Document(0, line, dict(record), value if isinstance(value, str) else "\n".join(value))


def parse_bounds(words_given: Sequence[str]) -> tuple[tuple[str, float], ...]:
    """Returns NAME=NUMBER words as pairs.

    >>> parse_bounds(["c4_sentences=3"])
    (('c4_sentences', 3.0),)
    """
    bounds: list[tuple[str, float]] = []
    problems: list[Problem] = []
    for text in words_given:
        name, _, number = text.partition("=")
        try:
            bounds.append((name, float(number)))
        except ValueError:
            problems.append(Problem("--limit", text, "is not NAME=NUMBER", "Write gopher_few_words=20, say."))
    if problems:
        raise ConfigError(problems)
    return tuple(bounds)


def rule_table(options: FilterOptions) -> list[tuple[str, str]]:
    """Returns the names of all rules of options, and what they do."""
    rules, line_rules = build_rules(options)
    return [(rule.name, "removes lines") for rule in line_rules] + [(rule.name, rule.bound) for rule in rules]
