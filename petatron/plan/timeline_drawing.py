"""Draws a pipeline timeline: one row per rank, one box per computation, simulated or measured.

SVG and text both use each rank's list of TimedAction. Transfers are not drawn: their cost shows as gaps between boxes.
"""

from __future__ import annotations

import colorsys
import math
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

from petatron.plan.pipeline_simulator import bubble_fraction
from petatron.schedule.actions import COMPUTE_KINDS, ActionKind, TimedAction

Events = Sequence[Sequence[TimedAction]]

# Name, hue and saturation of each kind; lightness tells a rank's stages apart.
_KINDS = {
    ActionKind.FORWARD: ("forward", 212, 62),
    ActionKind.BACKWARD: ("backward", 145, 42),
    ActionKind.INPUT_GRAD: ("input gradient", 170, 45),
    ActionKind.WEIGHT_GRAD: ("weight gradient", 32, 80),
}
_DARKEST, _LIGHTEST = 42, 74
_LABEL_WIDTH, _RIGHT, _TOP, _ROW, _GAP, _BOTTOM = 72, 24, 78, 28, 6, 46
_DIGIT_WIDTH = 6.6


@dataclass(frozen=True, slots=True)
class _Rows:
    """The boxes of a timeline: times from 0, and the index of each stage among those of its rank."""

    boxes: tuple[tuple[TimedAction, ...], ...]
    start: float
    span: float
    chunk_of: dict[int, int]
    chunks: int


def _rows(events: Events) -> _Rows:
    boxes = tuple(tuple(timed for timed in rank if timed.action.kind in COMPUTE_KINDS) for rank in events)
    every = [timed for rank in boxes for timed in rank]
    if not every:
        raise ValueError("there is nothing to draw: no rank computed anything")
    start = min(timed.start for timed in every)
    chunk_of: dict[int, int] = {}
    for rank in boxes:
        chunk_of |= {stage: at for at, stage in enumerate(sorted({timed.action.stage for timed in rank}))}
    span = max(timed.end for timed in every) - start
    return _Rows(boxes, start, span or 1.0, chunk_of, max(chunk_of.values()) + 1)


def timeline_svg(events: Events, *, title: str, unit: str = "", width: int | None = None) -> str:
    """Draws the timeline as an SVG document: hover over a box for its stage, micro-batch and times.

    `unit` names the unit of time on the axis. Without `width` the picture is as wide as its boxes need to show their numbers,
    within reason.
    """
    rows = _rows(events)
    width = width or _default_width(rows)
    scale = (width - _LABEL_WIDTH - _RIGHT) / rows.span
    height = _TOP + len(rows.boxes) * (_ROW + _GAP) + _BOTTOM
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" viewBox="0 0 {width} {height}" '
        'font-family="Helvetica, Arial, sans-serif" font-size="11">',
        f'<rect width="{width}" height="{height}" fill="white"/>',
        f'<text x="{_LABEL_WIDTH}" y="24" font-size="16" fill="#222">{escape(title)}</text>',
        *_legend(rows, bubble_fraction(tuple(tuple(rank) for rank in events))),
    ]
    for rank, boxes in enumerate(rows.boxes):
        y = _TOP + rank * (_ROW + _GAP)
        parts.append(f'<text x="{_LABEL_WIDTH - 10}" y="{y + 18}" text-anchor="end" fill="#222">rank {rank}</text>')
        parts.append(
            f'<rect x="{_LABEL_WIDTH}" y="{y}" width="{rows.span * scale:.2f}" height="{_ROW}" fill="#eceef1"/>'
        )
        parts += [_box(timed, rows, y=y, scale=scale, unit=unit) for timed in boxes]
    parts += _axis(rows, y=_TOP + len(rows.boxes) * (_ROW + _GAP), scale=scale, unit=unit)
    return "\n".join([*parts, "</svg>", ""])


