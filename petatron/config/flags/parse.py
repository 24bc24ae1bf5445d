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
from dataclasses import dataclass, field, replace
from pathlib import Path

from petatron.base.errors import Problem
from petatron.config.flags import foreign_names, megatron_flags
from petatron.config.flags.foreign_names import ALTERNATIVES, absent_feature, alternative
from petatron.config.schema.fields import (
    FieldInfo,
    FieldValue,
    closest_matches,
    fields_by_name,
    fields_by_path,
    join_with_or,
)
from petatron.config.value_origins import Setting, ValueOrigin

PRESET_FLAG, FILE_FLAG, FROM_FLAG = "--preset", "--config", "--from"
TOY_FLAG = "--toy"
_BINARY_DIGITS = {"1": "on", "0": "off"}
_SOURCES = {PRESET_FLAG: "a preset's name", FILE_FLAG: "a YAML file", FROM_FLAG: "the folder of a model or of a run"}


@dataclass(slots=True)
class ParsedFlags:
    """The settings of argv. `doubtful_flags` are flags whose value is in doubt, so that rules about them are skipped."""

    settings: list[Setting] = field(default_factory=list)
    preset: str | None = None
    files: list[str] = field(default_factory=list)
    from_folder: str | None = None
    notices: list[str] = field(default_factory=list)
    problems: list[Problem] = field(default_factory=list)
    doubtful_flags: set[str] = field(default_factory=set)
    drops_learned_positions: bool = False
    toy: bool = False

    def add_setting(self, info: FieldInfo, value: FieldValue, spelling: str) -> None:
        """The last of several wins; a flag that may be repeated takes the values of all."""
        if "repeatable" in info.marks and isinstance(value, tuple):
            before = [
                given.value for given in self.settings if given.path == info.path and isinstance(given.value, tuple)
            ]
            value = tuple(dict.fromkeys(map(str, (*(before[-1] if before else ()), *value))))
        self.settings.append(Setting(info.path, value, ValueOrigin("flag", spelling)))


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
    _drop_overridden_shorthands(parsed)
    _check_contradictions(parsed)
    return parsed


def known_flags() -> list[str]:
    """Returns every accepted spelling, for suggestions."""
    of_fields = [info.flag for info in fields_by_name().values()]
    negated = [f"--no-{info.flag[2:]}" for info in fields_by_name().values() if _needs_no_value(info)]
    others = [*megatron_flags.ALIASES, *megatron_flags.SHORTHANDS, *megatron_flags.CHOICE_FLAGS]
    return [*of_fields, *negated, *others, *megatron_flags.NO_OP_FLAGS, *_SOURCES, TOY_FLAG]


def unsupported_problem(where: str, value: str, feature: str, fix: str = "Leave it out") -> Problem:
    """The problem of a feature that exists elsewhere but not here yet."""
    return Problem(where, value, f"needs {feature}, which is not in this version", f"{fix}.")


def check_supported(info: FieldInfo, text: str) -> None:
    """Raises `ValueError` for a word that Megatron has and this version has not; choices and numbers are refused by their parser."""
    if info.kind == "str" and text in megatron_flags.UNSUPPORTED_VALUES.get(info.name, {}):
        raise ValueError("is not in this version")


def value_problem(info: FieldInfo, where: str, text: str, reason: str) -> Problem:
    """The problem of a value that does not fit its field; `where` is how the user named the field."""
    feature = megatron_flags.UNSUPPORTED_VALUES.get(info.name, {}).get(text)
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
    if presets is None or any(token.flag in _SOURCES for token in tokens):
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
    if flag == TOY_FLAG:
        return _apply_valueless(token, parsed, lambda: setattr(parsed, "toy", True))
    if (shorthand := megatron_flags.SHORTHANDS.get(flag)) is not None:
        target = fields_by_name()[shorthand.field]
        return _apply_valueless(token, parsed, lambda: parsed.add_setting(target, shorthand.value, token.typed))
    if (choices := megatron_flags.CHOICE_FLAGS.get(flag)) is not None:
        return _apply_choice(choices, token, parsed)
    if flag == megatron_flags.NO_POSITION_EMBEDDING:
        parsed.drops_learned_positions = True
        return token.following_words
    if (implied := megatron_flags.NO_OP_FLAGS.get(flag)) is not None:
        return _apply_no_op(implied, token, parsed)
    parsed.problems.append(_unknown_flag_problem(token, parsed))
    return ()


def _field(flag: str) -> FieldInfo | None:
    return fields_by_name().get(megatron_flags.ALIASES.get(flag, flag[2:].replace("-", "_")))


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
    for text in texts:
        try:
            check_supported(info, text)
            values.append(info.parse(megatron_flags.own_value_text(info.name, text)))
        except ValueError as error:
            parsed.problems.append(value_problem(info, token.typed, text, str(error)))
            parsed.doubtful_flags.add(info.flag)
    if len(values) == len(texts) and values:
        parsed.add_setting(info, tuple(values) if info.is_list else values[0], token.typed)  # type: ignore[arg-type]


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


