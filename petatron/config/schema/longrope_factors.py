"""The factors of LongRoPE: a list of numbers, one for each rotary pair, as the text of a JSON list."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence

MAX_FACTORS = 1 << 16


class LongRopeFactorError(ValueError):
    """A text that is not a list of factors; the message tells what is wrong with it."""


def parse_longrope_factors(text: str) -> tuple[float, ...]:
    """Returns the factors.

    >>> parse_longrope_factors("[1.0, 2.5]")
    (1.0, 2.5)
    """
    try:
        found = json.loads(text)
    except (ValueError, RecursionError):
        raise LongRopeFactorError("is not a list of numbers such as [1.0, 1.5]") from None
    if not isinstance(found, list) or not 0 < len(found) <= MAX_FACTORS:
        raise LongRopeFactorError("is not a list of numbers such as [1.0, 1.5]")
    if not all(is_factor(number) for number in found):
        raise LongRopeFactorError("holds something else than positive numbers")
    return tuple(float(number) for number in found)


def is_factor(number: object) -> bool:
    """Whether a value of JSON is a positive number."""
    return isinstance(number, int | float) and not isinstance(number, bool) and number > 0 and math.isfinite(number)


def format_longrope_factors(factors: Sequence[float]) -> str:
    """Returns the text of factors.

    >>> format_longrope_factors((1, 2.5))
    '[1.0, 2.5]'
    """
    return json.dumps([float(number) for number in factors])
