"""The variables of a shell script, and the expansion of words with them. No command is run and no environment is read.

A value that nobody can know here (an argument of the script, a variable of the environment, the output of a command) stays in the text as
`${NAME}`, and the text remembers the name.
"""

from __future__ import annotations

import fnmatch
import re
import shlex
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

from petatron.port.environment_variable_names import COMMANDS, is_of_environment
from petatron.port.shell_arithmetic import UnknownNumber, evaluate
from petatron.port.shell_lexer import ScriptError, Word, WordPart, word_of
from petatron.port.source_lines import NO_LINES, SourceLines

MAX_VALUE_LENGTH = 100_000
"""Characters of a value; `A=$A$A` in a loop of lines would need more memory than there is."""
_MAX_ITEMS = 5_000
_MAX_DEPTH = 20
_MAX_STRIPPED_LENGTH = 1_000  # the time of `${X%pattern}` grows with the square of it
_REFERENCE = re.compile(r"([#!]?)([A-Za-z_]\w*|[0-9]+|[@*#?$!-])(?:\[([^\]]*)\])?(.*)", re.S)
_DEFAULT = re.compile(r"(:?)([-=+?])(.*)", re.S)
_STRIP = re.compile(r"(##?|%%?)(.*)", re.S)


@dataclass(frozen=True, slots=True)
class ShellText:
    """A word after expansion. `missing` are names without a value; `is_bare`: it is nothing but such a name, unquoted.

    lines: where its text comes from, if that is more than one line.
    """

    text: str
    line: int
    missing: tuple[str, ...] = ()
    is_bare: bool = False
    lines: SourceLines = NO_LINES

    @property
    def source(self) -> SourceLines:
        return self.lines if self.lines.starts else SourceLines.of(self.line)


