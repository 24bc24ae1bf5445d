"""Parses the command line into settings and collects every problem.

A flag is a field of the schema (`--num-layers 2` or `--num-layers=2`), another spelling from `megatron_flags.py`, or wrong.
Booleans are `--x`, `--no-x`, `--x=false`; a bare `true` or `false` after one is its value, any other word is
not. A switch is written like a boolean, or with one of its choices. Fields with several values consume words until the
next flag. Underscores count as dashes, so torchrun's
`--nproc_per_node=8` is understood. A word that starts with `--` is always a flag; one that starts with a single dash is
a value, so negative numbers need no quoting.
"""

from __future__ import annotations

import shlex
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from petatron.base.errors import Problem
from petatron.config.flags import flag_names_of_other_trainers
from petatron.config.flags import megatron_flags as spellings
from petatron.config.flags.flag_combinations import apply_combined_rules
from petatron.config.flags.flag_names_of_other_trainers import ALTERNATIVES, absent_feature, alternative
from petatron.config.flags.megatron_table import MegatronFlag, megatron_flags
from petatron.config.flags.parsed_flags import ImpliedFlag, ParsedFlags
from petatron.config.flags.sft_flag import SFT_FLAG, apply_sft_flag
from petatron.config.schema.fields import (
    FieldInfo,
    FieldValue,
    all_fields,
    closest_matches,
    fields_by_name,
    join_with_or,
)

PRESET_FLAG, FILE_FLAG, FROM_FLAG = "--preset", "--config", "--from"
TOY_FLAG, SPLIT_DATA_FLAG = "--toy", "--per-split-data-args-path"
_BINARY_DIGITS = {"1": "on", "0": "off"}
_MODEL_SOURCES = {
    PRESET_FLAG: "a preset's name",
    FILE_FLAG: "a YAML file",
    FROM_FLAG: "the folder of a model or of a run",
}
_SOURCES = _MODEL_SOURCES | {SPLIT_DATA_FLAG: "a JSON file with the lists train, valid and test"}


@dataclass(frozen=True, slots=True)
class _FlagToken:
    """One flag with the words that follow it, up to the next flag; `inline_value` is the part after `=`."""

    typed: str
    flag: str
    inline_value: str | None
    following_words: tuple[str, ...]

    @property
    def value(self) -> str:
        """Its one value; empty without any."""
        return next(iter(self.following_words), "") if self.inline_value is None else self.inline_value

    @property
    def all_values(self) -> str:
        return " ".join(self.following_words) if self.inline_value is None else self.inline_value

    @property
    def words_after_value(self) -> tuple[str, ...]:
        return self.following_words[1:] if self.inline_value is None else self.following_words


def parse_flags(argv: Sequence[str], *, presets: Collection[str] | None = None) -> ParsedFlags:
    """Returns settings in the order typed; nothing is raised, the problems are in the result.

    presets: the names of all, where no other source names a model.
    """
    parsed = ParsedFlags()
    for token in _without_swallowed_model(_tokenize(argv, parsed), parsed, presets):
        surplus = _apply_flag(token, parsed)
        parsed.problems += [_stray_word(text) for text in surplus]
    if parsed.sft_files is not None:
        apply_sft_flag(parsed, parsed.sft_files)
    apply_combined_rules(parsed)
    return parsed


def known_flags() -> list[str]:
    """Returns every accepted spelling, for suggestions."""
    of_fields = [info.flag for info in fields_by_name().values()]
    negated = [f"--no-{info.flag[2:]}" for info in fields_by_name().values() if _needs_no_value(info)]
    others = [
        *spellings.ALIASES,
        *spellings.SHORTHANDS,
        *spellings.CHOICE_FLAGS,
        spellings.ROPE_TYPE,
        spellings.NO_GELU_FUSION,
    ]
    accepted = [flag for flag, answer in megatron_flags().items() if answer.kind == "always so"]
    return [*of_fields, *negated, *others, *accepted, *_SOURCES, TOY_FLAG, SFT_FLAG, spellings.MEGATRON_DEFAULTS_FLAG]


