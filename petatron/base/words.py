"""Numbers in sentences."""

from __future__ import annotations


def counted(number: int, noun: str, ending: str = "s") -> str:
    """A number and its noun, which takes the ending of its plural unless the number is 1.

    >>> counted(1, "rank"), counted(4096, "rank"), counted(2, "batch", "es")
    ('1 rank', '4,096 ranks', '2 batches')
    """
    return f"{number:,} {noun}{'' if number == 1 else ending}"
