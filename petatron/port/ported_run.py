"""A Megatron script or functional-test file as a run of ours: settings, everything that blocks, and what is only named."""

from __future__ import annotations

import difflib
import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from petatron.base.errors import ConfigError, DataError, PetatronError, Problem
from petatron.base.format_text import abbreviate_names, count_with_noun
from petatron.base.untrusted_files import read_limited_bytes
from petatron.config.flags.megatron_flags import MEGATRON_DEFAULTS
from petatron.config.flags.parse import parse_flags
from petatron.config.load import RawLoadedConfig
from petatron.config.schema.fields import flag_name
from petatron.config.value_origins import Setting
from petatron.port.flag_answers import AnsweredFlags, FlagAnswer, answer_flags, spelled, unquoted
from petatron.port.launch_command import (
    TrainingLaunch,
    find_launches,
    implied_flags,
    scheduler_variables,
    script_problem,
)
from petatron.port.megatron_test_yaml import read_functional_test
from petatron.port.ported_yaml import ported_yaml
from petatron.port.shell_interpreter import ScriptNote, interpret
from petatron.port.shell_values import ShellText, ShellVariables, is_settable
from petatron.validate import resolve_config
from petatron.validate.preflight import preflight

MAX_SCRIPT_BYTES = 1 << 18
"""The longest of Megatron's scripts have some twenty kilobytes."""
_CHECKPOINT_ARGS = "--use-checkpoint-args"


@dataclass(frozen=True, slots=True)
class MissingVariable:
    """A name without a value, why it has none, and the flags that need it."""

    name: str
    reason: str
    flags: tuple[str, ...]

    def __str__(self) -> str:
        how = f"--set {self.name}=VALUE" if is_settable(self.name) else "write the value into the file"
        return f"{self.name}: {self.reason}; for {abbreviate_names(self.flags)}: {how}"


@dataclass(frozen=True, slots=True)
class PortedRun:
    """What a script becomes. `problems` are of the settings together, `absent_files` only of this machine."""

    source: Path
    launch: TrainingLaunch
    flags: AnsweredFlags
    missing: tuple[MissingVariable, ...]
    notes: tuple[ScriptNote, ...]
    problems: tuple[Problem, ...]
    absent_files: tuple[Problem, ...]
    script_problem: str | None
    world_size: int | None

    @property
    def settings(self) -> tuple[tuple[Setting, FlagAnswer], ...]:
        return self.flags.settings

    @property
    def blocks(self) -> bool:
        """Whether the run cannot start as the script says."""
        return bool(self.script_problem or self.missing or self.problems or self.flags.of_kind("blocking"))

    @property
    def title(self) -> str:
        launch = self.launch
        ranks = "an unknown number of ranks"
        if launch.nodes is not None and launch.ranks_per_node is not None:
            ranks = f"{count_with_noun(launch.nodes, 'node')} x {count_with_noun(launch.ranks_per_node, 'rank')}"
        return f"{self.source.name}, line {launch.line}: {launch.launcher} {PurePosixPath(launch.script).name}, {ranks}"

    @property
    def summary(self) -> str:
        """The number of flags of each kind."""
        names = {"kept": "kept", "translated": "translated", "implied": "dropped as implied", "left out": "left out"}
        counts = [f"{len(self.flags.of_kind(kind))} {name}" for kind, name in names.items()]  # type: ignore[arg-type]
        counts += [
            f"{len(self.flags.of_kind('missing'))} without a value",
            f"{len(self.flags.of_kind('blocking'))} blocking",
        ]
        return f"{count_with_noun(len(self.flags.answers), 'flag')}: {', '.join(counts)}"

    def groups(self) -> list[tuple[str, list[str]]]:
        """Everything besides the settings, as headings with lines."""
        blocking = [f"{self.launch.script} {self.script_problem}"] if self.script_problem else []
        blocking += [_line(answer, _remedy(answer)) for answer in self.flags.of_kind("blocking")]
        translated = [_line(answer, f"is {self._made_by(answer)}") for answer in self.flags.of_kind("translated")]
        empty = dict.fromkeys(name for text in self.flags.empty_names for name in text.missing)
        notes = [ScriptNote(0, f"{name} has no value and counts as empty: --set {name}=VALUE") for name in empty]
        return [
            ("Blocking", blocking),
            ("Variables without a value", [str(variable) for variable in self.missing]),
            ("Problems of the settings together", [str(problem) for problem in self.problems]),
            ("Translated", translated),
            ("Dropped as implied", [_line(answer, answer.why, ":") for answer in self.flags.of_kind("implied")]),
            ("Left out as asked", [_line(answer, "") for answer in self.flags.of_kind("left out")]),
            ("Not evaluated, or not as written", [_note(note) for note in (*self.notes, *notes)]),
            ("Not on this machine, which does not block", [str(problem) for problem in self.absent_files]),
        ]

    def yaml(self) -> str:
        """Returns the file for `petatron train --config`."""
        return ported_yaml(f"{self.title}; {self.summary}", self.settings, self.groups())

    def _made_by(self, answer: FlagAnswer) -> str:
        made = [setting for setting, maker in self.settings if maker == answer]
        return ", ".join(f"{setting.path.partition('.')[2]}: {setting.value}" for setting in made)