def unsupported_problem(where: str, value: str, feature: str, fix: str = "Leave it out") -> Problem:
    """The problem of a feature that exists elsewhere but not here yet."""
    return Problem(where, value, f"needs {feature}, which is not in this version", f"{fix}.")


def check_supported(info: FieldInfo, text: str) -> None:
    """Raises `ValueError` for a word that Megatron has and this version has not; choices and numbers are refused by their parser."""
    if info.kind == "str" and text in spellings.UNSUPPORTED_VALUES.get(info.name, {}):
        raise ValueError("is not in this version")


def value_problem(info: FieldInfo, where: str, text: str, reason: str) -> Problem:
    """The problem of a value that does not fit its field; `where` is how the user named the field."""
    feature = spellings.UNSUPPORTED_VALUES.get(info.name, {}).get(text)
    if feature is not None:
        return unsupported_problem(where, text, feature, ALTERNATIVES.get(feature, f"Use {join_with_or(info.choices)}"))
    meant = _BINARY_DIGITS.get(text, text) if info.is_switch else text
    fix = _did_you_mean(meant, info.choices) or info.meaning
    return Problem(where, text or "''", reason, fix)


def _did_you_mean(text: str, choices: Iterable[str]) -> str:
    """Among few choices a loose match is unambiguous, so a swapped pair of characters in a short word (`mpl`) is near enough."""
    close = closest_matches(text, choices, count=1, cutoff=0.6)
    return f"Did you mean {close[0]}?" if close else ""


def _tokenize(argv: Sequence[str], parsed: ParsedFlags) -> list[_FlagToken]:
    starts = [index for index, text in enumerate(argv) if text.startswith("--")]
    first = starts[0] if starts else len(argv)
    parsed.problems += [_stray_word(text) for text in argv[:first]]
    tokens: list[_FlagToken] = []
    for start, end in zip(starts, [*starts[1:], len(argv)]):
        typed, equals, attached = argv[start].partition("=")
        flag = typed.replace("_", "-")
        tokens.append(_FlagToken(typed, flag, attached if equals else None, tuple(argv[start + 1 : end])))
    return tokens


def _without_swallowed_model(
    tokens: list[_FlagToken], parsed: ParsedFlags, presets: Collection[str] | None
) -> list[_FlagToken]:
    """Takes a preset or a YAML file from the words of a flag with several values, where nothing else names a model: a problem.

    `--freeze PATTERN tiny-llama` would be two patterns, and a model without any size.
    """
    if presets is None or any(token.flag in _MODEL_SOURCES for token in tokens):
        return tokens
    kept: list[_FlagToken] = []
    for token in tokens:
        info, values = _field(token.flag), token.following_words
        if info is not None and info.is_list and values and _names_model(values[-1], presets):
            rule = f"names a model, and {token.typed} takes every word up to the next flag"
            typed = token.typed if token.inline_value is None else f"{token.typed}={token.inline_value}"
            command = shlex.join(("petatron", "train", values[-1], typed, *values[:-1]))
            parsed.problems.append(Problem(token.typed, values[-1], rule, f"Name the model first: `{command}`."))
            parsed.doubtful_flags.update(known_flags())
            token = replace(token, following_words=values[:-1])
        kept.append(token)
    return kept


def _names_model(word: str, presets: Collection[str]) -> bool:
    return word.endswith((".yaml", ".yml")) or (word in presets and not Path(f"{word}.idx").exists())


def _stray_word(text: str) -> Problem:
    return Problem(repr(text), "", "is not a flag and follows no flag that takes it", "Flags start with two dashes.")


