"""Formats numbers, sizes and lists of names for messages, and aligns rows of words in columns."""

from __future__ import annotations

from collections.abc import Sequence
from collections.abc import Set as AbstractSet

from petatron.base.terminal_escape import printable

_MOST_SHOWN = 12


def count_with_noun(number: int, noun: str, plural_ending: str = "s") -> str:
    """A number and its noun, which takes the ending of its plural unless the number is 1.

    >>> count_with_noun(1, "rank"), count_with_noun(4096, "rank"), count_with_noun(2, "batch", "es")
    ('1 rank', '4,096 ranks', '2 batches')
    """
    return f"{number:,} {noun}{'' if number == 1 else plural_ending}"


def abbreviate_names(names: Sequence[str] | AbstractSet[str]) -> str:
    """Up to a dozen names.

    >>> abbreviate_names(["a", "b"])
    'a, b'
    """
    shown = list(names) if isinstance(names, Sequence) else sorted(names)
    more = f" and {len(shown) - _MOST_SHOWN} more" if len(shown) > _MOST_SHOWN else ""
    return ", ".join(shown[:_MOST_SHOWN]) + more


def gigabytes(count: int) -> str:
    """Rounded up to three significant digits, so that a budget of as much is enough."""
    if count == 0:
        return "0"
    step = 10 ** max(len(str(count)) - 3, 0)
    digits = max(9 - len(str(step)) + 1, 0)
    return f"{-(-count // step) * step / 1e9:.{digits}f}"


def format_bytes(size: float) -> str:
    """A size in the largest unit that leaves something before the point.

    >>> format_bytes(812), format_bytes(1_234_567), format_bytes(98_765_432_100), format_bytes(1.33e15)
    ('812 B', '1.23 MB', '98.77 GB', '1,330.00 TB')
    """
    for unit, unit_bytes in (("TB", 1e12), ("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if size >= unit_bytes:
            return f"{size / unit_bytes:,.2f} {unit}"
    return f"{size:.0f} B"


def align_columns(rows: Sequence[Sequence[str]]) -> str:
    """Aligns columns; the last one is not padded. A foreign name cannot begin a row of its own."""
    rows = [[printable(cell) for cell in row] for row in rows]
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]) - 1)]
    return "\n".join("  ".join([*(f"{cell:{width}}" for cell, width in zip(row, widths)), row[-1]]) for row in rows)