@dataclass(slots=True)
class ShellVariables:
    """Values by name, each a list since it may be an array. `given` come from the user and win over the script's own."""

    given: Mapping[str, str] = field(default_factory=dict)
    values: dict[str, tuple[ShellText, ...]] = field(default_factory=dict)
    reasons: dict[str, str] = field(default_factory=dict)

    def get(self, name: str) -> tuple[ShellText, ...] | None:
        return (ShellText(self.given[name], 0),) if name in self.given else self.values.get(name)

    def assign(self, name: str, texts: Iterable[ShellText], *, line: int, appends: bool, is_array: bool) -> None:
        """Sets a variable. A value that is nothing but unknown is asked for by the variable's own name."""
        values = tuple(texts)
        before = self.get(name) or ()
        if appends and is_array:
            values = before + values
        elif appends and before:
            missing = (*before[0].missing, *values[0].missing)
            lines = SourceLines.joined((text.text, text.source) for text in (before[0], values[0]))
            values = (ShellText(before[0].text + values[0].text, line, missing, lines=lines),)
        elif not is_array and (source := _replaced_name(values[0])) not in (None, name):
            self.reasons[name] = self.reasons[source]
            values = (ShellText(_shown(name), line, (name,)),)
        if len(values) > _MAX_ITEMS or sum(len(value.text) for value in values) > MAX_VALUE_LENGTH:
            limit = f"{MAX_VALUE_LENGTH:,} characters or {_MAX_ITEMS:,} items"
            raise ScriptError(line, f"the value of {name} grows beyond {limit}")
        self.values[name] = values

    def expand(self, word: Word) -> list[ShellText]:
        """Returns the words that a word becomes: none for an empty list, several for an array or an unquoted list."""
        fields: list[_Field] = [_Field()]
        for part in word.parts:
            self._append_part(fields, part, word.line)
            if sum(len(item.text) for item in fields) > MAX_VALUE_LENGTH:
                raise ScriptError(word.line, f"this word grows beyond {MAX_VALUE_LENGTH:,} characters")
        return [item.finished(word.line) for item in fields if item.text or item.is_quoted]

    def expand_text(self, word: Word, *, depth: int = 0) -> ShellText:
        """Returns a word as one text, as an assignment takes it: nothing is split."""
        values = [value for part in word.parts for value in self._part(part, part.line or word.line, depth)]
        return _joined(values, word.line)

    def _append_part(self, fields: list[_Field], part: WordPart, line: int) -> None:
        is_array = part.kind == "variable" and part.is_quoted and re.search(r"^@$|\[@\]$", part.text) is not None
        values = self._part(part, part.line or line, depth=0)
        if is_array and not values and len(fields) == 1 and not fields[0].text:
            return
        if part.is_quoted or part.kind in ("literal", "placeholder"):
            fields[-1].is_quoted = fields[-1].is_quoted or (part.is_quoted and not is_array) or bool(values)
        for index, value in enumerate(values):
            if is_array and index:
                fields.append(_Field(is_quoted=True))
            if part.is_quoted or part.kind in ("literal", "placeholder"):
                if index and not is_array:
                    fields[-1].add(" ", _Value(" "))
                fields[-1].add(value.text, value, is_bare=is_array and value.text in map(_shown, value.missing))
                continue
            if index or value.text[:1].isspace():
                fields.append(_Field())
            pieces = list(re.finditer(r"\S+", value.text))
            for number, match in enumerate(pieces):
                if number:
                    fields.append(_Field())
                piece, lines = match[0], value.source.part(*match.span())
                names = _names_in(piece, value)
                part_of_value = replace(value, missing=names, line=lines.at(0), lines=lines)
                fields[-1].add(piece, part_of_value, is_bare=piece in map(_shown, names))
            if pieces and value.text[-1:].isspace():
                fields.append(_Field())

    def _part(self, part: WordPart, line: int, depth: int) -> list[_Value]:
        if depth > _MAX_DEPTH:
            raise ScriptError(line, f"expansions nest more than {_MAX_DEPTH} deep")
        if part.kind == "literal":
            return [_Value(part.text, line=line)]
        if part.kind == "placeholder":
            return [self._unknown(part.text, line, f"{part.text} is a placeholder")]
        if part.kind == "command":
            command = " ".join(part.text.split())
            if command in COMMANDS:
                return self._variable(COMMANDS[command], line, depth)
            return [self._unknown(f"({command})", line, f"it is the output of `{command}`, which is not run")]
        if part.kind == "arithmetic":
            return [self._arithmetic(part.text, line, depth)]
        return self._variable(part.text, line, depth)

    def _arithmetic(self, text: str, line: int, depth: int) -> _Value:
        expanded = self.expand_text(word_of(text, line), depth=depth + 1)
        if expanded.missing:
            return _Value(f"$(({expanded.text}))".replace(" ", ""), expanded.missing, line)
        try:
            return _Value(str(evaluate(expanded.text, self._number)), line=line)
        except UnknownNumber:
            names = [name for name in re.findall(r"[A-Za-z_]\w*", expanded.text) if self._number(name) is None]
            if names:
                return _Value(f"$(({text}))".replace(" ", ""), tuple(dict.fromkeys(names)), line)
            return self._unknown(f"(({text}))", line, f"`{text}` is not computed here")

    def _number(self, name: str) -> str | None:
        values = self.get(name)
        return values[0].text if values and not values[0].missing else None

    def _unknown(self, name: str, line: int, reason: str) -> _Value:
        self.reasons.setdefault(name, reason)
        return _Value(_shown(name), (name,), line)

    def _variable(self, text: str, line: int, depth: int) -> list[_Value]:
        match = _REFERENCE.fullmatch(text)
        if match is None:
            return [self._unknown(f"{{{text}}}", line, f"`${{{text}}}` is not evaluated")]
        prefix, name, index, rest = match.groups()
        if prefix == "!":
            return [self._unknown(f"{{{text}}}", line, f"`${{{text}}}` is not evaluated")]
        if name == "#" or prefix == "#":
            return [_Value(str(self._length(name, index, prefix)), line=line)]
        values = self._values(name, index)
        if not rest:
            return list(values) if values is not None else self._unset(name, line)
        if (default := _DEFAULT.fullmatch(rest)) is not None:
            return self._with_default(name, values, default, line, depth)
        if values is None:
            return self._unset(name, line)
        if (strip := _STRIP.fullmatch(rest)) is not None and not any(value.missing for value in values):
            pattern = self.expand_text(word_of(strip[2], line), depth=depth + 1).text
            if all(len(value.text) <= _MAX_STRIPPED_LENGTH for value in values):
                return [_Value(_stripped(value.text, strip[1], pattern[:100]), line=line) for value in values]
        if rest in (",,", "^^") and not any(value.missing for value in values):
            return [_Value(value.text.lower() if rest == ",," else value.text.upper(), line=line) for value in values]
        return [self._unknown(f"{{{text}}}", line, f"`${{{text}}}` is not evaluated")]

    def _unset(self, name: str, line: int) -> list[_Value]:
        if name in "@*":
            return []
        if name.isdigit():
            reason = f"it is ${name}, an argument of the script"
        elif is_of_environment(name):
            reason = "the shell that starts the run has it"
        elif name.isidentifier():
            reason = "the script does not set it, and the environment is not read"
        else:
            reason = f"`${name}` is known only while a script runs"
        return [self._unknown(name, line, reason)]

    def _length(self, name: str, index: str | None, prefix: str) -> int:
        if name == "#" and not prefix:
            return len(list(self._positional()))
        values = self._values(name, index) or ()
        return len(values) if index in ("@", "*") else len(values[0].text) if values else 0

    def _values(self, name: str, index: str | None) -> tuple[_Value, ...] | None:
        if name in ("@", "*"):
            return tuple(self._positional()) or None
        if name == "?":
            return (_Value("0"),)
        values = self.get(name)
        if values is None:
            return None
        if index in ("@", "*") and name in self.given:
            values = tuple(replace(values[0], text=word) for word in _given_words(values[0].text))
        if index not in ("@", "*"):
            at = int(index) if index and index.isdigit() else 0
            values = values[at : at + 1]
        return tuple(
            _Value(value.text, value.missing, value.line, number > 0, value.lines)
            for number, value in enumerate(values)
        )

    def _positional(self) -> Iterator[_Value]:
        number = 1
        while (values := self.get(str(number))) is not None:
            yield _Value(values[0].text, values[0].missing, values[0].line, number > 1, values[0].lines)
            number += 1

    def _with_default(
        self, name: str, values: tuple[_Value, ...] | None, match: re.Match[str], line: int, depth: int
    ) -> list[_Value]:
        colon, kind, argument = match.groups()
        is_set = values is not None and not (colon and all(value.text == "" for value in values))
        if kind == "+":
            is_set = not is_set
            values = ()
        if is_set:
            return list(values or ())
        if kind == "?":
            return self._unset(name, line)
        parts = _default_parts(argument, line)
        made = [value for part in parts for value in self._part(part, line, depth + 1)]
        if kind == "=" and name.isidentifier():  # `: ${X=default}` is an assignment too
            self.assign(name, [_joined(made, line)], line=line, appends=False, is_array=False)
        return made


