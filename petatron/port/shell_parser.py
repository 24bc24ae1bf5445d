"""Parses the tokens of a shell script into commands: simple ones, blocks with conditions, loops and functions."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from petatron.port.shell_lexer import ScriptError, Token, Word, WordPart, tokenize
from petatron.port.source_lines import SourceLines

_ASSIGNMENT = re.compile(r"([A-Za-z_]\w*)(\+?)=")
_FUNCTION_NAME = re.compile(r"[\w.:-]+")
_DECLARATIONS = ("export", "declare", "local", "readonly", "typeset")
_CLOSING = ("then", "elif", "else", "fi", "do", "done", "esac", "}")
_MAX_NESTING = 50


@dataclass(frozen=True, slots=True)
class Assignment:
    """`name=value`, `name+=value` or `name=(values)`."""

    name: str
    values: tuple[Word, ...]
    line: int
    is_array: bool = False
    appends: bool = False


@dataclass(slots=True)
class SimpleCommand:
    """A command with the assignments in front of it, or those of `export` and the like."""

    line: int
    assignments: list[Assignment] = field(default_factory=list)
    arguments: list[Word] = field(default_factory=list)
    joined_lines: list[int] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class IfBlock:
    """Conditions with their commands; the last condition may be empty, for `else`. `text` names it in messages.

    joint: `&&` or `||` if it is two commands joined, of which the first is a test.
    """

    line: int
    branches: tuple[tuple[tuple[Node, ...], tuple[Node, ...]], ...]
    text: str
    joint: str = ""


@dataclass(frozen=True, slots=True)
class CaseBlock:
    line: int
    subject: Word
    branches: tuple[tuple[tuple[Word, ...], tuple[Node, ...]], ...]


@dataclass(frozen=True, slots=True)
class ForLoop:
    """A loop over words; `name` is empty for `while`, `until` and C-style loops, whose turns nobody can know."""

    line: int
    name: str
    values: tuple[Word, ...]
    body: tuple[Node, ...]


@dataclass(frozen=True, slots=True)
class ShellFunction:
    name: str
    body: tuple[Node, ...]


@dataclass(frozen=True, slots=True)
class CommandGroup:
    """`{ ... }` or `( ... )`."""

    body: tuple[Node, ...]


Node = SimpleCommand | IfBlock | CaseBlock | ForLoop | ShellFunction | CommandGroup


@dataclass(frozen=True, slots=True)
class ParsedScript:
    nodes: tuple[Node, ...]
    open_documents: tuple[int, ...]


def parse_script(text: str, lines: SourceLines | None = None) -> ParsedScript:
    """Returns the commands of a script; `ScriptError` for a quote, bracket or block without an end. lines: of a text within a script."""
    script = tokenize(text, lines)
    parser = _Parser(script.tokens)
    nodes = parser.commands(())
    if (extra := parser.peek()) is not None:
        raise ScriptError(extra.line, f"{extra.operator or parser.reserved()!r} closes nothing")
    return ParsedScript(tuple(nodes), tuple(script.open_documents))


class _Parser:
    def __init__(self, tokens: Sequence[Token]) -> None:
        self.tokens, self.at, self.depth = tokens, 0, 0

    def peek(self) -> Token | None:
        return self.tokens[self.at] if self.at < len(self.tokens) else None

    def reserved(self) -> str:
        """The plain text of the next word, which may be a reserved one."""
        token = self.peek()
        return (token.word.plain or "") if token is not None and token.word is not None else ""

    def operator(self) -> str:
        token = self.peek()
        return token.operator if token is not None else ""

    def skip_separators(self) -> None:
        while self.operator() in ("\n", ";", "&"):
            self.at += 1

    def expect(self, text: str, line: int, block: str) -> None:
        self.skip_separators()
        if self.reserved() != text and self.operator() != text:
            raise ScriptError(line, f"this {block} has no {text!r}")
        self.at += 1

    def commands(self, ends: tuple[str, ...]) -> list[Node]:
        """Parses up to one of some reserved words or operators, which is left."""
        self.depth += 1
        nodes: list[Node] = []
        while True:
            self.skip_separators()
            token = self.peek()
            if token is None or self.reserved() in ends or token.operator in ends or token.operator == ")":
                break
            if self.depth > _MAX_NESTING:
                raise ScriptError(token.line, f"blocks nest more than {_MAX_NESTING} deep")
            if token.operator not in ("", "("):
                raise ScriptError(token.line, f"{token.operator!r} follows no command")
            nodes += self.and_or(nodes)
        self.depth -= 1
        return nodes

    def and_or(self, before: list[Node]) -> list[Node]:
        """Parses commands joined by `&&`, `||` and pipes. What depends on a test becomes a block with that condition."""
        nodes: list[Node] = self.single(before)
        while self.operator() in ("&&", "||", "|", "|&"):
            joint = self.operator()
            self.at += 1
            while self.operator() == "\n":
                self.at += 1
            if self.operator() not in ("", "("):
                raise ScriptError(self.tokens[self.at].line, f"{self.operator()!r} follows no command")
            after = self.single([])
            left = nodes[-1] if nodes else None
            if (
                joint == "||"
                and isinstance(left, IfBlock)
                and left.joint == "&&"
                and not _is_test(left.branches[0][1][-1])
            ):
                nodes[-1] = replace(left, branches=(*left.branches, ((), tuple(after))))  # a && b || c
            elif joint in ("&&", "||") and left is not None and _is_test(left):
                branches = (((left,), tuple(after)),) if joint == "&&" else (((left,), ()), ((), tuple(after)))
                text = left.text if isinstance(left, IfBlock) else command_text(left)  # type: ignore[arg-type]
                nodes[-1] = IfBlock(left.line, branches, text, joint)  # type: ignore[union-attr]
            elif joint != "||":  # after `||` comes what to do when a command fails
                nodes += after
        return nodes

    def single(self, before: list[Node]) -> list[Node]:
        token = self.peek()
        if token is None:
            return []
        blocks = {"if": self.if_block, "case": self.case_block, "for": self.loop, "while": self.loop}
        blocks |= {"until": self.loop, "select": self.loop, "function": self.function}
        text = self.reserved()
        if text in blocks:
            return [blocks[text](token.line)]
        if text in _CLOSING:
            raise ScriptError(token.line, f"{text!r} closes nothing")
        if text == "{" or token.operator == "(":
            self.at += 1
            closing = "}" if text == "{" else ")"
            body = self.commands((closing,))
            self.expect(closing, token.line, "group")
            self.skip_redirected()
            return [CommandGroup(tuple(body))]
        if text == "!":
            self.at += 1
            negated = self.single([])
            if negated and isinstance(negated[0], SimpleCommand) and token.word is not None:
                negated[0].arguments.insert(0, token.word)
            return negated
        return self.simple(before)

    def skip_redirected(self) -> None:
        """Words after a block are none: redirections have been removed. So nothing remains up to the separator."""
        while (
            (token := self.peek()) is not None and token.word is not None and self.reserved() not in ("}", "fi", "done")
        ):
            self.at += 1

    def if_block(self, line: int) -> Node:
        branches: list[tuple[tuple[Node, ...], tuple[Node, ...]]] = []
        text = ""
        while self.reserved() in ("if", "elif"):
            self.at += 1
            condition = tuple(self.commands(("then",)))
            text = text or " ".join(command_text(node) for node in condition if isinstance(node, SimpleCommand))
            self.expect("then", line, "if")
            branches.append((condition, tuple(self.commands(("elif", "else", "fi")))))
        if self.reserved() == "else":
            self.at += 1
            branches.append(((), tuple(self.commands(("fi",)))))
        self.expect("fi", line, "if")
        return IfBlock(line, tuple(branches), text)

    def case_block(self, line: int) -> Node:
        self.at += 1
        token = self.peek()
        if token is None or token.word is None:
            raise ScriptError(line, "this case has no word")
        self.at += 1
        self.expect("in", line, "case")
        branches: list[tuple[tuple[Word, ...], tuple[Node, ...]]] = []
        while True:
            self.skip_separators()
            if self.reserved() == "esac":
                break
            patterns: list[Word] = []
            while (item := self.peek()) is not None and item.operator != ")":
                patterns += [item.word] if item.word is not None else []
                self.at += 1
            self.expect(")", line, "case")
            branches.append((tuple(patterns), tuple(self.commands((";;", ";&", ";;&", "esac")))))
            self.at += self.operator() in (";;", ";&", ";;&")
            if self.peek() is None:
                raise ScriptError(line, "this case has no 'esac'")
        self.at += 1
        return CaseBlock(line, token.word, tuple(branches))

    def loop(self, line: int) -> Node:
        kind, name, values = self.reserved(), "", []
        self.at += 1
        if kind == "for" and self.reserved().isidentifier():
            name = self.reserved()
            self.at += 1
            if self.reserved() == "in":
                self.at += 1
                while (token := self.peek()) is not None and token.word is not None:
                    values.append(token.word)
                    self.at += 1
        self.commands(("do",))
        self.expect("do", line, kind)
        body = tuple(self.commands(("done",)))
        self.expect("done", line, kind)
        self.skip_redirected()
        return ForLoop(line, name if values else "", tuple(values), body)

    def function(self, line: int) -> Node:
        self.at += self.reserved() == "function"
        name = self.reserved()
        self.at += 1
        while self.operator() in ("(", ")", "\n"):
            self.at += 1
        body = self.single([])
        return ShellFunction(name, tuple(body))

    def simple(self, before: list[Node]) -> list[Node]:
        token = self.peek()
        assert token is not None
        command = SimpleCommand(token.line)
        following = self.tokens[self.at + 1 : self.at + 3]
        if [item.operator for item in following] == ["(", ")"] and _FUNCTION_NAME.fullmatch(self.reserved()):
            return [self.function(token.line)]
        while (token := self.peek()) is not None and token.word is not None:
            self.at += 1
            assignment = self.assignment(token.word, command)
            if assignment is not None:
                command.assignments.append(assignment)
            else:
                command.arguments.append(token.word)
        if self.operator() == "(":
            raise ScriptError(command.line, "'(' is not expected here; a value with brackets needs quotes")
        last = before[-1] if before else None
        first = command.arguments[0].leading_text if command.arguments else ""
        if isinstance(last, SimpleCommand) and last.arguments and _continues(first, last):
            last.arguments += command.arguments
            last.joined_lines.append(command.line)
            return []
        return [command]

    def assignment(self, word: Word, command: SimpleCommand) -> Assignment | None:
        """Returns the assignment that a word is, if its place allows one; an array takes the words of its brackets."""
        declares = bool(command.arguments) and command.arguments[0].plain in _DECLARATIONS
        first = word.parts[0] if word.parts else None
        if (command.arguments and not declares) or first is None or first.kind != "literal" or first.is_quoted:
            return None
        match = _ASSIGNMENT.match(first.text)
        if match is None:
            return None
        rest = first.text[match.end() :]
        token = self.peek()
        if not rest and len(word.parts) == 1 and token is not None and token.operator == "(" and token.is_adjacent:
            return Assignment(match[1], tuple(self.array(token.line)), word.line, is_array=True, appends=bool(match[2]))
        parts = ((WordPart("literal", rest, False),) if rest else ()) + word.parts[1:]
        return Assignment(match[1], (Word(parts, word.line),), word.line, appends=bool(match[2]))

    def array(self, line: int) -> list[Word]:
        self.at += 1
        values: list[Word] = []
        while (token := self.peek()) is not None and token.operator != ")":
            if token.operator not in ("", "\n"):
                raise ScriptError(
                    token.line, f"{token.operator!r} is not expected in an array; a value with it needs quotes"
                )
            values += [token.word] if token.word is not None else []
            self.at += 1
        if token is None:
            raise ScriptError(line, "this array has no end")
        self.at += 1
        return values


def _is_test(command: Node) -> bool:
    """Whether a command only compares values: `[ ... ]`, or several of them joined."""
    if isinstance(command, IfBlock):
        return bool(command.joint) and all(_is_test(node) for _, body in command.branches for node in body)
    if not isinstance(command, SimpleCommand):
        return False
    names = [word.plain for word in command.arguments if word.plain != "!"]
    return bool(names) and names[0] in ("[", "[[", "test")


def _continues(first: str, last: SimpleCommand) -> bool:
    """Whether a line that begins with a flag, or with the script of a launcher, belongs to the command of the line before."""
    return first.startswith("--") or (first.endswith(".py") and bool(last.joined_lines))


def command_text(command: SimpleCommand) -> str:
    """Returns a command as it is written, for messages."""
    spelling = {"variable": "${%s}", "command": "$(%s)", "arithmetic": "$((%s))"}
    texts = ("".join(spelling.get(part.kind, "%s") % part.text for part in word.parts) for word in command.arguments)
    return " ".join(texts)
