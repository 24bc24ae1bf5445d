"""Numbers, sizes and lists of names in sentences."""

from __future__ import annotations

from collections.abc import Sequence
from collections.abc import Set as AbstractSet

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


def format_bytes(count: float) -> str:
    """Bytes in the unit that leaves three digits, so that a small shortage is visible.

    >>> format_bytes(999), format_bytes(1_500_000), format_bytes(12_345_678_901), format_bytes(0)
    ('999 bytes', '1.5 MB', '12.3 GB', '0 bytes')
    """
    for size, unit in ((1e12, "TB"), (1e9, "GB"), (1e6, "MB"), (1e3, "KB")):
        if count >= size:
            return f"{count / size:.3g} {unit}" if count < 1e15 else f"{count / size:,.0f} {unit}"
    return f"{count:.0f} bytes"
