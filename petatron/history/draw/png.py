"""Plots as PNG, through matplotlib where it is installed."""

from __future__ import annotations

import io
from collections.abc import Sequence

from petatron.base.errors import ConfigError, Problem
from petatron.base.terminal_escape import printable
from petatron.history.draw.axis_ticks import compact, ticks, x_text
from petatron.history.draw.theme import Theme
from petatron.history.metric_curves import X_AXES, Panel

_PANEL_INCHES = (5.6, 3.2)
_DOTS_PER_INCH = 150


def figure_png(panels: Sequence[Panel], labels: Sequence[str], *, theme: Theme, title: str) -> bytes:
    """Returns the picture; `ConfigError` where matplotlib is missing. Foreign text is escaped, and never read as mathematics."""
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError as error:
        fix = "pip install 'petatron[log]', or write a .svg, which needs nothing."
        raise ConfigError([Problem("--out", "*.png", "needs matplotlib, which is not installed", fix)]) from error
    num_columns = min(2, max(1, len(panels)))
    num_rows = max(1, -(-len(panels) // num_columns))
    size = (_PANEL_INCHES[0] * num_columns, _PANEL_INCHES[1] * num_rows + (0.9 if len(labels) > 1 else 0.5))
    figure = Figure(figsize=size, dpi=_DOTS_PER_INCH, facecolor=theme.page, layout="constrained")
    FigureCanvasAgg(figure)
    figure.get_layout_engine().set(w_pad=0.12, h_pad=0.1)
    shown = figure.suptitle(printable(title, max_chars=110), color=theme.text, fontweight="bold")
    shown.set_parse_math(False)
    for index, panel in enumerate(panels):
        _draw(figure.add_subplot(num_rows, num_columns, index + 1), panel, theme)
    if len(labels) > 1:
        _legend(figure, labels, theme)
    content = io.BytesIO()
    figure.savefig(content, format="png", facecolor=theme.page)
    return content.getvalue()


def _draw(axes, panel: Panel, theme: Theme) -> None:
    low_x, high_x, low, high = panel.limits
    unit = f" ({panel.unit})" if panel.unit else ""
    axes.set_title(panel.title + unit, loc="left", color=theme.text, fontsize=11)
    if any(curve.is_marks and curve.x.size for curve in panel.curves):
        axes.set_title("◆ validation", loc="right", color=theme.muted, fontsize=9)
    axes.set_facecolor(theme.page)
    for curve in panel.curves:
        color = theme.run_color(curve.color)
        if curve.raw is not None:
            axes.plot(*curve.raw, color=color, alpha=0.28, linewidth=0.8)
        if curve.is_marks or curve.x.size == 1:
            axes.plot(curve.x, curve.y, "D", color=color, markersize=5, markeredgecolor=theme.page)
        else:
            axes.plot(curve.x, curve.y, color=color, linewidth=1.6, linestyle="--" if ": " in curve.label else "-")
        if curve.lost_x:
            axes.plot(curve.lost_x, [low] * len(curve.lost_x), "x", color=theme.alarm, clip_on=False)
    axes.set_xlim(low_x, high_x)
    axes.set_ylim(low, high)
    x_ticks, y_ticks = ticks(low_x, high_x, 6, x_axis=panel.x_axis), ticks(low, high, 5)
    axes.set_xticks(x_ticks, [x_text(value, panel.x_axis) for value in x_ticks])
    axes.set_yticks(y_ticks, [compact(value) for value in y_ticks])
    axes.tick_params(colors=theme.muted, labelsize=9, length=3)
    axes.set_xlabel(X_AXES[panel.x_axis], color=theme.muted, loc="right", fontsize=9)
    axes.grid(axis="y", color=theme.grid)
    axes.set_axisbelow(True)
    for name, spine in axes.spines.items():
        spine.set_visible(name == "bottom")
        spine.set_color(theme.muted)


def _legend(figure, labels: Sequence[str], theme: Theme) -> None:
    from matplotlib.lines import Line2D

    lines = [Line2D([], [], color=theme.run_color(index), linewidth=2.5) for index in range(len(labels))]
    legend = figure.legend(
        lines, [printable(label) for label in labels], loc="outside lower left", ncols=4, frameon=False,
        labelcolor=theme.text,
    )  # fmt: skip
    for text in legend.get_texts():
        text.set_parse_math(False)
