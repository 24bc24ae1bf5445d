"""Ports the flags of a Megatron script to settings: each flag is parsed alone (`config/flags/`), and all of them together."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, replace
from typing import Literal

from petatron.base.errors import Problem
from petatron.config.flags.megatron_flags import MEGATRON_DEFAULTS_FLAG, NO_POSITION_EMBEDDING, own_value
from petatron.config.flags.parse_command_line import ParsedFlags, known_flags, parse_flags
from petatron.config.schema.fields import fields_by_path
from petatron.config.value_origins import Setting
from petatron.port.environment_variable_names import is_of_environment
from petatron.port.shell_values import ShellText

PortedKind = Literal["kept", "translated", "typed", "implied", "left out", "missing", "blocking"]


@dataclass(frozen=True, slots=True)
class PortedFlag:
    """A flag with its values, and what becomes of it; `why` is the reason or the remedy.

    fields: paths of the settings that it makes, or would make if its value were known.
    """

    kind: PortedKind
    flag: ShellText
    values: tuple[ShellText, ...]
    why: str = ""
    fields: tuple[str, ...] = ()
    problems: tuple[Problem, ...] = ()

    @property
    def text(self) -> str:
        return " ".join((self.flag.text, *(value.text for value in self.values)))

    @property
    def missing(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys(name for text in (self.flag, *self.values) for name in text.missing))


@dataclass(frozen=True, slots=True)
class PortedFlags:
    """All flags of a script in their order, the settings that they make together, and words that are nothing but a name without a value.

    What has to be typed beside a file of settings makes none.
    """

    all_flags: tuple[PortedFlag, ...]
    settings: tuple[tuple[Setting, PortedFlag], ...]
    bare_names: tuple[ShellText, ...]

    @property
    def argv(self) -> list[str]:
        """All flags but those left out, for the rules about them together."""
        return [
            text.text
            for answer in self.all_flags
            if answer.kind != "left out" and not answer.flag.is_bare
            for text in (answer.flag, *answer.values)
        ]

    def of_kind(self, *kinds: PortedKind) -> list[PortedFlag]:
        return [ported for ported in self.all_flags if ported.kind in kinds]


def spelled(flag: str) -> str:
    """Returns a flag as tables have it: dashes, and nothing behind `=`."""
    return flag.partition("=")[0].replace("_", "-")


def port_flags(texts: Sequence[ShellText], left_out: AbstractSet[str]) -> PortedFlags:
    """Answers every flag of a command; `left_out` are the ones that the user does not want."""
    answers: list[PortedFlag] = []
    bare: list[ShellText] = []
    for flag, values in grouped_flags(texts):
        answer = _port_flag(flag, values, left_out)
        bare += [text for text in (flag, *values) if text.is_bare and (text is flag or text not in answer.values)]
        answers.append(answer)
    accepted = [answer for answer in answers if answer.kind in ("kept", "translated", "typed", "implied")]
    argv = [text.text for answer in accepted for text in (answer.flag, *answer.values)]
    together = parse_flags([MEGATRON_DEFAULTS_FLAG, *argv])
    last = {setting.path: setting for setting in together.settings}
    makers = {path: _maker(setting, accepted) for path, setting in last.items()}
    unused = {flag.text.partition(" ")[0]: flag.reason for flag in together.implied}
    marked = [_marked_if_replaced(answer, makers, unused) for answer in answers]
    settings = tuple((setting, makers[path]) for path, setting in last.items() if makers[path].kind != "typed")
    return PortedFlags(tuple(marked), settings, tuple(bare))


def unquoted(text: ShellText) -> ShellText:
    """Returns a value without quotes that a list of flags in a string left around it; Megatron's own parsers mostly ignore them."""
    has_quotes = len(text.text) >= 2 and text.text[0] == text.text[-1] and text.text[0] in "\"'"
    return replace(text, text=text.text[1:-1]) if has_quotes else text


def grouped_flags(texts: Sequence[ShellText]) -> list[tuple[ShellText, tuple[ShellText, ...]]]:
    """Returns every flag with the words that follow it; words before the first flag are groups of their own."""
    groups: list[tuple[ShellText, tuple[ShellText, ...]]] = []
    for text in texts:
        if text.text.startswith("--") or not groups or not groups[-1][0].text.startswith("--"):
            groups.append((text, ()))
        else:
            groups[-1] = (groups[-1][0], (*groups[-1][1], text))
    return groups


