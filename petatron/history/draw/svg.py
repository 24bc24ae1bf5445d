"""Plots as SVG: one figure of all panels as a file, or single panels whose colors a page's style sheet gives."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

import numpy as np

from petatron.base.terminal_escape import printable
from petatron.history.draw.axis_ticks import compact, ticks, x_text
from petatron.history.draw.theme import Theme
from petatron.history.metric_curves import X_AXES, Curve, Panel

PANEL_WIDTH, PANEL_HEIGHT = 520, 300
_LEFT, _RIGHT, _TOP, _BOTTOM = 58, 14, 36, 42
_MARGIN, _HEADER, _LEGEND_ROW = 16, 44, 20
_CHAR_WIDTH = 7.2
PLOT_BOX = (_LEFT, _TOP, PANEL_WIDTH - _LEFT - _RIGHT, PANEL_HEIGHT - _TOP - _BOTTOM)
"""Left, top, width and height of the drawing inside a panel."""
SHAPE_STYLE = (
    ".pt text{font:12.5px system-ui,-apple-system,'Segoe UI',Roboto,sans-serif}.pt .ttl{font-weight:600;font-size:14px}"
    ".pt .ln{fill:none;stroke-width:1.8;stroke-linejoin:round;stroke-linecap:round}.pt .raw{fill:none;stroke-width:1;opacity:.38}"
    ".pt .named{stroke-dasharray:5 3}.pt .grid{stroke-width:1}.pt .axis{stroke-width:1}"
)
"""The rules for fonts and lines, the same in every theme."""


def panel_style(theme: Theme) -> str:
    """Returns the rules that color panels."""
    text = f".pt text{{fill:{theme.text}}}.pt .dim{{fill:{theme.muted}}}.pt .grid{{stroke:{theme.grid}}}"
    text += f".pt .axis{{stroke:{theme.muted}}}.pt .lost{{stroke:{theme.alarm}}}"
    for index, color in enumerate(theme.runs):
        text += f".pt .s{index}{{stroke:{color}}}.pt .f{index}{{fill:{color};stroke:{theme.page}}}"
    return text


def figure_svg(panels: Sequence[Panel], labels: Sequence[str], *, theme: Theme, title: str) -> str:
    """Returns a whole figure with its legend; labels and title are foreign text and escaped here."""
    num_columns = min(2, max(1, len(panels)))
    width = num_columns * PANEL_WIDTH + 2 * _MARGIN
    legend, legend_height = _legend(labels, theme, width) if len(labels) > 1 else ("", 0)
    top = _HEADER + legend_height
    num_rows = -(-len(panels) // num_columns)
    height = top + num_rows * PANEL_HEIGHT + _MARGIN
    body = "".join(
        f'<g transform="translate({_MARGIN + index % num_columns * PANEL_WIDTH} {top + index // num_columns * PANEL_HEIGHT})">'
        f"{panel_body(panel, f'clip{index}', len(theme.runs))}</g>"
        for index, panel in enumerate(panels)
    )
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" class="pt" width="{width}" height="{height}" viewBox="0 0 {width} {height}">'
        f"<style>{SHAPE_STYLE}{panel_style(theme)}</style>"
        f'<rect width="{width}" height="{height}" fill="{theme.page}"/>'
        f'<text x="{_MARGIN + 4}" y="28" style="font-size:17px;font-weight:600">{html_text(title, 110)}</text>{legend}{body}</svg>\n'
    )


def panel_svg(panel: Panel, clip_id: str, num_colors: int) -> str:
    """Returns one panel for a page, which has the style."""
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" class="pt" viewBox="0 0 {PANEL_WIDTH} {PANEL_HEIGHT}" role="img" '
        f'aria-label="{html_text(panel.title)}">{panel_body(panel, clip_id, num_colors)}</svg>'
    )


def panel_body(panel: Panel, clip_id: str, num_colors: int) -> str:
    left, top, width, height = PLOT_BOX
    unit = f" ({panel.unit})" if panel.unit else ""
    parts = [
        f'<text class="ttl" x="{left}" y="22">{html_text(panel.title + unit)}</text>',
        f'<clipPath id="{clip_id}"><rect x="{left - 1}" y="{top - 6}" width="{width + 7}" height="{height + 6}"/></clipPath>',
        *_grid(panel),
        f'<g clip-path="url(#{clip_id})">',
        *(_curve(curve, panel, num_colors) for curve in panel.curves),
        "</g>",
        *_end_marks(panel),
    ]
    return "".join(parts)


def _grid(panel: Panel) -> list[str]:
    left, top, width, height = PLOT_BOX
    low_x, high_x, low, high = panel.limits
    parts = []
    for value in ticks(low, high, 5):
        y = f"{_y(value, panel):.1f}"
        parts.append(f'<line class="grid" x1="{left}" x2="{left + width}" y1="{y}" y2="{y}"/>')
        parts.append(f'<text class="dim" x="{left - 8}" y="{y}" dy="4" text-anchor="end">{compact(value)}</text>')
    for value in ticks(low_x, high_x, 6, x_axis=panel.x_axis):
        x, text = _x(value, panel), x_text(value, panel.x_axis)
        end = "end" if x + len(text) * _CHAR_WIDTH / 2 > PANEL_WIDTH else "middle"
        parts.append(f'<line class="axis" x1="{x:.1f}" x2="{x:.1f}" y1="{top + height}" y2="{top + height + 4}"/>')
        parts.append(f'<text class="dim" x="{x:.1f}" y="{top + height + 18}" text-anchor="{end}">{text}</text>')
    parts.append(f'<line class="axis" x1="{left}" x2="{left + width}" y1="{top + height}" y2="{top + height}"/>')
    name = X_AXES[panel.x_axis]
    parts.append(f'<text class="dim" x="{left + width}" y="{PANEL_HEIGHT - 6}" text-anchor="end">{name}</text>')
    return parts


def _curve(curve: Curve, panel: Panel, num_colors: int) -> str:
    color = curve.color % num_colors
    _, top, _, height = PLOT_BOX
    parts = [
        f'<path class="lost" d="M{_x(x, panel) - 4:.1f} {top + height - 10}l8 8m0 -8l-8 8"/>' for x in curve.lost_x
    ]
    if curve.is_marks:
        parts += [_diamond(x, y, panel, color) for x, y in zip(curve.x.tolist(), curve.y.tolist())]
    elif curve.x.size == 1:
        x, y = _x(float(curve.x[0]), panel), _y(float(curve.y[0]), panel)
        parts.append(f'<circle class="f{color}" cx="{x:.1f}" cy="{y:.1f}" r="4"/>')
    elif curve.x.size:
        if curve.raw is not None:
            parts.append(f'<path class="raw s{color}" d="{_path(*curve.raw, panel)}"/>')
        named = " named" if ": " in curve.label else ""
        parts.append(f'<path class="ln{named} s{color}" d="{_path(curve.x, curve.y, panel)}"/>')
    return "".join(parts)


def _diamond(x: float, y: float, panel: Panel, color: int) -> str:
    place = f"{_x(x, panel):.1f} {_y(y, panel) - 5:.1f}"
    hint = f"validation {compact(y)} at {x_text(x, panel.x_axis)}"
    return f'<path class="f{color}" d="M{place}l5 5l-5 5l-5 -5z"><title>{hint}</title></path>'


def _end_marks(panel: Panel) -> list[str]:
    """Says in the panel's corner what its signs mean."""
    texts = ["◆ validation"] if any(curve.is_marks and curve.x.size for curve in panel.curves) else []
    texts += ["✕ not finite"] if any(curve.lost_x for curve in panel.curves) else []
    left, _, width, _ = PLOT_BOX
    return [f'<text class="dim" x="{left + width}" y="22" text-anchor="end">{"  ".join(texts)}</text>'] if texts else []