def _apply_flag(token: _FlagToken, parsed: ParsedFlags) -> Sequence[str]:
    """Applies one flag; returns the following words it did not use."""
    flag = token.flag
    info = _field(flag)
    negated = _field(f"--{flag[5:]}") if flag.startswith("--no-") else None
    if info is not None:
        return _apply_field(info, token, parsed)
    if negated is not None and _needs_no_value(negated):
        return _apply_valueless(token, parsed, lambda: parsed.add_setting(negated, negated.off_value, token.typed))
    if flag in _SOURCES:
        return _apply_source(token, parsed)
    if flag == spellings.MEGATRON_DEFAULTS_FLAG:
        return _apply_valueless(token, parsed, lambda: setattr(parsed, "megatron_defaults", True))
    if flag == TOY_FLAG:
        return _apply_valueless(token, parsed, lambda: setattr(parsed, "toy", True))
    if flag == SFT_FLAG:
        parsed.sft_files = (
            token.following_words if token.inline_value is None else (token.inline_value, *token.following_words)
        )
        return ()
    if (shorthand := spellings.SHORTHANDS.get(flag)) is not None:
        return _apply_valueless(token, parsed, lambda: _add_shorthand(shorthand, token, parsed))
    if (choices := spellings.CHOICE_FLAGS.get(flag)) is not None:
        return _apply_choice(choices, token, parsed)
    if flag == spellings.ROPE_TYPE:
        return _apply_rope_type(token, parsed)
    if flag == spellings.NO_POSITION_EMBEDDING:
        parsed.drops_learned_positions = True
        return token.following_words
    if flag == spellings.NO_GELU_FUSION:
        return _apply_valueless(token, parsed, lambda: setattr(parsed, "exact_gelu", True))
    answer = megatron_flags().get(flag)
    if answer is not None and answer.kind == "always so":
        return _apply_always_so(answer, token, parsed)
    if answer is not None and answer.asks_for_nothing(token.all_values):
        parsed.implied.append(ImpliedFlag(f"{token.typed} {token.all_values}", "that is what happens anyway"))
        return ()
    parsed.problems.append(_unknown_flag_problem(token, answer, parsed))
    return ()


def _add_shorthand(shorthand: spellings.Shorthand, token: _FlagToken, parsed: ParsedFlags) -> None:
    for name, value in ((shorthand.field, shorthand.value), *shorthand.also):
        parsed.add_setting(fields_by_name()[name], value, token.typed)


def _apply_rope_type(token: _FlagToken, parsed: ParsedFlags) -> Sequence[str]:
    if token.value in spellings.ROPE_TYPES:
        parsed.rope_type = token.value
    else:
        choices = join_with_or(spellings.ROPE_TYPES)
        rule = f"is not one of {choices}" if token.value else "needs a value"
        parsed.problems.append(Problem(token.typed, token.value, rule, f"Use {choices}."))
    return token.words_after_value


def _field(flag: str) -> FieldInfo | None:
    return fields_by_name().get(spellings.ALIASES.get(flag, flag[2:].replace("-", "_")))


def _needs_no_value(info: FieldInfo) -> bool:
    return info.kind == "bool" or info.is_switch


def _apply_field(info: FieldInfo, token: _FlagToken, parsed: ParsedFlags) -> Sequence[str]:
    if info.is_list:
        texts = token.following_words if token.inline_value is None else (token.inline_value, *token.following_words)
        _add_parsed(info, token, texts, parsed)
        return ()
    if token.inline_value is not None:
        _add_parsed(info, token, (token.inline_value,), parsed)
        return token.following_words
    if _needs_no_value(info):
        # A word after a switch is meant as its choice, also where it is none.
        explicit = tuple(word for word in token.following_words[:1] if info.is_switch or word in info.value_words)
        _add_parsed(info, token, explicit or ("true",), parsed)
        return token.following_words[len(explicit) :]
    _add_parsed(info, token, token.following_words[:1], parsed)
    return token.following_words[1:]


def _add_parsed(info: FieldInfo, token: _FlagToken, texts: Sequence[str], parsed: ParsedFlags) -> None:
    values: list[FieldValue] = []
    if not texts:
        parsed.problems.append(Problem(token.typed, "", "needs a value", info.meaning))
        parsed.doubtful_flags.add(info.flag)
    for typed in texts:
        ours = spellings.own_value(info.name, typed)
        text = typed if ours is None else ours.value
        if ours is not None and ours.reason:
            parsed.renamed_values.add((info.name, typed))
            parsed.notices.append(f"{token.typed} {typed} is {text} here: {ours.reason}")
            for name, value in ours.also:
                parsed.add_setting(fields_by_name()[name], value, token.typed)
        try:
            check_supported(info, text)
            values.append(info.parse(text))
        except ValueError as error:
            parsed.problems.append(value_problem(info, token.typed, text, str(error)))
            parsed.doubtful_flags.add(info.flag)
    if len(values) == len(texts) and values:
        parsed.add_setting(info, tuple(values) if info.is_list else values[0], token.typed)  # type: ignore[arg-type]
    elif info.name == "tokenizer_type":  # what another tokenizer would need is unknown
        parsed.doubtful_flags.update(other.flag for other in all_fields() if other.section == info.section)


