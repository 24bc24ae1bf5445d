"""Interprets a shell script: its commands with their words expanded, computed from its assignments. Nothing is executed, no file is read.

Conditions are computed where they compare known values. A variable that is not set counts as empty there, as it would in a shell; what
depends on a file, a command or an unknown value is left out and named. A loop over words takes its first. `exit` inside a block only
ends that block: it is a check of the script's arguments, and the names without a value are reported anyway.
"""

from __future__ import annotations

import fnmatch
import itertools
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from petatron.port.shell_arithmetic import UnknownNumber, evaluate
from petatron.port.shell_lexer import ScriptError, Word
from petatron.port.shell_parser import (
    Assignment,
    CaseBlock,
    CommandGroup,
    ForLoop,
    IfBlock,
    Node,
    ShellFunction,
    SimpleCommand,
    command_text,
    parse_script,
)
from petatron.port.shell_values import ShellText, ShellVariables
from petatron.port.source_lines import NO_LINES, SourceLines

_MAX_DEPTH = 8
_MAX_STEPS = 20_000
_SHELLS = ("bash", "sh", "zsh", "/bin/bash", "/bin/sh")
_DECLARATIONS = ("export", "declare", "local", "readonly", "typeset")
_READERS = ("read", "mapfile", "readarray", "getopts")
_NUMBER_TESTS = {"-eq": "==", "-ne": "!=", "-lt": "<", "-le": "<=", "-gt": ">", "-ge": ">="}


@dataclass(frozen=True, slots=True)
class ScriptNote:
    """Something in the script that was not evaluated, or not as written."""

    line: int
    text: str


@dataclass(frozen=True, slots=True)
class ShellCommand:
    """A command with its words expanded."""

    line: int
    arguments: tuple[ShellText, ...]


@dataclass(slots=True)
class InterpretedScript:
    """The commands in the order they would run, what was not evaluated, and the variables at the end."""

    variables: ShellVariables
    commands: list[ShellCommand] = field(default_factory=list)
    notes: list[ScriptNote] = field(default_factory=list)


class _Exit(Exception):
    """The script, function or block ends."""


def interpret(text: str, *, given: Mapping[str, str], preset: Mapping[str, str]) -> InterpretedScript:
    """Interprets a script; `given` variables win over the script's own, `preset` ones are those that a scheduler sets."""
    script = parse_script(text)
    variables = ShellVariables(given, {name: (ShellText(value, 0),) for name, value in preset.items()})
    result = InterpretedScript(variables)
    result.notes += [
        ScriptNote(line, "this here-document has no end: all lines below belong to it")
        for line in script.open_documents
    ]
    interpreter = _Interpreter(result)
    try:
        interpreter.run(script.nodes)
    except _Exit:
        pass
    except RecursionError as error:
        raise ScriptError(1, "its blocks and expansions nest too deeply") from error
    return result