def _given_words(text: str) -> list[str]:
    """Returns the items of an array that the user gives as one text."""
    try:
        return shlex.split(text)
    except ValueError:
        return text.split()


def _replaced_name(value: ShellText) -> str | None:
    """Returns the unknown name that a variable's own name takes the place of: all of the value, or of one word that nobody can set."""
    if any(is_of_environment(name) for name in value.missing):
        return None
    unsettable = [name for name in value.missing if not is_settable(name)]
    if unsettable and not any(char.isspace() for char in value.text):
        return unsettable[0]
    return value.missing[0] if len(value.missing) == 1 and value.text == _shown(value.missing[0]) else None


def is_settable(name: str) -> bool:
    """Whether a missing value has a name that `--set` can give: a variable, or the number of an argument."""
    return re.fullmatch(r"\w+", name) is not None


def _default_parts(argument: str, line: int) -> tuple[WordPart, ...]:
    """The default after `:-` may have quotes of its own."""
    stripped = argument.strip()
    if (
        len(stripped) >= 2
        and stripped[0] == stripped[-1]
        and stripped[0] in "\"'"
        and stripped[0] not in stripped[1:-1]
    ):
        if stripped[0] == "'":
            return (WordPart("literal", stripped[1:-1], True),)
        argument = stripped[1:-1]
    return word_of(argument, line).parts


def _stripped(text: str, sign: str, pattern: str) -> str:
    """Removes the shortest (`#`, `%`) or longest (`##`, `%%`) match of a pattern from the front or the end."""
    lengths = range(len(text) + 1) if len(sign) == 1 else range(len(text), -1, -1)
    for length in lengths:
        piece, rest = (
            (text[:length], text[length:])
            if sign[0] == "#"
            else (text[len(text) - length :], text[: len(text) - length])
        )
        if fnmatch.fnmatchcase(piece, pattern):
            return rest
    return text


def _shown(name: str) -> str:
    """How a name without a value is written; without blanks, so that it stays one word."""
    return f"${{{name}}}" if name.isidentifier() or name.isdigit() else f"${name}".replace(" ", "_")


@dataclass(frozen=True, slots=True)
class _Value:
    text: str
    missing: tuple[str, ...] = ()
    line: int = 0
    follows_blank: bool = False
    lines: SourceLines = NO_LINES

    @property
    def source(self) -> SourceLines:
        return self.lines if self.lines.starts else SourceLines.of(self.line)


def _joined(values: Sequence[_Value], line: int) -> ShellText:
    """Returns values as one text; those of a list have blanks between them."""
    pieces: list[tuple[str, SourceLines]] = []
    for value in values:
        pieces += [(" ", NO_LINES)] if pieces and value.follows_blank else []
        pieces.append((value.text, value.source))
    missing = tuple(dict.fromkeys(name for value in values for name in value.missing))
    return ShellText("".join(text for text, _ in pieces), line, missing, lines=SourceLines.joined(pieces))


def _names_in(piece: str, value: _Value) -> tuple[str, ...]:
    """Returns the names without a value in one word of a value: written as such, or inside `$((...))`."""
    return tuple(name for name in value.missing if _shown(name) in piece or ("$((" in piece and name in piece))


@dataclass(slots=True)
class _Field:
    """A word while its parts are put together."""

    text: str = ""
    missing: tuple[str, ...] = ()
    is_quoted: bool = False
    is_bare: bool = False
    line: int = 0
    pieces: list[tuple[str, SourceLines]] = field(default_factory=list)

    def add(self, text: str, value: _Value, *, is_bare: bool = False) -> None:
        self.is_bare = is_bare and not self.text and not any(map(is_of_environment, value.missing))
        self.pieces.append((text, value.source))
        self.text += text
        self.missing = tuple(dict.fromkeys((*self.missing, *value.missing)))
        self.line = self.line or value.line

    def finished(self, line: int) -> ShellText:
        lines = SourceLines.joined(self.pieces)
        return ShellText(self.text, self.line or line, self.missing, self.is_bare and bool(self.missing), lines)