def _apply_choice(
    choices: Mapping[str, megatron_flags.Shorthand], token: _FlagToken, parsed: ParsedFlags
) -> Sequence[str]:
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


def _apply_no_op(no_op: megatron_flags.NoOpFlag, token: _FlagToken, parsed: ParsedFlags) -> Sequence[str]:
    notice = f"{token.typed} is accepted and changes nothing: {no_op.reason}"
    if not no_op.takes_value:
        return _apply_valueless(token, parsed, lambda: parsed.notices.append(notice))
    parsed.notices.append(notice)
    return token.words_after_value


def _apply_source(token: _FlagToken, parsed: ParsedFlags) -> Sequence[str]:
    if not token.value:
        parsed.problems.append(Problem(token.typed, "", "needs a value", f"Give {_SOURCES[token.flag]}."))
    elif token.flag == PRESET_FLAG:
        parsed.preset = token.value
    elif token.flag == FROM_FLAG:
        parsed.from_folder = token.value
    else:
        parsed.files.append(token.value)
    return token.words_after_value


def _unknown_flag_problem(token: _FlagToken, parsed: ParsedFlags) -> Problem:
    flag, typed = token.flag, token.typed
    value = token.inline_value if token.inline_value is not None else " ".join(token.following_words)
    feature = megatron_flags.UNSUPPORTED_FLAGS.get(flag) or absent_feature(foreign_names.without_section(flag))
    if feature is not None:
        return unsupported_problem(typed, value, feature, alternative(feature))
    if (renamed := megatron_flags.RENAMED_FLAGS.get(flag)) is not None:
        parsed.doubtful_flags.update(foreign_names.suggested_flags(renamed))
        return Problem(typed, "", "is an old name", f"Use {renamed}.")
    if flag in megatron_flags.OTHER_COMMAND_FLAGS:
        fix = f"It is a flag of `{megatron_flags.OTHER_COMMAND_FLAGS[flag]}`."
        return Problem(typed, "", "does not belong to this command", fix)
    close = closest_matches(foreign_names.without_section(flag), known_flags())
    meant = foreign_names.suggestion(flag) or (join_with_or(close) if close else "")
    # A misspelt --num-layers should not also be reported as a missing --num-layers; what a model's folder or a preset would have
    # set is unknown, so that every value is in doubt.
    flags = foreign_names.suggested_flags(meant)
    parsed.doubtful_flags.update(flags if _SOURCES.keys().isdisjoint(flags) else known_flags())
    fix = f"Did you mean {meant}?" if meant else "See `petatron train --help` for all flags."
    return Problem(typed, "", "is not a known flag", fix)


def _drop_overridden_shorthands(parsed: ParsedFlags) -> None:
    """`--data-parallel-sharding-strategy optim_grads --use-megatron-fsdp`: the field's own flag wins in either order."""

    def yields(setting: Setting) -> bool:
        shorthand = megatron_flags.SHORTHANDS.get(setting.origin.detail.replace("_", "-"))
        return shorthand is not None and shorthand.is_overridable

    named = {setting.path for setting in parsed.settings if not yields(setting)}
    parsed.settings = [setting for setting in parsed.settings if not (yields(setting) and setting.path in named)]


def _check_contradictions(parsed: ParsedFlags) -> None:
    """`--swiglu --squared-relu`, `--fp8-format e4m3 --fp8-hybrid`: each names a whole choice, so neither can quietly win.

    The same flag twice is no contradiction, the last one wins; nor is a `none` or `--no-x` that reverts an earlier one,
    nor a field's own flag that refines a model whose base was given in shorthands. Of two names of one field (`--tp 2
    --tensor-model-parallel-size 4`) the last wins too, as scripts that add flags expect; a notice says so.
    """
    before: dict[str, Setting] = {}
    for setting in parsed.settings:
        earlier, info = before.get(setting.path), fields_by_path()[setting.path]
        before[setting.path] = setting
        if earlier is None or earlier.value == setting.value:
            continue
        first, last = (given.origin.detail.replace("_", "-") for given in (earlier, setting))
        if first != last and {first, last} <= {info.flag, *megatron_flags.ALIASES}:
            rule = f"both set {info.flag}, and the last one wins"
            parsed.notices.append(f"{last} {setting.value} takes the place of {first} {earlier.value}: {rule}")
            continue
        if setting.value in (None, info.off_value):
            continue
        short = [flag in megatron_flags.SHORTHANDS or flag in megatron_flags.CHOICE_FLAGS for flag in (first, last)]
        if first != last and (all(short) or (any(short) and info.section != "model")):
            names_field = info.flag in (first, last)
            rule = f"contradicts {earlier.origin.detail}" + ("" if names_field else f"; both set {info.flag}")
            parsed.problems.append(Problem(setting.origin.detail, "", rule, "Keep one of them."))