def _port_flag(flag: ShellText, values: tuple[ShellText, ...], left_out: AbstractSet[str]) -> PortedFlag:
    if spelled(flag.text) in left_out:
        solid = tuple(value for value in values if not value.is_bare)
        return PortedFlag("left out", flag, solid or values, "left out as asked")
    if flag.is_bare:
        return PortedFlag("missing", flag, values, "it has no value")
    missing = any(text.missing for text in (flag, *values))
    if missing:
        alike = _parsed(flag, values)
        if alike.implied and not alike.problems and not alike.settings:  # whatever its value
            return _port_parsed_flag(flag, values)
        solid = tuple(value for value in values if not value.is_bare)
        if not any(text.missing for text in (flag, *solid)) and not _parsed(flag, solid).problems:
            return _port_parsed_flag(flag, solid)
        if spelled(flag.text) in known_flags():
            parsed = _parsed(flag, solid or values)
            fields = tuple(path for path, info in fields_by_path().items() if info.flag in parsed.doubtful_flags)
            fields += tuple(setting.path for setting in parsed.settings)
            if (
                solid
                and not parsed.problems
                and all(is_of_environment(name) for text in solid for name in text.missing)
            ):
                why = "the shell that starts the run fills in what its environment has"
                return PortedFlag("typed", flag, solid, why, tuple(setting.path for setting in parsed.settings))
            return PortedFlag("missing", flag, values, "its value is not known", fields)
    return _port_parsed_flag(flag, values)


def _parsed(flag: ShellText, values: Sequence[ShellText]) -> ParsedFlags:
    return parse_flags([flag.text, *(value.text for value in values)])


def _port_parsed_flag(flag: ShellText, values: tuple[ShellText, ...]) -> PortedFlag:
    parsed = _parsed(flag, values)
    ported = PortedFlag("kept", flag, values, fields=tuple(setting.path for setting in parsed.settings))
    if parsed.problems:
        why = " ".join(f"{problem.rule}. {problem.fix}" for problem in parsed.problems)
        doubtful = tuple(path for path, info in fields_by_path().items() if info.flag in parsed.doubtful_flags)
        return replace(ported, kind="blocking", why=why, problems=tuple(parsed.problems), fields=doubtful)
    if parsed.preset or parsed.files or parsed.from_folder or parsed.toy:
        why = "names another source of settings, which a file cannot do. Type it after `petatron train`."
        return replace(ported, kind="blocking", why=why)
    if parsed.split_data_file:
        return replace(ported, kind="typed", why="names a file of lists of data, which a file of settings cannot do")
    if not parsed.settings:
        why = "; ".join(flag.reason for flag in parsed.implied)
        is_position = spelled(flag.text) == NO_POSITION_EMBEDDING
        return replace(ported, kind="implied", why="the type of positions decides" if is_position else why)
    infos = [fields_by_path()[setting.path] for setting in parsed.settings]
    same_name = spelled(flag.text) in [info.flag for info in infos]
    texts = [value.text for value in values] or [flag.text.partition("=")[2]]
    if same_name and all(own_value(info.name, text) is None for info in infos for text in texts) and not parsed.notices:
        return ported
    return replace(ported, kind="translated", why="; ".join(parsed.notices))


def _maker(setting: Setting, accepted: Sequence[PortedFlag]) -> PortedFlag:
    """Returns the flag that makes a setting: of the flags with its spelling, the last one that makes the setting alone."""
    spelling = [ported for ported in reversed(accepted) if ported.flag.text.partition("=")[0] == setting.origin.detail]
    return next((ported for ported in spelling if setting.path in ported.fields), spelling[0])


def _marked_if_replaced(answer: PortedFlag, makers: dict[str, PortedFlag], unused: Mapping[str, str]) -> PortedFlag:
    """A flag whose every setting another one makes, or leaves out, has no effect; one that may be repeated adds to the last."""
    if answer.kind not in ("kept", "translated", "typed") or not answer.fields:
        return answer
    if makers.keys().isdisjoint(answer.fields):
        return replace(answer, kind="implied", why=unused.get(answer.flag.text, "other flags leave it out"))
    others = [makers[path] for path in answer.fields if path in makers and makers[path] is not answer]
    if len(others) < len(answer.fields) or any("repeatable" in fields_by_path()[path].marks for path in answer.fields):
        return answer
    return replace(answer, kind="implied", why=f"{others[0].text} (line {others[0].flag.line}) takes its place")
