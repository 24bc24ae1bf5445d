"""Histograms of lengths: bars in the terminal, or an SVG with a line of steps for each source."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from petatron.base.format_text import align_columns
from petatron.history.draw.axis_ticks import compact, ticks
from petatron.history.draw.svg import SHAPE_STYLE, html_text, panel_style
from petatron.history.draw.theme import Theme

_BAR_WIDTH = 40
_EIGHTHS = " ▏▎▍▌▋▊▉"
_WIDTH, _HEIGHT, _LEFT, _RIGHT, _TOP, _BOTTOM, _LEGEND_ROW = 640, 300, 58, 20, 44, 42, 20


@dataclass(frozen=True, slots=True)
class Histogram:
    """Shares of a source by bins that begin at the same numbers for all sources."""

    label: str
    starts: Sequence[int]
    shares: Sequence[float]


def bin_text(starts: Sequence[int], index: int) -> str:
    """Returns the numbers of a bin.

    >>> [bin_text((0, 1, 2, 4), index) for index in range(4)]
    ['0', '1', '2-3', '4-7']
    """
    start = starts[index]
    end = starts[index + 1] - 1 if index + 1 < len(starts) else 2 * start - 1
    return f"{start:,}" if end <= start else f"{start:,}-{end:,}"


def histogram_text(histogram: Histogram, notes: Sequence[str], *, ascii_only: bool = False) -> str:
    """Returns a row for each bin, from the first to the last that is not empty, with a note behind its bar."""
    present = [index for index, share in enumerate(histogram.shares) if share > 0]
    if not present:
        return "(no documents)"
    most = max(histogram.shares)
    rows = [
        (
            bin_text(histogram.starts, index),
            f"{histogram.shares[index]:6.1%}",
            _bar(histogram.shares[index] / most, ascii_only),
            notes[index],
        )
        for index in range(present[0], present[-1] + 1)
    ]
    return align_columns(rows)


def _bar(share: float, ascii_only: bool) -> str:
    if ascii_only:
        return "#" * round(share * _BAR_WIDTH)
    full, part = divmod(round(share * _BAR_WIDTH * 8), 8)
    return "█" * full + _EIGHTHS[part].strip()


def histogram_svg(histograms: Sequence[Histogram], *, title: str, x_label: str, theme: Theme) -> str:
    """Returns a picture of all sources; title and labels are foreign text and escaped here."""
    starts = histograms[0].starts
    highest = max((share for histogram in histograms for share in histogram.shares), default=0) or 1.0
    legend_rows = len(histograms) if len(histograms) > 1 else 0
    top = _TOP + legend_rows * _LEGEND_ROW
    total_height = top + _HEIGHT + _BOTTOM
    step = (_WIDTH - _LEFT - _RIGHT) / len(starts)

    def y_of(share: float) -> float:
        return top + (1 - share / highest) * _HEIGHT

    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" class="pt" width="{_WIDTH}" height="{total_height}" '
        f'viewBox="0 0 {_WIDTH} {total_height}"><style>{SHAPE_STYLE}{panel_style(theme)}</style>'
        f'<rect width="{_WIDTH}" height="{total_height}" fill="{theme.page}"/>'
        f'<text class="ttl" x="{_LEFT}" y="26">{html_text(title, 90)}</text>'
    ]
    for index, histogram in enumerate(histograms[:legend_rows]):
        y = _TOP + index * _LEGEND_ROW
        color = theme.run_color(index)
        parts.append(f'<line x1="{_LEFT}" x2="{_LEFT + 22}" y1="{y}" y2="{y}" stroke="{color}" stroke-width="3"/>')
        parts.append(f'<text x="{_LEFT + 28}" y="{y}" dy="4">{html_text(histogram.label, 80)}</text>')
    for value in ticks(0, highest * 100, 5):
        y = f"{y_of(value / 100):.1f}"
        parts.append(f'<line class="grid" x1="{_LEFT}" x2="{_WIDTH - _RIGHT}" y1="{y}" y2="{y}"/>')
        parts.append(f'<text class="dim" x="{_LEFT - 8}" y="{y}" dy="4" text-anchor="end">{compact(value)}%</text>')
    every = -(-len(starts) // 12)
    for index in range(0, len(starts), every):
        x = _LEFT + index * step
        parts.append(
            f'<text class="dim" x="{x:.1f}" y="{top + _HEIGHT + 18}" text-anchor="middle">{compact(starts[index])}</text>'
        )
    for index, histogram in enumerate(histograms):
        points = [f"M{_LEFT} {y_of(0):.1f}"]
        for place, share in enumerate(histogram.shares):
            points.append(f"V{y_of(share):.1f}H{_LEFT + (place + 1) * step:.1f}")
        path = "".join(points) + f"V{y_of(0):.1f}"
        color = theme.run_color(index)
        fill = f'fill="{color}" fill-opacity="0.25"' if len(histograms) == 1 else 'fill="none"'
        parts.append(
            f'<path d="{path}" {fill} stroke="{color}" stroke-width="1.8"><title>{html_text(histogram.label)}</title></path>'
        )
    parts.append(f'<line class="axis" x1="{_LEFT}" x2="{_WIDTH - _RIGHT}" y1="{top + _HEIGHT}" y2="{top + _HEIGHT}"/>')
    parts.append(
        f'<text class="dim" x="{_WIDTH - _RIGHT}" y="{total_height - 8}" text-anchor="end">{html_text(x_label)}</text></svg>\n'
    )
    return "".join(parts)
