"""Lexes a shell script into tokens: words with their quotes and expansions, operators, line ends. Nothing is expanded here.

Comments, continuations, redirections and here-documents are removed, since none of them changes the words of a command.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field, replace
from typing import Literal

from petatron.base.errors import DataError
from petatron.port.source_lines import SourceLines

PartKind = Literal["literal", "variable", "arithmetic", "command", "placeholder"]
_OPERATORS = (";;&", ";;", ";&", "&&", "||", "|&", ";", "|", "&", "(", ")")
_SIMPLE_NAME = re.compile(r"[A-Za-z_]\w*|[0-9@*#?$!-]")
_PLACEHOLDER = re.compile(r"<[A-Za-z][^<>\n|&;\"'`$]*>(?=[\s/;)\"']|$)")
_BEFORE_HOME, _HOME = re.compile(r"([A-Za-z_]\w*\+?=)?"), re.compile(r"~(?=[/\s;|&)]|$)")
_ESCAPES = {"n": "\n", "t": "\t", "\\": "\\", "'": "'", '"': '"'}
_MAX_NESTING = 50


class ScriptError(DataError):
    """A script that cannot be read: its line, and what is wrong there."""

    def __init__(self, line: int, why: str) -> None:
        super().__init__(f"line {line}: {why}")


@dataclass(frozen=True, slots=True)
class WordPart:
    """Part of a word: text, or what is inside `${...}`, `$((...))` or `$(...)`; `<Specify path>` is a placeholder.

    line: where it begins, if that is not the line of the word; quoted text has a part for each of its lines.
    """

    kind: PartKind
    text: str
    is_quoted: bool
    line: int = 0


@dataclass(frozen=True, slots=True)
class Word:
    """A word before expansion."""

    parts: tuple[WordPart, ...]
    line: int

    @property
    def plain(self) -> str | None:
        """The text of a word without quotes and expansions, as reserved words have to be."""
        if len(self.parts) == 1 and self.parts[0].kind == "literal" and not self.parts[0].is_quoted:
            return self.parts[0].text
        return None

    @property
    def leading_text(self) -> str:
        """The unquoted text before the first quote or expansion."""
        first = self.parts[0] if self.parts else None
        return first.text if first is not None and first.kind == "literal" and not first.is_quoted else ""


@dataclass(frozen=True, slots=True)
class Token:
    """A word, an operator, or the end of a line (operator `\\n`). `is_adjacent`: no blank is in front of it."""

    line: int
    word: Word | None = None
    operator: str = ""
    is_adjacent: bool = False


@dataclass(slots=True)
class TokenizedScript:
    """Tokens, and the lines of here-documents without an end."""

    tokens: list[Token] = field(default_factory=list)
    open_documents: list[int] = field(default_factory=list)


def tokenize(text: str, lines: SourceLines | None = None) -> TokenizedScript:
    """Returns the tokens of a script; `ScriptError` for a quote or bracket without an end.

    lines: the script's line numbers of the text, if the text is only a part of a script.
    """
    return _Lexer(text, 1, lines).run()


def word_of(text: str, line: int) -> Word:
    """Returns a text as one word, lexed as if it were in double quotes: blanks and operators do not end it."""
    return Word(tuple(_Lexer(text, line).quoted_parts()), line)


class _Lexer:
    def __init__(self, text: str, first_line: int, lines: SourceLines | None = None) -> None:
        self.text, self.at, self.lines = text, 0, lines
        self.line = first_line if lines is None else lines.at(0)
        self.script = TokenizedScript()
        self.is_test = False  # inside [[ ]], where < > ( ) && || are words
        self.documents: list[tuple[str, bool, int]] = []  # delimiter, whether tabs are stripped, line

    def run(self) -> TokenizedScript:
        adjacent = False
        while self.at < len(self.text):
            char = self.text[self.at]
            if char == "\n":
                self.script.tokens.append(Token(self.line, operator="\n"))
                self._advance(1)
                self._skip_documents()
                adjacent = False
            elif char in " \t\r":
                self._advance(1)
                adjacent = False
            elif self._starts("\\\n") or self._starts("\\\r\n"):
                self._advance(2 + (self.text[self.at + 1] == "\r"))
                adjacent = False
            elif char == "#" and not adjacent:
                end = self.text.find("\n", self.at)
                self._advance((len(self.text) if end < 0 else end) - self.at)
            else:
                self._token(adjacent)
                adjacent = True
        return self.script

    def _starts(self, prefix: str) -> bool:
        return self.text.startswith(prefix, self.at)

    def _advance(self, count: int) -> str:
        passed = self.text[self.at : self.at + count]
        self.at += count
        self.line = self.line + passed.count("\n") if self.lines is None else self.lines.at(self.at)
        return passed

    def _token(self, adjacent: bool) -> None:
        line, char = self.line, self.text[self.at]
        if not self.is_test and char in "<>" and _PLACEHOLDER.match(self.text, self.at) is None:
            if self.text[self.at + 1 : self.at + 2] != "(":
                self._redirection()
                return
        elif not self.is_test and self._starts("&>"):
            self._advance(1)
            self._redirection()
            return
        elif self._starts("((") and not self.is_test:
            self._advance(2)
            inner = self._until_balanced("(", ")", closing="))", what="((")
            part = WordPart("arithmetic", inner, True)
            self.script.tokens.append(Token(line, Word((WordPart("literal", "((", False), part), line)))
            return
        operator = next((name for name in _OPERATORS if self._starts(name)), None)
        if operator is not None:
            self._advance(len(operator))
            token = Token(line, operator=operator, is_adjacent=adjacent)
            if self.is_test:
                token = Token(line, Word((WordPart("literal", operator, False),), line))
            self.script.tokens.append(token)
            return
        word = self._word()
        if word.plain is not None and word.plain.isdigit() and self.text[self.at : self.at + 1] in ("<", ">"):
            return  # the number of a redirected descriptor
        self.is_test = word.plain == "[[" or (self.is_test and word.plain != "]]")
        self.script.tokens.append(Token(line, word, is_adjacent=adjacent))

    def _redirection(self) -> None:
        """Removes a redirection with its target; a here-document is removed at the end of the line."""
        if self._starts("<<") and not self._starts("<<<"):
            strips_tabs = self._starts("<<-")
            self._advance(3 if strips_tabs else 2)
            self._skip_blanks()
            line, delimiter = self.line, self._word()
            self.documents.append(("".join(part.text for part in delimiter.parts), strips_tabs, line))
            return
        while self.at < len(self.text) and self.text[self.at] in "<>&|":
            self._advance(1)
        self._skip_blanks()
        if self.at < len(self.text) and self.text[self.at] not in "\n;|&()":
            self._word()

    def _skip_blanks(self) -> None:
        while self.at < len(self.text) and self.text[self.at] in " \t":
            self._advance(1)

    def _skip_documents(self) -> None:
        for delimiter, strips_tabs, line in self.documents:
            while True:
                if self.at >= len(self.text):
                    self.script.open_documents.append(line)
                    break
                end = self.text.find("\n", self.at)
                passed = self._advance((len(self.text) if end < 0 else end + 1) - self.at).rstrip("\r\n")
                if (passed.lstrip("\t") if strips_tabs else passed) == delimiter:
                    break
        self.documents = []

    def _word(self) -> Word:
        line, parts, text = self.line, [], ""

        def add(more: list[WordPart]) -> None:
            nonlocal text
            if text:
                parts.append(WordPart("literal", text, False))
                text = ""
            parts.extend(more)

        while self.at < len(self.text):
            char = self.text[self.at]
            if self._starts("\\\n"):
                self._advance(2)
            elif char == "\\":
                add([WordPart("literal", self._advance(2)[1:], True)])
            elif char == "~" and not parts and _BEFORE_HOME.fullmatch(text) and _HOME.match(self.text, self.at):
                self._advance(1)
                add([])
                parts.append(WordPart("variable", "HOME", True))
            elif char == "'":
                add(self._single_quoted_parts())
            elif char == '"':
                add(self._double_quoted())
            elif char in "$`":
                add([self._expansion(is_quoted=False)])
            elif char in "<>" and self.text[self.at + 1 : self.at + 2] == "(" and not self.is_test:
                self._advance(2)
                add([WordPart("command", self._until_balanced("(", ")", closing=")", what="<("), False)])
            elif not self.is_test and (placeholder := _PLACEHOLDER.match(self.text, self.at)):
                add([WordPart("placeholder", self._advance(len(placeholder[0])), False)])
            elif char in " \t\r\n" or (char in ";|&()<>" and not (self.is_test and char in "<>")):
                break
            else:
                text += self._advance(1)
        add([])
        if not parts:
            self._advance(1)  # a sign that begins nothing
        return Word(tuple(parts), line)

    def _single_quoted(self) -> str:
        line, end = self.line, self.text.find("'", self.at + 1)
        if end < 0:
            raise ScriptError(line, "this quote (') has no end")
        return self._advance(end + 1 - self.at)[1:-1]

    def _single_quoted_parts(self) -> list[WordPart]:
        """Returns a part for each line of a quoted text."""
        begin, lexer = self.at + 1, _Lexer(self.text, self.line, self.lines)
        text = self._single_quoted()
        lexer.at, parts = begin, []
        for line_text in text.splitlines(keepends=True) or [""]:
            parts.append(WordPart("literal", line_text, True, lexer.line))
            lexer._advance(len(line_text))
        return parts

    def _double_quoted(self) -> list[WordPart]:
        line = self.line
        self._advance(1)
        parts = self.quoted_parts(closing='"')
        if self.at >= len(self.text):
            raise ScriptError(line, 'this quote (") has no end')
        self._advance(1)
        return parts

    def quoted_parts(self, closing: str = "") -> list[WordPart]:
        """Returns the parts up to the closing quote, one for each line of text; an empty one if there is nothing, which still is a word."""
        parts: list[WordPart] = []
        text, line = "", self.line

        def end_text() -> None:
            nonlocal text, line
            parts.extend([WordPart("literal", text, True, line)] if text else [])
            text, line = "", self.line

        while self.at < len(self.text) and not (closing and self._starts(closing)):
            if self._starts("\\\n"):
                self._advance(2)
            elif self.text[self.at] == "\\" and self.text[self.at + 1 : self.at + 2] in ("$", "`", '"', "\\"):
                text += self._advance(2)[1]
            elif self.text[self.at] in "$`":
                end_text()
                parts.append(replace(self._expansion(is_quoted=True), line=line))
                line = self.line
            else:
                text += self._advance(1)
            if self.line != line:
                end_text()
        end_text()
        return parts or [WordPart("literal", "", True)]

    def _expansion(self, *, is_quoted: bool) -> WordPart:
        line = self.line
        if self._starts("`"):
            end = self.text.find("`", self.at + 1)
            if end < 0:
                raise ScriptError(line, "this quote (`) has no end")
            return WordPart("command", self._advance(end + 1 - self.at)[1:-1], is_quoted)
        for opening, bracket, closing, kind in (
            ("$((", "(", "))", "arithmetic"),
            ("$(", "(", ")", "command"),
            ("${", "{", "}", "variable"),
        ):
            if self._starts(opening):
                self._advance(len(opening))
                pair = ")" if bracket == "(" else "}"
                inner = self._until_balanced(bracket, pair, closing=closing, what=opening)
                return WordPart(kind, inner, is_quoted)  # type: ignore[arg-type]
        self._advance(1)
        if self._starts("'") and not is_quoted:
            return WordPart(
                "literal", re.sub(r"\\(.)", lambda match: _ESCAPES.get(match[1], match[0]), self._single_quoted()), True
            )
        name = _SIMPLE_NAME.match(self.text, self.at)
        if name is None:
            return WordPart("literal", "$", is_quoted)
        return WordPart("variable", self._advance(len(name[0])), is_quoted)

    def _until_balanced(self, opening: str, pair: str, *, closing: str, what: str) -> str:
        """Passes text up to the closing bracket and returns it; brackets may nest, and those in quotes do not count."""
        line, start, depth = self.line, self.at, 0
        while self.at < len(self.text):
            char = self.text[self.at]
            if depth == 0 and self._starts(closing):
                inner = self.text[start : self.at]
                self._advance(len(closing))
                return inner
            if char == "\\":
                self._advance(2)
            elif char == "'" and what != "$((":
                self._single_quoted()
            elif char == '"':
                self._double_quoted()
            else:
                depth += (char == opening) - (char == pair)
                if depth > _MAX_NESTING:
                    raise ScriptError(line, f"brackets nest more than {_MAX_NESTING} deep")
                self._advance(1)
        raise ScriptError(line, f"this bracket ({what}) has no end")
