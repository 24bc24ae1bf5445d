"""Draws with braille characters: a cell is 2 x 4 dots."""

from __future__ import annotations

# Bits of a braille cell by dot row, for its left and right dot column.
_BRAILLE = 0x2800
_LEFT = (0x01, 0x02, 0x04, 0x40)
_RIGHT = (0x08, 0x10, 0x20, 0x80)


class BrailleCanvas:
    """`width` x `height` characters of dots; the last color drawn in a cell is the cell's."""

    def __init__(self, width: int, height: int) -> None:
        self.width, self.height = width, height
        self._bits = [[0] * width for _ in range(height)]
        self._colors: dict[tuple[int, int], int] = {}

    def dot(self, column: int, row: int, color: int = 0) -> None:
        """Sets the dot at a dot column and a dot row, counted from the upper left."""
        self._bits[row // 4][column // 2] |= (_RIGHT if column % 2 else _LEFT)[row % 4]
        self._colors[row // 4, column // 2] = color

    def line(self, start: tuple[int, int], end: tuple[int, int], color: int = 0) -> None:
        """Draws a straight line between two dots (column, row)."""
        steps = max(abs(end[0] - start[0]), abs(end[1] - start[1]), 1)
        for index in range(steps + 1):
            column, row = (round(a + (b - a) * index / steps) for a, b in zip(start, end))
            self.dot(column, row, color)

    def color(self, row: int, column: int) -> int | None:
        """Returns the color of a cell; None for an empty one."""
        return self._colors.get((row, column))

    def rows(self) -> list[str]:
        return ["".join(chr(_BRAILLE + bits) if bits else " " for bits in row) for row in self._bits]