def _default_width(rows: _Rows) -> int:
    lengths = sorted(timed.end - timed.start for rank in rows.boxes for timed in rank)
    typical = lengths[len(lengths) // 4] or rows.span
    return int(min(4000, max(960, _LABEL_WIDTH + _RIGHT + 20 * rows.span / typical)))


def _color(kind: ActionKind, chunk: int, chunks: int) -> tuple[str, str]:
    """Returns the fill of a box, and of the number in it."""
    _, hue, saturation = _KINDS[kind]
    lightness = _DARKEST + (_LIGHTEST - _DARKEST) * chunk / max(1, chunks - 1)
    # Written as red, green, blue: not every viewer of SVG knows hsl().
    parts = colorsys.hls_to_rgb(hue / 360, lightness / 100, saturation / 100)
    fill = "#" + "".join(f"{round(255 * part):02x}" for part in parts)
    return fill, "#fff" if lightness < 55 else "#1a1a1a"


def _legend(rows: _Rows, bubble: float) -> list[str]:
    used = [kind for kind in _KINDS if any(timed.action.kind is kind for rank in rows.boxes for timed in rank)]
    x, parts = float(_LABEL_WIDTH), []
    entries = [(_color(kind, 0, rows.chunks)[0], f"{kind} {_KINDS[kind][0]}") for kind in used]
    entries.append(("#eceef1", f"idle {100 * bubble:.1f}%"))
    for color, label in entries:
        parts.append(
            f'<rect x="{x:.0f}" y="40" width="14" height="14" fill="{color}" stroke="#999" stroke-width="0.5"/>'
        )
        parts.append(f'<text x="{x + 20:.0f}" y="51" fill="#222">{label}</text>')
        x += 44 + _DIGIT_WIDTH * len(label)
    if rows.chunks > 1:
        parts.append(f'<text x="{x:.0f}" y="51" fill="#222">lighter: later stage of the rank</text>')
    return parts


def _box(timed: TimedAction, rows: _Rows, *, y: int, scale: float, unit: str) -> str:
    action = timed.action
    x = _LABEL_WIDTH + (timed.start - rows.start) * scale
    width = (timed.end - timed.start) * scale
    fill, ink = _color(action.kind, rows.chunk_of[action.stage], rows.chunks)
    times = f"{timed.start - rows.start:.6g} to {timed.end - rows.start:.6g} {unit}".strip()
    edge = ' stroke="white" stroke-width="0.6"' if width > 3 else ""
    parts = [
        f"<g><title>{action}: {times}</title>",
        f'<rect x="{x:.2f}" y="{y}" width="{width:.2f}" height="{_ROW}" fill="{fill}"{edge}/>',
    ]
    number = str(action.micro_batch)
    if width >= _DIGIT_WIDTH * len(number) + 3:
        parts.append(f'<text x="{x + width / 2:.2f}" y="{y + 18}" text-anchor="middle" fill="{ink}">{number}</text>')
    return "".join([*parts, "</g>"])


def _axis(rows: _Rows, *, y: int, scale: float, unit: str) -> list[str]:
    power = 10.0 ** math.floor(math.log10(rows.span / 10))
    # 1, 2 or 5 times a power of ten, for about ten ticks.
    step = next(power * factor for factor in (1, 2, 5, 10) if power * factor >= rows.span / 10 * 0.999)
    parts = [f'<line x1="{_LABEL_WIDTH}" y1="{y}" x2="{_LABEL_WIDTH + rows.span * scale:.2f}" y2="{y}" stroke="#555"/>']
    for tick in range(int(rows.span / step + 1e-9) + 1):
        x = _LABEL_WIDTH + tick * step * scale
        parts.append(f'<line x1="{x:.2f}" y1="{y}" x2="{x:.2f}" y2="{y + 5}" stroke="#555"/>')
        parts.append(f'<text x="{x:.2f}" y="{y + 18}" text-anchor="middle" fill="#555">{tick * step:g}</text>')
    name = f"time ({unit})" if unit else "time"
    middle = _LABEL_WIDTH + rows.span * scale / 2
    parts.append(f'<text x="{middle:.0f}" y="{y + 36}" text-anchor="middle" fill="#555">{escape(name)}</text>')
    return parts


def timeline_text(events: Events, *, columns: int = 100) -> str:
    """Draws the timeline in at most `columns` characters: letter of the kind and micro-batch, dots where a rank is idle.

    Lower case is the second, fourth, ... stage of a rank. A box too narrow for its number shows its letter; where
    several boxes fall into one column, the one in its middle is shown.
    """
    rows = _rows(events)
    labels = [f"rank {rank} " for rank in range(len(rows.boxes))]
    margin = max(len(label) for label in labels)
    available = max(10, columns - margin)
    shortest = min((t.end - t.start for rank in rows.boxes for t in rank if t.end > t.start), default=rows.span)
    per_shortest = available * shortest / rows.span
    # Whole columns per shortest box keep equal boxes equally wide.
    width = int(math.floor(per_shortest + 1e-9) * rows.span / shortest + 0.5) if per_shortest >= 1 else available
    lines = [
        f"{label:<{margin}}{_text_row(boxes, rows, columns=min(width, available))}"
        for label, boxes in zip(labels, rows.boxes)
    ]
    return "\n".join(lines)


def _text_row(boxes: Sequence[TimedAction], rows: _Rows, *, columns: int) -> str:
    cells = ["."] * columns
    for timed in boxes:
        # The columns whose middle lies in the box.
        first = math.ceil((timed.start - rows.start) / rows.span * columns - 0.5)
        last = math.ceil((timed.end - rows.start) / rows.span * columns - 0.5)
        letter = str(timed.action.kind)
        if rows.chunk_of[timed.action.stage] % 2:
            letter = letter.lower()
        label = f"{letter}{timed.action.micro_batch}"
        room = last - first
        cells[first:last] = (label if len(label) <= room else letter).ljust(room, "-")[:room]
    return "".join(cells)