def port_file(
    source: Path, *, given: Mapping[str, str], left_out: Iterable[str] = (), world_size: int | None = None
) -> PortedRun:
    """Reads a script or a functional-test file; `DataError` or `ConfigError` if there is nothing to port."""
    text = _read(source)
    try:
        if source.suffix in (".yaml", ".yml"):
            launch, variables, notes = read_functional_test(text, given)
        else:
            launch, variables, notes = _read_script(text, source, given)
    except DataError as error:
        raise DataError(f"{source}: {error}") from error
    removed = {spelled(name if name.startswith("-") else f"--{name}") for name in left_out}
    implied = [ShellText(flag, launch.line) for flag in implied_flags(launch.script)]
    typed = [unquoted(text) for text in launch.flags]
    implied += [ShellText(word, launch.line) for word in _default_flags([text.text for text in typed])]
    notes += [
        ScriptNote(text.line, f"the quotes in {text.text} would be part of the value; they are removed")
        for text, plain in zip(launch.flags, typed)
        if text != plain
    ]
    flags = answer_flags([*implied, *typed], removed)
    _check_options(flags, removed, given, variables, text)
    size = world_size or launch.world_size
    loaded, problems, check_notes = _check(flags, size)
    missing = _missing_variables(flags, variables, text)
    unknown = [name for name in launch.unknown_counts if name not in {variable.name for variable in missing}]
    if unknown:
        counts = (
            f"nodes and ranks: the number is not known without {' and '.join(f'--set {name}=N' for name in unknown)}"
        )
        notes.append(ScriptNote(launch.line, counts))
    absent = [] if loaded is None else [problem for problem in preflight(loaded.config) if "${" not in problem.value]
    return PortedRun(
        source,
        launch,
        flags,
        tuple(missing),
        (*notes, *check_notes),
        tuple(problems),
        tuple(absent),
        script_problem(launch.script),
        size,
    )


def _default_flags(argv: Sequence[str]) -> list[str]:
    """Returns Megatron's defaults that a script relies on, where ours are others."""
    given = {setting.path.partition(".")[2]: setting.value for setting in parse_flags(argv).settings}
    relied_on = {"fp8_recipe": bool(given.get("fp8_format")), "muon_momentum": given.get("optimizer") == "muon"}
    return [
        word
        for name, value in MEGATRON_DEFAULTS.items()
        if relied_on[name] and name not in given
        for word in (flag_name(name), str(value))
    ]


def _read(source: Path) -> str:
    try:
        content = read_limited_bytes(source, MAX_SCRIPT_BYTES)
        text = content.decode()
    except OSError as error:
        raise DataError(f"{source} cannot be read: {error.strerror or error}") from error
    except ValueError as error:
        raise DataError(f"{source} is not UTF-8 text, so it is no script") from error
    if "\0" in text:
        raise DataError(f"{source} has NUL characters, so it is no script")
    if not text.strip():
        raise DataError(f"{source} is empty")
    return text.replace("\r\n", "\n")


