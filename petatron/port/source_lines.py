"""`SourceLines`: the script's line of each character of a text that is joined from several, for messages."""

from __future__ import annotations

import bisect
from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class SourceLines:
    """Where each line's share of a text begins: pairs of an offset, from 0 on, and the line from there on.

    >>> lines = SourceLines.joined((("ab", SourceLines.of(3)), ("cd", SourceLines.of(3)), ("ef", SourceLines.of(5))))
    >>> lines.starts, lines.at(3), lines.at(4)
    (((0, 3), (4, 5)), 3, 5)
    """

    starts: tuple[tuple[int, int], ...] = ()

    @classmethod
    def of(cls, line: int) -> SourceLines:
        """Returns those of a text on one line."""
        return cls(((0, line),))

    @classmethod
    def joined(cls, pieces: Iterable[tuple[str, SourceLines]]) -> SourceLines:
        """Returns those of texts one behind the other."""
        starts: list[tuple[int, int]] = []
        offset = 0
        for text, lines in pieces:
            for start, line in lines.starts if text else ():
                if not starts or starts[-1][1] != line:
                    starts.append((offset + start, line))
            offset += len(text)
        return cls(tuple(starts))

    def at(self, offset: int) -> int:
        """Returns the line of a character; 0 if it is not known."""
        index = self._count_up_to(offset) - 1
        return self.starts[index][1] if index >= 0 else 0

    def part(self, start: int, end: int) -> SourceLines:
        """Returns those of a slice of the text."""
        inner = self.starts[self._count_up_to(start) : self._count_up_to(end - 1)]
        return SourceLines(((0, self.at(start)), *((at - start, line) for at, line in inner)))

    def _count_up_to(self, offset: int) -> int:
        """Returns how many lines begin at a character or before it."""
        return bisect.bisect_right(self.starts, offset, key=lambda start: start[0])


NO_LINES = SourceLines()
"""Those of a text that comes from no line."""