class _Interpreter:
    def __init__(self, result: InterpretedScript) -> None:
        self.result, self.variables = result, result.variables
        self.functions: dict[str, tuple[Node, ...]] = {}
        self.depth, self.steps = 0, 0
        self.prefix: tuple[ShellText, ...] = ()

    def note(self, line: int, text: str) -> None:
        note = ScriptNote(line, text)
        if note not in self.result.notes:
            self.result.notes.append(note)

    def run(self, nodes: Sequence[Node]) -> None:
        for node in nodes:
            self.steps += 1
            if self.steps > _MAX_STEPS:
                raise ScriptError(getattr(node, "line", 1), f"the script has more than {_MAX_STEPS:,} commands")
            match node:
                case SimpleCommand():
                    self.simple(node)
                case IfBlock():
                    self.conditional(node)
                case CaseBlock():
                    self.case(node)
                case ForLoop():
                    self.loop(node)
                case ShellFunction():
                    self.functions[node.name] = node.body
                case CommandGroup():
                    self.run(node.body)

    def block(self, nodes: Sequence[Node], line: int) -> None:
        try:
            self.run(nodes)
        except _Exit:
            self.note(line, "the script would end in this block; reading goes on after it")

    def simple(self, command: SimpleCommand) -> None:
        for assignment in command.assignments:
            self.assign(assignment)
        if not command.arguments:
            return
        arguments = [text for word in command.arguments for text in self.variables.expand(word)]
        if command.joined_lines:
            lines = (
                f"line {command.joined_lines[0]}"
                if len(command.joined_lines) == 1
                else f"lines {command.joined_lines[0]} to {command.joined_lines[-1]}"
            )
            self.note(
                command.line,
                f"{lines} begin with a flag, and no \\ ends the line before: they are taken as part of this command",
            )
        if arguments:
            self.apply(arguments, command)

    def apply(self, arguments: list[ShellText], command: SimpleCommand) -> None:
        name = arguments[0].text
        texts = [argument.text for argument in arguments]
        if name in ("exit", "return"):
            raise _Exit
        if name in _DECLARATIONS or name in ("[", "[[", "test", "true", "false", ":", "echo", "printf"):
            return
        if name == "unset":
            for text in texts[1:]:
                self.variables.values.pop(text, None)
        elif name == "set" and "--" in texts:
            for number, value in enumerate(arguments[texts.index("--") + 1 :], start=1):
                self.variables.assign(str(number), [value], line=command.line, appends=False, is_array=False)
        elif name == "shift":
            self.shift(int(texts[1]) if len(texts) > 1 and texts[1].isdigit() else 1)
        elif name in ("source", "."):
            file = texts[1] if len(texts) > 1 else ""
            self.note(command.line, f"{file} is not read; give what it sets with --set NAME=VALUE")
        elif name in _READERS:
            self.note(command.line, f"`{command_text(command)}` is not run")
        elif name in self.functions:
            self.call(name, arguments[1:], command.line)
        elif name == "eval":
            self.inner(_with_blanks(arguments[1:], command.line), command.line, ())
        elif (places := _shell_command(texts)) is not None:
            self.inner(arguments[places[1]], command.line, tuple(arguments[: places[0]]))
        else:
            self.result.commands.append(ShellCommand(command.line, (*self.prefix, *arguments)))

    def assign(self, assignment: Assignment) -> None:
        if assignment.is_array:
            texts = [text for word in assignment.values for text in self.variables.expand(word)]
        else:
            text = self.variables.expand_text(assignment.values[0])
            texts = [replace(text, line=assignment.line)]
        self.variables.assign(
            assignment.name, texts, line=assignment.line, appends=assignment.appends, is_array=assignment.is_array
        )

    def shift(self, count: int) -> None:
        values = self.variables.values
        numbers = sorted(int(name) for name in values if name.isdigit() and int(name) > 0)
        moved = {str(number - count): values[str(number)] for number in numbers if number > count}
        for number in numbers:
            del values[str(number)]
        values |= moved

    def call(self, name: str, arguments: Sequence[ShellText], line: int) -> None:
        if self.depth >= _MAX_DEPTH:
            raise ScriptError(line, f"calls nest more than {_MAX_DEPTH} deep")
        saved = {key: value for key, value in self.variables.values.items() if key.isdigit()}
        for key in saved:
            del self.variables.values[key]
        for number, value in enumerate(arguments, start=1):
            self.variables.values[str(number)] = (value,)
        self.depth += 1
        try:
            self.block(self.functions[name], line)
        finally:
            self.depth -= 1
            for key in [key for key in self.variables.values if key.isdigit()]:
                del self.variables.values[key]
            self.variables.values |= saved

    def inner(self, text: ShellText, line: int, prefix: tuple[ShellText, ...]) -> None:
        """Reads the text that `eval` or `bash -c` would run. Placeholders in it are names again."""
        if self.depth >= _MAX_DEPTH:
            raise ScriptError(line, f"eval and bash -c nest more than {_MAX_DEPTH} deep")
        self.depth += 1
        before, self.prefix = self.prefix, (*self.prefix, *prefix)
        try:
            self.run(parse_script(text.text, text.source).nodes)
        finally:
            self.depth -= 1
            self.prefix = before

    def conditional(self, block: IfBlock) -> None:
        for condition, body in block.branches:
            outcome = self.outcome(condition, block.line)
            if outcome is None:
                self.skipped(block, [node for _, nodes in block.branches for node in nodes])
                return
            if outcome:
                self.block(body, block.line)
                return

    def skipped(self, block: IfBlock, nodes: Sequence[Node]) -> None:
        names = _assigned(nodes)
        changes = f"; it may set {', '.join(names)}" if names else ""
        self.note(block.line, f"`if {block.text}` cannot be decided here, and the block is left out{changes}")

    def case(self, block: CaseBlock) -> None:
        subject = self.variables.expand_text(block.subject)
        if any(name not in self.unset(subject) for name in subject.missing):
            self.note(block.line, f"`case {subject.text}` cannot be decided here, and the block is left out")
            return
        text = "" if subject.missing else subject.text
        if subject.missing:
            self.note(block.line, f"{' and '.join(subject.missing)} in `case` has no value and counts as empty")
        for patterns, body in block.branches:
            if any(fnmatch.fnmatchcase(text, self.variables.expand_text(pattern).text[:200]) for pattern in patterns):
                self.block(body, block.line)
                return

    def loop(self, loop: ForLoop) -> None:
        values = [text for word in loop.values for text in self.variables.expand(word)]
        if not loop.name or not values:
            self.note(loop.line, "this loop is left out: its turns are known only while the script runs")
            return
        self.variables.assign(loop.name, [values[0]], line=loop.line, appends=False, is_array=False)
        if len(values) > 1:
            self.note(
                loop.line,
                f"of this loop over {len(values)} values only the first is read, {loop.name}={values[0].text}",
            )
        self.block(loop.body, loop.line)

    def outcome(self, condition: Sequence[Node], line: int) -> bool | None:
        """Whether a condition holds; None if that is not known here. `else` has no condition."""
        if not condition:
            return True
        command = condition[0]
        if len(condition) == 1 and isinstance(command, IfBlock) and command.joint:
            return self.joined(command)
        if len(condition) > 1 or not isinstance(command, SimpleCommand) or command.assignments:
            return None
        negate, arguments = False, list(command.arguments)
        while arguments and arguments[0].plain == "!":
            negate, arguments = not negate, arguments[1:]
        if not arguments:
            return None
        result = self.test(arguments, line)
        return None if result is None else result != negate

    def joined(self, block: IfBlock) -> bool | None:
        """Whether tests that `&&` or `||` joins hold."""
        first = self.outcome(block.branches[0][0], block.line)
        if first is None or first == (block.joint == "||"):
            return first
        return self.outcome(block.branches[-1][1], block.line)

    def test(self, arguments: Sequence[Word], line: int) -> bool | None:
        first = arguments[0].plain
        if first in ("true", "false"):
            return first == "true"
        if len(arguments[0].parts) == 2 and arguments[0].parts[0].text == "((":
            try:
                return evaluate(arguments[0].parts[1].text.replace("$", ""), self.number) != 0
            except UnknownNumber:
                return None
        if first not in ("[", "[[", "test"):
            return None
        inner = arguments[1:-1] if first != "test" else arguments[1:]
        groups: list[list[Word]] = [[]]
        joints: list[str] = []
        for word in inner:
            if word.plain in ("&&", "||", "-a", "-o"):
                joints.append("and" if word.plain in ("&&", "-a") else "or")
                groups.append([])
            else:
                groups[-1].append(word)
        results = [self.comparison(group, line) for group in groups]
        if len(set(joints)) > 1:
            return None
        known = [result for result in results if result is not None]
        if joints and joints[0] == "or":
            return True if any(known) else None if len(known) < len(results) else False
        return False if not all(known) else None if len(known) < len(results) else True

    def number(self, name: str) -> str | None:
        values = self.variables.get(name)
        return values[0].text if values and not values[0].missing else None

    def comparison(self, group: Sequence[Word], line: int) -> bool | None:
        """Whether one comparison holds, as `-z "$X"`, `"$X" == "y"` or `$N -gt 1`."""
        negate = bool(group) and group[0].plain == "!"
        texts = [self.tested(word, line) for word in group[negate:]]
        values = [text for text in texts if text is not None]
        if len(values) < len(texts):
            return None
        result: bool | None = None
        if len(values) == 1:
            result = bool(values[0])
        elif len(values) == 2 and values[0] in ("-z", "-n"):
            result = (values[1] == "") == (values[0] == "-z")
        elif len(values) == 3 and values[1] in ("=", "==", "!="):
            result = fnmatch.fnmatchcase(values[0], values[2][:200]) == (values[1] != "!=")
        elif len(values) == 3 and values[1] in _NUMBER_TESTS:
            try:
                result = bool(evaluate(f"({values[0]}){_NUMBER_TESTS[values[1]]}({values[2]})", lambda name: None))
            except UnknownNumber:
                result = None
        return None if result is None else result != negate

    def tested(self, word: Word, line: int) -> str | None:
        """The text of a word of a comparison; a variable that is not set is empty. None if it is not known."""
        expanded = self.variables.expand_text(word)
        if not expanded.missing:
            return expanded.text
        unset = self.unset(expanded)
        if any(name not in unset for name in expanded.missing) or expanded.text.count("$") != 1:
            return None
        self.note(line, f"{expanded.missing[0]} has no value and counts as empty in this condition")
        return re.sub(r"\$(\{\w+\})", "", expanded.text)

    def unset(self, text: ShellText) -> list[str]:
        """The missing names of a text that are variables which nobody set, and not results of commands."""
        return [name for name in text.missing if re.fullmatch(r"\w+", name) and self.variables.get(name) is None]