def _legend(labels: Sequence[str], theme: Theme, width: int) -> tuple[str, int]:
    parts, x, row = [], _MARGIN + 4.0, 0
    for index, label in enumerate(labels):
        text = printable(label)
        needed = 30 + len(text) * _CHAR_WIDTH + 18
        if x + needed > width - _MARGIN and x > _MARGIN + 4:
            x, row = _MARGIN + 4.0, row + 1
        y = _HEADER + row * _LEGEND_ROW + 4
        parts.append(
            f'<line x1="{x:.0f}" x2="{x + 22:.0f}" y1="{y}" y2="{y}" stroke="{theme.run_color(index)}" stroke-width="3"/>'
        )
        parts.append(f'<text x="{x + 28:.0f}" y="{y}" dy="4">{html_text(label)}</text>')
        x += needed
    return "".join(parts), (row + 1) * _LEGEND_ROW + 6


def _path(x: np.ndarray, y: np.ndarray, panel: Panel) -> str:
    points = " ".join(f"{_x(a, panel):.1f} {_y(b, panel):.1f}" for a, b in zip(x.tolist(), y.tolist()))
    return f"M{points}"


def _x(value: float, panel: Panel) -> float:
    left, _, width, _ = PLOT_BOX
    low, high = panel.limits[:2]
    return left + (value - low) / (high - low) * width


def _y(value: float, panel: Panel) -> float:
    """What is far outside is put close to the edge: renderers fail with huge numbers."""
    _, top, _, height = PLOT_BOX
    low, high = panel.limits[2:]
    return top + min(2.0, max(-1.0, (high - value) / (high - low))) * height


def html_text(text: str, max_chars: int | None = None) -> str:
    """Returns foreign text without control characters, escaped for SVG and HTML."""
    return escape(printable(text, max_chars=max_chars))