def _read_script(
    text: str, source: Path, given: Mapping[str, str]
) -> tuple[TrainingLaunch, ShellVariables, list[ScriptNote]]:
    scheduler = scheduler_variables(text)
    script = interpret(text, given={"0": source.name, **given}, preset=scheduler)
    launches = find_launches(script.commands, scheduler)
    if not launches:
        lists = [name for name, values in script.variables.values.items() if values and values[0].text.startswith("--")]
        lists_text = f" Flags are in {abbreviate_names(lists)}, but no command uses them." if lists else ""
        inner = {item.text for command in script.commands for item in command.arguments if item.text.endswith(".sh")}
        lists_text += f" It runs {abbreviate_names(inner)}: port that one, with --set." if inner else ""
        skipped = [note.text for note in script.notes]
        reason = f" Not evaluated: {'; '.join(skipped[:5])}." if skipped else ""
        raise DataError(
            f"no command starts a Python script, as `torchrun ... pretrain_gpt.py FLAGS` does.{lists_text}{reason}"
        )
    first, *others = launches
    notes = script.notes
    notes += [ScriptNote(launch.line, f"another command, of {launch.script}, is not ported") for launch in others]
    return first, script.variables, notes


def _check_options(
    flags: AnsweredFlags, removed: set[str], given: Mapping[str, str], variables: ShellVariables, text: str
) -> None:
    """What a user typed and the script does not have is a slip, and would have no effect."""
    present = {spelled(answer.flag.text) for answer in flags.answers}
    problems = [
        Problem("--without", flag, "is not a flag of this script", "Leave it out.")
        for flag in sorted(removed - present)
    ]
    known = {*variables.values, *variables.reasons}
    problems += [
        Problem("--set", name, "is not a variable of this script", _similar_variables(name, known))
        for name in given
        if name not in known and name not in text and not name.isdigit()
    ]
    if problems:
        raise ConfigError(problems)


def _similar_variables(name: str, known: Collection[str]) -> str:
    close = difflib.get_close_matches(name, known, n=2)
    return f"Did you mean {' or '.join(close)}?" if close else "Check its spelling."


def _check(
    flags: AnsweredFlags, world_size: int | None
) -> tuple[RawLoadedConfig | None, list[Problem], list[ScriptNote]]:
    """Returns the config, and the problems of all flags together that no flag alone has."""
    argv, notes = flags.argv, []
    try:
        loaded, problems = resolve_config(argv, world_size=world_size)
    except PetatronError as error:
        kept = [text for text in argv if spelled(text) != _CHECKPOINT_ARGS]
        if len(kept) == len(argv):
            return None, [Problem("the settings", "", f"cannot be read: {error}", "")], notes
        notes.append(ScriptNote(0, f"{_CHECKPOINT_ARGS} is checked only where the checkpoint is: {error}"))
        loaded, problems = resolve_config(kept, world_size=world_size)
    told = [problem for answer in flags.answers for problem in answer.problems]
    unknown = {answer.flag.text.partition("=")[0] for answer in flags.of_kind("missing")}
    return loaded, [item for item in problems if item not in told and item.where not in unknown], notes


def _missing_variables(flags: AnsweredFlags, variables: ShellVariables, text: str) -> list[MissingVariable]:
    """Returns the names without a value. A listing that lost its line ends may have their values in comments."""
    users: dict[str, list[str]] = {}
    for answer in flags.of_kind("missing"):
        for name in answer.missing:
            users.setdefault(name, []).append(answer.flag.text.partition("=")[0])
    missing: list[MissingVariable] = []
    for name, names in users.items():
        reason = variables.reasons.get(name, "it has no value")
        comment = re.search(rf"#.*?\b({re.escape(name)}=[^\s#]+)", text) if is_settable(name) else None
        reason += f" (a comment has {comment[1]})" if comment is not None else ""
        missing.append(MissingVariable(name, reason, tuple(dict.fromkeys(names))))
    return missing


def _line(answer: FlagAnswer, text: str, separator: str = "") -> str:
    line = f" (line {answer.flag.line})" if answer.flag.line else ""
    return f"{answer.text}{line}{separator} {text}".rstrip()


def _remedy(answer: FlagAnswer) -> str:
    return (
        f"{answer.why} Or --without {spelled(answer.flag.text)[2:]}"
        if answer.flag.text.startswith("--")
        else answer.why
    )


def _note(note: ScriptNote) -> str:
    return f"line {note.line}: {note.text}" if note.line else note.text