def _with_blanks(texts: Sequence[ShellText], line: int) -> ShellText:
    """Returns words as one text with blanks between them, as `eval` reads its arguments."""
    pieces = [piece for text in texts for piece in ((" ", NO_LINES), (text.text, text.source))][1:]
    return ShellText("".join(text for text, _ in pieces), line, lines=SourceLines.joined(pieces))


def _shell_command(texts: Sequence[str]) -> tuple[int, int] | None:
    """Returns where the shell and the text of `bash -x -c TEXT` are, also behind `srun`."""
    for at, text in enumerate(texts):
        if text in _SHELLS:
            options = itertools.takewhile(lambda word: word[:1] in ("-", "+"), texts[at + 1 :])
            place = next((index for index, word in enumerate(options) if re.fullmatch(r"-[a-z]*c", word)), None)
            if place is not None and at + place + 2 < len(texts):
                return at, at + place + 2
    return None


def _assigned(nodes: Sequence[Node]) -> list[str]:
    """Returns the variables that commands may set, in order."""
    names: list[str] = []
    for node in nodes:
        match node:
            case SimpleCommand():
                names += [assignment.name for assignment in node.assignments]
            case IfBlock():
                names += _assigned([inner for _, body in node.branches for inner in body])
            case CaseBlock():
                names += _assigned([inner for _, body in node.branches for inner in body])
            case ForLoop() | CommandGroup():
                names += _assigned(node.body)
            case ShellFunction():
                pass
    return list(dict.fromkeys(names))
