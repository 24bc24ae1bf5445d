"""Reads a script or a functional-test file as the command that it starts, with its variables and with everything that was left out."""

from __future__ import annotations

import difflib
import re
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path, PurePosixPath

from petatron.base.errors import ConfigError, DataError, Problem
from petatron.base.format_text import abbreviate_names, count_with_noun
from petatron.base.untrusted_files import read_limited_bytes
from petatron.port.find_launch_command import TrainingLaunch, find_launches, scheduler_variables
from petatron.port.megatron_test_yaml import read_functional_test
from petatron.port.port_flags import spelled
from petatron.port.shell_interpreter import InterpretedScript, ScriptNote, interpret
from petatron.port.shell_values import ShellText, ShellVariables, is_settable

MAX_SCRIPT_BYTES = 1 << 18
"""The longest of Megatron's scripts have some twenty kilobytes."""
_FRAGMENT_SCRIPT = "pretrain_gpt.py"


@dataclass(frozen=True, slots=True)
class ScriptFile:
    """What was read of a file; `given` are the values that the user gave."""

    source: Path
    text: str
    given: Mapping[str, str]
    launch: TrainingLaunch
    variables: ShellVariables
    notes: tuple[ScriptNote, ...]

    @property
    def title(self) -> str:
        launch = self.launch
        ranks = "an unknown number of ranks"
        if launch.nodes is not None and launch.ranks_per_node is not None:
            ranks = f"{count_with_noun(launch.nodes, 'node')} x {count_with_noun(launch.ranks_per_node, 'rank')}"
        return f"{self.source.name}, line {launch.line}: {launch.launcher} {PurePosixPath(launch.script).name}, {ranks}"


@dataclass(frozen=True, slots=True)
class MissingVariable:
    """A name without a value that reaches the command line, why it has none, and the flags that need it.

    Without such a flag it stands where flags may be, and may be empty; but a list of flags may have been lost with it.
    """

    name: str
    reason: str
    flags: tuple[str, ...]
    line: int

    def __str__(self) -> str:
        how = f"--set {self.name}=VALUE" if is_settable(self.name) else "write the value into the file"
        if not self.flags:
            how += f", or --set {self.name}= if it is empty" if is_settable(self.name) else ", or remove it"
        user = f"for {abbreviate_names(self.flags)}" if self.flags else "a word of the command line"
        line = f" (line {self.line})" if self.line else ""
        return f"{self.name}{line}: {self.reason}; {user}: {how}"


def read_script(source: Path, given: Mapping[str, str]) -> ScriptFile:
    """Reads a script or a functional-test file; `DataError` if there is nothing to port."""
    text = _read(source)
    try:
        if source.suffix in (".yaml", ".yml"):
            launch, variables, notes = read_functional_test(text, given)
        else:
            launch, variables, notes = _read_shell_script(text, source, given)
    except DataError as error:
        raise DataError(f"{source}: {error}") from error
    return ScriptFile(source, text, given, launch, variables, tuple(notes))


def note_line(note: ScriptNote) -> str:
    """Returns a note with its line."""
    return f"line {note.line}: {note.text}" if note.line else note.text


def check_options(script: ScriptFile, flags: Iterable[ShellText], removed: set[str]) -> None:
    """What a user typed and the script does not have is a slip, and would have no effect."""
    present = {spelled(flag.text) for flag in flags}
    problems = [
        Problem("--without", flag, "is not a flag of this script", "Leave it out.")
        for flag in sorted(removed - present)
    ]
    known = {*script.variables.values, *script.variables.reasons}
    problems += [
        Problem("--set", name, "is not a variable of this script", _similar_variables(name, known))
        for name in script.given
        if name not in known and name not in script.text and not name.isdigit()
    ]
    if problems:
        raise ConfigError(problems)


def missing_variables(script: ScriptFile, users: Iterable[tuple[str, ShellText]]) -> tuple[MissingVariable, ...]:
    """Returns the names without a value, from the words that need them, each with its flag; a word may have none. A listing that lost its
    line ends may have their values in comments."""
    uses_by_name: dict[str, list[tuple[str, ShellText]]] = {}
    for flag, text in users:
        for name in text.missing:
            uses_by_name.setdefault(name, []).append((flag, text))
    missing: list[MissingVariable] = []
    for name, uses in uses_by_name.items():
        reason = script.variables.reasons.get(name, "it has no value")
        comment = re.search(rf"#.*?\b({re.escape(name)}=[^\s#]+)", script.text) if is_settable(name) else None
        reason += f" (a comment has {comment[1]})" if comment is not None else ""
        flags = tuple(dict.fromkeys(flag for flag, _ in uses if flag))
        missing.append(MissingVariable(name, reason, flags, uses[0][1].line))
    return tuple(missing)


def _similar_variables(name: str, known: Collection[str]) -> str:
    close = difflib.get_close_matches(name, known, n=2)
    return f"Did you mean {' or '.join(close)}?" if close else "Check its spelling."


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


def _read_shell_script(
    text: str, source: Path, given: Mapping[str, str]
) -> tuple[TrainingLaunch, ShellVariables, list[ScriptNote]]:
    scheduler = scheduler_variables(text)
    names = {"0": source.name, **given}
    script = interpret(text, given=names, preset=scheduler)
    launches = find_launches(script.commands, scheduler)
    if not launches and (lists := _flag_lists(script)):  # a fragment, which other scripts source
        commands = [name for name in lists if any(".py " in item.text for item in script.variables.values[name])]
        flags = " ".join(f"${{{name}[@]}}" for name in lists)
        line = f'eval "${{{commands[-1]}}}"' if commands else f"python {_FRAGMENT_SCRIPT} {flags}"
        script = interpret(f"{text}\n{line}\n", given=names, preset=scheduler)
        launches = find_launches(script.commands, scheduler)
        rule = f"no command uses the flags of {abbreviate_names(lists)}: they are read as those of {_FRAGMENT_SCRIPT}"
        rule = f"no command was found that runs ${commands[-1]}: it is read as one" if commands else rule
        script.notes.append(ScriptNote(0, rule))
        launches = [replace(launch, nodes=None, ranks_per_node=None) for launch in launches]
    if not launches:
        inner = {item.text for command in script.commands for item in command.arguments if item.text.endswith(".sh")}
        inner_text = f" It runs {abbreviate_names(inner)}: port that one, with --set." if inner else ""
        skipped = [note.text for note in script.notes]
        reason = f" Not evaluated: {'; '.join(skipped[:5])}." if skipped else ""
        raise DataError(
            f"no command starts a Python script, as `torchrun ... pretrain_gpt.py FLAGS` does.{inner_text}{reason}"
        )
    first, *others = launches
    notes = script.notes
    notes += [ScriptNote(launch.line, f"another command, of {launch.script}, is not ported") for launch in others]
    return first, script.variables, notes


def _flag_lists(script: InterpretedScript) -> list[str]:
    """Returns the names of the variables that hold flags."""
    variables = script.variables.values.items()
    return [name for name, values in variables if any(" --" in f" {value.text}" for value in values)]
