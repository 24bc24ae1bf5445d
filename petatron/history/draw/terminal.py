"""Plots in a terminal: braille curves with colors where rich is installed, and one letter per run where there are no colors."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise
from typing import TextIO

from petatron.base.terminal_escape import printable
from petatron.history.draw.axis_ticks import compact, ticks, x_text
from petatron.history.draw.braille import BrailleCanvas
from petatron.history.metric_curves import X_AXES, Curve, Panel

MIN_WIDTH = 40
_LABEL_WIDTH = 8
_GAP = 3
_TWO_PANELS_FROM = 110
_GLYPHS = "abcdefghijklmnop"
_COLORS = ("cyan", "yellow", "green", "magenta", "bright_blue", "bright_red", "white", "bright_green")
_MARK, _LOST = "◆", "×"
_ASCII = str.maketrans("◆×┤│└─┬━", "*x+|+-+-")
Cell = tuple[str, str]
"""A character, or several, and its style."""
Line = list[Cell]


def print_panels(
    panels: Sequence[Panel], labels: Sequence[str], *, stream: TextIO, width: int, height: int, colored: bool
) -> None:
    """Writes all panels to a raw stream; labels are foreign text and escaped here."""
    if not _can_encode(stream):
        lines = panel_lines(panels, labels, width=width, height=height, colored=False, lettered=True)
        stream.write(_plain_text(lines).translate(_ASCII).encode("ascii", "replace").decode())
        return
    lines = panel_lines(panels, labels, width=width, height=height, colored=colored)
    if not colored:
        stream.write(_plain_text(lines))
        return
    from rich.console import Console
    from rich.text import Text

    console = Console(file=stream, width=width, force_terminal=True, highlight=False)
    for line in lines:
        console.print(Text.assemble(*line, no_wrap=True, overflow="crop"), soft_wrap=True)


def _can_encode(stream: TextIO) -> bool:
    """Whether a stream can represent braille; a terminal of an old locale has ASCII alone."""
    try:
        f"\u28ff{_MARK}".encode(stream.encoding or "utf-8")
    except (UnicodeEncodeError, LookupError):
        return False
    return True


def _plain_text(lines: Sequence[Line]) -> str:
    return "".join("".join(text for text, _ in line).rstrip() + "\n" for line in lines)


def can_color(stream: TextIO) -> bool:
    """Whether rich is installed and would use colors on this stream."""
    try:
        from rich.console import Console
    except ImportError:
        return False
    console = Console(file=stream)
    return console.is_terminal and console.color_system is not None and not console.no_color


def panel_lines(
    panels: Sequence[Panel],
    labels: Sequence[str],
    *,
    width: int,
    height: int,
    colored: bool,
    lettered: bool | None = None,
) -> list[Line]:
    """Returns the lines of all panels, side by side where there is room for two.

    lettered: one letter per run instead of dots; None: where several runs could not be told apart.
    """
    per_row = 2 if width >= _TWO_PANELS_FROM and len(panels) > 1 else 1
    panel_width = (width - _GAP * (per_row - 1)) // per_row
    if lettered is None:
        lettered = not colored and len(labels) > 1
    drawn = [_draw(panel, width=panel_width, height=height, lettered=lettered) for panel in panels]
    lines: list[Line] = _legend(labels, width=width, lettered=lettered) if len(labels) > 1 else []
    for first in range(0, len(drawn), per_row):
        if lines:
            lines.append([])
        row = drawn[first : first + per_row]
        for index in range(max(map(len, row))):
            line: Line = []
            for place, panel in enumerate(row):
                cells = panel[index] if index < len(panel) else []
                used = sum(len(text) for text, _ in cells)
                line += cells
                if place < len(row) - 1:
                    line.append((" " * (panel_width - used + _GAP), ""))
            lines.append(line)
    return lines


def _legend(labels: Sequence[str], *, width: int, lettered: bool) -> list[Line]:
    lines: list[Line] = [[]]
    used = 0
    for index, label in enumerate(labels):
        sign = _glyph(index) if lettered else "━━"
        text = f" {printable(label, max_chars=max(8, width - 8))}"
        if used and used + len(sign) + len(text) + 3 > width:
            lines.append([])
            used = 0
        lines[-1] += [("   " if used else "", ""), (sign, _style(index)), (text, "")]
        used += len(sign) + len(text) + 3
    return lines


def _draw(panel: Panel, *, width: int, height: int, lettered: bool) -> list[Line]:
    cells = width - _LABEL_WIDTH - 2
    canvas = BrailleCanvas(cells, height)
    glyphs: dict[tuple[int, int], tuple[str, int]] = {}
    for curve in panel.curves:
        dots = _dots(curve, panel, cells, height)
        if curve.is_marks or len(dots) == 1:
            sign = _glyph(curve.color).upper() if lettered else _MARK
            glyphs |= {(row // 4, column // 2): (sign, curve.color) for column, row in dots}
        elif lettered:
            for start, end in pairwise(dots):
                glyphs |= _letter_cells(start, end, curve.color)
        else:
            for start, end in pairwise(dots):
                canvas.line(start, end, curve.color)
    for curve in panel.curves:
        glyphs |= {(height - 1, _column(x, panel, cells) // 2): (_LOST, -1) for x in curve.lost_x}
    return [_title(panel, width), *_rows(panel, canvas, glyphs, height), *_x_axis(panel, cells)]


def _title(panel: Panel, width: int) -> Line:
    title = f"{panel.title} ({panel.unit})" if panel.unit else panel.title
    lines = [curve for curve in panel.curves if not curve.is_marks and curve.y.size]
    marks = [curve for curve in panel.curves if curve.is_marks and curve.y.size]
    note = ""
    if len(lines) == 1:
        note = f"  last {compact(float(lines[0].y[-1]))}"
        note += f"  {_MARK} validation {compact(float(marks[0].y[-1]))}" if marks else ""
    lost = sum(len(curve.lost_x) for curve in panel.curves)
    note += f"  {_LOST} not finite" if lost else ""
    return [(title[:width], "bold"), (note[: max(0, width - len(title))], "dim")]


def _rows(
    panel: Panel, canvas: BrailleCanvas, glyphs: dict[tuple[int, int], tuple[str, int]], height: int
) -> list[Line]:
    low, high = panel.limits[2:]
    labels = {
        round((high - value) / (high - low) * (height - 1)): compact(value)
        for value in ticks(low, high, max(2, height // 2))
    }
    lines: list[Line] = []
    for row, text in enumerate(canvas.rows()):
        label = labels.get(row, "")
        line: Line = [(f"{label:>{_LABEL_WIDTH}.{_LABEL_WIDTH}} {'┤' if label else '│'}", "dim")]
        for column, cell in enumerate(text):
            sign, color = glyphs.get((row, column), (cell, canvas.color(row, column)))
            line.append((sign, "bold red" if color == -1 else _style(color) if color is not None else ""))
        lines.append(line)
    return lines


def _x_axis(panel: Panel, cells: int) -> list[Line]:
    low, high = panel.limits[:2]
    rule, text = ["─"] * cells, [" "] * (cells + _LABEL_WIDTH)
    end = 0
    for value in ticks(low, high, max(2, cells // 12), x_axis=panel.x_axis):
        at = _column(value, panel, cells) // 2
        label = x_text(value, panel.x_axis)
        start = max(0, min(at - len(label) // 2, cells - len(label)))
        if start > end or end == 0:
            text[start : start + len(label)] = label
            rule[at] = "┬"
            end = start + len(label) + 1
    name = X_AXES[panel.x_axis]
    indent = " " * _LABEL_WIDTH
    shown = "".join(text).rstrip()
    return [
        [(f"{indent} └{''.join(rule)}", "dim")],
        [(f"{name:>{_LABEL_WIDTH}.{_LABEL_WIDTH}}  {shown}", "dim")],
    ]


def _dots(curve: Curve, panel: Panel, cells: int, height: int) -> list[tuple[int, int]]:
    """Returns the dots of a curve inside the panel; what is above or below is drawn on its edge."""
    low, high = panel.limits[2:]
    scale, most = (4 * height - 1) / (high - low), 4 * height - 1
    dots: list[tuple[int, int]] = []
    for x, y in zip(curve.x.tolist(), curve.y.tolist()):
        dot = _column(x, panel, cells), round(min(most, max(0.0, (high - y) * scale)))
        if not dots or dot != dots[-1]:
            dots.append(dot)
    return dots


def _column(x: float, panel: Panel, cells: int) -> int:
    low, high = panel.limits[:2]
    place = (x - low) / (high - low) * (2 * cells - 1)
    return 0 if math.isnan(place) else round(min(2 * cells - 1, max(0.0, place)))


def _letter_cells(start: tuple[int, int], end: tuple[int, int], color: int) -> dict[tuple[int, int], tuple[str, int]]:
    steps = max(abs(end[0] - start[0]) // 2, abs(end[1] - start[1]) // 4, 1)
    places = [[round(a + (b - a) * index / steps) for a, b in zip(start, end)] for index in range(steps + 1)]
    return {(row // 4, column // 2): (_glyph(color), color) for column, row in places}


def _glyph(index: int) -> str:
    return _GLYPHS[index % len(_GLYPHS)]


def _style(index: int) -> str:
    return _COLORS[index % len(_COLORS)]