def _apply_valueless(token: _FlagToken, parsed: ParsedFlags, apply: Callable[[], None]) -> Sequence[str]:
    """Applies a flag without a value: an attached one is a problem."""
    if token.inline_value is None:
        apply()
    else:
        rule = "is given to a flag that takes no value"
        parsed.problems.append(
            Problem(token.typed, token.inline_value, rule, f"Write {token.typed} alone, or leave it out.")
        )
    return token.following_words


def _apply_choice(choices: Mapping[str, spellings.Shorthand], token: _FlagToken, parsed: ParsedFlags) -> Sequence[str]:
    text = token.value
    meant = choices.get(text)
    if meant is not None:
        parsed.add_setting(fields_by_name()[meant.field], meant.value, token.typed)
    else:
        rule = f"is not one of {join_with_or(choices)}" if text else "needs a value"
        fix = _did_you_mean(text, choices) or f"Use {join_with_or(choices)}."
        parsed.problems.append(Problem(token.typed, text, rule, fix))
        parsed.doubtful_flags.update(fields_by_name()[choice.field].flag for choice in choices.values())
    return token.words_after_value


def _apply_always_so(answer: MegatronFlag, token: _FlagToken, parsed: ParsedFlags) -> Sequence[str]:
    if not answer.takes_value:
        implied = ImpliedFlag(token.typed, answer.text)
        return _apply_valueless(token, parsed, lambda: parsed.implied.append(implied))
    value = token.all_values if answer.takes_several else token.value
    parsed.implied.append(ImpliedFlag(f"{token.typed} {value}".strip(), answer.text))
    return () if answer.takes_several else token.words_after_value


def _apply_source(token: _FlagToken, parsed: ParsedFlags) -> Sequence[str]:
    if not token.value:
        parsed.problems.append(Problem(token.typed, "", "needs a value", f"Give {_SOURCES[token.flag]}."))
    elif token.flag == PRESET_FLAG:
        parsed.preset = token.value
    elif token.flag == FROM_FLAG:
        parsed.from_folder = token.value
    elif token.flag == SPLIT_DATA_FLAG:
        parsed.split_data_file = token.value
    else:
        parsed.files.append(token.value)
    return token.words_after_value


def _unknown_flag_problem(token: _FlagToken, answer: MegatronFlag | None, parsed: ParsedFlags) -> Problem:
    flag, typed = token.flag, token.typed
    if answer is not None and answer.kind == "gone":
        parsed.doubtful_flags.update(flag_names_of_other_trainers.suggested_flags(answer.text))
        fix = (
            f"Use {answer.text}."
            if answer.text.startswith("--")
            else "Leave it out: Megatron has no such flag any more."
        )
        return Problem(typed, "", "is an old name", fix)
    if answer is not None and answer.command:
        return Problem(typed, "", "does not belong to this command", f"It is for `{answer.command}`.")
    feature = answer.text if answer is not None else absent_feature(flag_names_of_other_trainers.without_section(flag))
    if feature:
        remedy = answer.remedy if answer is not None else ""
        return unsupported_problem(typed, token.all_values, feature, remedy or alternative(feature))
    close = closest_matches(flag_names_of_other_trainers.without_section(flag), known_flags())
    meant = flag_names_of_other_trainers.suggestion(flag) or (join_with_or(close) if close else "")
    # A misspelt --num-layers should not also be reported as a missing --num-layers; what a model's folder or a preset would have
    # set is unknown, so that every value is in doubt.
    flags = flag_names_of_other_trainers.suggested_flags(meant)
    parsed.doubtful_flags.update(flags if _MODEL_SOURCES.keys().isdisjoint(flags) else known_flags())
    fix = f"Did you mean {meant}?" if meant else "See `petatron train --help` for all flags."
    return Problem(typed, "", "is not a known flag", fix)
