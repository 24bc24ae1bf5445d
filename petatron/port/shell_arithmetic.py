"""`$((...))`: whole numbers, names and the usual operators, computed here and never by a shell."""

from __future__ import annotations

import operator
import re
from collections.abc import Callable, Mapping

_TOKEN = re.compile(r"\s*(?:(\d+)|([A-Za-z_]\w*)|(\*\*|<=|>=|==|!=|&&|\|\||[-+*/%()<>?:]))")
_MAX_NUMBER = 1 << 63
_MAX_LENGTH = 1000


class UnknownNumber(ValueError):
    """An expression that is not computed: a name without a value, an operator that is not known, or a number too large."""


def _quotient(left: int, right: int) -> int:
    """Rounds toward zero, as a shell does."""
    if right == 0:
        raise UnknownNumber("division by zero")
    magnitude = abs(left) // abs(right)
    return magnitude if (left < 0) == (right < 0) else -magnitude


def _power(base: int, exponent: int) -> int:
    if not 0 <= exponent < 64:
        raise UnknownNumber("power")
    return base**exponent


_LEVELS: tuple[Mapping[str, Callable[[int, int], int]], ...] = (
    {"||": lambda left, right: int(bool(left or right))},
    {"&&": lambda left, right: int(bool(left and right))},
    {"==": operator.eq, "!=": operator.ne, "<": operator.lt, ">": operator.gt, "<=": operator.le, ">=": operator.ge},
    {"+": operator.add, "-": operator.sub},
    {"*": operator.mul, "/": _quotient, "%": lambda left, right: left - _quotient(left, right) * right},
    {"**": _power},
)


def evaluate(expression: str, numbers: Callable[[str], str | None]) -> int:
    """Returns the value of an expression; `numbers` gives the text of a name's value. `UnknownNumber` if it cannot be told.

    >>> evaluate("GPUS * (2 + 1) / 4", {"GPUS": "8"}.get)
    6
    """
    if len(expression) > _MAX_LENGTH:
        raise UnknownNumber("too long")
    return _Expression(expression, numbers).value()


class _Expression:
    def __init__(self, text: str, numbers: Callable[[str], str | None]) -> None:
        self.numbers, self.tokens, self.at = numbers, [], 0
        position = 0
        while text[position:].strip():
            match = _TOKEN.match(text, position)
            if match is None:
                raise UnknownNumber(text)
            self.tokens.append(match[0].strip())
            position = match.end()

    def value(self) -> int:
        result = self.choice()
        if self.at < len(self.tokens):
            raise UnknownNumber(self.tokens[self.at])
        return result

    def choice(self) -> int:
        """`condition ? value : other`, or a value without a condition."""
        result = self.level(0)
        if self.tokens[self.at : self.at + 1] != ["?"]:
            return result
        self.at += 1
        first = self.choice()
        if self.tokens[self.at : self.at + 1] != [":"]:
            raise UnknownNumber("?")
        self.at += 1
        second = self.choice()
        return first if result else second

    def level(self, depth: int) -> int:
        if depth == len(_LEVELS):
            return self.atom()
        result = self.level(depth + 1)
        while self.at < len(self.tokens) and self.tokens[self.at] in _LEVELS[depth]:
            compute = _LEVELS[depth][self.tokens[self.at]]
            self.at += 1
            result = int(compute(result, self.level(depth + 1)))
            if abs(result) >= _MAX_NUMBER:
                raise UnknownNumber("too large")
        return result

    def atom(self) -> int:
        token = self.tokens[self.at] if self.at < len(self.tokens) else ""
        self.at += 1
        if token == "(":
            result = self.choice()
            if self.tokens[self.at : self.at + 1] != [")"]:
                raise UnknownNumber("(")
            self.at += 1
            return result
        if token in ("+", "-"):
            return self.atom() * (1 if token == "+" else -1)
        text = token if token.isdigit() else (self.numbers(token) or "") if token.isidentifier() else ""
        if not re.fullmatch(r"\s*-?\d{1,19}\s*", text):
            raise UnknownNumber(token)
        return int(text)
