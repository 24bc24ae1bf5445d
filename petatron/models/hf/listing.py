"""Names in an error message: all of them if they are few, else the first and how many more there are."""

from __future__ import annotations

from collections.abc import Sequence
from collections.abc import Set as AbstractSet

_MOST_SHOWN = 12


def some(names: Sequence[str] | AbstractSet[str]) -> str:
    """Up to a dozen names.

    >>> some(["a", "b"])
    'a, b'
    """
    shown = list(names) if isinstance(names, Sequence) else sorted(names)
    more = f" and {len(shown) - _MOST_SHOWN} more" if len(shown) > _MOST_SHOWN else ""
    return ", ".join(shown[:_MOST_SHOWN]) + more
