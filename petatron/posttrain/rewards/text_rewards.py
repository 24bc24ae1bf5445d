"""Rewards that are rules about an answer's text: 1 if it holds, 0 if not. Each reads the keys of the prompt's line that it needs.

exact[:KEY]      the answer is the text of KEY (`answer`), but for spaces around it
contains[:KEY]   the text of KEY is in the answer
math[:KEY]       the last number of the answer (that in \\boxed{} if there is one) equals that of KEY, also 0.5 and 1/2
regex:PATTERN    the whole answer matches a regular expression, but for spaces around it
json             the answer is a JSON object
"""

from __future__ import annotations

import json
import re
from abc import ABC, abstractmethod
from collections.abc import Mapping
from fractions import Fraction
from typing import Any

_NUMBER = re.compile(r"-?\d[\d,]*(?:\.\d+)?(?:\s*/\s*\d+)?")
_BOXED = re.compile(r"\\boxed\{([^{}]*)\}")
_MAX_CHARS = 100_000
"""Longer answers are cut for rules: a regular expression of a user's could take hours on them."""


class TextReward(ABC):
    """A rule about an answer, read from the argument after its name."""

    def __init__(self, argument: str | None) -> None:
        self.key = argument or "answer"

    @abstractmethod
    def reward(self, answer: str, record: Mapping[str, Any]) -> float:
        """Returns the reward of an answer to the prompt of a record; raises `ValueError` if the record lacks what is needed."""

    def expected(self, record: Mapping[str, Any]) -> str:
        if self.key not in record:
            raise ValueError(f"the line of the prompt has no {self.key!r}")
        value = record[self.key]
        return value if isinstance(value, str) else json.dumps(value)


class Exact(TextReward):
    """
    >>> Exact(None).reward(" 19 ", {"answer": 19})
    1.0
    """

    def reward(self, answer: str, record: Mapping[str, Any]) -> float:
        return float(answer.strip() == self.expected(record).strip())


class Contains(TextReward):
    def reward(self, answer: str, record: Mapping[str, Any]) -> float:
        return float(self.expected(record).strip() in answer)


class Math(TextReward):
    """
    >>> Math(None).reward("so it is 1,024 / 2", {"answer": "512"}), Math(None).reward("\\\\boxed{1/2} of 7", {"answer": 0.5})
    (1.0, 1.0)
    """

    def reward(self, answer: str, record: Mapping[str, Any]) -> float:
        wanted = last_number(self.expected(record))
        if wanted is None:
            raise ValueError(f"{self.key!r} of the prompt's line has no number")
        return float(last_number(answer) == wanted)


class Matches(TextReward):
    """
    >>> Matches("[0-9]+").reward("12 ", {}), Matches("[0-9]+").reward("12a", {})
    (1.0, 0.0)
    """

    def __init__(self, argument: str | None) -> None:
        super().__init__(argument)
        if not argument:
            raise ValueError("has no regular expression: regex:PATTERN")
        try:
            self._pattern = re.compile(argument, re.DOTALL)
        except re.error as error:
            raise ValueError(f"has a regular expression that cannot be read: {error}") from error

    def reward(self, answer: str, record: Mapping[str, Any]) -> float:
        return float(self._pattern.fullmatch(answer.strip()[:_MAX_CHARS]) is not None)


class JsonObject(TextReward):
    def reward(self, answer: str, record: Mapping[str, Any]) -> float:
        try:
            return float(isinstance(json.loads(answer), dict))
        except (ValueError, RecursionError):
            return 0.0


def last_number(text: str) -> Fraction | None:
    """Returns the last number of a text, or of what is in its last \\boxed{}; None without one.

    >>> last_number("3 apples and 1,200.50 pears"), last_number("none")
    (Fraction(2401, 2), None)
    """
    boxed = _BOXED.findall(text[-_MAX_CHARS:])
    numbers = _NUMBER.findall(boxed[-1] if boxed else text[-_MAX_CHARS:])
    if not numbers:
        return None
    above, _, below = numbers[-1].replace(",", "").replace(" ", "").partition("/")
    try:
        return Fraction(above) / (Fraction(below) if below else 1)
    except (ZeroDivisionError, ValueError):
        return None


TEXT_REWARDS: Mapping[str, type[TextReward]] = {
    "exact": Exact,
    "contains": Contains,
    "math": Math,
    "regex": Matches,
    "json": JsonObject,
}
