"""The command line: argv to settings, with every problem collected.

A flag is a field of the schema (`--num-layers 2` or `--num-layers=2`), another spelling from `megatron_flags.py`, or wrong.
Booleans are `--x`, `--no-x`, `--x=false`; a bare `true` or `false` after one is taken as its value, any other word is
not. Fields that hold several values take words until the next flag. Underscores count as dashes, so torchrun's
`--nproc_per_node=8` is understood. A word that starts with `--` is always a flag; one that starts with a single dash is
a value, so negative numbers need no quoting.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from petatron.base.errors import Problem
from petatron.config.flags import megatron_flags
from petatron.config.schema.fields import FieldInfo, Value, by_name, by_path, listing, nearest
from petatron.config.value_origins import Origin, Setting

PRESET_FLAG, FILE_FLAG = "--preset", "--config"


@dataclass(slots=True)
class ParsedFlags:
    """What argv said. `suspects` are flags whose value is in doubt, so that rules about them stay silent."""

    settings: list[Setting] = field(default_factory=list)
    preset: str | None = None
    files: list[str] = field(default_factory=list)
    notices: list[str] = field(default_factory=list)
    problems: list[Problem] = field(default_factory=list)
    suspects: set[str] = field(default_factory=set)
    drops_learned_positions: bool = False

    def add(self, info: FieldInfo, value: Value, spelling: str) -> None:
        self.settings.append(Setting(info.path, value, Origin("flag", spelling)))


@dataclass(frozen=True, slots=True)
class _Word:
    """One flag with the words that follow it, up to the next flag; `attached` is what stood after `=`."""

    typed: str
    flag: str
    attached: str | None
    following: tuple[str, ...]


def parse_flags(argv: Sequence[str]) -> ParsedFlags:
    """Settings in the order typed; nothing is raised, the problems are in the answer."""
    parsed = ParsedFlags()
    for word in _split(argv, parsed):
        surplus = _take(word, parsed)
        parsed.problems += [_stray(text) for text in surplus]
    _drop_yielding_shorthands(parsed)
    _refuse_contradictions(parsed)
    return parsed


def known_flags() -> list[str]:
    """Every spelling that is understood, for suggestions."""
    own = [info.flag for info in by_name().values()]
    negated = [f"--no-{info.flag[2:]}" for info in by_name().values() if info.kind == "bool"]
    others = (megatron_flags.ALIASES, megatron_flags.SHORTHANDS, megatron_flags.CHOICES, megatron_flags.IMPLIED)
    return [*own, *negated, *(flag for table in others for flag in table), PRESET_FLAG, FILE_FLAG]


def later_problem(where: str, found: str, feature: str, fix: str = "Leave it out") -> Problem:
    """The one wording for what exists elsewhere but not here yet."""
    return Problem(where, found, f"needs {feature}, which is not in this version", f"{fix}.")


def value_problem(info: FieldInfo, where: str, text: str, reason: str) -> Problem:
    """A value that does not fit its field; `where` is how the user named the field."""
    feature = megatron_flags.LATER_VALUES.get(info.name, {}).get(text)
    if feature is not None:
        return later_problem(where, text, feature, f"Use {listing(info.choices)}")
    fix = _did_you_mean(text, info.choices) or f"It is: {info.doc.removesuffix('.')}."
    return Problem(where, text or "''", reason, fix)


def _did_you_mean(text: str, choices: Iterable[str]) -> str:
    """Of a few choices one is easily told, so a swapped pair of letters in a short word (`mpl`) is near enough."""
    close = nearest(text, choices, count=1, cutoff=0.6)
    return f"Did you mean {close[0]}?" if close else ""


def _split(argv: Sequence[str], parsed: ParsedFlags) -> list[_Word]:
    starts = [index for index, text in enumerate(argv) if text.startswith("--")]
    first = starts[0] if starts else len(argv)
    parsed.problems += [_stray(text) for text in argv[:first]]
    words: list[_Word] = []
    for start, end in zip(starts, [*starts[1:], len(argv)]):
        typed, equals, attached = argv[start].partition("=")
        flag = typed.replace("_", "-")
        words.append(_Word(typed, flag, attached if equals else None, tuple(argv[start + 1 : end])))
    return words


def _stray(text: str) -> Problem:
    return Problem(repr(text), "", "is not a flag and follows no flag that takes it", "Flags start with two dashes.")


def _take(word: _Word, parsed: ParsedFlags) -> Sequence[str]:
    """Apply one flag; the answer is the following words it did not use."""
    flag = word.flag
    info = _field(flag)
    negated = _field(f"--{flag[5:]}") if flag.startswith("--no-") else None
    if info is not None:
        return _take_field(info, word, parsed)
    if negated is not None and negated.kind == "bool":
        return _take_bare(word, parsed, lambda: parsed.add(negated, False, word.typed))
    if flag in (PRESET_FLAG, FILE_FLAG):
        return _take_source(word, parsed)
    if (shorthand := megatron_flags.SHORTHANDS.get(flag)) is not None:
        target = by_name()[shorthand.field]
        return _take_bare(word, parsed, lambda: parsed.add(target, shorthand.value, word.typed))
    if (choices := megatron_flags.CHOICES.get(flag)) is not None:
        return _take_choice(choices, word, parsed)
    if flag == megatron_flags.NO_POSITION_EMBEDDING:
        parsed.drops_learned_positions = True
        return word.following
    if (implied := megatron_flags.IMPLIED.get(flag)) is not None:
        return _take_implied(implied, word, parsed)
    parsed.problems.append(_refusal(word, parsed))
    return ()


def _field(flag: str) -> FieldInfo | None:
    return by_name().get(megatron_flags.ALIASES.get(flag, flag[2:].replace("-", "_")))


def _take_field(info: FieldInfo, word: _Word, parsed: ParsedFlags) -> Sequence[str]:
    if info.many:
        texts = word.following if word.attached is None else (word.attached, *word.following)
        if not texts:
            parsed.problems.append(_needs_value(info, word))
            parsed.suspects.add(info.flag)
        _add_parsed(info, word, texts, parsed)
        return ()
    if word.attached is not None:
        _add_parsed(info, word, (word.attached,), parsed)
        return word.following
    if info.kind == "bool":
        explicit = word.following[:1] if word.following[:1] in (("true",), ("false",)) else ()
        _add_parsed(info, word, explicit or ("true",), parsed)
        return word.following[len(explicit) :]
    if not word.following:
        parsed.problems.append(_needs_value(info, word))
        parsed.suspects.add(info.flag)
        return ()
    _add_parsed(info, word, word.following[:1], parsed)
    return word.following[1:]


def _add_parsed(info: FieldInfo, word: _Word, texts: Sequence[str], parsed: ParsedFlags) -> None:
    values: list[Value] = []
    for text in texts:
        try:
            values.append(info.parse(text))
        except ValueError as error:
            parsed.problems.append(value_problem(info, word.typed, text, str(error)))
            parsed.suspects.add(info.flag)
    if len(values) == len(texts) and values:
        parsed.add(info, tuple(values) if info.many else values[0], word.typed)  # type: ignore[arg-type]


def _take_bare(word: _Word, parsed: ParsedFlags, apply: Callable[[], None]) -> Sequence[str]:
    """A flag that has no value: an attached one is a mistake."""
    if word.attached is None:
        apply()
    else:
        rule = "is given to a flag that takes no value"
        parsed.problems.append(Problem(word.typed, word.attached, rule, f"Write {word.typed} alone, or leave it out."))
    return word.following


def _take_choice(choices: Mapping[str, megatron_flags.Shorthand], word: _Word, parsed: ParsedFlags) -> Sequence[str]:
    text = word.attached if word.attached is not None else next(iter(word.following), "")
    meant = choices.get(text)
    if meant is not None:
        parsed.add(by_name()[meant.field], meant.value, word.typed)
    else:
        rule = f"is not one of {listing(choices)}" if text else "needs a value"
        fix = _did_you_mean(text, choices) or f"Use {listing(choices)}."
        parsed.problems.append(Problem(word.typed, text, rule, fix))
        parsed.suspects.update(by_name()[choice.field].flag for choice in choices.values())
    return word.following if word.attached is not None else word.following[1:]


def _take_implied(implied: megatron_flags.Implied, word: _Word, parsed: ParsedFlags) -> Sequence[str]:
    notice = f"{word.typed} is accepted and changes nothing: {implied.reason}"
    if not implied.takes_value:
        return _take_bare(word, parsed, lambda: parsed.notices.append(notice))
    parsed.notices.append(notice)
    return word.following[1:] if word.attached is None else word.following


def _take_source(word: _Word, parsed: ParsedFlags) -> Sequence[str]:
    text = word.attached if word.attached is not None else next(iter(word.following), "")
    if not text:
        what = "a preset's name" if word.flag == PRESET_FLAG else "a YAML file"
        parsed.problems.append(Problem(word.typed, "", "needs a value", f"Give {what}."))
    elif word.flag == PRESET_FLAG:
        parsed.preset = text
    else:
        parsed.files.append(text)
    return word.following if word.attached is not None else word.following[1:]


def _needs_value(info: FieldInfo, word: _Word) -> Problem:
    return Problem(word.typed, "", "needs a value", f"It is: {info.doc.removesuffix('.')}.")


def _refusal(word: _Word, parsed: ParsedFlags) -> Problem:
    flag, typed = word.flag, word.typed
    found = word.attached if word.attached is not None else " ".join(word.following)
    if flag in megatron_flags.LATER:
        return later_problem(typed, found, megatron_flags.LATER[flag])
    if flag in megatron_flags.RENAMED:
        return Problem(typed, "", "is an old name", f"Use {megatron_flags.RENAMED[flag]}.")
    if flag in megatron_flags.ELSEWHERE:
        return Problem(
            typed, "", "does not belong to this command", f"It is a flag of `{megatron_flags.ELSEWHERE[flag]}`."
        )
    close = nearest(flag, known_flags())
    # A misspelt --num-layers should not also be reported as a missing --num-layers.
    parsed.suspects.update(close)
    fix = f"Did you mean {listing(close)}?" if close else "See `petatron train --help` for all flags."
    return Problem(typed, "", "is not a known flag", fix)


def _drop_yielding_shorthands(parsed: ParsedFlags) -> None:
    """`--data-parallel-sharding-strategy optim_grads --use-megatron-fsdp`: the field's own flag wins in either order."""

    def yields(setting: Setting) -> bool:
        shorthand = megatron_flags.SHORTHANDS.get(setting.origin.detail.replace("_", "-"))
        return shorthand is not None and shorthand.yields

    named = {setting.path for setting in parsed.settings if not yields(setting)}
    parsed.settings = [setting for setting in parsed.settings if not (yields(setting) and setting.path in named)]


def _refuse_contradictions(parsed: ParsedFlags) -> None:
    """`--swiglu --squared-relu`, `--fp8-format e4m3 --fp8-hybrid`: each names a whole choice, so neither can quietly win.

    The same flag twice is no contradiction, the last one wins; nor is a `none` or `--no-x` that takes back what stood before,
    nor a field's own flag that refines a model whose base was described in shorthands.
    """
    before: dict[str, Setting] = {}
    for setting in parsed.settings:
        earlier, info = before.get(setting.path), by_path()[setting.path]
        before[setting.path] = setting
        if earlier is None or setting.value in (None, False) or earlier.value == setting.value:
            continue
        first, last = (one.origin.detail.replace("_", "-") for one in (earlier, setting))
        short = [flag in megatron_flags.SHORTHANDS or flag in megatron_flags.CHOICES for flag in (first, last)]
        if first != last and (all(short) or (any(short) and info.section != "model")):
            own = info.flag in (first, last)
            rule = f"contradicts {earlier.origin.detail}" + ("" if own else f"; both set {info.flag}")
            parsed.problems.append(Problem(setting.origin.detail, "", rule, "Keep one of them."))
